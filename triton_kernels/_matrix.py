"""Matrices of the scan kernels: how a tile is loaded, and the product of the state with it.

Registers cannot be indexed, so a tile's shape decides how a product runs. A matrix in registers is
[BLOCK_IN / WIDE, BLOCK_OUT, WIDE]: every thread multiplies the columns that it holds, and the sums over threads come
last. A matrix for tensor cores is [BLOCK_IN, BLOCK_OUT].
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# Contiguous columns of a matrix that 8 threads of a warp share, 4 each. With 8 warps a thread then holds 4 by 16 of 128
# by 128 elements. The fewer rows a thread holds, the cheaper is the sum over threads; the fewer columns, the less it
# reads of the state.
WIDE = tl.constexpr(32)
# The compiler places the other threads of a warp along a second axis, which must be that of the rows. Up to Triton 3.6
# this is the first axis of a tile, from 3.7 on the second to last. Along the other axis, the sum over threads would
# need 5 shuffles per row, not 3.
OUT_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.jit
def load_matrix(p, i_out, i_in, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Rows [i_out, ...) and columns [i_in, ...) of a matrix [OUT, IN], as [BLOCK_IN / WIDE, BLOCK_OUT, WIDE].

    A panel of fewer columns than WIDE is [1, BLOCK_OUT, BLOCK_IN].
    """
    SIDE: tl.constexpr = WIDE if BLOCK_IN >= WIDE else BLOCK_IN
    if OUT_FIRST:
        o_out = i_out + tl.arange(0, BLOCK_OUT)[:, None, None]
        o_wide = tl.arange(0, BLOCK_IN // SIDE)[None, :, None] * SIDE
    else:
        o_out = i_out + tl.arange(0, BLOCK_OUT)[None, :, None]
        o_wide = tl.arange(0, BLOCK_IN // SIDE)[:, None, None] * SIDE
    o_in = i_in + o_wide + tl.arange(0, SIDE)[None, None, :]
    b_matrix = tl.load(p + o_out * IN + o_in, mask=(o_out < OUT) & (o_in < IN), other=0.0)
    if OUT_FIRST:
        b_matrix = tl.permute(b_matrix, (1, 0, 2))
    return b_matrix


@triton.jit
def load_fragments(
    p, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BF16: tl.constexpr
):
    """The transpose of a matrix [OUT, IN], as [BLOCK_IN, BLOCK_OUT], for a product on tensor cores."""
    o_in, o_out = tl.arange(0, BLOCK_IN)[:, None], tl.arange(0, BLOCK_OUT)[None, :]
    b = tl.load(p + o_out * IN + o_in, mask=(o_out < OUT) & (o_in < IN), other=0.0)
    if BF16:
        b = b.to(tl.bfloat16)
    return b


# Note [Computed once]
#     A product needs its factor in a layout of its own, with up to 16 elements per thread. The compiler may produce it
#     by computing the factor in that layout, back to the loads it came from: it counts loads of a row as cheap where
#     a program has more threads than the row has elements. Every thread would then hold 16 elements of all prefetched
#     rows, and compute the activation 16 times: 16 tanh per step, and for prelu at N = 128 up to 168 bytes of spilled
#     registers per thread (Triton 3.7). The compiler does not propagate a layout through a reduction that changes it.
#     So the state (backward: delta) passes through a sum over a single row. The sum adds nothing: each element is
#     computed once and distributed through shared memory.


@triton.jit
def once(b_x):
    """b_x [1, M] as [M], see Note [Computed once]."""
    return tl.sum(b_x, axis=0)


@triton.jit
def elements(b_x, i_in, BLOCK_IN: tl.constexpr):
    """Elements [i_in, i_in + WIDE) of b_x [BLOCK_IN], [WIDE]; i_in is a multiple of WIDE.

    Registers cannot be indexed, so a mask selects them. ``tl.where`` rather than a product with the mask, because a NaN
    in another element must not reach the result.
    """
    m_pick = tl.arange(0, BLOCK_IN // WIDE)[:, None] == i_in // WIDE
    return tl.sum(tl.where(m_pick, tl.reshape(b_x, [BLOCK_IN // WIDE, WIDE]), 0.0), axis=0)


@triton.jit
def multiply_row(b_x, b_matrix, BLOCK_IN: tl.constexpr):
    """b_x, of BLOCK_IN elements, times the transpose of a tile of ``load_matrix``, [1, BLOCK_OUT]."""
    SIDE: tl.constexpr = WIDE if BLOCK_IN >= WIDE else BLOCK_IN
    b_wide = tl.reshape(b_x, [BLOCK_IN // SIDE, 1, SIDE])
    return tl.sum(tl.sum(b_wide * b_matrix, axis=0), axis=1)[None, :]


@triton.jit
def multiply_rows(b_x, b_fragments, PRECISION: tl.constexpr):
    """b_x [BLOCK_B, BLOCK_IN] times a tile of ``load_fragments``, [BLOCK_B, BLOCK_OUT], on tensor cores."""
    if PRECISION == "bf16":
        b_y = tl.dot(b_x.to(tl.bfloat16), b_fragments)
    else:
        b_y = tl.dot(b_x, b_fragments, input_precision=PRECISION)
    return b_y


@triton.jit
def resident(
    p_first,
    p_scale,
    p_second,
    N: tl.constexpr,
    K: tl.constexpr,
    FACTORED: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(first, scale, second) as ``product`` reads them from registers; 0.0 for what it does not read."""
    b_first = 0.0
    b_scale = 0.0
    b_second = 0.0
    o_k = tl.arange(0, BLOCK_K)
    if WAY == "rows":
        b_second = load_matrix(p_second, 0, 0, N, K, BLOCK_N, BLOCK_K)
    elif WAY == "dot":
        b_second = load_fragments(p_second, N, K, BLOCK_N, BLOCK_K, PRECISION == "bf16")
    if FACTORED:
        if WAY == "rows":
            b_first = load_matrix(p_first, 0, 0, K, N, BLOCK_K, BLOCK_N)
            b_scale = tl.load(p_scale + o_k, mask=o_k < K, other=0.0)[None, :]
        elif WAY == "dot":
            b_first = load_fragments(p_first, K, N, BLOCK_K, BLOCK_N, PRECISION == "bf16")
            b_scale = tl.load(p_scale + o_k, mask=o_k < K, other=0.0)[None, :]
    return b_first, b_scale, b_second


@triton.jit
def product(
    b_x,
    b_first,
    b_scale,
    b_second,
    p_first,
    p_scale,
    p_second,
    N: tl.constexpr,
    K: tl.constexpr,
    FACTORED: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """second (scale * (first x)), or second x, for the rows b_x [BLOCK_B, BLOCK_N]. The result has the same shape."""
    if WAY == "rows":
        if FACTORED:
            b_y = multiply_row(multiply_row(once(b_x), b_first, BLOCK_N) * b_scale, b_second, BLOCK_K)
        else:
            b_y = multiply_row(once(b_x), b_second, BLOCK_K)
    elif WAY == "dot":
        if FACTORED:
            b_y = multiply_rows(multiply_rows(b_x, b_first, PRECISION) * b_scale, b_second, PRECISION)
        else:
            b_y = multiply_rows(b_x, b_second, PRECISION)
    else:
        b_row = once(b_x)
        b_y = tl.zeros([1, BLOCK_N], dtype=b_x.dtype)
        for i_k in range(0, K, WIDE):
            if FACTORED:
                o_k = i_k + tl.arange(0, WIDE)
                b_z = multiply_row(b_row, load_matrix(p_first, i_k, 0, K, N, WIDE, BLOCK_N), BLOCK_N)
                b_z *= tl.load(p_scale + o_k, mask=o_k < K, other=0.0)[None, :]
            else:
                b_z = elements(b_row, i_k, BLOCK_N)
            b_y += multiply_row(b_z, load_matrix(p_second, 0, i_k, N, K, BLOCK_N, WIDE), WIDE)
    return b_y
