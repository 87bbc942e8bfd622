"""peephole_scan on CUDA: library products, and a kernel of ``csrc/cuda/peephole_scan.cu`` after each."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._products import ieee_products, product_with_states
from orthokern._scan_contract import PeepholeGradients, PeepholeInputs, PeepholeStates
from orthokern.cuda import _call as native
from orthokern.cuda._steps import Steps
from orthokern.cuda._steps import run as run_steps

_FORWARD, _BACKWARD = range(2)  # parts of run_peephole_step in csrc/cuda/peephole_scan.h
# the tensors of PeepholeScanArgs there that only one direction has
_NONE = dict.fromkeys(("x", "hs", "grad_hs", "grad_cs", "grad_x", "grad_c0"))


@ieee_products()
def peephole_scan_fwd(inputs: PeepholeInputs, *, need_gates: bool = True) -> PeepholeStates:
    """See ``orthokern.ops.peephole_scan``."""
    assert inputs.x is not None
    T, (B, N) = inputs.x.shape[0], inputs.h0.shape
    inputs, _ = native.ready_args(inputs, T)
    h0, new = inputs.h0, inputs.h0.new_empty
    states = PeepholeStates(new(T, B, N), new(T, B, N), new(T, B, 4 * N))

    def launch(steps: Steps, count: int) -> None:
        rows, state, sums = steps.tensors["w"].mT, steps.tensors["state"], steps.tensors["sums"]
        end_step = steps.kernel(_FORWARD, sums, state)
        for step in range(count):
            torch.mm(state, rows, out=sums)
            end_step(step=step)

    args = {**_NONE, "peephole": inputs.peephole, "c0": inputs.c0, "x": inputs.x, **states._asdict()}
    tensors = {"w": inputs.w, "state": h0.clone(), "sums": new(B, 4 * N)}
    run_steps("peephole", _FORWARD, {"T": T, "B": B, "N": N}, args, tensors, launch, T)
    return states


@ieee_products()
def peephole_scan_bwd(
    inputs: PeepholeInputs, grad_hs: Tensor | None, grad_cs: Tensor | None, states: PeepholeStates
) -> PeepholeGradients:
    """See ``orthokern.ops.peephole_scan``."""
    T, (B, N) = len(states.hs), inputs.h0.shape
    saved = {"grad_hs": grad_hs, "grad_cs": grad_cs, **states._asdict()}
    (_, w, peephole, h0, c0), ready = native.ready_args(inputs, T, **saved)
    grad_hs, grad_cs, hs, cs, gates = ready
    grad_x, grad_c0 = torch.empty_like(gates), torch.zeros_like(c0)

    def launch(steps: Steps, count: int) -> None:
        of_map, adjoints, carry = steps.tensors["w"], steps.tensors["adjoints"], steps.tensors["carry"]
        begin_step = steps.kernel(_BACKWARD, carry, adjoints)
        for step in range(count):
            begin_step(step=step)
            torch.mm(adjoints, of_map, out=carry)  # after the last step unused: `carry` may be of a graph

    args = {**_NONE, "peephole": peephole, "c0": c0, "cs": cs, "gates": gates, "grad_hs": grad_hs, "grad_cs": grad_cs}
    args |= {"grad_x": grad_x, "grad_c0": grad_c0}
    tensors = {"w": w, "carry": torch.zeros_like(h0), "adjoints": h0.new_empty(B, 4 * N)}
    run_steps("peephole", _BACKWARD, {"T": T, "B": B, "N": N}, args, tensors, launch, T)

    d_i, d_f, _, d_o = grad_x.chunk(4, 2)
    before = torch.cat([c0.unsqueeze(0), cs[:-1]])
    grad_peephole = torch.stack([(a * b).sum((0, 1)) for a, b in ((d_i, before), (d_f, before), (d_o, cs))])
    return PeepholeGradients(grad_x, product_with_states(grad_x, h0, hs), grad_peephole, grad_x[0] @ w, grad_c0)
