"""linear_cross_entropy: a linear readout with cross-entropy, in one pass over hidden [R, N]; logits stay in registers.

    program i_r  ->  rows [i_r BLOCK_R, ...) of hidden, target, grad_hidden, d

    N ->     BLOCK_N          HBM: hidden and target in; grad_hidden and d [R, C] out
    rows   +-----------+      L2: weight [C, N], read twice by every program
    BLOCK_R|  i_r      |      registers: logits [BLOCK_R, BLOCK_C], then d = c (softmax - onehot) in their place; one
           +-----------+      tile of hidden or grad_hidden at a time

d = dL/dz is C / N of the size of hidden. grad_weight = d^T hidden and grad_bias, the sums of d, are torch's, over
chunks of rows in a fixed order: no atomics, bit-identical results in every run. With more than MAX_FUSED_C classes the
logits of a chunk of rows are torch's product, and a second kernel turns them into d in place, one program for each row.

There is no device synchronization. A target outside [0, C) makes the loss, and the gradients of its row, NaN. Products
are IEEE float32, even if the process allows TF32. Bound by bandwidth for few classes: hidden is read twice and
grad_hidden written once, while log_softmax and its backward on stored logits take seven passes over [R, C] more.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._elements import check_readout
from orthokern._products import ieee_products
from orthokern._scan_contract import LinearLoss, Readout

# Classes that one program holds for all of its rows.
MAX_FUSED_C = 128
FUSED_WARPS, ROW_WARPS = 4, 4
# Elements of d, or of the logits, at a time: 128 MiB.
CHUNK_ELEMENTS = 1 << 25
ROW_BLOCK_C = 2048


@triton.jit(do_not_specialize=["R", "ROWS"])
def linear_cross_entropy_fwd_kernel(
    p_hidden,  # [R, N]
    p_weight,  # [C, N]
    p_bias,  # [C], or None
    p_target,  # int64 [R]
    p_grad_hidden,  # [R, N], or None
    p_d,  # [R, C], or None
    p_loss,  # [programs]: sums over the rows of a program
    R,
    ROWS,  # of the whole batch, for the mean
    N: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_r = tl.program_id(0)
    o_r = i_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_r, m_c = o_r < R, o_c < C
    b_z = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for i_n in range(0, N, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < N
        b_h = tl.load(p_hidden + o_r[:, None] * N + o_n[None, :], mask=m_r[:, None] & m_n[None, :], other=0.0)
        b_w = tl.load(p_weight + o_c[None, :] * N + o_n[:, None], mask=m_c[None, :] & m_n[:, None], other=0.0)
        b_z += tl.dot(b_h, b_w, input_precision="ieee")
    if BIAS:
        b_z += tl.load(p_bias + o_c, mask=m_c, other=0.0)[None, :]
    b_z = tl.where(m_c[None, :], b_z, float("-inf"))
    b_target = tl.load(p_target + o_r, mask=m_r, other=0)
    b_hit = b_target[:, None] == o_c[None, :]
    b_known = (b_target >= 0) & (b_target < C)
    b_largest = tl.max(b_z, axis=1)
    b_z -= b_largest[:, None]
    b_picked = tl.where(b_known, tl.sum(tl.where(b_hit, b_z, 0.0), axis=1), float("nan"))
    b_p = tl.exp(b_z)
    b_sum = tl.sum(b_p, axis=1)
    tl.store(p_loss + i_r, tl.sum(tl.where(m_r, tl.log(b_sum) - b_picked, 0.0), axis=0))
    if NEED_GRAD:
        b_d = b_p / b_sum[:, None] - tl.where(b_hit, 1.0, 0.0)
        if MEAN:
            b_d = b_d / ROWS
        b_d = tl.where(
            b_known[:, None] & (m_r[:, None] & m_c[None, :]), b_d, tl.where(b_known, 0.0, float("nan"))[:, None]
        )
        tl.store(p_d + o_r[:, None] * C + o_c[None, :], b_d, mask=m_r[:, None] & m_c[None, :])
        for i_n in range(0, N, BLOCK_N):
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_n = o_n < N
            b_w = tl.load(p_weight + o_c[:, None] * N + o_n[None, :], mask=m_c[:, None] & m_n[None, :], other=0.0)
            b_grad = tl.dot(b_d, b_w, input_precision="ieee")
            tl.store(p_grad_hidden + o_r[:, None] * N + o_n[None, :], b_grad, mask=m_r[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["ROWS"])
def linear_cross_entropy_row_kernel(
    p_z,  # [R, C] logits; with NEED_GRAD they become d
    p_target,  # int64 [R]
    p_loss,  # [R]
    ROWS,  # of the whole batch, for the mean
    C: tl.constexpr,
    MEAN: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    target = tl.load(p_target + i_r)
    known = (target >= 0) & (target < C)
    b_largest = tl.full([BLOCK_C], float("-inf"), dtype=tl.float32)
    for i_c in range(0, C, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        b_largest = tl.maximum(b_largest, tl.load(p_z + i_r * C + o_c, mask=o_c < C, other=float("-inf")))
    largest = tl.max(b_largest, axis=0)
    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_picked = tl.zeros([BLOCK_C], dtype=tl.float32)
    for i_c in range(0, C, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        b_z = tl.load(p_z + i_r * C + o_c, mask=o_c < C, other=float("-inf")) - largest
        b_sum += tl.exp(b_z)
        b_picked += tl.where(o_c == target, b_z, 0.0)
    total = tl.sum(b_sum, axis=0)
    picked = tl.where(known, tl.sum(b_picked, axis=0), float("nan"))
    tl.store(p_loss + i_r, tl.log(total) - picked)
    if NEED_GRAD:
        for i_c in range(0, C, BLOCK_C):
            o_c = i_c + tl.arange(0, BLOCK_C)
            b_z = tl.load(p_z + i_r * C + o_c, mask=o_c < C, other=float("-inf")) - largest
            b_d = tl.exp(b_z) / total - tl.where(o_c == target, 1.0, 0.0)
            if MEAN:
                b_d = b_d / ROWS
            tl.store(p_z + i_r * C + o_c, tl.where(known, b_d, float("nan")), mask=o_c < C)


def fused_blocks(C: int) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_N, BLOCK_C): a product needs at least 16 of each; with few classes there are more rows."""
    block_c = max(16, triton.next_power_of_2(C))
    return 64 if block_c <= 32 else 32, 32, block_c


