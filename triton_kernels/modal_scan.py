"""modal_scan: z_t = lambda z_{t-1} + x_t mode by mode, in chunks of time that run at once.

    lane     o_n = b M + m, mode m of sequence b; R = B M of them. Programs own BLOCK lanes of one chunk
    chunk    CHUNK steps, those of program_id(1)

    1  ends     every chunk from zero                         x -> end [chunks, 2, R]
    2  join     a lane's chunks in turn                       state_{c+1} = lambda^CHUNK state_c + end_c
    3  chunks   every chunk from its state                    x, state -> z

Note [Modal chunks]
    Eigenvalues, states, adjoints, powers and all sums are float64, also for float32 tensors; x is widened when it is
    used, and z rounded when it is stored. lambda^CHUNK is made by squaring, CHUNK being a power of 2, so that it is
    wrong by CHUNK roundings, as the product of the steps is. The adjoint goes the same way from the end, with the
    conjugate of lambda. A lane's chunks wait for each other in 2 alone: 2 CHUNK + chunks steps in place of T, least
    for CHUNK = sqrt(T / 2).

Note [Sums over equal ids]
    grad_table[d] is the sum of delta_t over the steps with id d. delta turns with its mode, and its sum over many steps
    is far smaller than its terms: it is taken in float64. With few ids, each lane of each chunk has a sum for every id
    in memory, [chunks, D, 2, R]. A run of steps with the same id is added up in registers first. With more ids than
    half a chunk's steps delta itself is stored, in float64, for a span of steps at a time, and summed by
    ``token_gradient``. No atomics: the same bits every time.

Nothing is read of padding. An id outside the table makes its sequence NaN from there on and counts for no row; a length
out of range counts as 0 or T.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern.triton_kernels._inputs import token_gradient

BLOCK = 64  # lanes of a program: 2 warps, of which 32 programs fill a processor
NUM_WARPS = 2
MIN_CHUNK = 16
# So many lanes fill the largest device; then time need not be cut.
ENOUGH_LANES = 2**18
DELTA_BYTES = 2**27  # of the adjoints that are stored for sums over equal ids


@triton.jit
def entering(p_x, p_table, o_row, o_m, m, D, M: tl.constexpr, TOKENS: tl.constexpr):
    """(real, imaginary) of what enters lanes at rows o_row (int64) of [T * B], in the dtype of the call."""
    if TOKENS:
        b_id = tl.load(p_x + o_row, mask=m, other=0).to(tl.int64)
        m_row = m & (b_id >= 0) & (b_id < D)
        p_row = p_table + b_id * (2 * M) + o_m
        b_r = tl.load(p_row, mask=m_row, other=float("nan"))
        b_i = tl.load(p_row + M, mask=m_row, other=float("nan"))
    else:
        p_row = p_x + o_row * (2 * M) + o_m
        b_r = tl.load(p_row, mask=m, other=0.0)
        b_i = tl.load(p_row + M, mask=m, other=0.0)
    return b_r, b_i


@triton.jit
def rows_of(p, o_row, o_m, m, M: tl.constexpr):
    """(real, imaginary) of rows of [T * B, 2M], 0 where they are masked."""
    p_row = p + o_row * (2 * M) + o_m
    return tl.load(p_row, mask=m, other=0.0), tl.load(p_row + M, mask=m, other=0.0)


@triton.jit
def living(p_lengths, o_b, m_n, FIRST, T, LENGTHS: tl.constexpr):
    """The number of steps of each lane from step FIRST on, at most T: int64 [BLOCK]."""
    b_end = tl.zeros_like(o_b).to(tl.int64) + T
    if LENGTHS:
        b_end = tl.minimum(b_end, tl.load(p_lengths + o_b, mask=m_n, other=0) - FIRST)
    return b_end


@triton.jit(do_not_specialize=["T", "B", "D", "CHUNK", "FIRST"])
def modal_scan_fwd_kernel(
    p_x,  # [T, B, 2M], or ids [T, B] with a table
    p_table,  # [D, 2M], or None
    p_re,  # float64 [M]
    p_im,  # float64 [M]
    p_state,  # float64 [chunks, 2, B M], the state before each chunk; None: zeros
    p_z,  # [T, B, 2M], or None
    p_end,  # float64 [chunks, 2, B M], or None
    p_lengths,  # int64 [B], or None
    T,
    B,
    D,
    CHUNK,
    FIRST,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    START: tl.constexpr,
    STORE: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_c = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < B * M
    o_b, o_m = o_n // M, o_n % M
    o_lane = i_c.to(tl.int64) * 2 * (B * M) + o_n
    b_end = living(p_lengths, o_b, m_n, FIRST, T, LENGTHS)
    i_low = i_c * CHUNK
    i_high = tl.minimum(i_low + CHUNK, T)
    b_re = tl.load(p_re + o_m, mask=m_n, other=0.0)
    b_im = tl.load(p_im + o_m, mask=m_n, other=0.0)
    b_r = tl.zeros([BLOCK], dtype=tl.float64)
    b_i = tl.zeros([BLOCK], dtype=tl.float64)
    if START:
        b_r = tl.load(p_state + o_lane, mask=m_n, other=0.0)
        b_i = tl.load(p_state + o_lane + B * M, mask=m_n, other=0.0)
    o_row = i_low.to(tl.int64) * B + o_b
    b_xr, b_xi = entering(p_x, p_table, o_row, o_m, m_n & (i_low < b_end), D, M, TOKENS)
    for t in range(i_low, i_high):
        # the next step, fetched while this one is computed
        m_next = m_n & (t + 1 < i_high) & (t + 1 < b_end)
        b_next_r, b_next_i = entering(p_x, p_table, o_row + B, o_m, m_next, D, M, TOKENS)
        b_old = b_r
        b_r = b_re * b_old - b_im * b_i + b_xr.to(tl.float64)
        b_i = b_im * b_old + b_re * b_i + b_xi.to(tl.float64)
        if LENGTHS:
            b_r = tl.where(t < b_end, b_r, 0.0)
            b_i = tl.where(t < b_end, b_i, 0.0)
        if STORE:
            p_row = p_z + o_row * (2 * M) + o_m
            tl.store(p_row, b_r.to(p_z.dtype.element_ty), mask=m_n)
            tl.store(p_row + M, b_i.to(p_z.dtype.element_ty), mask=m_n)
        o_row += B
        b_xr = b_next_r
        b_xi = b_next_i
    if not STORE:
        tl.store(p_end + o_lane, b_r, mask=m_n)
        tl.store(p_end + o_lane + B * M, b_i, mask=m_n)


@triton.jit(do_not_specialize=["R", "CHUNKS", "SQUARINGS"])
def modal_scan_join_kernel(
    p_re,  # float64 [M]
    p_im,  # float64 [M]
    p_first,  # float64 [2, R]: what enters the first chunk (backward: the last)
    p_end,  # float64 [CHUNKS, 2, R]
    p_state,  # float64 [CHUNKS, 2, R]
    R,
    CHUNKS,
    SQUARINGS,  # log2 of the steps of a chunk
    M: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < R
    b_pr = tl.load(p_re + o_n % M, mask=m_n, other=0.0)
    b_pi = tl.load(p_im + o_n % M, mask=m_n, other=0.0)
    if BACKWARD:
        b_pi = -b_pi
    for _ in range(SQUARINGS):
        b_square = (b_pr - b_pi) * (b_pr + b_pi)
        b_pi = 2.0 * b_pr * b_pi
        b_pr = b_square
    b_r = tl.load(p_first + o_n, mask=m_n, other=0.0)
    b_i = tl.load(p_first + R + o_n, mask=m_n, other=0.0)
    o = o_n.to(tl.int64)
    o_step = tl.zeros_like(o) + 2 * R
    if BACKWARD:
        o += (CHUNKS - 1).to(tl.int64) * 2 * R
        o_step = -o_step
    # four chunks are on their way while one is joined
    b_r0 = tl.load(p_end + o, mask=m_n & (CHUNKS > 1), other=0.0)
    b_i0 = tl.load(p_end + o + R, mask=m_n & (CHUNKS > 1), other=0.0)
    b_r1 = tl.load(p_end + o + o_step, mask=m_n & (CHUNKS > 2), other=0.0)
    b_i1 = tl.load(p_end + o + o_step + R, mask=m_n & (CHUNKS > 2), other=0.0)
    b_r2 = tl.load(p_end + o + 2 * o_step, mask=m_n & (CHUNKS > 3), other=0.0)
    b_i2 = tl.load(p_end + o + 2 * o_step + R, mask=m_n & (CHUNKS > 3), other=0.0)
    for i in range(CHUNKS):
        m_next = m_n & (i + 4 < CHUNKS)  # what the last chunk ends with enters none
        b_r3 = tl.load(p_end + o + 3 * o_step, mask=m_next, other=0.0)
        b_i3 = tl.load(p_end + o + 3 * o_step + R, mask=m_next, other=0.0)
        tl.store(p_state + o, b_r, mask=m_n)
        tl.store(p_state + o + R, b_i, mask=m_n)
        b_old = b_r
        b_r = b_pr * b_old - b_pi * b_i + b_r0
        b_i = b_pi * b_old + b_pr * b_i + b_i0
        b_r0 = b_r1
        b_i0 = b_i1
        b_r1 = b_r2
        b_i1 = b_i2
        b_r2 = b_r3
        b_i2 = b_i3
        o += o_step


@triton.jit(do_not_specialize=["T", "B", "D", "CHUNK", "FIRST"])
def modal_scan_bwd_kernel(
    p_grad,  # [T, B, 2M]
    p_z,  # [T, B, 2M], or None
    p_before,  # [B, 2M], the state before step 0, or None
    p_ids,  # [T, B], or None
    p_re,  # float64 [M]
    p_im,  # float64 [M]
    p_carry,  # float64 [chunks, 2, B M], the adjoint behind each chunk; None: zeros
    p_delta,  # [T, B, 2M], or None
    p_table,  # float64 [chunks, D, 2, B M], zeros, or None: Note [Sums over equal ids]
    p_sums,  # float64 [chunks, 2, B M], or None: of delta_t conj(z_{t-1})
    p_end,  # float64 [chunks, 2, B M]: the adjoint of each chunk's first step
    p_lengths,  # int64 [B], or None
    T,
    B,
    D,
    CHUNK,
    FIRST,
    M: tl.constexpr,
    START: tl.constexpr,
    STORE: tl.constexpr,
    TABLE: tl.constexpr,
    SUMS: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_c = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < B * M
    o_b, o_m = o_n // M, o_n % M
    o_lane = i_c.to(tl.int64) * 2 * (B * M) + o_n
    b_end = living(p_lengths, o_b, m_n, FIRST, T, LENGTHS)
    i_low = i_c * CHUNK
    i_high = tl.minimum(i_low + CHUNK, T)
    b_re = tl.load(p_re + o_m, mask=m_n, other=0.0)
    b_im = tl.load(p_im + o_m, mask=m_n, other=0.0)
    b_r = tl.zeros([BLOCK], dtype=tl.float64)
    b_i = tl.zeros([BLOCK], dtype=tl.float64)
    if START:
        b_r = tl.load(p_carry + o_lane, mask=m_n, other=0.0)
        b_i = tl.load(p_carry + o_lane + B * M, mask=m_n, other=0.0)
    b_sum_re = tl.zeros([BLOCK], dtype=tl.float64)
    b_sum_im = tl.zeros([BLOCK], dtype=tl.float64)
    b_row_r = tl.zeros([BLOCK], dtype=tl.float64)
    b_row_i = tl.zeros([BLOCK], dtype=tl.float64)
    o_row = (i_high - 1).to(tl.int64) * B + o_b
    m_t = m_n & (i_high - 1 < b_end)
    b_gr, b_gi = rows_of(p_grad, o_row, o_m, m_t, M)
    if SUMS:
        b_zr, b_zi = state_before(p_z, p_before, o_row, o_b, o_m, i_high - 1, m_t, B, M)
    if TABLE:
        b_id = tl.load(p_ids + o_row, mask=m_t, other=0).to(tl.int64)
        b_id = tl.where(m_t, b_id, -1)
    for i in range(i_high - i_low):
        t = i_high - 1 - i
        # the step before this one, fetched while this one is computed
        m_next = m_n & (t > i_low) & (t - 1 < b_end)
        b_next_gr, b_next_gi = rows_of(p_grad, o_row - B, o_m, m_next, M)
        if SUMS:
            b_next_zr, b_next_zi = state_before(p_z, p_before, o_row - B, o_b, o_m, t - 1, m_next, B, M)
        if TABLE:
            b_next_id = tl.load(p_ids + o_row - B, mask=m_next, other=0).to(tl.int64)
            b_next_id = tl.where(m_next, b_next_id, -1)
        b_old = b_r
        b_r = b_re * b_old + b_im * b_i + b_gr.to(tl.float64)
        b_i = b_re * b_i - b_im * b_old + b_gi.to(tl.float64)
        if LENGTHS:
            b_r = tl.where(t < b_end, b_r, 0.0)
            b_i = tl.where(t < b_end, b_i, 0.0)
        if STORE:
            p_row = p_delta + o_row * (2 * M) + o_m
            tl.store(p_row, b_r.to(p_delta.dtype.element_ty), mask=m_n)
            tl.store(p_row + M, b_i.to(p_delta.dtype.element_ty), mask=m_n)
        if SUMS:
            b_sum_re += b_r * b_zr.to(tl.float64) + b_i * b_zi.to(tl.float64)
            b_sum_im += b_i * b_zr.to(tl.float64) - b_r * b_zi.to(tl.float64)
            b_zr = b_next_zr
            b_zi = b_next_zi
        if TABLE:
            b_row_r += b_r
            b_row_i += b_i
            m_last = (t == i_low) | (b_next_id != b_id)  # of a run of steps with the same id
            m_row = m_n & m_last & (b_id >= 0) & (b_id < D)
            p_row = p_table + (i_c.to(tl.int64) * D + b_id) * 2 * (B * M) + o_n
            b_had_r = tl.load(p_row, mask=m_row, other=0.0)
            b_had_i = tl.load(p_row + B * M, mask=m_row, other=0.0)
            tl.store(p_row, b_had_r + b_row_r, mask=m_row)
            tl.store(p_row + B * M, b_had_i + b_row_i, mask=m_row)
            tl.debug_barrier()  # before a later step reads it
            b_row_r = tl.where(m_last, 0.0, b_row_r)
            b_row_i = tl.where(m_last, 0.0, b_row_i)
            b_id = b_next_id
        o_row -= B
        b_gr = b_next_gr
        b_gi = b_next_gi
    tl.store(p_end + o_lane, b_r, mask=m_n)
    tl.store(p_end + o_lane + B * M, b_i, mask=m_n)
    if SUMS:
        tl.store(p_sums + o_lane, b_sum_re, mask=m_n)
        tl.store(p_sums + o_lane + B * M, b_sum_im, mask=m_n)


@triton.jit
def state_before(p_z, p_before, o_row, o_b, o_m, t, m, B, M: tl.constexpr):
    """(real, imaginary) of the state before step t, whose rows are o_row."""
    b_r, b_i = rows_of(p_z, o_row - B, o_m, m & (t > 0), M)
    b_first_r, b_first_i = rows_of(p_before, o_b, o_m, m & (t == 0), M)
    return b_r + b_first_r, b_i + b_first_i


@triton.jit(do_not_specialize=["T", "B", "P", "CHUNK", "FIRST"])
def modal_scan_pairs_kernel(
    p_grad,  # [T, B, 2M]
    p_z,  # [T, B, 2M]
    p_before,  # [B, 2M]
    p_pairs,  # int64 [P, 2]
    p_re,  # float64 [M]
    p_im,  # float64 [M]
    p_carry,  # float64 [chunks, 2, B M]
    p_sums,  # float64 [chunks, 4, B P]: of delta_t[j] z_{t-1}[k], rr, ri, ir, ii
    p_lengths,  # int64 [B], or None
    T,
    B,
    P,
    CHUNK,
    FIRST,
    M: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A lane is one pair (j, k) of one sequence: the adjoint of mode j once more. A pair of no modes gives NaN."""
    i_c = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < B * P
    o_b = o_n // P
    b_j = tl.load(p_pairs + 2 * (o_n % P), mask=m_n, other=0)
    b_k = tl.load(p_pairs + 2 * (o_n % P) + 1, mask=m_n, other=0)
    m_p = m_n & (b_j >= 0) & (b_j < M) & (b_k >= 0) & (b_k < M)
    o_lane = i_c.to(tl.int64) * 2 * (B * M) + o_b * M + b_j
    b_end = living(p_lengths, o_b, m_n, FIRST, T, LENGTHS)
    i_low = i_c * CHUNK
    i_high = tl.minimum(i_low + CHUNK, T)
    b_re = tl.load(p_re + b_j, mask=m_p, other=0.0)
    b_im = tl.load(p_im + b_j, mask=m_p, other=0.0)
    b_r = tl.load(p_carry + o_lane, mask=m_p, other=float("nan"))
    b_i = tl.load(p_carry + o_lane + B * M, mask=m_p, other=float("nan"))
    b_rr = tl.zeros([BLOCK], dtype=tl.float64)
    b_ri = tl.zeros([BLOCK], dtype=tl.float64)
    b_ir = tl.zeros([BLOCK], dtype=tl.float64)
    b_ii = tl.zeros([BLOCK], dtype=tl.float64)
    o_row = (i_high - 1).to(tl.int64) * B + o_b
    for i in range(i_high - i_low):
        t = i_high - 1 - i
        m_t = m_p & (t < b_end)
        b_gr, b_gi = rows_of(p_grad, o_row, b_j, m_t, M)
        b_zr, b_zi = state_before(p_z, p_before, o_row, o_b, b_k, t, m_t, B, M)
        b_old = b_r
        b_r = b_re * b_old + b_im * b_i + b_gr.to(tl.float64)
        b_i = b_re * b_i - b_im * b_old + b_gi.to(tl.float64)
        b_rr += b_r * b_zr.to(tl.float64)
        b_ri += b_r * b_zi.to(tl.float64)
        b_ir += b_i * b_zr.to(tl.float64)
        b_ii += b_i * b_zi.to(tl.float64)
        o_row -= B
    p_out = p_sums + i_c.to(tl.int64) * 4 * (B * P) + o_n
    tl.store(p_out, b_rr, mask=m_n)
    tl.store(p_out + B * P, b_ri, mask=m_n)
    tl.store(p_out + 2 * (B * P), b_ir, mask=m_n)
    tl.store(p_out + 3 * (B * P), b_ii, mask=m_n)


