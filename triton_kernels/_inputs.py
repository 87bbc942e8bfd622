"""The input term of a scan and its gradients: features times a weight, and the sums over equal token ids.

features_kernel         program i_r, i_n -> rows [i_r BLOCK_R, ...) and columns [i_n BLOCK_N, ...) of
                        e [T, B, N], the sum over D in panels of 32. The bits of a row depend on that row alone, so time
                        steps that are recomputed for the backward have the same bits; torch.addmm does not guarantee
                        that. Bound by FMA units (or tensor cores, if selected) from D of about 100 on.
token_gradient_kernel   program d, i_s -> part i_s of the rows with token id d, in the order of time, added in BLOCK_R
                        partial sums. No atomics; the work is proportional to the rows, for any D. Bound by HBM, or by
                        the most frequent id if it has most of the rows.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEATURES_BLOCK_R = 64
FEATURES_BLOCK_N = 64
FEATURES_BLOCK_D = 32
FEATURES_WARPS = 8
# tl.dot takes float64 from Triton 3.5 on, which comes with torch 2.9. Before, float64 is multiplied without it.
DOT_F64 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5)

TOKENS_TILE = 2048
TOKENS_WARPS = 4
# With few ids, the rows of each id are divided among several programs, up to this many programs in total.
TOKENS_PROGRAMS = 512


@triton.jit(do_not_specialize=["R"])
def features_kernel(
    p_x,  # [T, B, D]
    p_weight,  # [N, D]
    p_bias,  # [N], or None
    p_e,  # [T, B, N]
    R,  # rows, T B
    D: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_r = o_r < R
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    b_e = tl.zeros([BLOCK_R, BLOCK_N], dtype=p_x.dtype.element_ty)
    if DOT:
        for i_d in range(0, D, BLOCK_D):
            o_d = i_d + tl.arange(0, BLOCK_D)
            b_x = tl.load(p_x + o_r * D + o_d[None, :], mask=m_r & (o_d[None, :] < D), other=0.0)
            b_w = tl.load(p_weight + o_n * D + o_d[:, None], mask=(o_n < N) & (o_d[:, None] < D), other=0.0)
            if PRECISION == "bf16":
                b_e += tl.dot(b_x.to(tl.bfloat16), b_w.to(tl.bfloat16))
            else:
                b_e += tl.dot(b_x, b_w, input_precision=PRECISION, out_dtype=p_x.dtype.element_ty)
    else:
        for i_d in range(D):
            b_x = tl.load(p_x + o_r * D + i_d, mask=m_r, other=0.0)
            b_e += b_x * tl.load(p_weight + o_n * D + i_d, mask=o_n < N, other=0.0)
    if BIAS:
        b_e += tl.load(p_bias + o_n, mask=o_n < N, other=0.0)
    tl.store(p_e + o_r * N + o_n, b_e, mask=m_r & (o_n < N))


@triton.jit(do_not_specialize=["D", "SPLITS"])
def token_gradient_kernel(
    p_delta,  # [R, N]
    p_order,  # int64 [R], the rows in the order of their ids, equal ids in the order of the rows
    p_bounds,  # int64 [D + 1], where the rows of each id begin in p_order
    p_partial,  # [SPLITS, D, N]
    D,
    SPLITS,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_d, i_s = tl.program_id(0), tl.program_id(1)
    begin = tl.load(p_bounds + i_d)
    count = tl.load(p_bounds + i_d + 1) - begin
    low = begin + count * i_s // SPLITS
    high = begin + count * (i_s + 1) // SPLITS
    o_n = tl.arange(0, BLOCK_N)[None, :]
    b_sum = tl.zeros([BLOCK_R, BLOCK_N], dtype=p_delta.dtype.element_ty)
    for i_r in range(low, high, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        o_row = tl.load(p_order + o_r, mask=o_r < high, other=0)
        b_sum += tl.load(p_delta + o_row[:, None] * N + o_n, mask=(o_r < high)[:, None] & (o_n < N), other=0.0)
    o_n = tl.arange(0, BLOCK_N)
    p_partial += (i_s.to(tl.int64) * D + i_d) * N
    tl.store(p_partial + o_n, tl.sum(b_sum, axis=0), mask=o_n < N)


def features_term(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """e [T, B, N] from features x [T, B, D], weight [N, D] and bias [N], all contiguous. precision: by Triton's
    name."""
    (T, B, D), N = x.shape, weight.shape[0]
    e = torch.empty(T, B, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(T * B, FEATURES_BLOCK_R), triton.cdiv(N, FEATURES_BLOCK_N))
    with torch.cuda.device_of(x):
        features_kernel[grid](
            x,
            weight,
            bias,
            e,
            T * B,
            D=D,
            N=N,
            BIAS=bias is not None,
            DOT=DOT_F64 or x.dtype != torch.float64,
            PRECISION=precision if x.dtype == torch.float32 else "ieee",
            BLOCK_R=FEATURES_BLOCK_R,
            BLOCK_N=FEATURES_BLOCK_N,
            BLOCK_D=FEATURES_BLOCK_D,
            num_warps=FEATURES_WARPS,
            enable_fp_fusion=True,
        )
    return e


def token_gradient(delta: Tensor, ids: Tensor, D: int) -> Tensor:
    """Sum of the rows of delta [R, N] with each id, [D, N]; rows whose id (int64 [R]) is outside [0, D) are skipped."""
    R, N = delta.shape
    splits = max(1, min(TOKENS_PROGRAMS // D, triton.cdiv(R, 64)))
    block_n = triton.next_power_of_2(N)
    partial = torch.empty(splits, D, N, dtype=delta.dtype, device=delta.device)
    ordered, order = torch.sort(ids, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(D + 1, device=ids.device))
    with torch.cuda.device_of(delta):
        token_gradient_kernel[(D, splits)](
            delta,
            order,
            bounds,
            partial,
            D,
            splits,
            N=N,
            BLOCK_R=max(1, TOKENS_TILE // block_n),
            BLOCK_N=block_n,
            num_warps=TOKENS_WARPS,
            enable_fp_fusion=True,
        )
    return partial.sum(0)