@ieee_products()
def linear_cross_entropy_fwd(hidden: Tensor, readout: Readout, *, need_grad: bool = True) -> LinearLoss:
    """See ``orthokern.ops.linear_cross_entropy``; tensors are float32 and contiguous."""
    check_readout(hidden, readout)
    weight, bias, target, reduction = readout
    rows, C = hidden.shape[0], weight.shape[0]
    mean = reduction == "mean"
    grad_hidden = torch.empty_like(hidden) if need_grad else None
    grad_weight = torch.zeros_like(weight) if need_grad else None
    grad_bias = torch.zeros_like(bias) if need_grad and bias is not None else None
    loss = hidden.new_zeros((), dtype=torch.float64)
    for first in range(0, rows, max(64, CHUNK_ELEMENTS // C)):
        h, t = (tensor[first : first + max(64, CHUNK_ELEMENTS // C)] for tensor in (hidden, target))
        grad = None if grad_hidden is None else grad_hidden[first : first + len(h)]
        route = _fused if C <= MAX_FUSED_C else _by_rows
        losses, d = route(h, weight, bias, t, grad, rows, mean)
        loss += losses.sum(dtype=torch.float64)
        if d is not None and grad_weight is not None:
            grad_weight.addmm_(d.mT, h)
            if grad_bias is not None:
                grad_bias += d.sum(0)
    if mean:
        loss /= rows
    return LinearLoss(loss.to(hidden.dtype), grad_hidden, grad_weight, grad_bias)


def _fused(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, grad: Tensor | None, rows: int, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """(sums of losses, d [R, C] or None); grad [R, N] is filled if it is not None."""
    (R, N), C = hidden.shape, weight.shape[0]
    block_r, block_n, block_c = fused_blocks(C)
    programs = triton.cdiv(R, block_r)
    losses = hidden.new_empty(programs)
    d = None if grad is None else hidden.new_empty(R, C)
    with torch.cuda.device_of(hidden):
        linear_cross_entropy_fwd_kernel[(programs,)](
            hidden,
            weight,
            bias,
            target,
            grad,
            d,
            losses,
            R,
            rows,
            N=N,
            C=C,
            BIAS=bias is not None,
            MEAN=mean,
            NEED_GRAD=grad is not None,
            BLOCK_R=block_r,
            BLOCK_N=block_n,
            BLOCK_C=block_c,
            num_warps=FUSED_WARPS,
            enable_fp_fusion=True,
        )
    return losses, d


def _by_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, grad: Tensor | None, rows: int, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """The same for many classes: the logits [R, C] of these rows are overwritten by d."""
    z = hidden @ weight.mT if bias is None else torch.addmm(bias, hidden, weight.mT)
    losses = hidden.new_empty(len(hidden))
    with torch.cuda.device_of(hidden):
        linear_cross_entropy_row_kernel[(len(hidden),)](
            z,
            target,
            losses,
            rows,
            C=weight.shape[0],
            MEAN=mean,
            NEED_GRAD=grad is not None,
            BLOCK_C=min(ROW_BLOCK_C, triton.next_power_of_2(weight.shape[0])),
            num_warps=ROW_WARPS,
            enable_fp_fusion=True,
        )
    if grad is None:
        return losses, None
    torch.mm(z, weight, out=grad)
    return losses, z
