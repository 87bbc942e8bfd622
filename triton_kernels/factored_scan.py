"""factored_scan: h_t = phi(U (s * (V^T h_{t-1})) + e_t), the whole time loop in one launch; W is never formed.

Maps, memory and the ways to multiply: ``_scan.py``. Here: two resident matrices, 128 KiB of registers at N = K = 128 in
float32, and two products in every step. Limits: N up to 512; from N = 129 on (float64: from 65 on) the matrices are
read in every step, see docs/triton-kernels.md. Chunks of time compute W and run the kernels of the dense scan.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from orthokern._products import factor_gradients
from orthokern.triton_kernels._gradients import Kernels, run_backward, run_forward
from orthokern.triton_kernels._scan import Map, backward, forward
from orthokern.triton_kernels.dense_scan import dense_scan_bwd_kernel, dense_scan_fwd_kernel


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST", "D"])
def factored_scan_fwd_kernel(
    p_x,  # [T, B, N], or int64 [T, B] with a table
    p_table,  # [D, N], or None
    p_first,  # [K, N], the transpose of V
    p_scale,  # [K], s
    p_second,  # [N, K], U
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
        p_x, p_table, p_first, p_scale, p_second, p_h0, p_param, p_hs, p_pre, p_last, p_lengths, T, B, R, CHUNK, FIRST,
        D, N, K, True, TOKENS, ACTIVATION, PARAM, STORE_HS, STORE_PRE, STORE_LAST, LENGTHS, WAY, PRECISION, BLOCK_B,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST"])
def factored_scan_bwd_kernel(
    p_grad,  # [T, B, N]
    p_hs,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_first,  # [K, N], the transpose of U
    p_scale,  # [K], s
    p_second,  # [N, K], V
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
        p_grad, p_hs, p_pre, p_first, p_scale, p_second, p_carry, p_param, p_delta, p_left, p_square, p_sum, p_lengths,
        p_clip, T, B, R, CHUNK, FIRST, N, K, True, ACTIVATION, PARAM, STORE_DELTA, STORE_SUM, FROM_HS, FROM_PRE,
        LENGTHS, CLIP, WAY, PRECISION, BLOCK_B, BLOCK_N, BLOCK_K,
    )  # fmt: skip


KERNELS = Kernels(factored_scan_fwd_kernel, factored_scan_bwd_kernel, dense_scan_fwd_kernel, dense_scan_bwd_kernel)


def factored_scan_fwd(
    x: Tensor,
    u: Tensor,
    s: Tensor,
    v: Tensor,
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
    """Forward of ``orthokern.ops.factored_scan``, which has the equations.

    Args:
        u, v: [N, K], N up to 512. s: [K].
        Others: as in ``dense_scan.dense_scan_fwd``, with the same dtypes, device and layout.

    Returns:
        hs [T, B, N]; ckpt [ceil(T / checkpoint_every), B, N], empty without checkpoints; pre [T, B, N], empty unless
        the backward needs it.

    Example::

        u, v = torch.linalg.qr(torch.randn(2, 64, 64, device="cuda"))[0]
        s, x, h0 = u.new_ones(64), torch.randn(100, 8, 64, device="cuda"), u.new_zeros(8, 64)
        hs, ckpt, pre = factored_scan_fwd(x, u, s, v, h0, None, None, None, activation="tanh")
    """
    return run_forward(
        KERNELS, Map(u, v.mT.contiguous(), s), x, h0, weight, bias, act_param, activation=activation,
        checkpoint_every=checkpoint_every, precision=precision, algorithm=algorithm, lengths=lengths,
        message_clip=message_clip,
    )  # fmt: skip


def factored_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    u: Tensor,
    s: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward of ``orthokern.ops.factored_scan``.

    Args:
        u, v: [N, K]. s: [K].
        Others: as in ``dense_scan.dense_scan_bwd``.

    Returns:
        (grad_x, grad_u [N, K], grad_s [K], grad_v [N, K], grad_h0 [B, N], grad_weight [N, D], grad_bias [N],
        grad_act_param, grad_norm [T]). What does not apply or is not needed is empty.

    Example::

        grads = factored_scan_bwd(torch.ones_like(hs), hs, pre, None, u, s, v, h0, None, None, None, activation="tanh")
    """
    grad_x, m, grad_h0, *others = run_backward(
        KERNELS, Map(u, v.mT.contiguous(), s), Map(v, u.mT.contiguous(), s), grad_hs, states, pre, x, h0, weight, bias,
        act_param, activation=activation, checkpoint_every=checkpoint_every, need_x=need_x, need_params=need_params,
        precision=precision, algorithm=algorithm, lengths=lengths, message_clip=message_clip,
    )  # fmt: skip
    return grad_x, *factor_gradients(m, u, s, v), grad_h0, *others
