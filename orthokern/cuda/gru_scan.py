"""gru_scan on CUDA; the kernels: ``csrc/cuda/gru_scan.cu``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._gpu_scans import new_results
from orthokern._gru_parameters import parameter_gradients
from orthokern._products import ieee_products
from orthokern._scan_contract import GruArgs, GruGradients, GruStates, started
from orthokern.cuda import _call as native
from orthokern.cuda._steps import Steps
from orthokern.cuda._steps import run as run_steps

_LIBRARY = 1  # GruPath::kLibrary of csrc/cuda/gru_scan.h
# the tensors of GruArgs in csrc/cuda/gru_scan.h
_TENSORS = ("x", "w", "h0", "bias", "lengths", "resets", "reset_state")
_GATES, _CANDIDATE, _ALL, _RESET, _CARRY = range(5)  # GruStep of csrc/cuda/gru_step.h


class _Scan:
    """One GRU scan with the plan of the native planner (csrc/cuda/gru_scan.h)."""

    def __init__(self, args: GruArgs, T: int, *, backward: bool) -> None:
        B, N = args.h0.shape
        self.args, self.backward = args, backward
        self.sizes = {"T": T, "B": B, "N": N, "kanai": int(args.kanai)}
        self.plan = native.plan("gru_scan_plan", args.h0.device, {**self.sizes, "backward": int(backward)})

    def run(self, **tensors: Tensor | None) -> None:
        """Launch it on the current stream; tensors by the names in csrc/cuda/gru_scan.h."""
        h0 = self.args.h0
        work = h0.new_zeros(self.plan["work"]) if self.plan["work"] else None
        args = {**{name: getattr(self.args, name) for name in _TENSORS}, **tensors, "work": work}
        if self.plan["path"] != _LIBRARY:
            sizes: dict[str, Any] = {**self.sizes, "backward": int(self.backward), "plan": self.plan}
            native.call("gru_scan", h0.device, sizes, args)
            return
        with ieee_products():
            (self._run_backward if self.backward else self._run_forward)(args)

    def _run_forward(self, args: dict[str, Tensor | None]) -> None:
        """Library products, and one kernel after each."""
        h0, resets, N = self.args.h0, self.args.resets, self.sizes["N"]
        first = None if resets is None else resets[0]
        state, kanai = started(h0, first, self.args.reset_state).clone(), self.args.kanai
        sums = h0.new_empty(len(h0), (2 if kanai else 3) * N)
        tensors = {"w": self.args.w, "state": state, "sums": sums}
        if kanai:  # rows of m of sequences that have ended are not written
            tensors |= {"m": torch.zeros_like(state), "of_m": torch.empty_like(state)}

        def launch(steps: Steps, count: int) -> None:
            own, rows = steps.tensors, steps.tensors["w"].mT
            if not kanai:
                end_step = steps.kernel(_ALL, own["sums"], own["state"])
                for step in range(count):
                    torch.mm(own["state"], rows, out=own["sums"])
                    end_step(step=step)
                return
            gates = steps.kernel(_GATES, own["sums"], own["m"])
            candidate = steps.kernel(_CANDIDATE, own["of_m"], own["state"])
            for step in range(count):
                torch.mm(own["state"], rows[:, : 2 * N], out=own["sums"])
                gates(step=step)
                torch.mm(own["m"], rows[:, 2 * N :], out=own["of_m"])
                candidate(step=step)

        run_steps("gru", ("forward", kanai), self.sizes, args, tensors, launch, self.sizes["T"])

    def _run_backward(self, args: dict[str, Tensor | None]) -> None:
        """Library products, and one kernel after each."""
        N, kanai, carry = self.sizes["N"], self.args.kanai, torch.zeros_like(self.args.h0)
        # zeros for sequences that have ended
        tensors = {"w": self.args.w, "carry": carry, "adjoints": carry.new_zeros(len(carry), 3 * N)}
        if kanai:
            tensors["of_candidate"] = torch.empty_like(carry)

        def launch(steps: Steps, count: int) -> None:
            own, w = steps.tensors, steps.tensors["w"]
            carry, adjoints = own["carry"], own["adjoints"]
            end_step = steps.kernel(_CARRY, carry, adjoints)
            if not kanai:
                for step in range(count):
                    torch.mm(adjoints, w, out=carry)
                    end_step(step=step + 1)
                return
            reset = steps.kernel(_RESET, own["of_candidate"], adjoints)
            for step in range(count):
                torch.mm(adjoints[:, 2 * N :], w[2 * N :], out=own["of_candidate"])
                reset(step=step)
                torch.mm(adjoints[:, : 2 * N], w[: 2 * N], out=carry)
                end_step(step=step + 1)

        def opening(steps: Steps) -> None:
            steps.kernel(_CARRY, steps.tensors["carry"], steps.tensors["adjoints"])(step=0)

        run_steps("gru", ("backward", kanai), self.sizes, args, tensors, launch, self.sizes["T"], opening)


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See ``orthokern.ops.gru_scan``."""
    assert args.x is not None
    T, (B, N), new = args.x.shape[0], args.h0.shape, new_results(args)
    args, _ = native.ready_args(args, T)
    states = GruStates(hs=new(T, B, N), gates=new(T, B, 3 * N), pre=None if args.kanai else new(T, B, N))
    of_backward = dict.fromkeys(("grad_hs", "grad_x", "factor", "grad_h0", "grad_reset_state", "norms"))
    _Scan(args, T, backward=False).run(**of_backward, **states._asdict())
    return states


def gru_scan_bwd(args: GruArgs, grad_hs: Tensor, states: GruStates, needs: Any) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    tensors = {"grad_hs": grad_hs, **states._asdict()}
    args, ready = native.ready_args(args._replace(x=None), len(grad_hs), **tensors)
    saved, h0, hs = dict(zip(tensors, ready, strict=True)), args.h0, ready[1]
    T, (B, N), new = len(grad_hs), h0.shape, new_results(args)
    grad_x, factor, grad_h0 = new(T, B, 3 * N), new(T, B, N), torch.empty_like(h0)
    scan = _Scan(args, T, backward=True)
    norms = h0.new_zeros(T, scan.plan["norm_columns"]) if needs.norm else None
    state = args.reset_state
    grad_state = None if args.resets is None or state is None else torch.zeros_like(state)
    scan.run(**saved, grad_x=grad_x, factor=factor, grad_h0=grad_h0, grad_reset_state=grad_state, norms=norms)
    grad_w = grad_bias = None
    if needs.w or needs.bias:
        grad_w, grad_bias = parameter_gradients(args, hs, grad_x, factor)
    norm = None if norms is None else norms.sum(1).sqrt()
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_state, norm)
