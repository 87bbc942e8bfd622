"""Functions shared by the scans: products of a row with a matrix, steps and rows of a sequence, and the sizes of tiles.

Registers cannot be indexed, so a tile's shape decides how a product runs. A matrix tile is [BLOCK_IN / WIDE, BLOCK_OUT,
WIDE]: every thread multiplies the columns that it holds, and the sums over threads come last. A program owns one
sequence, and its vectors are rows [1, BLOCK].
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
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
def load_matrix(p, i_in, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Columns [i_in, i_in + BLOCK_IN) of a matrix [OUT, IN], as [BLOCK_IN / WIDE, BLOCK_OUT, WIDE]."""
    if OUT_FIRST:
        o_out = tl.arange(0, BLOCK_OUT)[:, None, None]
        o_wide = tl.arange(0, BLOCK_IN // WIDE)[None, :, None] * WIDE
    else:
        o_out = tl.arange(0, BLOCK_OUT)[None, :, None]
        o_wide = tl.arange(0, BLOCK_IN // WIDE)[:, None, None] * WIDE
    o_in = i_in + o_wide + tl.arange(0, WIDE)[None, None, :]
    b_matrix = tl.load(p + o_out * IN + o_in, mask=(o_out < OUT) & (o_in < IN), other=0.0)
    if OUT_FIRST:
        b_matrix = tl.permute(b_matrix, (1, 0, 2))
    return b_matrix


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
    b_wide = tl.reshape(b_x, [BLOCK_IN // WIDE, 1, WIDE])
    return tl.sum(tl.sum(b_wide * b_matrix, axis=0), axis=1)[None, :]


@triton.jit
def load_resident(
    p, OUT: tl.constexpr, IN: tl.constexpr, RESIDENT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr
):
    """The matrix [OUT, IN] in registers, or 0.0 if it is read in every step."""
    b_matrix = 0.0
    if RESIDENT:
        b_matrix = load_matrix(p, 0, OUT, IN, BLOCK_OUT, BLOCK_IN)
    return b_matrix


@triton.jit
def product(
    b_x,
    b_matrix,
    p_matrix,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """The row b_x [1, BLOCK_IN] times the transpose of a matrix [OUT, IN], with b_matrix from ``load_resident``."""
    b_row = once(b_x)
    if RESIDENT:
        b_y = multiply_row(b_row, b_matrix, BLOCK_IN)
    else:
        b_y = tl.zeros([1, BLOCK_OUT], dtype=b_x.dtype)
        for i_in in range(0, IN, WIDE):
            b_panel = load_matrix(p_matrix, i_in, OUT, IN, BLOCK_OUT, WIDE)
            b_y += multiply_row(elements(b_row, i_in, BLOCK_IN), b_panel, WIDE)
    return b_y


@triton.jit
def steps_of(p_lengths, i_b, TIME, T):
    """The number of steps of sequence i_b from step TIME on, clamped to [0, T]: checking lengths on the host would need
    a device synchronization. int32; p_lengths: int64 [B], or None."""
    steps = T
    if p_lengths is not None:
        # at least 0 before TIME is subtracted: the smallest int64 would become a large length
        left = tl.maximum(tl.load(p_lengths + i_b), 0) - TIME
        steps = tl.minimum(tl.maximum(left, 0), T).to(tl.int32)
    return steps


@triton.jit
def flag_at(p_flags, row, exists):
    """Whether the flag of a step, uint8 [T * B], is set: a scalar, False unless the step exists."""
    return tl.load(p_flags + row, mask=exists, other=0) != 0


@triton.jit
def columns(o_n, exists, N: tl.constexpr):
    """The mask [1, BLOCK_N] of a row, all False unless the row exists.

    Not m_n & exists: if exists is a scalar, the interpreter of Triton 3.9 does not accept the result as a mask.
    """
    return o_n < tl.where(exists, N, 0)


@triton.jit
def row_or_zeros(p, i_row, p_like, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row i_row of a matrix [., N], [1, BLOCK_N]; zeros of the dtype of p_like if p is None."""
    o_n = tl.arange(0, BLOCK_N)[None, :]
    b_row = tl.zeros([1, BLOCK_N], dtype=p_like.dtype.element_ty)
    if p is not None:
        b_row = tl.load(p + i_row.to(tl.int64) * N + o_n, mask=o_n < N, other=0.0)
    return b_row


class Plan(NamedTuple):
    """How a launch multiplies: whether the matrices stay in registers, and its tiles."""

    resident: bool
    block_n: int
    block_k: int
    num_warps: int


# 32-bit words of the matrices that may stay in registers: half of the 65536 of an SM. With 8-byte elements every
# intermediate needs twice the words as well, so the limit is half of that.
RESIDENT_WORDS = {torch.float32: 32768, torch.float64: 16384}


def plan(N: int, K: int, matrices: int, dtype: torch.dtype) -> Plan:
    """The plan for a number of matrices of N by K, from sizes alone.

    With fewer warps for matrices in registers, the compiler prefers a layout in which a warp spans 32 columns, and the
    sum over threads costs 5 shuffles per row instead of 3.
    """
    block_n, block_k = (max(32, triton.next_power_of_2(size)) for size in (N, K))
    words = dtype.itemsize // 4
    widest = max(block_n, block_k) * words
    if widest <= 128 and matrices * block_n * block_k * words <= RESIDENT_WORDS[dtype]:
        return Plan(True, block_n, block_k, widest // 16)
    return Plan(False, block_n, block_k, 4 if block_n <= 64 else 8)
