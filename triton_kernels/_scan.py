"""The kernels of both scans: the time loops. ``_launch.py`` launches them.

The maps come as row-major matrices with a row per output: ``second`` [N, K] and, for the factored scan, ``first``
[K, N] and ``scale`` [K]. One step of either direction is y = second (scale * (first x)), or y = second x in the dense
scan:

    forward   factored: first = V^T, second = U     dense: second = W
    backward  factored: first = U^T, second = V     dense: second = W^T

    program i_r  ->  BLOCK_B sequences, all T steps; nothing is exchanged between programs

    on chip, for all T:    first, second (see below where); the state [BLOCK_B, BLOCK_N] in registers
    shared memory:         the state, between the threads that compute it and those that multiply with it
    HBM, in every step:    forward reads the input term, or a token id whose row of the table comes from L2, one step
                           ahead, and writes h_t. Backward reads g_t, and h_t or a_t, and writes delta_t and the squared
                           norm of dL/dh_t.

Three ways to multiply, chosen by ``plan`` in ``_launch.py``:

    rows     BLOCK_B = 1. FMA units, IEEE, matrices in registers. Products are summed over the columns that a thread
             holds, then over 8 threads.
    dot      BLOCK_B = 16. Tensor cores, for precision "tf32", "3xtf32" and "bf16". The matrices are in shared memory.
    panels   BLOCK_B = 1. For matrices that do not fit into the registers: up to 32 rows of first and columns of second
             at a time, read in every step from L1 or L2. The dense scan has no first, and selects 32 elements of x.

Virtual sequences. A launch runs over P B rows; row p B + b is chunk p (the steps p CHUNK ... of T) of sequence b. The
plain scan has P = 1 and CHUNK = T.

Lengths. With LENGTHS, row r ends with its sequence. A program runs the steps of its longest row and writes zeros for
all later steps. Rows that have ended earlier are zeros too. Padding is never read. Lengths are clamped to [0, T],
because checking them on the host would need a device synchronization.
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from orthokern.triton_kernels._activation import apply, chain
from orthokern.triton_kernels._matrix import product, resident
from orthokern.triton_kernels.activations import parameter


@triton.jit
def rows_of(B, R, CHUNK, BLOCK_B: tl.constexpr):
    """(o_b, o_row, o_start, m_row), int32 [BLOCK_B]: the sequence, row and first step of this program's rows, and which
    exist."""
    o = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    return o % B, o, (o // B) * CHUNK, o < R


@triton.jit
def row_ends(p_lengths, o_b, m_row, o_start, T, CHUNK, FIRST, LENGTHS: tl.constexpr):
    """(o_last, o_end, steps): the end of each row in memory, the end of its sequence, and the number of steps to run.

    o_start, o_last, o_end: int32 [BLOCK_B], in steps of the launch, which starts at step FIRST of the sequence. The
    ends are exclusive.
    """
    o_last = tl.minimum(o_start + CHUNK, T)
    o_end = o_last
    steps = CHUNK
    if LENGTHS:
        # at least 0 before FIRST is subtracted: the smallest int64 would become a large length
        b_length = tl.maximum(tl.load(p_lengths + o_b, mask=m_row, other=0), 0) - FIRST
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

    A token id outside [0, D) gives NaN. It is not used as an address.
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


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST", "D"])
def scan_fwd_kernel(
    p_x,  # [T, B, N], or int64 [T, B] with a table
    p_table,  # [D, N], bias included, or None
    p_first,  # [K, N], or None
    p_scale,  # [K], or None
    p_second,  # [N, K]
    p_h0,  # [P B, N]
    p_param,  # [1] or [N], or None
    p_hs,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_last,  # [P B, N], or None: the state after the last step of each row; zeros where its sequence has ended
    p_lengths,  # int64 [B], or None
    p_cut,  # uint8 [T, B], or None: the steps after which the state becomes that of p_restart
    p_restart,  # [B, N], or None
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
    CUTS: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h_t = phi(product(h_{t-1}) + e_t) for the rows of this program.

    Longer than 100 lines: a line for every argument.
    """
    o_b, o_row, o_start, m_row = rows_of(B, R, CHUNK, BLOCK_B)
    o_last, o_end, steps = row_ends(p_lengths, o_b, m_row, o_start, T, CHUNK, FIRST, LENGTHS)
    o_r = o_start.to(tl.int64) * B + o_b  # rows of [T * B, N]
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    m_rn = m_row[:, None] & m_n[None, :]

    b_first, b_scale, b_second = resident(p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N, BLOCK_K)
    b_param = parameter(p_param, o_n, m_n, PARAM)
    b_h = tl.load(p_h0 + o_row.to(tl.int64)[:, None] * N + o_n[None, :], mask=m_rn, other=0.0)

    if CUTS:
        b_restart = tl.load(p_restart + o_b[:, None] * N + o_n[None, :], mask=m_rn, other=0.0)

    # ids are loaded two steps ahead, rows of the input one step ahead, which hides both latencies
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
        if CUTS:
            b_cut = tl.load(p_cut + o_r, mask=m_row & (o_start + t < o_last), other=0)
        b_a = (
            product(
                b_h,
                b_first,
                b_scale,
                b_second,
                p_first,
                p_scale,
                p_second,
                N,
                K,
                FACTORED,
                WAY,
                PRECISION,
                BLOCK_N,
                BLOCK_K,
            )
            + b_e
        )
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
        if CUTS:
            b_h = tl.where((b_cut != 0)[:, None], b_restart, b_h)
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
def load_step(p_grad, p_hs, p_pre, o, m, FROM_HS: tl.constexpr, FROM_PRE: tl.constexpr):
    """(g_t, h_t, a_t) at the offsets o [BLOCK_B, BLOCK_N]; 0.0 for what the derivative does not read."""
    b_g = tl.load(p_grad + o, mask=m, other=0.0)
    b_h = 0.0
    b_a = 0.0
    if FROM_HS:
        b_h = tl.load(p_hs + o, mask=m, other=0.0)
    if FROM_PRE:
        b_a = tl.load(p_pre + o, mask=m, other=0.0)
    return b_g, b_h, b_a


