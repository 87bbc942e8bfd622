"""modal_cross_entropy: the recurrence of ``modal_scan.py`` with a readout and its loss, a span of steps at a time.

    once        states before every chunk of time, float64 [chunks, 2, B M]
    each span   z of its steps from those states                    modal_scan_fwd_kernel
    (last       logits = z C^T                                      torch product
     first)     loss, hits, d = c (softmax - onehot) in their place  modal_cross_entropy_fwd_kernel, a program owns
                                                                    BLOCK_R rows and goes over the classes in tiles
                grad_readout += d^T z, g = d C                      torch products
                the adjoint of its steps, from the span behind it   modal_scan_bwd_kernel

A span is as many whole chunks as SPAN_BYTES holds z, logits and g of. So neither states nor logits of all steps exist,
and what one kernel writes for the next may stay in a cache of that size. Rows on padding have d = 0. A target that is
no class makes the loss NaN. Sums over spans are float64.

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

from orthokern._products import ieee_products
from orthokern.triton_kernels.modal_scan import Adjoint, Recurrence, living

SPAN_BYTES = 2**26
TILE = 1024  # elements of logits
MAX_BLOCK_C = 1024
NUM_WARPS = 4
SUM_ROWS = 1024  # of a product over steps, between two additions in float64


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
    p_logits,  # [T * B, C] without the bias; d when it is done
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
    m_live = m_r & (o_r // B < living(p_lengths, o_r % B, m_r, FIRST, T, LENGTHS))
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
    # the other classes: a small loss keeps its digits in 1 + rest
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


def span_steps(B: int, M: int, C: int, itemsize: int) -> int:
    """Steps of a span: a power of 2."""
    return 1 << max(0, (SPAN_BYTES // (B * (4 * M + C) * itemsize)).bit_length() - 1)


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64, of [R, *] both: products of SUM_ROWS rows in their dtype, which are added up."""
    whole = len(left) // SUM_ROWS * SUM_ROWS
    total = (left[whole:].mT @ right[whole:]).double()
    if whole:
        blocks = left[:whole].view(-1, SUM_ROWS, left.shape[1]).mT @ right[:whole].view(-1, SUM_ROWS, right.shape[1])
        total += blocks.sum(0, dtype=torch.float64)
    return total


def loss_of_span(
    logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, lengths: Tensor | None, first: int, grad: bool
) -> tuple[Tensor, Tensor]:
    """(sum of the losses, float64, hits int64 [steps]); with grad, logits [steps * B, C] become d.

    Args:
        target: [steps, B]; first: the step that they begin with.
        scale: float64 [1], what d is multiplied by.
    """
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
    return losses.sum(), right.view(steps, B).sum(1)


@ieee_products()
def modal_cross_entropy_fwd(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pairs: Tensor | None,
    *,
    reduction: str = "mean",
    need_grad: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See ``orthokern.ops.modal_cross_entropy`` for the arguments, all contiguous. Returns (loss, hits, grad_x,
    grad_re, grad_im, grad_z0, grad_table, grad_readout, grad_bias, grad_pairs)."""
    (T, B), C, M, dtype = target.shape, readout.shape[0], re.shape[0], z0.dtype
    steps = span_steps(B, M, C, dtype.itemsize)
    call = Recurrence.of(x, re, im, z0, table, lengths, T, longest=steps)
    span = max(1, steps // call.chunk)
    scale = re.new_ones(1)
    if reduction == "mean":
        scale = scale / T / B if lengths is None else scale / lengths.clamp(0, T).sum()
    adjoint = Adjoint(call, pairs) if need_grad else None
    grad_x = torch.empty_like(x) if table is None and need_grad else None
    grad_readout, grad_bias = re.new_zeros(readout.shape), re.new_zeros(C)
    loss, hits = re.new_zeros(()), torch.empty(T, dtype=torch.int64, device=z0.device)
    states = call.states()
    for last in range(call.chunks, 0, -span):
        first = max(0, last - span)
        here = call.steps(first, last)
        z = z0.new_empty(here.stop - here.start, B, 2 * M)
        call.forward(first, last, states[first:last], z, None)
        rows = z.view(-1, 2 * M)
        d = rows @ readout.mT
        found, hits[here] = loss_of_span(d, bias, target[here], scale, lengths, here.start, need_grad)
        loss += found
        if adjoint is None:
            continue
        grad_readout += sum_of_products(d, rows)
        grad_bias += d.sum(0, dtype=torch.float64)
        before = call.by_row(states[first]).to(dtype)
        adjoint.run(first, last, (d @ readout).view_as(z), z, before, None if grad_x is None else grad_x[here])
    empty = z0.new_empty(0)
    loss = (loss * scale[0]).to(dtype)
    if adjoint is None:
        wide = re.new_empty(0)
        return loss, hits, empty, wide, wide, empty, empty, empty, empty, wide
    return (
        loss,
        hits,
        empty if grad_x is None else grad_x,
        *adjoint.gradients(),
        grad_readout.to(dtype),
        empty if bias is None else grad_bias.to(dtype),
        re.new_empty(0) if pairs is None else adjoint.pair_sums,
    )
