"""gru_scan: a gated recurrent unit over a sequence, in two variants of the reset gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import GruInputs, GruOptions, GruStates
from orthokern.dispatch import Support
from orthokern.ops import _route, _taps
from orthokern.ops._common import check_lengths, contiguous, filled, needed, no_second_derivative
from orthokern.ops._register import custom_op

VARIANTS = ("kanai", "torch")
FEATURES = ("lengths", "resets")  # optional arguments that a backend may lack, see Support.features

_GPU: dict[str, Any] = {"devices": ("cuda",), "features": FEATURES, "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 512}, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), **_GPU),
}
dispatch.register("gru_scan", SUPPORT)


@keeps_dtype
def gru_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    bias: Tensor | None,
    *,
    variant: str,
    backend: str | None = None,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> Tensor:
    """A GRU layer over a whole sequence. Inputs are taken as checked (``orthokern.functional`` does).

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
        As in ``orthokern.functional.gru_scan``, with an h0 that is not None. Floating tensors share one dtype and
        device; any strides (tensors that are not contiguous are copied).
        x: the input terms W_ih x_t + b_ih of r, z, n.
        bias: in variant "kanai", and for r and z, the same as adding it to x.
        backend: an explicit "reference" runs plain differentiable torch code.
        lengths: checked on a CPU only, since a check on a GPU would synchronise; there they are clamped to [0, T].
        resets: Note [Resets] in ``orthokern/reference/_scan.py``.

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps.

    Saved:
        hs [T, B, N], gates [T, B, 3N] (r, z, n), pre [T, B, N] (W_n h_{t-1} + b_n; variant "torch" only), all zero on
        padding, w, h0, bias, lengths, resets and reset_state.
        The backward op also computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 6 T B N^2 flops, backward scan the same, gradient of w the same. Forward reads 3 T B N elements and
        writes 4 T B N (5 in variant "torch"); backward reads 5 T B N (6) and writes 3 T B N, and T B N more for the
        gradient of W_n. With lengths, the cpu backend's scans skip padding in a batch sorted by decreasing length; in
        another order products include all rows up to the last sequence that has not ended.

    Numerics:
        Accumulation in the dtype of w, fixed order of sums in the scans: the same bits for the same inputs, machine and
        thread count. The gradients of w and bias are torch's products and sums over all steps. The logistic function is
        1 / (1 + exp(-a)); its relative error is small until it underflows.
    """
    if not _route.by_reference(backend, x, w, h0, bias, reset_state):
        hs: Tensor = _fwd(x, w, h0, bias, variant, backend, lengths, resets, reset_state)[0]
        return hs
    reference = dispatch.resolve("gru_scan", "reference", device=w.device, dtype=w.dtype)
    check_lengths(lengths, x.shape[0])
    inputs, options = GruInputs(x, w, h0, bias, reset_state), GruOptions(variant, lengths, resets)
    hs = reference.gru_scan_fwd(inputs, options).hs
    _taps.record_states("gru_scan", hs)
    return hs


def _arguments(
    x: Tensor | None,
    w: Tensor,
    h0: Tensor,
    bias: Tensor | None,
    variant: str,
    backend: str | None,
    lengths: Tensor | None,
    resets: Tensor | None,
    reset_state: Tensor | None,
) -> tuple[str | None, GruInputs, GruOptions]:
    """The backend, and the arguments of its functions."""
    inputs = GruInputs(x, w, h0, bias, None if resets is None else reset_state)
    return backend, inputs, GruOptions(variant, lengths, resets)


def _leaf(T: int, *arguments: Any) -> tuple[Any, GruInputs, GruOptions]:
    """The leaf that serves a call of T steps, and its arguments, whose values are checked."""
    backend, inputs, options = _arguments(*arguments)
    w, cuts = inputs.w, (options.lengths, options.resets)
    used = tuple(name for name, tensor in zip(FEATURES, cuts, strict=True) if tensor is not None)
    leaf = dispatch.resolve("gru_scan", backend, device=w.device, dtype=w.dtype, features=used, N=w.shape[-1])
    check_lengths(options.lengths, T)
    options.lengths, options.resets = map(contiguous, cuts)
    return leaf, GruInputs._make(map(contiguous, inputs)), options


@custom_op(
    "gru_scan_fwd",
    "(Tensor x, Tensor w, Tensor h0, Tensor? bias, str variant, str? backend=None, Tensor? lengths=None, "
    "Tensor? resets=None, Tensor? reset_state=None) -> (Tensor, Tensor, Tensor)",
)
def _fwd(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """(hs, gates, pre); pre is empty in variant "kanai"."""
    leaf, inputs, options = _leaf(x.shape[0], x, *rest)
    states = leaf.gru_scan_fwd(inputs, options)
    _taps.record_states("gru_scan", states.hs)
    return filled(states, states.hs)


@_fwd.register_fake
def _fwd_fake(x: Tensor, w: Tensor, h0: Tensor, _: Tensor | None, variant: str, *__: Any) -> tuple[Tensor, ...]:
    T, (B, N), new = x.shape[0], h0.shape, w.new_empty
    return new(T, B, N), new(T, B, 3 * N), new(T, B, N) if variant == "torch" else new(0)


@custom_op(
    "gru_scan_bwd",
    "(Tensor grad_hs, Tensor hs, Tensor gates, Tensor pre, Tensor w, Tensor h0, Tensor? bias, str variant, "
    "bool need_params=True, str? backend=None, Tensor? lengths=None, Tensor? resets=None, Tensor? reset_state=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """(grad_x, grad_w, grad_h0, grad_bias, grad_reset_state, grad_norm [T]); what is not needed is empty."""
    variant, need_params, *others = rest
    leaf, inputs, options = _leaf(grad_hs.shape[0], None, w, h0, bias, variant, *others)
    states = GruStates(hs.contiguous(), gates.contiguous(), None if options.kanai else pre.contiguous())
    grads = leaf.gru_scan_bwd(inputs, options, grad_hs.contiguous(), states, need_params=need_params)
    if _taps.SINKS:
        _taps.record("gru_scan", grads.norm)
    return filled(grads, h0)


@_bwd.register_fake
def _bwd_fake(
    grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    _, need_params, _, _, resets, reset_state = rest

    def like(tensor: Tensor | None, required: bool) -> Tensor:
        return w.new_empty(tensor.shape if tensor is not None and required else 0)

    norm_dtype = torch.float32 if w.dtype in (torch.float16, torch.bfloat16) else w.dtype
    return (
        w.new_empty(gates.shape),
        like(w, need_params),
        like(h0, True),
        like(bias, need_params),
        like(reset_state, resets is not None),
        w.new_empty(grad_hs.shape[0], dtype=norm_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, w, h0, bias, ctx.variant, ctx.backend, *cuts = inputs
    hs, gates, pre = output
    if ctx.variant != "torch":
        ctx.mark_non_differentiable(pre)  # gates, and pre in variant "torch", have gradients in a second derivative
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hs, gates, pre, w, h0, bias, *cuts)


def _backward(
    ctx: Any,
    saved: tuple[Any, ...],
    grad_hs: Tensor | None,
    grad_gates: Tensor | None,
    grad_pre: Tensor | None,
) -> tuple[Any, ...]:
    of_saved = grad_gates is not None or grad_pre is not None
    if grad_hs is None and not of_saved:
        return ()
    needs, resets = ctx.needs_input_grad, saved[7]  # as in _setup_context
    need_params = needs[1] or needs[3]
    if of_saved or _route.recording():
        grads = _differentiable(ctx, saved, (grad_hs, grad_gates, grad_pre), need_params)
    else:
        grads = _bwd(grad_hs, *saved[:6], ctx.variant, need_params, ctx.backend, *saved[6:])
    of_reset_state = needed(grads[4], resets is not None and needs[8])
    return (*map(needed, grads[:4], needs[:4]), *(None,) * 4, of_reset_state)


def _differentiable(
    ctx: Any, saved: tuple[Any, ...], cotangents: tuple[Tensor | None, ...], need_params: bool
) -> tuple[Tensor | None, ...]:
    """The results of the backward op, computed by the reference as differentiable functions of all tensors. There hs,
    gates and pre are functions of the inputs through the forward op."""
    hs, gates, pre, w, h0, bias, *cuts = saved
    grad_hs, grad_gates, grad_pre = cotangents
    _, inputs, options = _arguments(None, w, h0, bias, ctx.variant, ctx.backend, *cuts)
    reference = dispatch.resolve("gru_scan", "reference", device=w.device, dtype=w.dtype)
    result: tuple[Tensor | None, ...] = reference.gru_scan_bwd(
        inputs,
        options,
        torch.zeros_like(hs) if grad_hs is None else grad_hs,
        GruStates(hs, gates, None if options.kanai else pre),
        need_params=need_params,
        grad_gates=grad_gates,
        grad_pre=grad_pre,
    )
    if _taps.SINKS and grad_gates is None and grad_pre is None:
        norm = result[-1]
        assert norm is not None
        _taps.record("gru_scan", norm.detach())
    return result


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("gru_scan"))
