"""gru_scan: a gated recurrent unit, the whole time loop in one launch. See Note [GRU scan backward] of the reference.

    program i_b  ->  one sequence, all its steps; nothing is exchanged between programs

    forward   kanai   (r, z) of h, then n of r * h       two sequential products, of 2 N^2 and N^2
              torch   (r, z, q) of h                     one product of 3 N^2
    backward  kanai   d_m of d_n, then carry of (d_r, d_z)
              torch   carry of (d_r, d_z, d_q)

    on chip, for all T:    way "rows": the three matrices [N, N] in registers, 48 KiB at N = 64 in float32
    L1 or L2, every step:  way "panels": the same, 32 columns of each at a time
    shared memory:         the state (backward: the adjoints), between threads
    HBM, in every step:    forward reads x_t, 3 N; writes r, z, n, h (and q), 4 N (5 N). Backward reads g, h', r, z, n
                           (and q), 5 N (6 N); writes d_r, d_z, d_n, 3 N, |ghat|^2, and N for the other factor of the
                           gradient of W_n. The inputs of a step are loaded during the step before.

The gradients of w and bias are torch's products over all steps afterwards. The product with a matrix and its tile's
layout are those of ``_matrix.py``. Limits: IEEE products only; N up to 128; from N = 65 on (float64: 33) w is read in
every step.
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._gru_parameters import parameter_gradients
from orthokern._scan_contract import GruArgs, GruGradients, GruStates
from orthokern.triton_kernels._activation import tanh
from orthokern.triton_kernels._launch import PANEL_WARPS, look_up
from orthokern.triton_kernels._matrix import WIDE, elements, load_matrix, multiply_row, once

# ------------------------------------------------------------------------------------------------------------ products


@triton.jit
def sigmoid(b_x):
    """1 / (1 + exp(-x)), accurate in relative terms; a NaN stays a NaN."""
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def resident(p_matrix, N: tl.constexpr, WAY: tl.constexpr, BLOCK_N: tl.constexpr):
    """The matrix [N, N] in registers, or 0.0 where it is read in panels."""
    b_matrix = 0.0
    if WAY == "rows":
        b_matrix = load_matrix(p_matrix, 0, 0, N, N, BLOCK_N, BLOCK_N)
    return b_matrix


@triton.jit
def product(b_x, b_matrix, p_matrix, N: tl.constexpr, WAY: tl.constexpr, BLOCK_N: tl.constexpr):
    """The row b_x [1, BLOCK_N] times the transpose of a matrix [N, N]."""
    b_row = once(b_x)
    if WAY == "rows":
        b_y = multiply_row(b_row, b_matrix, BLOCK_N)
    else:
        b_y = tl.zeros([1, BLOCK_N], dtype=b_x.dtype)
        for i_n in range(0, N, WIDE):
            b_y += multiply_row(elements(b_row, i_n, BLOCK_N), load_matrix(p_matrix, 0, i_n, N, N, BLOCK_N, WIDE), WIDE)
    return b_y


@triton.jit
def two_products(
    b_x,
    b_y,
    b_first,
    b_second,
    p_first,
    p_second,
    SAME: tl.constexpr,
    N: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first x, second y), each as in ``product``. SAME: y is x, which is then distributed once."""
    b_row_x = once(b_x)
    b_row_y = b_row_x
    if not SAME:
        b_row_y = once(b_y)
    if WAY == "rows":
        b_to_x = multiply_row(b_row_x, b_first, BLOCK_N)
        b_to_y = multiply_row(b_row_y, b_second, BLOCK_N)
    else:
        b_to_x = tl.zeros([1, BLOCK_N], dtype=b_x.dtype)
        b_to_y = tl.zeros([1, BLOCK_N], dtype=b_x.dtype)
        for i_n in range(0, N, WIDE):
            b_few_x = elements(b_row_x, i_n, BLOCK_N)
            b_few_y = b_few_x
            if not SAME:
                b_few_y = elements(b_row_y, i_n, BLOCK_N)
            b_to_x += multiply_row(b_few_x, load_matrix(p_first, 0, i_n, N, N, BLOCK_N, WIDE), WIDE)
            b_to_y += multiply_row(b_few_y, load_matrix(p_second, 0, i_n, N, N, BLOCK_N, WIDE), WIDE)
    return b_to_x, b_to_y


