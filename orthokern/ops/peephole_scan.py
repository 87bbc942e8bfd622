"""peephole_scan: an LSTM with peepholes over a sequence, the baseline that orthogonal recurrences are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import PeepholeInputs, PeepholeStates
from orthokern.dispatch import Support
from orthokern.ops._common import by_reference, needs_grad, no_second_derivative
from orthokern.ops._register import custom_op

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(missing="a step is a product of a library and a small kernel, which the cuda backend has"),
    "cuda": Support(devices=("cuda",), dtypes=(torch.float32,), capability=(8, 0)),
}
dispatch.register("peephole_scan", SUPPORT)


@keeps_dtype
def peephole_scan(
    x: Tensor, w: Tensor, peephole: Tensor, h0: Tensor, c0: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(h, c) of every step. Inputs are assumed to be checked, as by ``orthokern.nn.PeepholeLSTM``.

    Equation (Gers & Schmidhuber 2000, with diagonal peepholes as in Graves 2013):
        a_t = x_t + W h_{t-1},
        i = sigma(a_i + p_i * c_{t-1}),  f = sigma(a_f + p_f * c_{t-1}),  g = tanh(a_g),
        c_t = f * c_{t-1} + i * g,  o = sigma(a_o + p_o * c_t),  h_t = o * tanh(c_t),
        with * elementwise and sigma the logistic function. Backward: Note [Peephole scan backward] in
        ``orthokern/reference/peephole_scan.py``.

    Args:
        x: input terms [T, B, 4N], of the gates i, f, g, o, with their biases.
        w: [4N, N], in the same order.
        peephole: [3, N], in the order i, f, o.
        h0, c0: [B, N].
        backend: as in ``orthokern.functional``. An explicit "reference" runs plain differentiable torch code.

    Returns:
        (hs, cs), each [T, B, N].

    Saved:
        With gradients, hs, cs and the gates [T, B, 4N].

    Cost:
        8 N^2 flops per step and sequence forward, and 16 N^2 backward, half of which are for the gradient of w. Memory
        traffic per step and sequence: 10 N values forward, and 15 N backward with one gradient of states; on CUDA twice
        as much, and the map in each step, since its product is a library's.

    Numerics:
        Accumulation in the dtype of w. On the CPU the same inputs, machine and thread count give bit-identical results.

    A second derivative is not available, except with the reference.
    """
    if by_reference(backend, x, w, peephole, h0, c0):
        reference = dispatch.leaf("peephole_scan", "reference")
        states: PeepholeStates = reference.peephole_scan_fwd(PeepholeInputs(x, w, peephole, h0, c0), need_gates=False)
        return states[:2]
    hs, cs, _ = _fwd(x, w, peephole, h0, c0, backend, needs_grad(x, w, peephole, h0, c0))
    return hs, cs


def _leaf(x: Tensor | None, w: Tensor, *rest: Any) -> tuple[Any, PeepholeInputs]:
    """The leaf that serves a call, and its arguments."""
    *others, backend = rest
    leaf = dispatch.resolve("peephole_scan", backend, device=w.device, dtype=w.dtype, N=w.shape[-1])
    return leaf, PeepholeInputs(x, w, *others)


@custom_op(
    "peephole_scan_fwd",
    "(Tensor x, Tensor w, Tensor peephole, Tensor h0, Tensor c0, str? backend=None, bool need_gates=True) -> "
    "(Tensor, Tensor, Tensor)",
)
def _fwd(*arguments: Any) -> PeepholeStates:
    """(hs, cs, gates [T, B, 4N], empty unless need_gates)."""
    *others, need_gates = arguments
    leaf, inputs = _leaf(*others)
    states: PeepholeStates = leaf.peephole_scan_fwd(inputs, need_gates=need_gates)
    return states if need_gates else states._replace(gates=None)


@_fwd.register_fake
def _fwd_fake(x: Tensor, w: Tensor, peephole: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    T, (B, N), need_gates = x.shape[0], h0.shape, rest[-1]
    return x.new_empty(T, B, N), x.new_empty(T, B, N), x.new_empty(T, B, 4 * N) if need_gates else None


@custom_op(
    "peephole_scan_bwd",
    "(Tensor? grad_hs, Tensor? grad_cs, Tensor hs, Tensor cs, Tensor gates, Tensor w, Tensor peephole, Tensor h0, "
    "Tensor c0, str? backend=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_hs: Tensor | None, grad_cs: Tensor | None, hs: Tensor, cs: Tensor, gates: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of x, w, peephole, h0 and c0. A gradient of states that is None is zero."""
    leaf, inputs = _leaf(None, *rest)
    return tuple(leaf.peephole_scan_bwd(inputs, grad_hs, grad_cs, PeepholeStates(hs, cs, gates)))


@_bwd.register_fake
def _bwd_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in arguments[4:9])  # gates, w, peephole, h0, c0


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, *tensors, ctx.backend, ctx.need_gates = inputs
    hs, cs, gates = output
    if gates is not None:
        ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hs, cs, gates, *tensors)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, grad_cs: Tensor | None, *_: Any) -> Any:
    if grad_hs is None and grad_cs is None:
        return ()
    if not ctx.need_gates:  # as in a program that was exported under no_grad
        raise RuntimeError("peephole_scan_fwd was called with need_gates=False: it kept nothing for a backward")
    return _bwd(grad_hs, grad_cs, *saved, ctx.backend)


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("an LSTM (peephole_scan)", "ORTHOKERN_BACKEND=reference"))