@triton.jit
def clear_later(
    p_delta,
    p_square,
    o_r,
    m_row,
    o_start,
    o_last,
    steps,
    B,
    CHUNK,
    N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Zeros in delta and the squared norms of the steps after the last one that runs; o_r is that of step CHUNK - 1."""
    o_n = tl.arange(0, BLOCK_N)
    b_zero = tl.zeros([BLOCK_B, BLOCK_N], dtype=p_delta.dtype.element_ty)
    b_none = tl.zeros([BLOCK_B], dtype=p_delta.dtype.element_ty)
    for i in range(CHUNK - steps):
        m_now = m_row & (o_start + (CHUNK - 1 - i) < o_last)
        tl.store(p_delta + o_r[:, None] * N + o_n[None, :], b_zero, mask=m_now[:, None] & (o_n < N)[None, :])
        tl.store(p_square + o_r, b_none, mask=m_now)
        o_r -= B


@triton.jit(do_not_specialize=["T", "B", "R", "CHUNK", "FIRST"])
def scan_bwd_kernel(
    p_grad,  # [T, B, N]
    p_hs,  # [T, B, N], or None where phi' needs no output
    p_pre,  # [T, B, N], or None where phi' needs no input
    p_first,  # [K, N], or None
    p_scale,  # [K], or None
    p_second,  # [N, K]
    p_carry,  # [P B, N]: W^T delta of the step after the last one of each row
    p_param,  # [1] or [N], or None
    p_delta,  # [T, B, N], or None
    p_left,  # [P B, N]: W^T delta of the first step of each row
    p_square,  # [T, B], or None: |dL/dh_t|^2 of every sequence
    p_sum,  # [P B, N], or None: the gradient of the parameter by row and unit; updated
    p_lengths,  # int64 [B], or None
    p_clip,  # [1], or None: the bound of |delta|
    p_cut,  # uint8 [T, B], or None: the steps that no carry leaves
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
    CUTS: tl.constexpr,
    WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ghat_t = g_t + carry, delta_t = phi'(a_t) ghat_t, carry = product(delta_t), from the last step of each row on.

    With CLIP, delta_t is clipped before it is used, see Note [Message clip] of the reference. Longer than 100 lines: a
    line for every argument.
    """
    o_b, o_row, o_start, m_row = rows_of(B, R, CHUNK, BLOCK_B)
    o_last, o_end, steps = row_ends(p_lengths, o_b, m_row, o_start, T, CHUNK, FIRST, LENGTHS)
    o_r = (o_start + (CHUNK - 1)).to(tl.int64) * B + o_b
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    m_rn = m_row[:, None] & m_n[None, :]
    o_rn = o_row.to(tl.int64)[:, None] * N + o_n[None, :]

    b_first, b_scale, b_second = resident(p_first, p_scale, p_second, N, K, FACTORED, WAY, PRECISION, BLOCK_N, BLOCK_K)
    b_param = parameter(p_param, o_n, m_n, PARAM)
    b_carry = tl.load(p_carry + o_rn, mask=m_rn, other=0.0)
    if STORE_SUM:
        b_sum = tl.load(p_sum + o_rn, mask=m_rn, other=0.0)
    if CLIP:
        b_clip = tl.load(p_clip)

    if LENGTHS:
        if STORE_DELTA:
            clear_later(p_delta, p_square, o_r, m_row, o_start, o_last, steps, B, CHUNK, N, BLOCK_B, BLOCK_N)
        o_r -= (CHUNK - steps).to(tl.int64) * B

    m_t = (m_row & (o_start + (steps - 1) < o_end))[:, None] & m_n[None, :]
    b_g, b_h, b_a = load_step(p_grad, p_hs, p_pre, o_r[:, None] * N + o_n[None, :], m_t, FROM_HS, FROM_PRE)

    for i in range(steps):
        t = steps - 1 - i
        # load the previous step while this one is computed
        m_before = (m_row & (o_start + (t - 1) < o_end) & (o_start + (t - 1) >= o_start))[:, None] & m_n[None, :]
        o_before = (o_r - B)[:, None] * N + o_n[None, :]
        b_g_before, b_h_before, b_a_before = load_step(p_grad, p_hs, p_pre, o_before, m_before, FROM_HS, FROM_PRE)

        m_now = m_row & (o_start + t < o_last)
        if CUTS:
            b_cut = tl.load(p_cut + o_r, mask=m_now, other=0)
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
            b_delta,
            b_first,
            b_scale,
            b_second,
            p_first,
            p_scale,
            p_second,
            N,
            K,
            FACTORED,
            WAY,
            PRECISION,
            BLOCK_N,
            BLOCK_K,
        )
        if CUTS:
            b_carry = tl.where((b_cut != 0)[:, None], 0.0, b_carry)
        o_r -= B
        b_g = b_g_before
        if FROM_HS:
            b_h = b_h_before
        if FROM_PRE:
            b_a = b_a_before
    tl.store(p_left + o_rn, b_carry, mask=m_rn)
    if STORE_SUM:
        tl.store(p_sum + o_rn, b_sum, mask=m_rn)
