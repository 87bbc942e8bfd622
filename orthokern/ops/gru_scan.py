"""gru_scan: a gated recurrent unit over a sequence, in both readings of the reset gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import GruInputs, GruOptions, GruStates
from orthokern.dispatch import Support
from orthokern.ops import _route, _second_gru, _taps
from orthokern.ops._common import check_lengths, contiguous, filled, given, no_second_derivative
from orthokern.ops._register import custom_op

VARIANTS = ("kanai", "torch")
FEATURES = ("lengths", "resets")  # optional arguments that a backend may lack, see Support.features

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=FEATURES),
    "triton": Support(
        devices=("cuda",),
        dtypes=(torch.float64, torch.float32),
        limits={"N": 512},
        features=FEATURES,
        capability=(8, 0),
    ),
    "cuda": Support(devices=("cuda",), dtypes=(torch.float32,), features=FEATURES, capability=(8, 0)),
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
        z = 1 keeps the state, in both variants: that of Kanai et al., eq. 3, and that of torch are the same convention
        (Cho et al. 2014 too; others exchange z and 1 - z). With lengths, h_t = 0 for t > lengths[b].
        With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [GRU scan backward] in ``orthokern/reference/gru_scan.py``.

    Args:
        x: [T, B, 3N], the input's part of r, z, n in this order: W_ih x_t + b_ih.
        w: [3N, N], the recurrent weights of r, z, n, applied to column vectors, as torch's weight_hh.
        h0: [B, N], the state before the first step.
        bias: [3N] or None, recurrent biases. In variant "kanai" and in r and z the same as adding it to x.
        variant: one of VARIANTS.
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code.
        lengths: int64 [B], in [1, T], the steps that each sequence has; None: T for all. Checked on a CPU; on a GPU,
            where the values would have to travel to the host, the kernels count one below 0 or above T as 0 or T.
            What stands on padding in x, and in the cotangent of hs, is not read.
        resets: bool [T, B]: before the step the state becomes reset_state [B, N] (zeros for None). Note [Resets] in
            ``orthokern/reference/_scan.py``.
        Floating tensors share one dtype and device; any strides (what is not contiguous is copied).

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps.

    Saved:
        hs [T, B, N], gates [T, B, 3N] (r, z, n), pre [T, B, N] (W_n h_{t-1} + b_n; variant "torch" only), all zero on
        padding, w, h0, bias, lengths, resets and reset_state.
        The backward op also computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 6 T B N^2 flops, backward scan the same, gradient of w the same. Forward reads 3 T B N elements and
        writes 4 T B N (5 in variant "torch"); backward reads 5 T B N (6) and writes 3 T B N, and T B N more for the
        gradient of W_n. With lengths, the cpu backend's scans do no work on padding in a batch that is sorted by
        falling length; in another order products run up to the last sequence that has not ended.

    Numerics:
        Accumulation in the dtype of w, fixed order of sums in the scans: the same bits for the same inputs, machine and
        thread count. The gradients of w and bias are torch's products and sums over all steps. The logistic function is
        1 / (1 + exp(-a)), accurate in relative terms down to where it underflows.
    """
    route = _route.route(backend)
    if route == "reference":
        reference = dispatch.resolve("gru_scan", "reference", device=w.device, dtype=w.dtype)
        check_lengths(lengths, x.shape[0])
        inputs, options = GruInputs(x, w, h0, bias, reset_state), GruOptions(variant, lengths, resets)
        hs: Tensor = reference.gru_scan_fwd(inputs, options).hs
        _taps.record_states("gru_scan", hs)
        return hs
    forward = _fwd if route == "op" else _second_gru.Gru.apply
    hs, _, _ = forward(x, w, h0, bias, variant, backend, lengths, resets, reset_state)
    return hs


