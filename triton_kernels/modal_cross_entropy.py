"""modal_cross_entropy: the recurrence of ``modal_scan.py`` with a readout and its loss, one span of steps at a time.

Note [Spans of the loss] in ``orthokern/_modal_chunks.py`` explains spans. This file has the kernel for the loss of rows
of logits. A program computes BLOCK_R rows, with three passes over the classes in tiles of BLOCK_C: maximum, sum of
exponentials, gradient. The second and third pass read from the L1 cache.

HBM (or L2) traffic of a step and sequence, in elements of the dtype: z is written once and read three times, g written
once and read twice, logits written twice and read six times: 14 M + 8 C; without gradients 4 M + 3 C.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._modal_chunks import run_cross_entropy
from orthokern._scan_contract import ModalInputs, ModalLoss, Readout
from orthokern.triton_kernels.modal_scan import KERNELS

TILE = 1024  # elements of logits
MAX_BLOCK_C = 1024
NUM_WARPS = 4


@triton.jit
def logits_of(p_logits, p_bias, o_r, o_c, m_r, C, BIAS: tl.constexpr):
    """A tile [BLOCK_R, BLOCK_C], -inf outside."""
    m = m_r[:, None] & (o_c < C)[None, :]
    b_l = tl.load(p_logits + o_r[:, None] * C + o_c[None, :], mask=m, other=float("-inf"))
    if BIAS:
        b_l += tl.load(p_bias + o_c, mask=o_c < C, other=0.0)[None, :]
    return b_l


@triton.jit(do_not_specialize=["T", "B", "C", "FIRST"])
def modal_cross_entropy_fwd_kernel(
    p_logits,  # [T * B, C] without the bias; overwritten by d
    p_bias,  # [C], or None
    p_target,  # [T, B]
    p_scale,  # float64 [1]
    p_loss,  # float64 [programs]
    p_right,  # int32 [T * B]
    p_lengths,  # int64 [B], or None
    T,
    B,
    C,
    FIRST,
    BIAS: tl.constexpr,
    GRAD: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r // B < T
    m_live = m_r
    if LENGTHS:
        m_live = m_r & (o_r // B + FIRST < tl.load(p_lengths + o_r % B, mask=m_r, other=0))
    b_target = tl.load(p_target + o_r, mask=m_live, other=0).to(tl.int64)
    b_wrong = tl.where((b_target >= 0) & (b_target < C), 0.0, float("nan"))
    b_top = tl.full([BLOCK_R], float("-inf"), dtype=p_logits.dtype.element_ty)
    b_best = tl.zeros([BLOCK_R], dtype=tl.int64)
    b_hit = tl.zeros([BLOCK_R], dtype=p_logits.dtype.element_ty)
    for i_c in range(0, C, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        b_l = logits_of(p_logits, p_bias, o_r, o_c, m_live, C, BIAS)
        b_most, b_where = tl.max(b_l, axis=1, return_indices=True)
        b_best = tl.where(b_most > b_top, i_c + b_where, b_best)
        b_top = tl.where(b_most > b_top, b_most, b_top)
        b_hit += tl.sum(tl.where(o_c[None, :] == b_target[:, None], b_l, 0.0), axis=1)
    b_top = tl.where(m_live, b_top, 0.0)
    # sum over the other classes: log(1 + rest) is accurate for a small loss
    b_rest = tl.zeros([BLOCK_R], dtype=p_logits.dtype.element_ty)
    for i_c in range(0, C, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        b_p = tl.exp(logits_of(p_logits, p_bias, o_r, o_c, m_live, C, BIAS) - b_top[:, None])
        b_rest += tl.sum(tl.where(o_c[None, :] == b_best[:, None], 0.0, b_p), axis=1)
    b_loss = (b_top - b_hit).to(tl.float64) + tl.log(1.0 + b_rest.to(tl.float64)) + b_wrong
    tl.store(p_loss + tl.program_id(0), tl.sum(tl.where(m_live, b_loss, 0.0), axis=0))
    tl.store(p_right + o_r, (m_live & (b_best == b_target)).to(tl.int32), mask=m_r)
    if GRAD:
        b_scale = (tl.load(p_scale) + b_wrong).to(p_logits.dtype.element_ty)
        b_share = b_scale / (1.0 + b_rest)
        for i_c in range(0, C, BLOCK_C):
            o_c = i_c + tl.arange(0, BLOCK_C)
            b_p = tl.exp(logits_of(p_logits, p_bias, o_r, o_c, m_live, C, BIAS) - b_top[:, None]) * b_share[:, None]
            b_p -= tl.where(o_c[None, :] == b_target[:, None], b_scale[:, None], 0.0)
            m = m_r[:, None] & (o_c < C)[None, :]
            tl.store(p_logits + o_r[:, None] * C + o_c[None, :], tl.where(m_live[:, None], b_p, 0.0), mask=m)


def launch_loss(
    logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, lengths: Tensor | None, first: int, grad: bool
) -> tuple[Tensor, Tensor]:
    """See ``run_cross_entropy``."""
    (steps, B), C = target.shape, logits.shape[1]
    block_c = min(triton.next_power_of_2(C), MAX_BLOCK_C)
    block_r = TILE // block_c
    programs = triton.cdiv(steps * B, block_r)
    losses = scale.new_empty(programs)
    right = torch.empty(steps * B, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        modal_cross_entropy_fwd_kernel[(programs,)](
            logits, bias, target, scale, losses, right, lengths, steps, B, C, first, BIAS=bias is not None, GRAD=grad,
            LENGTHS=lengths is not None, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return losses, right


def modal_cross_entropy_fwd(inputs: ModalInputs, readout: Readout, *, need_grad: bool = True) -> ModalLoss:
    """See ``orthokern.ops.modal_cross_entropy`` for the arguments, all contiguous."""
    return run_cross_entropy(KERNELS, launch_loss, inputs, readout, need_grad)