# ---- launches --------------------------------------------------------------------------------------------------------


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2); of sizes alone, so that no device changes the bits."""
    if lanes >= ENOUGH_LANES:
        return T
    return max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2)))))


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A call's recurrence, by chunks of time.

    Attributes:
        x: [T, B, 2M], or ids [T, B] with a table; None where no forward will be asked for.
        re, im, z0, table, lengths: as in the ops.
        T, chunk: steps altogether, and of a chunk.
    """

    x: Tensor | None
    re: Tensor
    im: Tensor
    z0: Tensor
    table: Tensor | None
    lengths: Tensor | None
    T: int
    chunk: int

    @classmethod
    def of(
        cls,
        x: Tensor | None,
        re: Tensor,
        im: Tensor,
        z0: Tensor,
        table: Tensor | None,
        lengths: Tensor | None,
        T: int,
        longest: int | None = None,
    ) -> Recurrence:
        """Of a call with T steps.

        longest: what a chunk has at most, a power of 2; None: it may have all steps.
        """
        chunk = chunk_length(T, z0.shape[0] * re.shape[0])
        return cls(x, re, im, z0, table, lengths, T, chunk if longest is None or longest >= T else min(chunk, longest))

    @property
    def chunks(self) -> int:
        """How many there are."""
        return triton.cdiv(self.T, self.chunk)

    @property
    def lanes(self) -> int:
        """R = B M."""
        return self.z0.shape[0] * self.re.shape[0]

    def steps(self, first: int, last: int) -> slice:
        """The steps of chunks [first, last)."""
        return slice(first * self.chunk, min(last * self.chunk, self.T))

    def by_chunk(self, chunks: int) -> Tensor:
        """An empty float64 [chunks, 2, R]."""
        return self.re.new_empty(chunks, 2, self.lanes)

    def by_lane(self, rows: Tensor) -> Tensor:
        """[B, 2M] as float64 [2, R]."""
        return rows.double().view(-1, 2, self.re.shape[0]).transpose(0, 1).reshape(2, self.lanes)

    def by_row(self, lanes: Tensor) -> Tensor:
        """And back, float64."""
        return lanes.view(2, -1, self.re.shape[0]).transpose(0, 1).reshape(-1, 2 * self.re.shape[0])

    def forward(self, first: int, last: int, state: Tensor | None, z: Tensor | None, end: Tensor | None) -> None:
        """Run chunks [first, last) from state [chunks, 2, R], or zeros: into z, or to end."""
        assert self.x is not None
        x, M = self.x[self.steps(first, last)], self.re.shape[0]
        grid = (triton.cdiv(self.lanes, BLOCK), last - first)
        with torch.cuda.device_of(self.z0):
            modal_scan_fwd_kernel[grid](
                x, self.table, self.re, self.im, state, z, end, self.lengths, x.shape[0], self.z0.shape[0],
                0 if self.table is None else self.table.shape[0], self.chunk, first * self.chunk, M=M,
                TOKENS=self.table is not None, START=state is not None, STORE=z is not None,
                LENGTHS=self.lengths is not None, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
            )  # fmt: skip

    def join(self, entering: Tensor, end: Tensor, *, backward: bool) -> Tensor:
        """What enters each chunk [chunks, 2, R], from what enters the first (backward: the last) [2, R]."""
        state = torch.empty_like(end)
        with torch.cuda.device_of(self.z0):
            modal_scan_join_kernel[(triton.cdiv(self.lanes, BLOCK),)](
                self.re, self.im, entering, end, state, self.lanes, end.shape[0], self.chunk.bit_length() - 1,
                M=self.re.shape[0], BACKWARD=backward, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        return state

    def states(self) -> Tensor:
        """The state before every chunk, float64 [chunks, 2, R]."""
        end = self.by_chunk(self.chunks)
        if self.chunks > 1:
            self.forward(0, self.chunks - 1, None, None, end)
        return self.join(self.by_lane(self.z0), end, backward=False)


class Adjoint:
    """The adjoint recurrence from the last chunk to the first, a span of chunks at a time, and its sums."""

    def __init__(self, of: Recurrence, pairs: Tensor | None) -> None:
        M, B = of.re.shape[0], of.z0.shape[0]
        self.of, self.pairs = of, pairs
        self.carry = of.re.new_zeros(2, of.lanes)  # the adjoint behind the next span
        self.sums = of.re.new_zeros(2, M)
        self.pair_sums = of.re.new_zeros(0 if pairs is None else pairs.shape[0], 2, 2)
        self.table = None if of.table is None else of.re.new_zeros(of.table.shape)
        self.few_ids = of.table is not None and 2 * of.table.shape[0] <= of.chunk
        row_bytes = 16 * B * M
        self.span = of.chunks if of.table is None or self.few_ids else max(1, DELTA_BYTES // (row_bytes * of.chunk))

    def launch(
        self, first: int, last: int, g: Tensor, z: Tensor | None, before: Tensor | None, carry: Tensor | None,
        delta: Tensor | None, table: Tensor | None, sums: Tensor | None, end: Tensor,
    ) -> None:  # fmt: skip
        """Run chunks [first, last): tensors as the kernel's."""
        of = self.of
        ids = None if table is None or of.x is None else of.x[of.steps(first, last)]
        grid = (triton.cdiv(of.lanes, BLOCK), last - first)
        with torch.cuda.device_of(of.z0):
            modal_scan_bwd_kernel[grid](
                g, z, before, ids, of.re, of.im, carry, delta, table, sums, end, of.lengths, g.shape[0],
                of.z0.shape[0], 0 if of.table is None else of.table.shape[0], of.chunk, first * of.chunk,
                M=of.re.shape[0], START=carry is not None, STORE=delta is not None, TABLE=table is not None,
                SUMS=sums is not None, LENGTHS=of.lengths is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip

    def run(self, first: int, last: int, g: Tensor, z: Tensor, before: Tensor, grad_x: Tensor | None) -> None:
        """Chunks [first, last), which are next: g, z and grad_x are those of their steps, before [B, 2M] the state
        that the first of them begins with."""
        of, chunks = self.of, last - first
        end = of.by_chunk(chunks)
        if chunks > 1:  # what the first chunk begins with enters none of these
            self.launch(first + 1, last, g[of.chunk :], None, None, None, None, None, None, end[1:])
        carry = of.join(self.carry, end, backward=True)
        sums, table, delta = torch.empty_like(end), None, grad_x
        if of.table is not None:
            D = of.table.shape[0]
            if self.few_ids:
                table = of.re.new_zeros(chunks, D, 2, of.lanes)
            else:
                delta = of.re.new_empty(g.shape)
        self.launch(first, last, g, z, before, carry, delta, table, sums, end)
        self.carry = end[0]
        B, M = of.z0.shape[0], of.re.shape[0]
        self.sums += sums.sum(0).view(2, B, M).sum(1)
        if self.table is not None:
            if table is not None:
                self.table += table.sum(0).view(-1, 2, B, M).sum(2).view(-1, 2 * M)
            else:
                assert delta is not None
                self.table += token_gradient(delta.view(-1, 2 * M), self.ids(first, last), self.table.shape[0])
        if self.pairs is not None:
            self.run_pairs(first, last, g, z, before, carry)

    def ids(self, first: int, last: int) -> Tensor:
        """int64 [steps * B], -1 on padding."""
        of = self.of
        steps = of.steps(first, last)
        assert of.x is not None
        ids = of.x[steps].long()
        if of.lengths is not None:
            t = torch.arange(steps.start, steps.stop, device=ids.device)
            ids = torch.where(t[:, None] < of.lengths, ids, -1)
        return ids.flatten()

    def run_pairs(self, first: int, last: int, g: Tensor, z: Tensor, before: Tensor, carry: Tensor) -> None:
        """The sums of ``pairs`` over chunks [first, last)."""
        of, pairs = self.of, self.pairs
        assert pairs is not None
        B, P = of.z0.shape[0], pairs.shape[0]
        if not P:
            return
        sums = of.re.new_empty(last - first, 4, B, P)
        with torch.cuda.device_of(of.z0):
            modal_scan_pairs_kernel[(triton.cdiv(B * P, BLOCK), last - first)](
                g, z, before, pairs, of.re, of.im, carry, sums, of.lengths, g.shape[0], B, P, of.chunk,
                first * of.chunk, M=of.re.shape[0], LENGTHS=of.lengths is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip
        self.pair_sums += sums.sum(0).sum(1).mT.reshape(P, 2, 2)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(grad_re, grad_im, grad_z0, grad_table) of the ops, after the first chunk."""
        re, im, dtype = self.of.re, self.of.im, self.of.z0.dtype
        real, imag = self.of.by_row(self.carry).chunk(2, 1)
        grad_z0 = torch.cat([re * real + im * imag, re * imag - im * real], 1).to(dtype)  # L^T delta of the first step
        grad_table = self.of.z0.new_empty(0) if self.table is None else self.table.to(dtype)
        return self.sums[0].clone(), self.sums[1].clone(), grad_z0, grad_table


def modal_scan_fwd(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, table: Tensor | None, *, lengths: Tensor | None = None
) -> Tensor:
    """See ``orthokern.ops.modal_scan`` for the arguments, all contiguous. Returns z [T, B, 2M]."""
    call = Recurrence.of(x, re, im, z0, table, lengths, x.shape[0])
    z = z0.new_empty(x.shape[0], *z0.shape)
    call.forward(0, call.chunks, call.states(), z, None)
    return z


def modal_scan_bwd(
    grad_z: Tensor,
    z: Tensor,
    x: Tensor | None,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    pairs: Tensor | None,
    *,
    need_x: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``orthokern.ops.modal_scan``. Returns (grad_x, grad_re, grad_im, grad_z0, grad_table, grad_pairs)."""
    call = Recurrence.of(x, re, im, z0, table, lengths, grad_z.shape[0])
    adjoint = Adjoint(call, pairs)
    empty = z0.new_empty(0)
    grad_x = torch.empty_like(grad_z) if table is None and need_x else None
    for last in range(call.chunks, 0, -adjoint.span):
        first = max(0, last - adjoint.span)
        steps = call.steps(first, last)
        before = z[steps.start - 1] if first else z0
        adjoint.run(first, last, grad_z[steps], z[steps], before, None if grad_x is None else grad_x[steps])
    return (
        empty if grad_x is None else grad_x,
        *adjoint.gradients(),
        re.new_empty(0) if pairs is None else adjoint.pair_sums,
    )