def _leaf(
    T: int, x: Tensor | None, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str, backend: str | None,
    lengths: Tensor | None, resets: Tensor | None, reset_state: Tensor | None,
) -> tuple[Any, GruInputs, GruOptions]:  # fmt: skip
    """The leaf's module that serves a call of T steps, and what to pass to it, after the checks of values."""
    used = tuple(name for name, tensor in zip(FEATURES, (lengths, resets), strict=True) if tensor is not None)
    leaf = dispatch.resolve("gru_scan", backend, device=w.device, dtype=w.dtype, features=used, N=w.shape[1])
    check_lengths(lengths, T)
    inputs = GruInputs._make(map(contiguous, (x, w, h0, bias, None if resets is None else reset_state)))
    return leaf, inputs, GruOptions(variant, contiguous(lengths), contiguous(resets))


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
    T, (B, N) = x.shape[0], h0.shape
    pre = w.new_empty(T, B, N) if variant == "torch" else w.new_empty(0)
    return w.new_empty(T, B, N), w.new_empty(T, B, 3 * N), pre


@custom_op(
    "gru_scan_bwd",
    "(Tensor grad_hs, Tensor hs, Tensor gates, Tensor pre, Tensor w, Tensor h0, Tensor? bias, str variant, "
    "bool need_params=True, str? backend=None, Tensor? lengths=None, Tensor? resets=None, Tensor? reset_state=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str,
    need_params: bool, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(grad_x, grad_w, grad_h0, grad_bias, grad_reset_state, grad_norm [T]); what is not needed is empty."""
    leaf, inputs, options = _leaf(grad_hs.shape[0], None, w, h0, bias, variant, *rest)
    states = GruStates(hs.contiguous(), gates.contiguous(), None if options.kanai else pre.contiguous())
    grads = leaf.gru_scan_bwd(inputs, options, grad_hs.contiguous(), states, need_params=need_params)
    if _taps.SINKS:
        _taps.record("gru_scan", grads.norm)
    return filled(grads, h0)


@_bwd.register_fake
def _bwd_fake(
    grad_hs: Tensor, _: Tensor, gates: Tensor, __: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, ___: str,
    need_params: bool, ____: str | None, _____: Tensor | None, resets: Tensor | None, reset_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if tensor is not None and wanted else w.new_empty(0)

    norm_dtype = torch.float32 if w.dtype in (torch.float16, torch.bfloat16) else w.dtype
    return (
        like(gates, True),
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
        ctx.mark_non_differentiable(pre)  # gates, and pre where there is one, have gradients in a second derivative
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hs, gates, pre, w, h0, bias, *cuts)


def _backward(
    ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, grad_gates: Tensor | None, grad_pre: Tensor | None
) -> tuple[Any, ...]:
    of_saved = grad_gates is not None or grad_pre is not None
    if grad_hs is None and not of_saved:
        return ()
    hs, gates, pre, w, h0, bias, lengths, resets, reset_state = saved
    needs = ctx.needs_input_grad
    wanted = resets is not None and needs[8]
    recording = _route.recording()
    if of_saved or recording:
        leaf = _second_gru.cpu_leaf(ctx.backend, saved, grad_hs, grad_gates, grad_pre)
        options = GruOptions(ctx.variant, contiguous(lengths))
        if leaf is not None and not of_saved:
            found = _second_gru.First.apply(leaf, options, tuple(needs[:4]), grad_hs, hs, gates, pre, w, h0, bias)
            return (*map(given, found, needs[:4]), *(None,) * 5)
        if leaf is not None and not recording:
            found = _second_gru.of_saved(leaf, options, saved, grad_hs, grad_gates, grad_pre, needs)
            return (*(grad if need else None for grad, need in zip(found, needs, strict=False)), *(None,) * 5)
        taken = _second_gru.Taken(ctx.variant, *saved)
        *found, of_state = _second_gru.gradients(taken, grad_hs, grad_gates, grad_pre, (*needs[:4], wanted))
        return (*found, *(None,) * 4, of_state)
    *grads, grad_reset_state, _ = _bwd(
        grad_hs,
        hs,
        gates,
        pre,
        w,
        h0,
        bias,
        ctx.variant,
        needs[1] or needs[3],
        ctx.backend,
        lengths,
        resets,
        reset_state,
    )
    return (*map(given, grads, needs[:4]), *(None,) * 4, given(grad_reset_state, wanted))


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("gru_scan"))
