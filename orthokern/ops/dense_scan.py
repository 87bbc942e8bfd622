"""dense_scan: a recurrence through a dense W."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._activations import ACTIVATIONS
from orthokern._autocast import keeps_dtype
from orthokern.dispatch import Support
from orthokern.ops import _taps
from orthokern.ops._common import (
    SCAN_FEATURES,
    apart,
    check_lengths,
    check_tokens,
    contiguous,
    given,
    no_second_derivative,
    scan_features,
)
from orthokern.ops._register import custom_op

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=SCAN_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=SCAN_FEATURES),
    "triton": Support(
        devices=("cuda",),
        dtypes=(torch.float64, torch.float32),
        limits={"N": 512},
        algorithms=("sequential", "chunked"),
        features=SCAN_FEATURES,
        capability=(8, 0),
    ),
    "cuda": Support(
        devices=("cuda",),
        dtypes=(torch.float32,),
        algorithms=("sequential", "chunked"),
        features=SCAN_FEATURES,
        capability=(8, 0),
    ),
}
dispatch.register("dense_scan", SUPPORT)


@keeps_dtype
def dense_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> Tensor:
    """A dense recurrent layer over a whole sequence. Inputs are taken as checked (``orthokern.functional`` does).

    Equation:
        e_t = x_t                        without weight
            = weight x_t + bias          for features, and for token ids with x_t their one-hot form (never made)
        a_t = W h_{t-1} + e_t,    h_t = phi(a_t),    t = 1 ... T.
        With lengths, a_t = h_t = 0 for t > lengths[b].
        Backward: Note [Dense scan backward] in ``orthokern/reference/dense_scan.py``.

    Args:
        x: [T, B, N], or [T, B, D] with weight, in the floating dtype of w; or int64 [T, B] token ids in [0, D)
            (checked on a CPU; on a GPU, where a check would wait for the device, a wrong id makes its sequence NaN).
        w: [N, N], applied to column vectors (row form: h @ w.T), as torch's weight_hh.
        h0: [B, N], the state before the first step.
        weight: [N, D] or None; bias: [N] or None.
        act_param: [1] or [N]: slope (prelu, leaky_relu) or bias (modrelu); else None.
        activation: a name of ``orthokern.ops.activations.NAMES``.
        checkpoint_every: k > 0 keeps every k-th state for the backward and recomputes the others; 0 keeps all.
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code, where
            checkpoint_every changes nothing.
        precision: the least precision of float32 products that a kernel may use: "ieee", "3xtf32" (three TF32 products,
            nearly float32), "tf32" or "bf16" (both factors rounded). State and sums stay float32. A backend without
            the faster products computes IEEE ones, as cpu and reference always do; so does float64.
        algorithm: "sequential", step after step; "chunked", over chunks of time in parallel through powers of the map
            (activation identity and no message_clip only; forms W); "auto", the backend's choice of what it has.
        lengths: int64 [B], in [1, T], the steps that each sequence has; None: T for all. Checked on a CPU; on a GPU,
            where a check would wait for the device, a wrong one counts as 0 or T. States on padding are zeros. What
            stands there in x (NaN, wrong token ids) and in the cotangent is never looked at, and gradients there are
            zeros.
        message_clip: c > 0 clips delta_t, the gradient of a_t, to [-c, c] element by element in every step of the
            backward, before it goes on to anything; 0 does not. See Note [Message clip] in
            ``orthokern/reference/_scan.py``.
        Floating tensors share one dtype and device; any strides (what is not contiguous is copied).

    Returns:
        hs [T, B, N], the states h_1 ... h_T.

    Saved:
        hs, or with checkpoint_every = k: ckpt [ceil(T/k), B, N], the states entering each segment (ckpt[0] = h0), and
        x; pre [T, B, N], the a_t, for activations that need their input, without checkpoints; x if weight is given; all
        parameters, h0 and lengths; all zero on padding, but for the ckpt that enters right at a sequence's end. The
        backward op also computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 2 T B N^2 flops (+ 2 T B N D for features), backward scan the same, gradient of w 2 T B N^2,
        recomputation one forward more. Writes T B N elements forward, T B N of adjoints backward.

    Numerics:
        As factored_scan: accumulation in the dtype of w, fixed order of sums, the same bits for the same inputs,
        machine and thread count; rounding grows with T as the product of the Jacobians does.
    """
    if dispatch.plain_reference(backend):
        reference = dispatch.resolve("dense_scan", "reference", device=w.device, dtype=w.dtype, algorithm=algorithm)
        check_lengths(lengths, x.shape[0])
        check_tokens(x, weight, lengths)
        hs: Tensor = reference.dense_scan_fwd(
            x, w, h0, weight, bias, act_param, activation=activation, lengths=lengths, message_clip=message_clip
        )[0]
        _taps.record_states("dense_scan", hs)
        return hs
    hs, _, _ = torch.ops.orthokern.dense_scan_fwd(
        x, w, h0, weight, bias, act_param, activation, checkpoint_every, backend, precision, algorithm, lengths,
        message_clip,
    )  # fmt: skip
    return hs


@custom_op(
    "dense_scan_fwd",
    "(Tensor x, Tensor w, Tensor h0, Tensor? weight, Tensor? bias, Tensor? act_param, "
    'str activation, int checkpoint_every=0, str? backend=None, str precision="ieee", str algorithm="auto", '
    "Tensor? lengths=None, float message_clip=0.0) "
    "-> (Tensor, Tensor, Tensor)",
)
def _fwd(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int = 0,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, ...]:
    """(hs, ckpt, pre); what does not apply is empty."""
    leaf = dispatch.resolve(
        "dense_scan", backend, device=w.device, dtype=w.dtype, algorithm=algorithm,
        features=scan_features(lengths, message_clip), N=w.shape[0],
    )  # fmt: skip
    check_lengths(lengths, x.shape[0])
    check_tokens(x, weight, lengths)
    outputs = leaf.dense_scan_fwd(
        *map(contiguous, (x, w, h0, weight, bias, act_param)),
        activation=activation, checkpoint_every=checkpoint_every, precision=precision, algorithm=algorithm,
        lengths=contiguous(lengths), message_clip=message_clip,
    )  # fmt: skip
    _taps.record_states("dense_scan", outputs[0])
    return apart(outputs)


@_fwd.register_fake
def _fwd_fake(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int = 0,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    T, (B, N) = x.shape[0], h0.shape
    segments = (T + checkpoint_every - 1) // checkpoint_every if checkpoint_every else 0
    keep_pre = ACTIVATIONS[activation].needs_input and not checkpoint_every
    return (
        w.new_empty(T, B, N),
        w.new_empty(segments, B, N) if checkpoint_every else w.new_empty(0),
        w.new_empty(T, B, N) if keep_pre else w.new_empty(0),
    )


@custom_op(
    "dense_scan_bwd",
    "(Tensor grad_hs, Tensor states, Tensor pre, Tensor? x, Tensor w, Tensor h0, "
    "Tensor? weight, Tensor? bias, Tensor? act_param, str activation, int checkpoint_every=0, bool need_x=True, "
    'bool need_params=True, str? backend=None, str precision="ieee", str algorithm="auto", '
    "Tensor? lengths=None, float message_clip=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, ...]:
    """(grad_x, grad_w, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm).

    states is hs, or ckpt when checkpoint_every > 0; x may be None where it is not needed (no weight, no checkpoints).
    What does not apply or is not needed is empty. grad_norm: [T].
    """
    leaf = dispatch.resolve(
        "dense_scan", backend, device=w.device, dtype=w.dtype, algorithm=algorithm,
        features=scan_features(lengths, message_clip), N=w.shape[0],
    )  # fmt: skip
    check_lengths(lengths, grad_hs.shape[0])
    check_tokens(x, weight, lengths)
    grads = leaf.dense_scan_bwd(
        *map(contiguous, (grad_hs, states, pre, x, w, h0, weight, bias, act_param)),
        activation=activation, checkpoint_every=checkpoint_every, need_x=need_x, need_params=need_params,
        precision=precision, algorithm=algorithm, lengths=contiguous(lengths), message_clip=message_clip,
    )  # fmt: skip
    if _taps.SINKS:
        _taps.record("dense_scan", grads[-1])
    return apart(grads)


@_bwd.register_fake
def _bwd_fake(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    activation: str,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, ...]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        # new_empty, not empty_like: the gradients are contiguous whatever the strides of the input
        return tensor.new_empty(tensor.shape) if tensor is not None and wanted else w.new_empty(0)

    T = grad_hs.shape[0]
    features = x if x is not None and x.is_floating_point() else None
    norm_dtype = torch.float32 if w.dtype in (torch.float16, torch.bfloat16) else w.dtype
    return (
        like(grad_hs if weight is None else features, need_x),
        like(w, need_params),
        like(h0, True),
        like(weight, need_params),
        like(bias, need_params),
        like(act_param, need_params),
        w.new_empty(T, dtype=norm_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, h0, weight, bias, act_param, activation, checkpoint_every, *choices = inputs
    *ctx.choices, lengths, ctx.message_clip = choices
    hs, ckpt, pre = output
    ctx.mark_non_differentiable(ckpt, pre)
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.checkpoint_every = activation, checkpoint_every
    # a precomputed input term is only read again to recompute states, and may be as large as all of them
    x_needed = weight is not None or checkpoint_every > 0
    states = ckpt if checkpoint_every else hs
    ctx.save_for_backward(states, pre, x if x_needed else None, w, h0, weight, bias, act_param, lengths)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_hs is None:
        return ()
    states, pre, x, w, h0, weight, bias, act_param, lengths = saved
    needs = ctx.needs_input_grad
    need_params = needs[1] or any(needs[3:6])
    grads = torch.ops.orthokern.dense_scan_bwd(
        grad_hs, states, pre, x, w, h0, weight, bias, act_param,
        ctx.activation, ctx.checkpoint_every, needs[0], need_params, *ctx.choices, lengths,
        ctx.message_clip,
    )  # fmt: skip
    return tuple(map(given, grads[:6], needs[:6]))


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("dense_scan"))
