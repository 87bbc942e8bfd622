"""gru_scan: a gated recurrent unit over a sequence, in two variants of the reset gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import GruInputs, GruOptions, GruStates, LastGrad
from orthokern.dispatch import Support
from orthokern.ops import _replicas, _route, _second_gru, _taps, _vmap
from orthokern.ops._common import check_lengths, contiguous, filled, given, no_second_derivative
from orthokern.ops._register import custom_op

VARIANTS = ("kanai", "torch")
FEATURES = ("lengths", "resets")  # optional arguments that a backend may lack, see Support.features

_GPU: dict[str, Any] = {"devices": ("cuda",), "features": (*FEATURES, "replicas"), "capability": (8, 0)}
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
    route = _route.route(backend)
    if route == "reference":
        reference = dispatch.resolve("gru_scan", "reference", device=w.device, dtype=w.dtype)
        check_lengths(lengths, x.shape[0])
        inputs, options = GruInputs(x, w, h0, bias, reset_state), GruOptions(variant, lengths, resets)
        hs: Tensor = reference.gru_scan_fwd(inputs, options).hs
        _taps.record_states("gru_scan", hs)
        return hs
    by_op = route == "op" or (route == "function" and _route.first_reverse())
    forward = _fwd if by_op else _second_gru.Gru.apply
    hs, _, _ = forward(x, w, h0, bias, variant, backend, lengths, resets, reset_state)
    return hs


def gru_scan_with_last(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(hs, hs[-1]) of gru_scan, see ``CustomOp.with_last``."""
    if _route.route(backend) == "op":
        return _fwd.with_last(x, w, h0, bias, variant, backend)
    hs = gru_scan.__wrapped__(x, w, h0, bias, variant=variant, backend=backend)  # type: ignore[attr-defined]
    return hs, hs[-1]


def _leaf(
    T: int, x: Tensor | None, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str, backend: str | None,
    lengths: Tensor | None, resets: Tensor | None, reset_state: Tensor | None,
) -> tuple[Any, GruInputs, GruOptions]:  # fmt: skip
    """The leaf that serves a call of T steps, and its arguments, whose values are checked. A w [R, 3N, N] means R
    models, see ``_replicas``."""
    used = tuple(name for name, tensor in zip(FEATURES, (lengths, resets), strict=True) if tensor is not None)
    leaf = dispatch.resolve("gru_scan", backend, device=w.device, dtype=w.dtype, features=used, N=w.shape[-1])
    inputs, options = _replicas.gru_given_to_all(
        GruInputs(x, w, h0, bias, None if resets is None else reset_state), GruOptions(variant, lengths, resets)
    )
    check_lengths(lengths, T)
    options.lengths, options.resets = contiguous(options.lengths), _replicas.for_leaf(options.resets, w)
    return leaf, GruInputs(_replicas.for_leaf(inputs.x, w), *map(contiguous, inputs[1:])), options  # type: ignore[arg-type]


