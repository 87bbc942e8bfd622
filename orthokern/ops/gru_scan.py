"""gru_scan: a gated recurrent unit over a sequence, in two variants of the reset gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import (
    GRU_FEATURES,
    GRU_VARIANTS,
    GruArgs,
    GruGradients,
    GruStates,
    join_tensors,
    only_needed,
    schema_of,
    schema_of_needs,
    split_needs,
    split_tensors,
)
from orthokern.dispatch import Support
from orthokern.errors import InputError
from orthokern.ops import _route, _taps
from orthokern.ops._checks import gru_args
from orthokern.ops._common import check_lengths, no_second_derivative
from orthokern.ops._dispatcher import can_bypass_dispatcher
from orthokern.ops._register import custom_op

VARIANTS = GRU_VARIANTS

_GPU: dict[str, Any] = {"devices": ("cuda",), "features": GRU_FEATURES, "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=GRU_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=GRU_FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 128}, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), **_GPU),
}
dispatch.register("gru_scan", SUPPORT)


def gru_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    variant: str = "kanai",
    backend: str | None = None,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> Tensor:
    """A gated recurrent unit over a sequence; z = 1 keeps the state: h_t = z_t h_{t-1} + (1 - z_t) n_t.

    Equation:
        With (x_r, x_z, x_n) the three blocks of x_t, W_r, W_z, W_n and b_r, b_z, b_n those of w and bias, s the
        logistic function and * elementwise:
        r_t = s(x_r + W_r h_{t-1} + b_r),    z_t = s(x_z + W_z h_{t-1} + b_z)
        n_t = tanh(x_n + W_n (r_t * h_{t-1}) + b_n)        variant "kanai": Kanai et al. 2017, eq. 4
            = tanh(x_n + r_t * (W_n h_{t-1} + b_n))        variant "torch": torch.nn.GRU, cuDNN
        h_t = z_t * h_{t-1} + (1 - z_t) * n_t.
        z = 1 keeps the state in both variants, as in Kanai et al., eq. 3, in torch and in Cho et al. 2014 (others
        exchange z and 1 - z). With lengths, h_t = 0 for t > lengths[b].
        With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [GRU scan backward] in ``orthokern/reference/gru_scan.py``.

    Args:
        x: [T, B, 3N], the input terms of the reset gate, the update gate and the candidate, in this order.
        w: [3N, N], their recurrent weights, as torch's weight_hh. All floating tensors have its dtype.
        h0: [B, N], zeros if None.
        bias: [3N], recurrent biases, or None.
        variant: "kanai": the reset gate multiplies the state before W_n (Kanai et al. 2017, eq. 4); "torch": it
            multiplies W_n h + b_n, as in torch.nn.GRU and cuDNN.
        backend: see the module's docstring.
        lengths: int64 [B] or None, the number of steps of each sequence, as in ``factored_scan``.
        resets, reset_state: bool [T, B] and [B, N], or None, as in ``factored_scan``.

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps. Differentiable in x, w, h0, bias and
        reset_state.

    Raises:
        InputError: wrong shapes, dtypes, devices, variant, lengths or resets.
        BackendUnavailable: the backend asked for cannot serve.

    Saved:
        hs [T, B, N], gates [T, B, 3N] (r, z, n), pre [T, B, N] (W_n h_{t-1} + b_n; variant "torch" only), all zero on
        padding, w, h0, bias, lengths, resets and reset_state.
        While a tap is open, the backward op computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 6 T B N^2 flops, backward scan the same, gradient of w the same. Forward reads 3 T B N elements and
        writes 4 T B N (5 in variant "torch"); backward reads 5 T B N (6) and writes 3 T B N, and T B N more for the
        gradient of W_n. With lengths, the cpu backend's scans skip padding in a batch sorted by decreasing length; in
        another order products include all rows up to the last sequence that has not ended.

    Numerics:
        Accumulation in the dtype of w, fixed order of sums in the scans: the same bits for the same inputs, machine and
        thread count. The gradients of w and bias are torch's products and sums over all steps. The logistic function is
        1 / (1 + exp(-a)); its relative error is small until it underflows.

    Example::

        >>> gru_scan(torch.randn(100, 4, 24), torch.randn(24, 8) / 8).shape
        torch.Size([100, 4, 8])
    """
    args = GruArgs(x, w, h0, bias, variant, backend, lengths, resets, reset_state)  # type: ignore[arg-type]
    return scan(gru_args(args))


_SCHEMA = schema_of(GruArgs)


def scan(args: GruArgs) -> Tensor:
    """hs [T, B, N] of checked arguments."""
    if not _route.by_reference(args.backend, *args):
        hs: Tensor = _fwd(*args)[0]
        return hs
    return _by_reference(args)


@keeps_dtype
def _by_reference(args: GruArgs) -> Tensor:
    """hs by the plain torch code of the reference."""
    assert args.x is not None
    check_lengths(args.lengths, args.x.shape[0])
    hs: Tensor = _reference(args).gru_scan_fwd(args).hs
    _taps.record_states("gru_scan", hs)
    return hs


def _reference(args: GruArgs) -> Any:
    """The module of the reference backend."""
    return dispatch.resolve("gru_scan", "reference", device=args.w.device, dtype=args.w.dtype)


def _backend_module(args: GruArgs, T: int) -> Any:
    """The module of the backend that serves a call of T steps. Checks lengths."""
    w, used = args.w, args.features
    module = dispatch.resolve("gru_scan", args.backend, device=w.device, dtype=w.dtype, features=used, N=w.shape[-1])
    check_lengths(args.lengths, T)
    return module


@custom_op("gru_scan_fwd", f"({_SCHEMA.replace('?', '', 1)}) -> (Tensor, Tensor, Tensor)")
def _fwd(x: Tensor, *fields: Any) -> tuple[Tensor | None, ...]:
    """From the fields of GruArgs, those of GruStates; pre is empty in variant "kanai"."""
    args = GruArgs(x, *fields)
    states = _backend_module(args, x.shape[0]).gru_scan_fwd(args)
    _taps.record_states("gru_scan", states.hs)
    return tuple(states)


@_fwd.register_fake
def _fwd_fake(x: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    args = GruArgs(x, *fields)
    T, (B, N), new = x.shape[0], args.h0.shape, args.w.new_empty
    return new(T, B, N), new(T, B, 3 * N), new(0) if args.kanai else new(T, B, N)


@custom_op(
    "gru_scan_bwd",
    f"(Tensor grad_hs, Tensor hs, Tensor gates, Tensor? pre, {schema_of_needs(GruGradients)}, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor | None, *fields: Any) -> tuple[Tensor | None, ...]:
    """The fields of GruGradients; what is not needed is empty. x is not read."""
    needs, fields = split_needs(GruGradients, fields)
    args = GruArgs(*fields)
    return only_needed(_gradients(args, grad_hs, GruStates(hs, gates, None if args.kanai else pre), needs), needs)


def _gradients(args: GruArgs, grad_hs: Tensor, states: GruStates, needs: Any) -> GruGradients:
    """The results of the backward of the backend that serves a call."""
    if states.pre is None and not args.kanai:
        raise InputError('gru_scan_bwd: pre is None: it is needed in variant "torch"')
    grads: GruGradients = _backend_module(args, grad_hs.shape[0]).gru_scan_bwd(args, grad_hs, states, needs)
    if needs.norm:
        _taps.record("gru_scan", grads.norm)
    return grads


@_bwd.register_fake
def _bwd_fake(grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor, *fields: Any) -> tuple[Tensor | None, ...]:
    needs, fields = split_needs(GruGradients, fields)
    args = GruArgs(*fields)
    new, state = args.w.new_empty, None if args.resets is None else args.reset_state
    wide = torch.float32 if args.w.dtype in (torch.float16, torch.bfloat16) else args.w.dtype
    of = [None if tensor is None else new(tensor.shape) for tensor in (gates, args.w, args.h0, args.bias, state)]
    return only_needed((*of, new(grad_hs.shape[0], dtype=wide)), needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    args, (hs, gates, pre) = GruArgs(*inputs), output
    if args.kanai and pre is not None:
        ctx.mark_non_differentiable(pre)  # gates, and pre in variant "torch", have gradients in a second derivative
    ctx.set_materialize_grads(False)
    ctx.options, tensors = split_tensors(args._replace(x=None))
    ctx.save_for_backward(hs, gates, pre, *tensors)


def _backward(
    ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, grad_gates: Tensor | None, grad_pre: Tensor | None
) -> tuple[Any, ...]:
    of_saved = grad_gates is not None or grad_pre is not None
    if grad_hs is None and not of_saved:
        return ()
    hs, gates, pre, *tensors = saved
    args: GruArgs = join_tensors(ctx.options, tensors)
    of: Any = GruArgs._make(ctx.needs_input_grad[: len(GruArgs._fields)])
    needs = GruGradients._make((of.x, of.w, of.h0, of.bias, of.reset_state, _taps.needed()))
    states = GruStates(hs, gates, None if args.kanai else pre)
    if of_saved or _route.recording():
        grads = _differentiable(args, states, grad_hs, needs, grad_gates, grad_pre)
    elif grad_hs is not None and not torch.is_grad_enabled() and can_bypass_dispatcher((grad_hs, *states, *args)):
        grads = _gradients(args, grad_hs, states, needs)
    else:
        grads = GruGradients(*_bwd(grad_hs, hs, gates, pre, *needs, *args))
    of_state = None if args.resets is None else grads.reset_state
    return only_needed((grads.x, grads.w, grads.h0, grads.bias, *(None,) * 4, of_state), of)


def _differentiable(
    args: GruArgs,
    states: GruStates,
    grad_hs: Tensor | None,
    needs: Any,
    grad_gates: Tensor | None,
    grad_pre: Tensor | None,
) -> GruGradients:
    """The results of the backward op, computed by the reference as differentiable functions of all tensors. There hs,
    gates and pre are functions of the inputs through the forward op."""
    result: GruGradients = _reference(args).gru_scan_bwd(
        args,
        torch.zeros_like(states.hs) if grad_hs is None else grad_hs,
        states,
        needs,
        grad_gates=grad_gates,
        grad_pre=grad_pre,
    )
    if result.norm is not None and grad_gates is None and grad_pre is None:
        _taps.record("gru_scan", result.norm.detach())
    return result


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("gru_scan"))
