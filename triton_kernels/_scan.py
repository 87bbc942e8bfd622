"""What the two scans share: the time loops as device functions, and the launches and gradients around them.

The maps come as row-major matrices with a row per output: ``second`` [N, K] and, for the factored scan, ``first``
[K, N] and ``scale`` [K]. One step of either direction is y = second (scale * (first x)), or y = second x in the dense
scan:

    forward   factored: first = V^T, second = U     dense: second = W
    backward  factored: first = U^T, second = V     dense: second = W^T

    program i_r  ->  BLOCK_B sequences, all T steps; nothing is exchanged between programs

    on chip, for all T:    first, second (see below where); the state [BLOCK_B, BLOCK_N] in registers
    shared memory:         the state on its way from the threads that computed it to those that multiply with it
    HBM, in every step:    in: the input term, or a token id whose row of the table comes from L2, fetched one step
                           ahead; out: h_t (backward: g_t, h_t or a_t in; delta_t and the squared norm of dL/dh_t out)

Three ways to multiply, chosen by ``plan``:

    rows     BLOCK_B = 1. FMA units, IEEE, matrices in registers: multiply and add up over the columns that a thread
             has, then over 8 threads.
    dot      BLOCK_B = 16. Tensor cores, for precision "tf32", "3xtf32" and "bf16"; the matrices are in shared memory.
    panels   BLOCK_B = 1. Matrices too large for the registers: up to 32 rows of first and columns of second at a time,
             read in every step from the L1 cache or L2. The dense scan has no first: there it picks 32 elements.

Virtual sequences. A launch runs over R = P B rows; row r = p B + b is chunk p (the steps p CHUNK ... of T) of sequence
b. The plain scan has P = 1 and CHUNK = T.

Lengths. With LENGTHS, the steps of row r end where its sequence does. A program runs the steps of its longest row, and
writes zeros for the later ones; in the steps that it runs, rows that have ended are zeros too. Nothing on padding is
loaded. A length below 0 or beyond T counts as 0 or T: the host has not looked at it.
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanOptions
from orthokern.triton_kernels._activation import apply, chain
from orthokern.triton_kernels.activations import parameter, parameter_kind

# Columns of a matrix that lie side by side in memory and are shared out among 8 threads of a warp, 4 to each. With 8
# warps a thread then holds 4 by 16 of 128 by 128 elements: few enough rows that adding up over threads is cheap, few
# enough columns that handing out the state is.
WIDE = tl.constexpr(32)
# What is left of a warp goes along the axis that the compiler takes next, which shall be that of the rows: up to Triton
# 3.6 a tile's first, from 3.7 on its last but one. Along the other one, adding up would take 5 exchanges a row, not 3.
OUT_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))
# Rows and columns of a panel of a matrix that is not resident: WIDE, but in the factored scan, where two panels are at
# hand, so few that each has no more 32-bit words than this, 16 a thread.
PANEL_WORDS = tl.constexpr(8192)


# ------------------------------------------------------------------------------------------------------------ products


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
def load_fragments(p, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
                   BF16: tl.constexpr):  # fmt: skip
    """The transpose of a matrix [OUT, IN], as [BLOCK_IN, BLOCK_OUT], for a product on tensor cores."""
    o_in, o_out = tl.arange(0, BLOCK_IN)[:, None], tl.arange(0, BLOCK_OUT)[None, :]
    b = tl.load(p + o_out * IN + o_in, mask=(o_out < OUT) & (o_in < IN), other=0.0)
    if BF16:
        b = b.to(tl.bfloat16)
    return b


# Note [Computed once]
#     A product wants its factor in a layout of its own, up to 16 elements in every thread. The compiler may get there
#     by computing the factor in that layout too, back to the loads it came from: loads of a row count as cheap where a
#     program has more threads than the row has elements. All that a step fetches ahead, and its activation, would then
#     be in every thread 16 times: for tanh 16 of them a step, for prelu at N = 128 up to 168 bytes a thread beyond what
#     there is of registers (Triton 3.7). The compiler does not take this way through a sum whose result changes its
#     layout, so the state, and what goes back in its place, pass through one over a single row: nothing is added, and
#     each element is computed in one place and handed out through shared memory.


@triton.jit
def once(b_x):
    """The row b_x [1, M] as [M], see Note [Computed once]."""
    return tl.sum(b_x, axis=0)


@triton.jit
def elements(b_x, i_in, BLOCK_IN: tl.constexpr):
    """Elements [i_in, i_in + WIDE) of b_x [BLOCK_IN], [WIDE]; i_in is a multiple of WIDE.

    Registers cannot be indexed, so all are compared; where, not a product, because a NaN elsewhere must stay there.
    """
    m_pick = tl.arange(0, BLOCK_IN // WIDE)[:, None] == i_in // WIDE
    return tl.sum(tl.where(m_pick, tl.reshape(b_x, [BLOCK_IN // WIDE, WIDE]), 0.0), axis=0)


@triton.jit
def multiply_row(b_x, b_matrix, BLOCK_IN: tl.constexpr):
    """b_x, of BLOCK_IN elements, times the transpose of ``load_matrix``'s tile, [1, BLOCK_OUT]."""
    SIDE: tl.constexpr = WIDE if BLOCK_IN >= WIDE else BLOCK_IN
    b_wide = tl.reshape(b_x, [BLOCK_IN // SIDE, 1, SIDE])
    return tl.sum(tl.sum(b_wide * b_matrix, axis=0), axis=1)[None, :]


@triton.jit
def multiply_rows(b_x, b_fragments, PRECISION: tl.constexpr):
    """b_x [BLOCK_B, BLOCK_IN] times ``load_fragments``'s tile, [BLOCK_B, BLOCK_OUT], on tensor cores."""
    if PRECISION == "bf16":
        b_y = tl.dot(b_x.to(tl.bfloat16), b_fragments)
    else:
        b_y = tl.dot(b_x, b_fragments, input_precision=PRECISION)
    return b_y


@triton.jit
def resident(p_first, p_scale, p_second, N: tl.constexpr, K: tl.constexpr, FACTORED: tl.constexpr, WAY: tl.constexpr,
             PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """What ``product`` needs in registers: (first, scale, second); 0.0 for what it does not need."""
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
def product(b_x, b_first, b_scale, b_second, p_first, p_scale, p_second, N: tl.constexpr, K: tl.constexpr,
            FACTORED: tl.constexpr, WAY: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    """One step's product for the rows b_x [BLOCK_B, BLOCK_N], of the same shape."""
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
        BITS: tl.constexpr = b_x.dtype.primitive_bitwidth  # by name: up to Triton 3.3, `//` of an attribute fails
        FEW: tl.constexpr = PANEL_WORDS // (BLOCK_N * (BITS // 32))
        PANEL: tl.constexpr = WIDE if FEW >= WIDE or not FACTORED else FEW
        b_row = once(b_x)
        b_y = tl.zeros([1, BLOCK_N], dtype=b_x.dtype)
        for i_k in range(0, K, PANEL):
            if FACTORED:
                o_k = i_k + tl.arange(0, PANEL)
                b_z = multiply_row(b_row, load_matrix(p_first, i_k, 0, K, N, PANEL, BLOCK_N), BLOCK_N)
                b_z *= tl.load(p_scale + o_k, mask=o_k < K, other=0.0)[None, :]
            else:
                b_z = elements(b_row, i_k, BLOCK_N)
            b_y += multiply_row(b_z, load_matrix(p_second, 0, i_k, N, K, BLOCK_N, PANEL), PANEL)
    return b_y


# ---------------------------------------------------------------------------------------------------------- time loops


@triton.jit
def row_ends(p_lengths, o_row, m_row, o_start, T, B, CHUNK, FIRST, LENGTHS: tl.constexpr):
    """(o_last, o_end, steps): behind each row's last step in memory, behind the last of its sequence, how many to run.

    o_start, o_last, o_end: int32 [BLOCK_B], in steps of the launch, whose first one is step FIRST of the sequence.
    """
    o_last = tl.minimum(o_start + CHUNK, T)
    o_end = o_last
    steps = CHUNK
    if LENGTHS:
        b_length = tl.load(p_lengths + o_row % B, mask=m_row, other=0) - FIRST
        o_end = tl.minimum(o_last, tl.minimum(tl.maximum(b_length, 0), T).to(tl.int32))
        steps = tl.max(tl.maximum(o_end - o_start, 0), axis=0)
    return o_last, o_end, steps


@triton.jit
def load_ids(p_x, o_r, m_r):
    """Token ids [BLOCK_B] of one step; -1 where there is no row."""
    return tl.load(p_x + o_r, mask=m_r, other=-1)


@triton.jit
def load_input(p_x, p_table, b_ids, o_r, m_r, D, N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The input term [BLOCK_B, BLOCK_N] of one step: rows o_r of p_x [., N], or rows b_ids of p_table [D, N].

    A token id outside [0, D) gives NaN, and no access.
    """
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    if TOKENS:
        m_ids = (b_ids >= 0) & (b_ids < D)
        b_e = tl.load(p_table + b_ids[:, None] * N + o_n, mask=(m_r & m_ids)[:, None] & m_n, other=0.0)
        b_e = tl.where((m_r & ~m_ids)[:, None] & m_n, float("nan"), b_e)
    else:
        b_e = tl.load(p_x + o_r[:, None] * N + o_n, mask=m_r[:, None] & m_n, other=0.0)
    return b_e


@triton.jit
def forward(
    p_x,  # [T, B, N], or int64 [T, B] with a table
    p_table,  # [D, N], bias included, or None
    p_first,  # [K, N], or None
    p_scale,  # [K], or None
    p_second,  # [N, K]
    p_h0,  # [R, N]
    p_param,  # [1] or [N], or None
    p_hs,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_last,  # [R, N], or None: the state after each row's last step; zeros where its sequence has ended
    p_lengths,  # int64 [B], or None
    T,
    B,
    R,
    CHUNK,
    FIRST,
    D,
    N: tl.constexpr,
    K: tl.constexpr,
    FACTORED: tl.constexpr,
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
    """h_t = phi(product(h_{t-1}) + e_t) for the rows of this program."""
    o_row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    m_row = o_row < R
    o_start = (o_row // B) * CHUNK  # the first step of each row
    o_last, o_end, steps = row_ends(p_lengths, o_row, m_row, o_start, T, B, CHUNK, FIRST, LENGTHS)
    o_r = o_start.to(tl.int64) * B + o_row % B  # rows of [T * B, N]
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    m_rn = m_row[:, None] & m_n[None, :]

    b_first, b_scale, b_second = resident(
        p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N, BLOCK_K
    )  # fmt: skip
    b_param = parameter(p_param, o_n, m_n, PARAM)
    b_h = tl.load(p_h0 + o_row.to(tl.int64)[:, None] * N + o_n[None, :], mask=m_rn, other=0.0)

    # ids are fetched two steps ahead, rows of the input one step ahead: neither latency is waited for
    m_t = m_row & (o_start < o_end)
    b_ids = o_r
    if TOKENS:
        b_ids = load_ids(p_x, o_r, m_t)
    b_e = load_input(p_x, p_table, b_ids, o_r, m_t, D, N, TOKENS, BLOCK_N)
    if TOKENS:
        b_ids = load_ids(p_x, o_r + B, m_row & (o_start + 1 < o_end))

    for t in range(steps):
        m_next = m_row & (o_start + (t + 1) < o_end)
        b_next = load_input(p_x, p_table, b_ids, o_r + B, m_next, D, N, TOKENS, BLOCK_N)
        if TOKENS:
            b_ids = load_ids(p_x, o_r + 2 * B, m_row & (o_start + (t + 2) < o_end))
        b_a = product(
            b_h, b_first, b_scale, b_second, p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N,
            BLOCK_K,
        ) + b_e  # fmt: skip
        b_h = apply(b_a, b_param, ACTIVATION, BLOCK_B, BLOCK_N)
        if LENGTHS:
            m_live = (o_start + t < o_end)[:, None]
            b_a = tl.where(m_live, b_a, 0.0)
            b_h = tl.where(m_live, b_h, 0.0)
        m_now = (m_row & (o_start + t < o_last))[:, None] & m_n[None, :]
        o = o_r[:, None] * N + o_n[None, :]
        if STORE_HS:
            tl.store(p_hs + o, b_h, mask=m_now)
        if STORE_PRE:
            tl.store(p_pre + o, b_a, mask=m_now)
        o_r += B
        b_e = b_next
    if LENGTHS:
        b_zero = tl.zeros([BLOCK_B, BLOCK_N], dtype=p_h0.dtype.element_ty)
        for t in range(steps, CHUNK):
            m_now = (m_row & (o_start + t < o_last))[:, None] & m_n[None, :]
            o = o_r[:, None] * N + o_n[None, :]
            if STORE_HS:
                tl.store(p_hs + o, b_zero, mask=m_now)
            if STORE_PRE:
                tl.store(p_pre + o, b_zero, mask=m_now)
            o_r += B
        b_h = tl.where((o_end == o_last)[:, None], b_h, 0.0)
    if STORE_LAST:
        tl.store(p_last + o_row.to(tl.int64)[:, None] * N + o_n[None, :], b_h, mask=m_rn)


@triton.jit
def backward(
    p_grad,  # [T, B, N]
    p_hs,  # [T, B, N], or None where phi' needs no output
    p_pre,  # [T, B, N], or None where phi' needs no input
    p_first,  # [K, N], or None
    p_scale,  # [K], or None
    p_second,  # [N, K]
    p_carry,  # [R, N]: W^T delta of the step after each row's last one
    p_param,  # [1] or [N], or None
    p_delta,  # [T, B, N], or None
    p_left,  # [R, N]: W^T delta of each row's first step
    p_square,  # [T, B], or None: |dL/dh_t|^2 of every sequence
    p_sum,  # [R, N], or None: the parameter's gradient by row and unit, added to
    p_lengths,  # int64 [B], or None
    p_clip,  # [1], or None: what delta is clipped to
    T,
    B,
    R,
    CHUNK,
    FIRST,
    N: tl.constexpr,
    K: tl.constexpr,
    FACTORED: tl.constexpr,
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
    """ghat_t = g_t + carry, delta_t = phi'(a_t) ghat_t, carry = product(delta_t), from each row's last step down.

    With CLIP, delta_t is clipped before anything is done with it, see Note [Message clip] of the reference.
    """
    o_row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    m_row = o_row < R
    o_start = (o_row // B) * CHUNK
    o_last, o_end, steps = row_ends(p_lengths, o_row, m_row, o_start, T, B, CHUNK, FIRST, LENGTHS)
    o_r = (o_start + (CHUNK - 1)).to(tl.int64) * B + o_row % B
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    m_rn = m_row[:, None] & m_n[None, :]
    o_rn = o_row.to(tl.int64)[:, None] * N + o_n[None, :]

    b_first, b_scale, b_second = resident(
        p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N, BLOCK_K
    )  # fmt: skip
    b_param = parameter(p_param, o_n, m_n, PARAM)
    b_carry = tl.load(p_carry + o_rn, mask=m_rn, other=0.0)
    if STORE_SUM:
        b_sum = tl.load(p_sum + o_rn, mask=m_rn, other=0.0)
    if CLIP:
        b_clip = tl.load(p_clip)

    if LENGTHS and STORE_DELTA:
        b_zero = tl.zeros([BLOCK_B, BLOCK_N], dtype=p_carry.dtype.element_ty)
        b_none = tl.zeros([BLOCK_B], dtype=p_carry.dtype.element_ty)
        for i in range(CHUNK - steps):
            m_now = m_row & (o_start + (CHUNK - 1 - i) < o_last)
            tl.store(p_delta + o_r[:, None] * N + o_n[None, :], b_zero, mask=m_now[:, None] & m_n[None, :])
            tl.store(p_square + o_r, b_none, mask=m_now)
            o_r -= B
    elif LENGTHS:
        o_r -= (CHUNK - steps).to(tl.int64) * B

    m_t = (m_row & (o_start + (steps - 1) < o_end))[:, None] & m_n[None, :]
    o = o_r[:, None] * N + o_n[None, :]
    b_g = tl.load(p_grad + o, mask=m_t, other=0.0)
    b_h = 0.0
    b_a = 0.0
    if FROM_HS:
        b_h = tl.load(p_hs + o, mask=m_t, other=0.0)
    if FROM_PRE:
        b_a = tl.load(p_pre + o, mask=m_t, other=0.0)

    for i in range(steps):
        t = steps - 1 - i
        # the step before this one, fetched while this one is computed
        m_before = (m_row & (o_start + (t - 1) < o_end) & (o_start + (t - 1) >= o_start))[:, None] & m_n[None, :]
        o_before = (o_r - B)[:, None] * N + o_n[None, :]
        b_g_before = tl.load(p_grad + o_before, mask=m_before, other=0.0)
        if FROM_HS:
            b_h_before = tl.load(p_hs + o_before, mask=m_before, other=0.0)
        if FROM_PRE:
            b_a_before = tl.load(p_pre + o_before, mask=m_before, other=0.0)

        m_now = m_row & (o_start + t < o_last)
        b_ghat = b_g + b_carry
        if LENGTHS:
            m_live = (o_start + t < o_end)[:, None]
            b_ghat = tl.where(m_live, b_ghat, 0.0)
        b_delta, b_elementwise = chain(b_ghat, b_h, b_a, b_param, ACTIVATION, BLOCK_B, BLOCK_N)
        if CLIP:  # in this order a NaN stays a NaN
            b_delta = tl.where(b_delta > b_clip, b_clip, tl.where(b_delta < -b_clip, -b_clip, b_delta))
        if STORE_DELTA:
            tl.store(p_delta + o_r[:, None] * N + o_n[None, :], b_delta, mask=m_now[:, None] & m_n[None, :])
            tl.store(p_square + o_r, tl.sum(b_ghat * b_ghat, axis=1), mask=m_now)
        if STORE_SUM:
            b_sum += b_elementwise
        b_carry = product(
            b_delta, b_first, b_scale, b_second, p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        o_r -= B
        b_g = b_g_before
        if FROM_HS:
            b_h = b_h_before
        if FROM_PRE:
            b_a = b_a_before
    tl.store(p_left + o_rn, b_carry, mask=m_rn)
    if STORE_SUM:
        tl.store(p_sum + o_rn, b_sum, mask=m_rn)


# ------------------------------------------------------------------------------------------------------------- launches


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one launch multiplies: the ``way`` and the sizes of its tiles."""

    way: str
    block_b: int
    block_n: int
    block_k: int
    num_warps: int


# Warps by the larger of BLOCK_N and BLOCK_K, where the matrices stay in registers. With fewer, the compiler prefers a
# layout in which a warp spans 32 columns, and adding up over threads costs 5 exchanges a row in place of 3.
ROWS_WARPS = ((32, 2), (64, 4), (128, 8))
# 32-bit words of the matrices that may stay in registers: of 65536, half. 8-byte elements need twice the words for
# every intermediate too, so there the limit is half of that.
ROWS_WORDS = {torch.float32: 32768, torch.float64: 16384}
# Warps by the elements of the matrices, for the tensor cores, up to what fits in the 163 KiB of an sm_80. "tf32x3"
# keeps both halves of every factor.
DOT_WARPS = {
    "bf16": ((4096, 4), (32768, 8), (65536, 16)),
    "tf32": ((4096, 4), (32768, 16)),
    "tf32x3": ((4096, 4), (16384, 8)),
}
# Warps by BLOCK_N where the matrices are read in every step.
PANEL_WARPS = ((64, 4), (256, 8), (512, 16))
# Below this many rows a tile of 16 for the tensor cores is mostly padding.
DOT_ROWS = 5
DOT_BLOCK_B = 16

TRITON_PRECISION = {"ieee": "ieee", "tf32": "tf32", "3xtf32": "tf32x3", "bf16": "bf16"}


def look_up(table: tuple[tuple[int, int], ...], size: int) -> int | None:
    """The entry for the first bound of the table that is not below size; None beyond its end."""
    return next((entry for bound, entry in table if size <= bound), None)


def plan(N: int, K: int, rows: int, *, factored: bool, dtype: torch.dtype, precision: str) -> Plan:
    """The way to multiply, from shapes alone.

    Args:
        N, K: of the maps, K = N in the dense scan.
        rows: of the launch, B or the number of virtual sequences.
        precision: as Triton calls it. A way without a product of that precision computes a better one.
    """
    block_n, block_k = (max(32, triton.next_power_of_2(size)) for size in (N, K))
    words = block_n * block_k * (2 if factored else 1)
    if dtype == torch.float32 and precision != "ieee" and rows >= DOT_ROWS:
        warps = look_up(DOT_WARPS[precision], words)
        if warps:
            return Plan("dot", DOT_BLOCK_B, block_n, block_k, warps)
    warps = look_up(ROWS_WARPS, max(block_n, block_k) * (dtype.itemsize // 4))
    if warps and words * dtype.itemsize // 4 <= ROWS_WORDS[dtype]:
        return Plan("rows", 1, block_n, block_k, warps)
    return Plan("panels", 1, block_n, block_k, look_up(PANEL_WARPS, block_n) or 16)


def as_rows(map_: Map, *, transposed: bool = False) -> Map:
    """W, or W^T, as the kernels read it: first [K, N] and second [N, K] with a row per output, contiguous."""
    first, scale, second = map_
    if first is None:
        return Map(None, None, second.mT.contiguous() if transposed else second)
    if transposed:
        first, second = second, first
    return Map(first.mT.contiguous(), scale, second)


def launch_forward(
    kernel: Any,
    map_: Map,
    x: Tensor,
    table: Tensor | None,
    h0: Tensor,
    act_param: Tensor | None,
    *,
    T: int,
    B: int,
    chunk: int,
    activation: str,
    precision: str,
    hs: Tensor | None,
    pre: Tensor | None = None,
    last: Tensor | None = None,
    lengths: Tensor | None = None,
    first: int = 0,
) -> None:
    """Run ``forward`` from h0 [R, N]; x is the input term [T, B, N], or ids [T, B] with table [D, N].

    lengths: int64 [B] or None, of sequences whose step ``first`` is the first one here.
    """
    (R, N), K = h0.shape, map_.second.shape[1]
    way = plan(N, K, R, factored=map_.first is not None, dtype=h0.dtype, precision=precision)
    with torch.cuda.device_of(h0):
        kernel[(triton.cdiv(R, way.block_b),)](
            x, table, *[t for t in map_ if t is not None], h0, act_param, hs, pre, last, lengths, T, B, R, chunk, first,
            0 if table is None else table.shape[0], N=N, K=K, TOKENS=table is not None, ACTIVATION=activation,
            PARAM=parameter_kind(act_param), STORE_HS=hs is not None, STORE_PRE=pre is not None,
            STORE_LAST=last is not None, LENGTHS=lengths is not None, WAY=way.way, PRECISION=precision,
            BLOCK_B=way.block_b, BLOCK_N=way.block_n, BLOCK_K=way.block_k, num_warps=way.num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip


def launch_backward(
    kernel: Any,
    map_: Map,
    grad_hs: Tensor,
    hs: Tensor | None,
    pre: Tensor | None,
    carry: Tensor,
    act_param: Tensor | None,
    *,
    T: int,
    B: int,
    chunk: int,
    activation: str,
    precision: str,
    delta: Tensor | None,
    left: Tensor,
    square: Tensor | None,
    by_row: Tensor | None,
    lengths: Tensor | None = None,
    first: int = 0,
    clip: Tensor | None = None,
) -> None:
    """Run ``backward`` from carry [R, N] to left [R, N]; lengths, first as in ``launch_forward``, clip [1] or None."""
    (R, N), K = carry.shape, map_.second.shape[1]
    way = plan(N, K, R, factored=map_.first is not None, dtype=carry.dtype, precision=precision)
    reads = ACTIVATIONS[activation].reads
    from_hs, from_pre = reads == "output", reads == "input"
    with torch.cuda.device_of(carry):
        kernel[(triton.cdiv(R, way.block_b),)](
            grad_hs, hs if from_hs else None, pre if from_pre else None, *[t for t in map_ if t is not None], carry,
            act_param, delta, left, square, by_row, lengths, clip, T, B, R, chunk, first, N=N, K=K,
            ACTIVATION=activation,
            PARAM=parameter_kind(act_param), STORE_DELTA=delta is not None, STORE_SUM=by_row is not None,
            FROM_HS=from_hs, FROM_PRE=from_pre, LENGTHS=lengths is not None, CLIP=clip is not None, WAY=way.way,
            PRECISION=precision, BLOCK_B=way.block_b, BLOCK_N=way.block_n, BLOCK_K=way.block_k,
            num_warps=way.num_warps, enable_fp_fusion=True,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- chunks of time

# Note [Chunks of time]
#     With the identity, h_t = W h_{t-1} + e_t is linear, so a chunk of C steps maps the state that enters it to
#     W^C h + (what the chunk makes of zero). Three launches over P = ceil(T / C) chunks as virtual sequences:
#         1. every chunk from zero (the first from h0), keeping its last state only;
#         2. the states that enter the chunks: a scan of P steps with the dense map W^C, over those last states;
#         3. every chunk again, from the state that enters it, storing all states.
#     Backward is the same with W^T, from the end. Twice the arithmetic, 2 C + P steps one after another in place of T.
#     W^C comes from squaring in float64, where its cost does not matter, and is rounded once. Its entries grow at most
#     as max(s)^C, which is what C steps of the recurrence do to the state itself, so the product with W^C loses no more
#     digits than those steps would. C is near sqrt(T), where 2 C + P is least up to a factor, and at most CHUNK_LIMIT:
#     for a spectral margin of 0.1, 1.1^128 = 2e5 is a growth that float32 and the square of a norm survive by far. The
#     values in s would tell more, but reading them would make the host wait for the device.
#     Sequences of different lengths: chunks in which a sequence has ended make zeros whatever enters them, and hand
#     zeros back. A message clip makes the backward non-linear, so with one there are no chunks.
CHUNK_LIMIT = 128
# Chunks pay when the steps one after another, counted in rounds of programs, shrink by this factor at least.
CHUNK_GAIN = 0.7
# Shorter scans are bound by launches.
CHUNK_MIN_T = 512


def chunk_length(T: int) -> int:
    """C for T steps, see Note [Chunks of time]."""
    return max(1, min(CHUNK_LIMIT, math.isqrt(T)))


def wants_chunks(options: ScanOptions, T: int, B: int, device: torch.device, factored: bool) -> bool:
    """Whether to scan in chunks. "auto" counts rounds of programs, from shapes and the number of SMs."""
    if options.activation != "identity" or options.message_clip > 0 or options.algorithm == "sequential":
        return False
    if options.algorithm == "chunked":
        return True
    if T < CHUNK_MIN_T:
        return False
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    chunk = chunk_length(T)
    chunks = triton.cdiv(T, chunk)
    sequential = T * triton.cdiv(B, processors) * (2 if factored else 1)  # two products a step
    chunked = 2 * chunk * triton.cdiv(chunks * B, processors) + chunks  # one product
    return chunked < CHUNK_GAIN * sequential


def composed(map_: Map) -> Tensor:
    """The matrix [N, N] of a map of ``as_rows`` in float64."""
    second = map_.second.double()
    if map_.first is None or map_.scale is None:
        return second
    return (second * map_.scale.double()) @ map_.first.double()


def power(matrix: Tensor, exponent: int) -> Tensor:
    """matrix [N, N] to a positive power, by squaring."""
    result = None
    while True:
        if exponent & 1:
            result = matrix if result is None else result @ matrix
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        matrix = matrix @ matrix


def forward_in_chunks(
    kernel: Any,
    map_: Map,
    x: Tensor,
    table: Tensor | None,
    h0: Tensor,
    *,
    T: int,
    precision: str,
    hs: Tensor,
    lengths: Tensor | None = None,
) -> None:
    """Note [Chunks of time], forward: fills hs [T, B, N]. kernel is the dense scan's."""
    (B, N), C = h0.shape, chunk_length(T)
    P = triton.cdiv(T, C)
    options: dict[str, Any] = {"activation": "identity", "precision": precision}
    w = composed(map_)
    dense = Map(None, None, w.to(h0.dtype))
    entering = torch.zeros(P, B, N, dtype=h0.dtype, device=h0.device)
    entering[0] = h0
    if P > 1:
        last = torch.empty(P, B, N, dtype=h0.dtype, device=h0.device)
        launch_forward(
            kernel, dense, x, table, entering.view(P * B, N), None, T=T, B=B, chunk=C, hs=None,
            last=last.view(P * B, N), lengths=lengths, **options,
        )  # fmt: skip
        # last[0] is what h0 became, so the scan over chunks 1 ... starts from zero
        carried = Map(None, None, power(w, C).to(h0.dtype))
        launch_forward(
            kernel, carried, last[: P - 1], None, torch.zeros_like(h0), None, T=P - 1, B=B, chunk=P - 1,
            hs=entering[1:], **options,
        )  # fmt: skip
    launch_forward(
        kernel, dense, x, table, entering.view(P * B, N), None, T=T, B=B, chunk=C, hs=hs, lengths=lengths, **options
    )  # fmt: skip


def backward_in_chunks(
    kernel: Any,
    map_: Map,
    grad_hs: Tensor,
    *,
    precision: str,
    delta: Tensor,
    left: Tensor,
    square: Tensor,
    lengths: Tensor | None = None,
) -> None:
    """Note [Chunks of time], backward: fills delta [T, B, N], left [B, N] and square [T, B]."""
    T, B, N = grad_hs.shape
    C = chunk_length(T)
    P = triton.cdiv(T, C)
    options: dict[str, Any] = {"act_param": None, "activation": "identity", "precision": precision, "by_row": None}
    w = composed(map_)
    dense = Map(None, None, w.to(grad_hs.dtype))
    carry = torch.zeros(P, B, N, dtype=grad_hs.dtype, device=grad_hs.device)  # what reaches each chunk from behind
    if P > 1:
        alone = torch.empty_like(carry)  # what each chunk hands on if nothing reaches it
        launch_backward(
            kernel, dense, grad_hs, None, None, carry.view(P * B, N), T=T, B=B, chunk=C, delta=None,
            left=alone.view(P * B, N), square=None, lengths=lengths, **options,
        )  # fmt: skip
        # carry[p] = alone[p + 1] + (W^T)^C carry[p + 1]: the adjoint scan itself, whose delta_p is carry[p]
        carried, rest = Map(None, None, power(w, C).to(grad_hs.dtype)), torch.empty_like(left)
        launch_backward(
            kernel, carried, alone[1:], None, None, torch.zeros_like(left), T=P - 1, B=B, chunk=P - 1,
            delta=carry[: P - 1], left=rest, square=square.new_empty(P - 1, B), **options,
        )  # fmt: skip
    lefts = torch.empty_like(carry)
    launch_backward(
        kernel, dense, grad_hs, None, None, carry.view(P * B, N), T=T, B=B, chunk=C, delta=delta,
        left=lefts.view(P * B, N), square=square, lengths=lengths, **options,
    )  # fmt: skip
    left.copy_(lefts[0])