@custom_op(
    "gru_scan_fwd",
    "(Tensor x, Tensor w, Tensor h0, Tensor? bias, str variant, str? backend=None, Tensor? lengths=None, "
    "Tensor? resets=None, Tensor? reset_state=None) -> (Tensor, Tensor, Tensor)",
)
def _fwd(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """(hs, gates, pre); pre is empty in variant "kanai"."""
    leaf, inputs, options = _leaf(x.shape[0], x, *rest)
    states = _replicas.function_of("gru_scan", leaf, "fwd", inputs.w.ndim == 3, inputs)(inputs, options)
    _taps.record_states("gru_scan", states.hs)
    return filled(states, states.hs)


@_fwd.register_fake
def _fwd_fake(x: Tensor, w: Tensor, h0: Tensor, _: Tensor | None, variant: str, *__: Any) -> tuple[Tensor, ...]:
    T, rows, N = x.shape[0], (*w.shape[:-2], h0.shape[-2]), h0.shape[-1]  # rows: R in front for replicas
    pre = _replicas.empty(w, T, *rows, N) if variant == "torch" else w.new_empty(0)
    return _replicas.empty(w, T, *rows, N), _replicas.empty(w, T, *rows, 3 * N), pre


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
    saved = (grad_hs, hs, gates, None if options.kanai else pre)
    given_: list[Any] = [_replicas.for_leaf(tensor, w) for tensor in saved]
    function = _replicas.function_of("gru_scan", leaf, "bwd", inputs.w.ndim == 3, inputs)
    grads = function(inputs, options, given_[0], GruStates(*given_[1:]), need_params=need_params)
    if _taps.SINKS:
        _taps.record("gru_scan", grads.norm)
    return filled(grads, h0)


@_bwd.register_fake
def _bwd_fake(
    grad_hs: Tensor, hs: Tensor, gates: Tensor, pre: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, variant: str,
    need_params: bool, backend: str | None, lengths: Tensor | None, resets: Tensor | None, reset_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    replicas = w.shape[:-2]

    def like(tensor: Tensor | None, ndim: int, wanted: bool) -> Tensor:
        return w.new_empty(*replicas, *tensor.shape[-ndim:]) if tensor is not None and wanted else w.new_empty(0)

    norm_dtype = torch.float32 if w.dtype in (torch.float16, torch.bfloat16) else w.dtype
    return (
        _replicas.empty(gates, *gates.shape),
        like(w, 2, need_params),
        like(h0, 2, True),
        like(bias, 1, need_params),
        like(reset_state, 2, resets is not None),
        w.new_empty(*replicas, grad_hs.shape[0], dtype=norm_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, h0, bias, ctx.variant, ctx.backend, *cuts = inputs
    hs, gates, pre = output
    # replicas may share some of the tensors
    given_ = (x, w, h0, bias, cuts[-1])
    ctx.dimensions = [0 if t is None else t.ndim for t in given_] if w.ndim == 3 else None
    if ctx.variant != "torch":
        ctx.mark_non_differentiable(pre)  # gates, and pre in variant "torch", have gradients in a second derivative
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hs, gates, pre, w, h0, bias, *cuts)


def _backward(
    ctx: Any,
    saved: tuple[Any, ...],
    grad_hs: Tensor | LastGrad | None,
    grad_gates: Tensor | None,
    grad_pre: Tensor | None,
) -> tuple[Any, ...]:
    if isinstance(grad_hs, LastGrad):
        return _first_backward(_bwd.kernel, ctx, saved, grad_hs)
    of_saved = grad_gates is not None or grad_pre is not None
    if grad_hs is None and not of_saved:
        return ()
    needs, resets = ctx.needs_input_grad, saved[7]  # as in _setup_context
    recording = _route.recording(grad_hs, *saved)
    if not of_saved and not recording:
        return _first_backward(_bwd, ctx, saved, grad_hs)
    if ctx.dimensions is None:
        leaf = _second_gru.cpu_leaf(ctx.backend, saved, grad_hs, grad_gates, grad_pre)
        options = GruOptions(ctx.variant, contiguous(saved[6]))
        if leaf is not None and not of_saved:
            found = _second_gru.First.apply(leaf, options, tuple(needs[:4]), grad_hs, *saved[:6])
            return (*map(given, found, needs[:4]), *(None,) * 5)
        if leaf is not None and not recording:
            found = _second_gru.of_saved(leaf, options, saved, (grad_hs, grad_gates, grad_pre), needs)
            return (*(grad if need else None for grad, need in zip(found, needs, strict=False)), *(None,) * 5)
    wanted = (*needs[:4], resets is not None and needs[8])
    *found, last = _differentiable(ctx, saved, (grad_hs, grad_gates, grad_pre), wanted)
    return (*found, *(None,) * 4, last)


def _first_backward(
    run: Callable[..., tuple[Tensor, ...]], ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | LastGrad | None
) -> tuple[Any, ...]:
    """The gradients by the backward op."""
    needs, resets = ctx.needs_input_grad, saved[7]
    need_params = needs[1] or needs[3]
    *grads, grad_reset_state, _ = run(grad_hs, *saved[:6], ctx.variant, need_params, ctx.backend, *saved[6:])
    found = [*map(given, grads, needs[:4]), given(grad_reset_state, resets is not None and needs[8])]
    if ctx.dimensions is not None:
        found = _replicas.summed(found, ctx.dimensions)
    return (*found[:-1], *(None,) * 4, found[-1])


def _differentiable(
    ctx: Any, saved: tuple[Any, ...], cotangents: tuple[Any, Any, Any], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The same gradients, computed by differentiable operations."""
    if ctx.dimensions is None:
        return list(_second_gru.gradients(_second_gru.Taken(ctx.variant, *saved), *cotangents, needs))
    hs, gates, pre, w, h0, bias, lengths, resets, reset_state = saved

    def front(name: str, tensor: Tensor | None, r: int) -> Any:
        whole = _replicas.everywhere(name, tensor, len(w), "gru_scan")
        return None if whole is None else whole[r]

    models = []
    for r in range(len(w)):
        taken = _second_gru.Taken(
            ctx.variant, hs[:, r], gates[:, r], pre if pre.ndim == 1 else pre[:, r], w[r], front("h0", h0, r),
            front("bias", bias, r), front("lengths", lengths, r),
            resets if resets is None or resets.ndim == 2 else resets[:, r], front("reset_state", reset_state, r),
        )  # fmt: skip
        own = [None if cotangent is None else cotangent[:, r] for cotangent in cotangents]
        models.append(_second_gru.gradients(taken, own[0], own[1], own[2], needs))
    return _replicas.summed(_replicas.gradients_of_all(models), ctx.dimensions)


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("gru_scan"))
_fwd.register_vmap(_vmap.scan(_fwd, 1, 1, behind_time=3))
_bwd.register_vmap(_vmap.scan(_bwd, 4, 1, saved=4))
