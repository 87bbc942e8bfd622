"""factored_scan: h_t = phi(U (s * (V^T h_{t-1})) + e_t), the whole time loop in one launch; W is never formed.

Maps, memory and the ways to multiply: ``_scan.py``. Here: two resident matrices, 128 KiB of registers at N = K = 128 in
float32, and two products after one another in every step. Limits: N up to 512; from N = 129 on (float64: from 65 on)
they are read in every step, see docs/triton-kernels.md. Chunks of time form W, and run the dense scan's kernels.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import triton
import triton.language as tl

from orthokern.triton_kernels._gradients import Kernels, run_backward, run_forward
from orthokern.triton_kernels._scan import backward, forward
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
    p_cut,  # uint8 [T, B], or None
    p_restart,  # [B, N], or None
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
    CUTS: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    forward(
        p_x, p_table, p_first, p_scale, p_second, p_h0, p_param, p_hs, p_pre, p_last, p_lengths, p_cut, p_restart, T, B,
        R, CHUNK, FIRST, D, N, K, True, TOKENS, ACTIVATION, PARAM, STORE_HS, STORE_PRE, STORE_LAST, LENGTHS, CUTS, WAY,
        PRECISION, BLOCK_B, BLOCK_N, BLOCK_K,
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
    p_cut,  # uint8 [T, B], or None
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
    CUTS: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    backward(
        p_grad, p_hs, p_pre, p_first, p_scale, p_second, p_carry, p_param, p_delta, p_left, p_square, p_sum, p_lengths,
        p_clip, p_cut, T, B, R, CHUNK, FIRST, N, K, True, ACTIVATION, PARAM, STORE_DELTA, STORE_SUM, FROM_HS, FROM_PRE,
        LENGTHS, CLIP, CUTS, WAY, PRECISION, BLOCK_B, BLOCK_N, BLOCK_K,
    )  # fmt: skip


KERNELS = Kernels(factored_scan_fwd_kernel, factored_scan_bwd_kernel, dense_scan_fwd_kernel, dense_scan_bwd_kernel)
factored_scan_fwd = functools.partial(run_forward, KERNELS)
factored_scan_bwd = functools.partial(run_backward, KERNELS)
