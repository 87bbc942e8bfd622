"""gru_scan: a gated recurrent unit, the whole time loop in one launch. See Note [GRU scan backward] of the reference.

    program i_b  ->  one sequence, all its steps; nothing is exchanged between programs

    forward   kanai   (r, z) of h, then n of r * h       two sequential products, of 2 N^2 and N^2
              torch   (r, z, q) of h                     one product of 3 N^2
    backward  kanai   d_m of d_n, then carry of (d_r, d_z)
              torch   carry of (d_r, d_z, d_q)

    registers, for all T:  the three matrices [N, N] if they fit, 48 KiB at N = 64 in float32
    L1 or L2, every step:  matrices that do not fit, 32 columns at a time
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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._elements import checked
from orthokern._gpu_scans import new_results
from orthokern._gru_parameters import parameter_gradients
from orthokern._scan_contract import GruArgs, GruGradients, GruStates
from orthokern.triton_kernels._activation import tanh
from orthokern.triton_kernels._matrix import columns, flag_at, load_resident, plan, product, row_or_zeros, steps_of


@triton.jit
def sigmoid(b_x):
    """1 / (1 + exp(-x)), accurate in relative terms; a NaN stays a NaN."""
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def load_resident_gates(p_w, N: tl.constexpr, RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr):
    """``load_resident`` of the three matrices of [3, N, N]."""
    b_r = load_resident(p_w, N, N, RESIDENT, BLOCK_N, BLOCK_N)
    b_z = load_resident(p_w + N * N, N, N, RESIDENT, BLOCK_N, BLOCK_N)
    b_n = load_resident(p_w + 2 * N * N, N, N, RESIDENT, BLOCK_N, BLOCK_N)
    return b_r, b_z, b_n


@triton.jit
def load_gates(p, o, m, N: tl.constexpr):
    """The three blocks of a row [3N] that begins at o, each [1, BLOCK_N]."""
    b_r = tl.load(p + o, mask=m, other=0.0)
    b_z = tl.load(p + o + N, mask=m, other=0.0)
    b_n = tl.load(p + o + 2 * N, mask=m, other=0.0)
    return b_r, b_z, b_n


@triton.jit
def store_gates(p, o, b_r, b_z, b_n, m, N: tl.constexpr):
    tl.store(p + o, b_r, mask=m)
    tl.store(p + o + N, b_z, mask=m)
    tl.store(p + o + 2 * N, b_n, mask=m)


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
    p_state,  # [B, N], the state that resets start from; None: zeros
    T,
    B,
    N: tl.constexpr,
    KANAI: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_b = tl.program_id(0)
    steps = steps_of(p_lengths, i_b, 0, T)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    p_w_z = p_w + N * N
    p_w_n = p_w + 2 * N * N
    b_w_r, b_w_z, b_w_n = load_resident_gates(p_w, N, RESIDENT, BLOCK_N)
    b_bias_r, b_bias_z, b_bias_n = 0.0, 0.0, 0.0
    if p_bias is not None:
        b_bias_r, b_bias_z, b_bias_n = load_gates(p_bias, o_n, m_n, N)
    b_h = row_or_zeros(p_h0, i_b, p_h0, N, BLOCK_N)
    if p_resets is not None:
        b_state = row_or_zeros(p_state, i_b, p_h0, N, BLOCK_N)
    row = i_b.to(tl.int64)  # of the step in [T * B]
    b_x_r, b_x_z, b_x_n = load_gates(p_x, 3 * row * N + o_n, columns(o_n, steps > 0, N), N)
    for t in range(steps):
        if p_resets is not None:
            b_h = tl.where(flag_at(p_resets, row, t < steps), b_state, b_h)
        m_next = columns(o_n, t + 1 < steps, N)
        b_next_r, b_next_z, b_next_n = load_gates(p_x, 3 * (row + B) * N + o_n, m_next, N)
        b_r = sigmoid(product(b_h, b_w_r, p_w, N, N, RESIDENT, BLOCK_N, BLOCK_N) + b_bias_r + b_x_r)
        b_z = sigmoid(product(b_h, b_w_z, p_w_z, N, N, RESIDENT, BLOCK_N, BLOCK_N) + b_bias_z + b_x_z)
        if KANAI:
            b_n = tanh(product(b_r * b_h, b_w_n, p_w_n, N, N, RESIDENT, BLOCK_N, BLOCK_N) + b_bias_n + b_x_n)
        else:
            b_q = product(b_h, b_w_n, p_w_n, N, N, RESIDENT, BLOCK_N, BLOCK_N) + b_bias_n
            b_n = tanh(b_r * b_q + b_x_n)
            tl.store(p_pre + row * N + o_n, b_q, mask=m_n)
        b_h = b_z * b_h + (1.0 - b_z) * b_n
        store_gates(p_gates, 3 * row * N + o_n, b_r, b_z, b_n, m_n, N)
        tl.store(p_hs + row * N + o_n, b_h, mask=m_n)
        row += B
        b_x_r, b_x_z, b_x_n = b_next_r, b_next_z, b_next_n


@triton.jit
def load_saved(p_grad, p_hs, p_gates, p_pre, p_h0, i_b, t, B, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """(g, h_{t-1}, r, z, n, q) of step t, [1, BLOCK_N] each, zeros for t < 0; q is 0.0 without p_pre."""
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m = columns(o_n, t >= 0, N)
    row = t * B.to(tl.int64) + i_b
    b_g = tl.load(p_grad + row * N + o_n, mask=m, other=0.0)
    b_r, b_z, b_n = load_gates(p_gates, 3 * row * N + o_n, m, N)
    b_h = tl.load(p_hs + (row - B) * N + o_n, mask=columns(o_n, t > 0, N), other=0.0)
    b_h = tl.where(t > 0, b_h, tl.load(p_h0 + i_b.to(tl.int64) * N + o_n, mask=columns(o_n, t == 0, N), other=0.0))
    b_q = 0.0
    if p_pre is not None:
        b_q = tl.load(p_pre + row * N + o_n, mask=m, other=0.0)
    return b_g, b_h, b_r, b_z, b_n, b_q


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
    p_square,  # [T, B]: |dL/dh_t|^2 of every sequence, zeros on entry
    p_lengths,  # int64 [B], or None
    p_resets,  # uint8 [T, B], or None
    p_state,  # [B, N], the state that resets start from; None: zeros
    p_grad_state,  # [B, N], or None
    T,
    B,
    N: tl.constexpr,
    KANAI: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_b = tl.program_id(0)
    steps = steps_of(p_lengths, i_b, 0, T)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    p_t_z = p_w_t + N * N
    p_t_n = p_w_t + 2 * N * N
    b_t_r, b_t_z, b_t_n = load_resident_gates(p_w_t, N, RESIDENT, BLOCK_N)
    b_g, b_h, b_r, b_z, b_n, b_q = load_saved(p_grad, p_hs, p_gates, p_pre, p_h0, i_b, steps - 1, B, N, BLOCK_N)
    b_carry = row_or_zeros(None, i_b, p_h0, N, BLOCK_N)
    if p_resets is not None:
        b_state = row_or_zeros(p_state, i_b, p_h0, N, BLOCK_N)
        b_to_state = row_or_zeros(None, i_b, p_h0, N, BLOCK_N)
    for i in range(steps):
        t = steps - 1 - i
        row = t * B.to(tl.int64) + i_b
        if p_resets is not None:
            cut = flag_at(p_resets, row, t >= 0)
            b_h = tl.where(cut, b_state, b_h)
        # load the previous step while this one is computed
        b_next_g, b_next_h, b_next_r, b_next_z, b_next_n, b_next_q = load_saved(
            p_grad, p_hs, p_gates, p_pre, p_h0, i_b, t - 1, B, N, BLOCK_N
        )
        b_ghat = b_g + b_carry
        tl.store(p_square + row, tl.sum(tl.sum(b_ghat * b_ghat, axis=1), axis=0))
        b_d_z = b_ghat * (b_h - b_n) * (b_z * (1.0 - b_z))
        b_d_n = b_ghat * (1.0 - b_z) * (1.0 - b_n * b_n)
        if KANAI:
            b_d_m = product(b_d_n, b_t_n, p_t_n, N, N, RESIDENT, BLOCK_N, BLOCK_N)
            b_d_r = b_d_m * b_h * (b_r * (1.0 - b_r))
            b_direct = b_ghat * b_z + b_r * b_d_m
            b_factor = b_r * b_h
        else:
            b_factor = b_d_n * b_r
            b_d_r = b_d_n * b_q * (b_r * (1.0 - b_r))
            b_direct = b_ghat * b_z + product(b_factor, b_t_n, p_t_n, N, N, RESIDENT, BLOCK_N, BLOCK_N)
        store_gates(p_grad_x, 3 * row * N + o_n, b_d_r, b_d_z, b_d_n, m_n, N)
        if p_factor is not None:
            tl.store(p_factor + row * N + o_n, b_factor, mask=m_n)
        b_from_r = product(b_d_r, b_t_r, p_w_t, N, N, RESIDENT, BLOCK_N, BLOCK_N)
        b_carry = b_direct + (b_from_r + product(b_d_z, b_t_z, p_t_z, N, N, RESIDENT, BLOCK_N, BLOCK_N))
        if p_resets is not None:
            b_to_state += tl.where(cut, b_carry, 0.0)
            b_carry = tl.where(cut, 0.0, b_carry)
        b_g, b_h, b_r, b_z, b_n = b_next_g, b_next_h, b_next_r, b_next_z, b_next_n
        if p_pre is not None:
            b_q = b_next_q
    tl.store(p_grad_h0 + i_b.to(tl.int64) * N + o_n, b_carry, mask=m_n)
    if p_grad_state is not None:
        tl.store(p_grad_state + i_b.to(tl.int64) * N + o_n, b_to_state, mask=m_n)


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See ``orthokern.ops.gru_scan``; N is at most 128."""
    assert args.x is not None
    T, (B, N), new = args.x.shape[0], args.h0.shape, new_results(args)
    args, _ = checked(args, T, args.h0.dtype)
    x, h0 = args.x, args.h0
    states = GruStates(new(T, B, N), new(T, B, 3 * N), None if args.kanai else new(T, B, N))
    with torch.cuda.device_of(h0):
        gru_scan_fwd_kernel[(B,)](
            x, args.w, h0, args.bias, *states, *_rows(args), T, B, **_options(args), enable_fp_fusion=True
        )
    return states


