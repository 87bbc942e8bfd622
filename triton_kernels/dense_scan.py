"""dense_scan: h_t = phi(W h_{t-1} + e_t), the whole time loop in one launch.

Maps, memory and the ways to multiply: ``_scan.py``. Here: W is the one resident matrix, 64 KiB of registers at N = 128
in float32. Limits: N up to 512; from N = 129 on (float64: from 65 on) W is read in every step, see
docs/triton-kernels.md.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from orthokern.triton_kernels._gradients import Kernels, run_backward, run_forward
from orthokern.triton_kernels._scan import Map, backward, forward


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST", "D"])
def dense_scan_fwd_kernel(
    p_x,  # [T, B, N], or int64 [T, B] with a table
    p_table,  # [D, N], or None
    p_second,  # [N, N], W
    p_h0,  # [R, N]
    p_param,  # [1] or [N], or None
    p_hs,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_last,  # [R, N], or None
    p_lengths,  # int64 [B], or None
    T,
    B,
    R,
    CHUNK,
    FIRST,
    D,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARAM: tl.constexpr,
    STORE_HS: tl.constexpr,
    STORE_PRE: tl.constexpr,
    STORE_LAST: tl.constexpr,
    LENGTHS: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    forward(
        p_x, p_table, None, None, p_second, p_h0, p_param, p_hs, p_pre, p_last, p_lengths, T, B, R, CHUNK, FIRST, D, N,
        K, False, TOKENS, ACTIVATION, PARAM, STORE_HS, STORE_PRE, STORE_LAST, LENGTHS, WAY, PRECISION, BLOCK_B, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST"])
def dense_scan_bwd_kernel(
    p_grad,  # [T, B, N]
    p_hs,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_second,  # [N, N], the transpose of W
    p_carry,  # [R, N]
    p_param,  # [1] or [N], or None
    p_delta,  # [T, B, N], or None
    p_left,  # [R, N]
    p_square,  # [T, B], or None
    p_sum,  # [R, N], or None
    p_lengths,  # int64 [B], or None
    p_clip,  # [1], or None
    T,
    B,
    R,
    CHUNK,
    FIRST,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARAM: tl.constexpr,
    STORE_DELTA: tl.constexpr,
    STORE_SUM: tl.constexpr,
    FROM_HS: tl.constexpr,
    FROM_PRE: tl.constexpr,
    LENGTHS: tl.constexpr,
    CLIP: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    backward(
        p_grad, p_hs, p_pre, None, None, p_second, p_carry, p_param, p_delta, p_left, p_square, p_sum, p_lengths,
        p_clip, T, B, R, CHUNK, FIRST, N, K, False, ACTIVATION, PARAM, STORE_DELTA, STORE_SUM, FROM_HS, FROM_PRE,
        LENGTHS, CLIP, WAY, PRECISION, BLOCK_B, BLOCK_N, BLOCK_K,
    )  # fmt: skip


KERNELS = Kernels(dense_scan_fwd_kernel, dense_scan_bwd_kernel, dense_scan_fwd_kernel, dense_scan_bwd_kernel)


def dense_scan_fwd(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of ``orthokern.ops.dense_scan``, which has the equations.

    Tensors are contiguous, on one CUDA device, and float32 or float64 alike, unless stated otherwise.

    Args:
        x: [T, B, N] if weight is None; else features [T, B, D], or token ids int64 [T, B] in [0, D).
        w: [N, N], N up to 512. h0: [B, N].
        weight: [N, D] or None. bias: [N] or None. act_param: [1] or [N], or None.
        activation: a name of ``orthokern.ops.activations.NAMES``.
        checkpoint_every: steps between saved states; 0 saves all.
        precision: "ieee", "tf32", "3xtf32" or "bf16", of the products in float32.
        algorithm: "auto", "sequential" or "chunked" (identity only).
        lengths: int64 [B] in [1, T], or None for T.
        message_clip: bound of |delta| in the backward, 0 for none.

    Returns:
        hs [T, B, N]; ckpt [ceil(T / checkpoint_every), B, N], empty without checkpoints; pre [T, B, N], empty unless
        the backward needs it.

    Example::

        x, w = torch.randn(100, 8, 64, device="cuda"), torch.eye(64, device="cuda")
        h0 = torch.zeros(8, 64, device="cuda")
        hs, ckpt, pre = dense_scan_fwd(x, w, h0, None, None, None, activation="tanh")
    """
    return run_forward(
        KERNELS, Map(w), x, h0, weight, bias, act_param, activation=activation, checkpoint_every=checkpoint_every,
        precision=precision, algorithm=algorithm, lengths=lengths, message_clip=message_clip,
    )  # fmt: skip


def dense_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    need_x: bool = True,
    need_params: bool = True,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward of ``orthokern.ops.dense_scan``. Arguments that the forward has are as in `dense_scan_fwd`.

    Args:
        grad_hs: [T, B, N], dL/dhs.
        states: hs [T, B, N], or ckpt with checkpoints. pre: of the forward, [T, B, N] or empty.
        x: as in the forward; None where it is not needed (weight is None and there are no checkpoints).
        need_x, need_params: whether to compute grad_x, and the gradients of w, weight, bias and act_param.

    Returns:
        (grad_x, grad_w [N, N], grad_h0 [B, N], grad_weight [N, D], grad_bias [N], grad_act_param, grad_norm [T]), the
        last |dL/dh_t| over batch and units. What does not apply or is not needed is empty.

    Example::

        grads = dense_scan_bwd(torch.ones_like(hs), hs, pre, None, w, h0, None, None, None, activation="tanh")
    """
    return run_backward(
        KERNELS, Map(w), Map(w.mT.contiguous()), grad_hs, states, pre, x, h0, weight, bias, act_param,
        activation=activation, checkpoint_every=checkpoint_every, need_x=need_x, need_params=need_params,
        precision=precision, algorithm=algorithm, lengths=lengths, message_clip=message_clip,
    )  # fmt: skip