# ---------------------------------------------------------------------------------------------------------- time loops


@triton.jit
def steps_of(p_lengths, i_b, T, LENGTHS: tl.constexpr):
    """Steps of sequence i_b, clamped to [0, T]: checking lengths on the host would need a device synchronization."""
    steps = T
    if LENGTHS:
        steps = tl.minimum(tl.maximum(tl.load(p_lengths + i_b), 0), T).to(tl.int32)
    return steps


@triton.jit
def resets_at(p_resets, i_b, t, B, exists):
    """Whether step t of sequence i_b starts from the reset state: a scalar, False unless the step exists."""
    return tl.load(p_resets + t * B.to(tl.int64) + i_b, mask=exists, other=0) != 0


@triton.jit
def reset_row(p_state, i_b, o_n, m_n, N: tl.constexpr, STATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The state [1, BLOCK_N] that resets of sequence i_b start from, zeros without STATE."""
    b_state = tl.zeros([1, BLOCK_N], dtype=p_state.dtype.element_ty)
    if STATE:
        b_state = tl.load(p_state + i_b.to(tl.int64) * N + o_n, mask=m_n, other=0.0)
    return b_state


@triton.jit
def columns(o_n, exists, N: tl.constexpr):
    """The mask [1, BLOCK_N] of a row, all False unless the row exists.

    Not m_n & exists: where exists is a scalar, the interpreter of Triton 3.9 does not accept the result as a mask.
    """
    return o_n < tl.where(exists, N, 0)


@triton.jit
def load_gates(p, o, m_n, N: tl.constexpr):
    """The three blocks of a row [3N] that begins at o, each [1, BLOCK_N]."""
    b_r = tl.load(p + o, mask=m_n, other=0.0)
    b_z = tl.load(p + o + N, mask=m_n, other=0.0)
    b_n = tl.load(p + o + 2 * N, mask=m_n, other=0.0)
    return b_r, b_z, b_n


@triton.jit
def store_gates(p, o, b_r, b_z, b_n, m_n, N: tl.constexpr):
    tl.store(p + o, b_r, mask=m_n)
    tl.store(p + o + N, b_z, mask=m_n)
    tl.store(p + o + 2 * N, b_n, mask=m_n)


@triton.jit(do_not_specialize=["T", "B"])
def gru_scan_fwd_kernel(
    p_x,  # [T, B, 3N]
    p_w,  # [3N, N]
    p_h0,  # [B, N]
    p_bias,  # [3N], or None
    p_hs,  # [T, B, N]
    p_gates,  # [T, B, 3N]
    p_pre,  # [T, B, N], or None
    p_lengths,  # int64 [B], or None
    p_resets,  # uint8 [T, B], or None
    p_state,  # [B, N], the state that resets start from; without STATE any tensor of its dtype
    T,
    B,
    N: tl.constexpr,
    KANAI: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    RESETS: tl.constexpr,
    STATE: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_b = tl.program_id(0)
    steps = steps_of(p_lengths, i_b, T, LENGTHS)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    p_w_z = p_w + N * N
    p_w_n = p_w + 2 * N * N
    b_w_r, b_w_z, b_w_n = (
        resident(p_w, N, WAY, BLOCK_N),
        resident(p_w_z, N, WAY, BLOCK_N),
        resident(p_w_n, N, WAY, BLOCK_N),
    )
    b_bias_r, b_bias_z, b_bias_n = 0.0, 0.0, 0.0
    if BIAS:
        b_bias_r, b_bias_z, b_bias_n = load_gates(p_bias, o_n, m_n, N)
    b_h = tl.load(p_h0 + i_b.to(tl.int64) * N + o_n, mask=m_n, other=0.0)
    o = i_b.to(tl.int64) * N + o_n  # of the step's row in [T, B, N]; times 3 but for o_n in [T, B, 3N]
    stride = B.to(tl.int64) * N
    b_x_r, b_x_z, b_x_n = load_gates(p_x, 3 * (o - o_n) + o_n, columns(o_n, steps > 0, N), N)
    if RESETS:
        b_state = reset_row(p_state, i_b, o_n, m_n, N, STATE, BLOCK_N)
        b_cut = resets_at(p_resets, i_b, 0, B, steps > 0)
    for t in range(steps):
        o_row = 3 * (o - o_n) + o_n
        if RESETS:
            b_h = tl.where(b_cut, b_state, b_h)
            b_cut = resets_at(p_resets, i_b, t + 1, B, t + 1 < steps)
        b_next_r, b_next_z, b_next_n = load_gates(p_x, o_row + 3 * stride, columns(o_n, t + 1 < steps, N), N)
        b_to_r, b_to_z = two_products(b_h, b_h, b_w_r, b_w_z, p_w, p_w_z, True, N, WAY, BLOCK_N)
        b_r = sigmoid(b_to_r + b_bias_r + b_x_r)
        b_z = sigmoid(b_to_z + b_bias_z + b_x_z)
        if KANAI:
            b_n = tanh(product(b_r * b_h, b_w_n, p_w_n, N, WAY, BLOCK_N) + b_bias_n + b_x_n)
        else:
            b_q = product(b_h, b_w_n, p_w_n, N, WAY, BLOCK_N) + b_bias_n
            b_n = tanh(b_r * b_q + b_x_n)
            tl.store(p_pre + o, b_q, mask=m_n)
        b_h = b_z * b_h + (1.0 - b_z) * b_n
        store_gates(p_gates, o_row, b_r, b_z, b_n, m_n, N)
        tl.store(p_hs + o, b_h, mask=m_n)
        o += stride
        b_x_r, b_x_z, b_x_n = b_next_r, b_next_z, b_next_n
    if LENGTHS:
        b_zero = tl.zeros([1, BLOCK_N], dtype=p_h0.dtype.element_ty)
        for _ in range(steps, T):
            store_gates(p_gates, 3 * (o - o_n) + o_n, b_zero, b_zero, b_zero, m_n, N)
            tl.store(p_hs + o, b_zero, mask=m_n)
            if not KANAI:
                tl.store(p_pre + o, b_zero, mask=m_n)
            o += stride


@triton.jit(do_not_specialize=["T", "B"])
def gru_scan_bwd_kernel(
    p_grad,  # [T, B, N]
    p_hs,  # [T, B, N]
    p_gates,  # [T, B, 3N]
    p_pre,  # [T, B, N], or None
    p_w_t,  # [3, N, N]: the transposes of W_r, W_z, W_n
    p_h0,  # [B, N]
    p_grad_x,  # [T, B, 3N]
    p_factor,  # [T, B, N]: r h' (kanai) or d_q, for the gradient of W_n; or None
    p_grad_h0,  # [B, N]
    p_square,  # [T, B]: |dL/dh_t|^2 of every sequence
    p_lengths,  # int64 [B], or None
    p_resets,  # uint8 [T, B], or None
    p_state,  # [B, N], the state that resets start from; without STATE any tensor of its dtype
    p_grad_state,  # [B, N], or None without STATE
    T,
    B,
    N: tl.constexpr,
    KANAI: tl.constexpr,
    FACTOR: tl.constexpr,
    LENGTHS: tl.constexpr,
    RESETS: tl.constexpr,
    STATE: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Longer than 100 lines: a line for every argument."""
    i_b = tl.program_id(0)
    steps = steps_of(p_lengths, i_b, T, LENGTHS)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    p_t_z = p_w_t + N * N
    p_t_n = p_w_t + 2 * N * N
    b_t_r, b_t_z, b_t_n = (
        resident(p_w_t, N, WAY, BLOCK_N),
        resident(p_t_z, N, WAY, BLOCK_N),
        resident(p_t_n, N, WAY, BLOCK_N),
    )
    stride = B.to(tl.int64) * N
    o_start = i_b.to(tl.int64) * N
    b_none = tl.zeros([1], dtype=p_h0.dtype.element_ty)
    o_one = i_b.to(tl.int64) + tl.arange(0, 1)
    if LENGTHS:
        b_zero = tl.zeros([1, BLOCK_N], dtype=p_h0.dtype.element_ty)
        for t in range(steps, T):
            o_pad = o_start + t * stride
            store_gates(p_grad_x, 3 * o_pad + o_n, b_zero, b_zero, b_zero, m_n, N)
            if FACTOR:
                tl.store(p_factor + o_pad + o_n, b_zero, mask=m_n)
            tl.store(p_square + t * B.to(tl.int64) + o_one, b_none)

    b_h0 = tl.load(p_h0 + o_start + o_n, mask=m_n, other=0.0)
    o = o_start + (steps - 1) * stride + o_n  # of the step's row in [T, B, N]
    m_t = columns(o_n, steps > 0, N)
    b_g = tl.load(p_grad + o, mask=m_t, other=0.0)
    b_r, b_z, b_n = load_gates(p_gates, 3 * (o - o_n) + o_n, m_t, N)
    b_h = tl.where(steps > 1, tl.load(p_hs + o - stride, mask=columns(o_n, steps > 1, N), other=0.0), b_h0)
    b_q = 0.0
    if not KANAI:
        b_q = tl.load(p_pre + o, mask=m_t, other=0.0)
    b_carry = tl.zeros([1, BLOCK_N], dtype=p_h0.dtype.element_ty)
    if RESETS:
        b_state = reset_row(p_state, i_b, o_n, m_n, N, STATE, BLOCK_N)
        b_to_state = tl.zeros([1, BLOCK_N], dtype=p_h0.dtype.element_ty)
        b_cut_before = resets_at(p_resets, i_b, steps - 1, B, steps > 0)
    for i in range(steps):
        t = steps - 1 - i
        if RESETS:
            b_cut = b_cut_before
            b_h = tl.where(b_cut, b_state, b_h)
            b_cut_before = resets_at(p_resets, i_b, t - 1, B, t > 0)
        # load the previous step while this one is computed
        m_before = columns(o_n, t > 0, N)
        m_two = columns(o_n, t > 1, N)
        o_row = 3 * (o - o_n) + o_n
        b_g_before = tl.load(p_grad + o - stride, mask=m_before, other=0.0)
        b_r_before, b_z_before, b_n_before = load_gates(p_gates, o_row - 3 * stride, m_before, N)
        b_h_before = tl.where(t > 1, tl.load(p_hs + o - 2 * stride, mask=m_two, other=0.0), b_h0)
        if not KANAI:
            b_q_before = tl.load(p_pre + o - stride, mask=m_before, other=0.0)

        b_ghat = b_g + b_carry
        tl.store(p_square + t * B.to(tl.int64) + o_one, tl.sum(b_ghat * b_ghat, axis=1))
        b_d_z = b_ghat * (b_h - b_n) * (b_z * (1.0 - b_z))
        b_d_n = b_ghat * (1.0 - b_z) * (1.0 - b_n * b_n)
        if KANAI:
            b_d_m = product(b_d_n, b_t_n, p_t_n, N, WAY, BLOCK_N)
            b_d_r = b_d_m * b_h * (b_r * (1.0 - b_r))
            b_direct = b_ghat * b_z + b_r * b_d_m
            b_factor = b_r * b_h
        else:
            b_factor = b_d_n * b_r
            b_d_r = b_d_n * b_q * (b_r * (1.0 - b_r))
            b_direct = b_ghat * b_z + product(b_factor, b_t_n, p_t_n, N, WAY, BLOCK_N)
        store_gates(p_grad_x, o_row, b_d_r, b_d_z, b_d_n, m_n, N)
        if FACTOR:
            tl.store(p_factor + o, b_factor, mask=m_n)
        b_from_r, b_from_z = two_products(b_d_r, b_d_z, b_t_r, b_t_z, p_w_t, p_t_z, False, N, WAY, BLOCK_N)
        b_carry = b_direct + (b_from_r + b_from_z)
        if RESETS:
            b_to_state += tl.where(b_cut, b_carry, 0.0)
            b_carry = tl.where(b_cut, 0.0, b_carry)
        o -= stride
        b_g, b_r, b_z, b_n, b_h = b_g_before, b_r_before, b_z_before, b_n_before, b_h_before
        if not KANAI:
            b_q = b_q_before
    tl.store(p_grad_h0 + o_start + o_n, b_carry, mask=m_n)
    if STATE:
        tl.store(p_grad_state + o_start + o_n, b_to_state, mask=m_n)


# ------------------------------------------------------------------------------------------------------------- launches


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a launch multiplies: the ``way``, the size of its tiles and the warps."""

    way: str
    block_n: int
    num_warps: int


# Warps by BLOCK_N times the 32-bit words of an element, where the three matrices stay in registers: with these a thread
# holds 48 to 96 words of them. See ROWS_WARPS in _scan.py for why not fewer.
ROWS_WARPS = ((32, 2), (64, 4))


def plan(N: int, dtype: torch.dtype) -> Plan:
    """The way to multiply, from N and the dtype alone."""
    block_n = max(32, triton.next_power_of_2(N))
    warps = look_up(ROWS_WARPS, block_n * dtype.itemsize // 4)
    if warps:
        return Plan("rows", block_n, warps)
    return Plan("panels", block_n, look_up(PANEL_WARPS, block_n) or 8)


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See ``orthokern.ops.gru_scan``; tensors are contiguous, and N is at most 128."""
    x, h0, lengths, state = args.x, args.h0, args.lengths, args.reset_state
    assert x is not None
    T, (B, N) = x.shape[0], h0.shape
    pre = None if args.kanai else h0.new_empty(T, B, N)
    states = GruStates(h0.new_empty(T, B, N), h0.new_empty(T, B, 3 * N), pre)
    way = plan(N, h0.dtype)
    with torch.cuda.device_of(h0):
        gru_scan_fwd_kernel[(B,)](
            x,
            args.w,
            h0,
            args.bias,
            *states,
            lengths,
            _flags(args),
            h0 if state is None else state,
            T,
            B,
            N=N,
            KANAI=args.kanai,
            BIAS=args.bias is not None,
            LENGTHS=lengths is not None,
            RESETS=args.resets is not None,
            STATE=state is not None,
            WAY=way.way,
            BLOCK_N=way.block_n,
            num_warps=way.num_warps,
            enable_fp_fusion=True,
        )
    return states


def gru_scan_bwd(args: GruArgs, grad_hs: Tensor, states: GruStates, needs: Any) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    h0, lengths, state = args.h0, args.lengths, args.reset_state
    T, B, N = grad_hs.shape
    grad_x, grad_h0, square = torch.empty_like(states.gates), torch.empty_like(h0), h0.new_empty(T, B)
    factor = h0.new_empty(T, B, N) if needs.w or needs.bias else None
    grad_state = None if state is None else torch.empty_like(state)
    way = plan(N, h0.dtype)
    with torch.cuda.device_of(h0):
        gru_scan_bwd_kernel[(B,)](
            grad_hs,
            *states,
            args.w.view(-1, N, N).mT.contiguous(),
            h0,
            grad_x,
            factor,
            grad_h0,
            square,
            lengths,
            _flags(args),
            h0 if state is None else state,
            grad_state,
            T,
            B,
            N=N,
            KANAI=args.kanai,
            FACTOR=factor is not None,
            LENGTHS=lengths is not None,
            RESETS=args.resets is not None,
            STATE=state is not None,
            WAY=way.way,
            BLOCK_N=way.block_n,
            num_warps=way.num_warps,
            enable_fp_fusion=True,
        )
    grad_w = grad_bias = None
    if factor is not None:
        grad_w, grad_bias = parameter_gradients(args, states.hs, grad_x, factor)
    norm = square.sum(1).sqrt() if needs.norm else None
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_state, norm)


def _flags(args: GruArgs) -> Tensor | None:
    return None if args.resets is None else args.resets.view(torch.uint8)