def gru_scan_bwd(args: GruArgs, grad_hs: Tensor, states: GruStates, needs: Any) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    T, (B, N), new = len(grad_hs), args.h0.shape, new_results(args)
    args, (grad_hs, *saved) = checked(args._replace(x=None), T, args.h0.dtype, grad_hs=grad_hs, **states._asdict())
    h0, states = args.h0, GruStates(*saved)
    grad_x, grad_h0, square = new(T, B, 3 * N), torch.empty_like(h0), h0.new_zeros(T, B)
    factor = new(T, B, N) if needs.w or needs.bias else None
    grad_state = None if args.resets is None or args.reset_state is None else torch.empty_like(args.reset_state)
    results = grad_x, factor, grad_h0, square
    transposed = args.w.view(-1, N, N).mT.contiguous()
    with torch.cuda.device_of(h0):
        gru_scan_bwd_kernel[(B,)](
            grad_hs,
            *states,
            transposed,
            h0,
            *results,
            *_rows(args),
            grad_state,
            T,
            B,
            **_options(args),
            enable_fp_fusion=True,
        )
    grad_w = grad_bias = None
    if factor is not None:
        grad_w, grad_bias = parameter_gradients(args, states.hs, grad_x, factor)
    norm = square.sum(1).sqrt() if needs.norm else None
    return GruGradients(grad_x, grad_w, grad_h0, grad_bias, grad_state, norm)


def _rows(args: GruArgs) -> tuple[Tensor | None, ...]:
    """Lengths, resets and their state, as the kernels read them."""
    return args.lengths, None if args.resets is None else args.resets.view(torch.uint8), args.reset_state


def _options(args: GruArgs) -> dict[str, Any]:
    N = args.h0.shape[1]
    resident, block_n, _, num_warps = plan(N, N, 3, args.h0.dtype)
    return {"N": N, "KANAI": args.kanai, "RESIDENT": resident, "BLOCK_N": block_n, "num_warps": num_warps}
