"""modal_scan: z_t = lambda z_{t-1} + x_t for each mode, in chunks of time that run in parallel.

``orthokern/_modal_chunks.py`` has the order of the launches and the data between them; this file has the kernels. A
program computes BLOCK lanes (o_n = b M + m, mode m of sequence b) of one chunk, with coefficients, states and sums in
float64 registers. The inputs of a step are loaded one step ahead. Limits: none on B, T and M.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._modal_chunks import Adjoints, Inside, Kernels, Steps, run_scan_bwd, run_scan_fwd
from orthokern._scan_contract import ModalGradients, ModalInputs
from orthokern.triton_kernels._inputs import token_gradient

BLOCK = 64  # lanes of a program: 2 warps; 32 programs occupy a multiprocessor
NUM_WARPS = 2


@triton.jit
def chunk_and_lanes(R, BLOCK: tl.constexpr):
    """(chunk of the program, its lanes [BLOCK] of R). Both are on the first axis of the grid: others have at most 65535
    programs."""
    blocks = tl.cdiv(R, BLOCK)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def entering(p_x, p_table, o_row, o_m, m, D, M: tl.constexpr, TOKENS: tl.constexpr):
    """(real, imaginary) inputs of the lanes at rows o_row (int64) of [T * B], in the dtype of the call."""
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
        # at least 0 before FIRST is subtracted: the smallest int64 would become a large length
        b_end = tl.minimum(b_end, tl.maximum(tl.load(p_lengths + o_b, mask=m_n, other=0), 0) - FIRST)
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
    i_c, o_n = chunk_and_lanes(B * M, BLOCK)
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
        # the next step, loaded while this one is computed
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
    p_first,  # float64 [2, R]: initial state of the first chunk (backward: carry of the last)
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
    # loads of the next four chunks are in flight while one is joined
    b_r0 = tl.load(p_end + o, mask=m_n & (CHUNKS > 1), other=0.0)
    b_i0 = tl.load(p_end + o + R, mask=m_n & (CHUNKS > 1), other=0.0)
    b_r1 = tl.load(p_end + o + o_step, mask=m_n & (CHUNKS > 2), other=0.0)
    b_i1 = tl.load(p_end + o + o_step + R, mask=m_n & (CHUNKS > 2), other=0.0)
    b_r2 = tl.load(p_end + o + 2 * o_step, mask=m_n & (CHUNKS > 3), other=0.0)
    b_i2 = tl.load(p_end + o + 2 * o_step + R, mask=m_n & (CHUNKS > 3), other=0.0)
    for i in range(CHUNKS):
        m_next = m_n & (i + 4 < CHUNKS)  # the end of the last chunk is not needed
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
    p_carry,  # float64 [chunks, 2, B M], carry from the next chunk; None: zeros
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
    i_c, o_n = chunk_and_lanes(B * M, BLOCK)
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
        # the previous step, loaded while this one is computed
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
            m_last = (t == i_low) | (b_next_id != b_id)  # sums over consecutive steps with the same id
            m_row = m_n & m_last & (b_id >= 0) & (b_id < D)
            p_row = p_table + (i_c.to(tl.int64) * D + b_id) * 2 * (B * M) + o_n
            b_had_r = tl.load(p_row, mask=m_row, other=0.0)
            b_had_i = tl.load(p_row + B * M, mask=m_row, other=0.0)
            tl.store(p_row, b_had_r + b_row_r, mask=m_row)
            tl.store(p_row + B * M, b_had_i + b_row_i, mask=m_row)
            tl.debug_barrier()  # the store must be visible before a later step reads it
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
    """A lane is one pair (j, k) of one sequence. It recomputes the adjoint of mode j. Indices out of range give NaN."""
    i_c, o_n = chunk_and_lanes(B * P, BLOCK)
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
    b_r = tl.load(p_carry + o_lane, mask=m_p, other=0.0)
    b_i = tl.load(p_carry + o_lane + B * M, mask=m_p, other=0.0)
    b_rr = tl.zeros([BLOCK], dtype=tl.float64)
    b_ri = tl.zeros([BLOCK], dtype=tl.float64)
    b_ir = tl.zeros([BLOCK], dtype=tl.float64)
    b_ii = tl.zeros([BLOCK], dtype=tl.float64)
    o_row = (i_high - 1).to(tl.int64) * B + o_b
    steps = (i_high - i_low) * tl.max(m_p.to(tl.int32), axis=0)  # 0 if no lane has a valid pair
    for i in range(steps):
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
    b_rr = tl.where(m_p, b_rr, float("nan"))
    b_ri = tl.where(m_p, b_ri, float("nan"))
    b_ir = tl.where(m_p, b_ir, float("nan"))
    b_ii = tl.where(m_p, b_ii, float("nan"))
    tl.store(p_out, b_rr, mask=m_n)
    tl.store(p_out + B * P, b_ri, mask=m_n)
    tl.store(p_out + 2 * (B * P), b_ir, mask=m_n)
    tl.store(p_out + 3 * (B * P), b_ii, mask=m_n)


# ---- launches --------------------------------------------------------------------------------------------------------


def launch_forward(
    steps: Steps, x: Tensor, table: Tensor | None, state: Tensor | None, z: Tensor | None, end: Tensor | None
) -> None:
    """See ``Kernels.forward``."""
    re, im, lengths, B, chunk, first = steps
    T, M = x.shape[0], re.shape[0]
    with torch.cuda.device_of(re):
        modal_scan_fwd_kernel[(triton.cdiv(B * M, BLOCK) * triton.cdiv(T, chunk),)](
            x, table, re, im, state, z, end, lengths, T, B, 0 if table is None else table.shape[0], chunk, first, M=M,
            TOKENS=table is not None, START=state is not None, STORE=z is not None, LENGTHS=lengths is not None,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def launch_join(re: Tensor, im: Tensor, entering: Tensor, end: Tensor, chunk: int, backward: bool) -> Tensor:
    """See ``Kernels.join``."""
    state, R = torch.empty_like(end), end.shape[2]
    with torch.cuda.device_of(re):
        modal_scan_join_kernel[(triton.cdiv(R, BLOCK),)](
            re, im, entering, end, state, R, end.shape[0], chunk.bit_length() - 1, M=re.shape[0], BACKWARD=backward,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return state


def launch_backward(steps: Steps, inside: Inside, carry: Tensor | None, results: Adjoints) -> None:
    """See ``Kernels.backward``."""
    re, im, lengths, B, chunk, first = steps
    (g, z, before, ids), (end, delta, table, sums) = inside, results
    T, M = g.shape[0], re.shape[0]
    with torch.cuda.device_of(re):
        modal_scan_bwd_kernel[(triton.cdiv(B * M, BLOCK) * triton.cdiv(T, chunk),)](
            g, z, before, ids, re, im, carry, delta, table, sums, end, lengths, T, B,
            0 if table is None else table.shape[1], chunk, first, M=M, START=carry is not None, STORE=delta is not None,
            TABLE=table is not None, SUMS=sums is not None, LENGTHS=lengths is not None, BLOCK=BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def launch_pairs(steps: Steps, inside: Inside, pairs: Tensor, carry: Tensor, sums: Tensor) -> None:
    """See ``Kernels.pairs``."""
    re, im, lengths, B, chunk, first = steps
    g, z, before, _ = inside
    T, P = g.shape[0], pairs.shape[0]
    with torch.cuda.device_of(re):
        modal_scan_pairs_kernel[(triton.cdiv(B * P, BLOCK) * triton.cdiv(T, chunk),)](
            g, z, before, pairs, re, im, carry, sums, lengths, T, B, P, chunk, first, M=re.shape[0],
            LENGTHS=lengths is not None, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


KERNELS = Kernels(launch_forward, launch_join, launch_backward, launch_pairs, token_gradient)


def modal_scan_fwd(inputs: ModalInputs) -> Tensor:
    """See ``orthokern.ops.modal_scan`` for the arguments, all contiguous. Returns z [T, B, 2M]."""
    return run_scan_fwd(KERNELS, inputs)


def modal_scan_bwd(inputs: ModalInputs, grad_z: Tensor, z: Tensor, *, need_x: bool = True) -> ModalGradients:
    """See ``orthokern.ops.modal_scan``."""
    return run_scan_bwd(KERNELS, inputs, grad_z, z, need_x)
