"""activations: one pass over [R, N], where R is the product of the leading sizes.

    program i_r, i_n  ->  rows [i_r BLOCK_R, ...) and columns [i_n BLOCK_N, ...) of x, y, grad_y, grad_x

    columns ->  BLOCK_N        HBM: x in, y out (backward: grad_y, x in, grad_x out)
    rows    +-----------+      registers: one tile of each
    BLOCK_R |  i_r, i_n |      act_param: partial sums [programs along R, N], written once each and added by torch
            +-----------+      afterwards: no atomics, bit-identical in every run

Limits: none on R; N at most 2^23, for the number of programs along it. BLOCK_N and the first column of every tile are
even, so that no pair of oplu is split.
"""

# Triton compiles the kernels below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._elements import check
from orthokern.triton_kernels._activation import apply, chain

# Elements of a tile. Memory bandwidth is the limit; 8 elements per thread in 4 warps keep enough loads in flight.
TILE = 1024
NUM_WARPS = 4
MAX_BLOCK_N = 256
# Backward with a parameter: programs along the rows, each looping over its tiles, so that the partial sums stay few.
MAX_PARTIALS = 256


@triton.jit
def parameter(p_param, o_n, m_n, PARAM: tl.constexpr):
    """act_param as [1, BLOCK_N]; PARAM is its size: "none", "one" or "N"."""
    if PARAM == "none":
        b_param = 0.0
    elif PARAM == "one":
        b_param = tl.load(p_param)
    else:
        b_param = tl.load(p_param + o_n, mask=m_n, other=0.0)[None, :]
    return b_param


@triton.jit(do_not_specialize=["R"])
def activation_fwd_kernel(
    p_x,  # [R, N]
    p_param,  # [1] or [N], or None
    p_y,  # [R, N]
    R,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_r, i_n = tl.program_id(0), tl.program_id(1)
    o_r = i_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    m = (o_r < R)[:, None] & m_n[None, :]
    o = o_r[:, None] * N + o_n[None, :]
    b_x = tl.load(p_x + o, mask=m, other=0.0)
    b_param = parameter(p_param, o_n, m_n, PARAM)
    tl.store(p_y + o, apply(b_x, b_param, ACTIVATION, BLOCK_R, BLOCK_N), mask=m)


@triton.jit(do_not_specialize=["R", "TILES"])
def activation_bwd_kernel(
    p_grad_y,  # [R, N]
    p_x,  # [R, N]
    p_param,  # [1] or [N], or None
    p_grad_x,  # [R, N]
    p_partial,  # [programs along R, N], or None
    R,
    TILES,  # tiles of rows for each program
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_r, i_n = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_param = parameter(p_param, o_n, m_n, PARAM)
    b_sum = tl.zeros([BLOCK_R, BLOCK_N], dtype=p_x.dtype.element_ty)
    for i_tile in range(TILES):
        o_r = (i_r.to(tl.int64) * TILES + i_tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        m = (o_r < R)[:, None] & m_n[None, :]
        o = o_r[:, None] * N + o_n[None, :]
        b_x = tl.load(p_x + o, mask=m, other=0.0)
        b_grad = tl.load(p_grad_y + o, mask=m, other=0.0)
        b_h = apply(b_x, b_param, ACTIVATION, BLOCK_R, BLOCK_N)
        b_delta, b_elementwise = chain(b_grad, b_h, b_x, b_param, ACTIVATION, BLOCK_R, BLOCK_N)
        tl.store(p_grad_x + o, b_delta, mask=m)
        if PARAM != "none":
            b_sum += b_elementwise
    if PARAM != "none":
        tl.store(p_partial + i_r.to(tl.int64) * N + o_n, tl.sum(b_sum, axis=0), mask=m_n)


def parameter_kind(act_param: Tensor | None) -> str:
    """The size of act_param as the kernels name it: "none", "one" or "N"."""
    return "none" if act_param is None else "one" if act_param.numel() == 1 else "N"


def blocks(R: int, N: int) -> tuple[int, int]:
    """(BLOCK_R, BLOCK_N) for [R, N]: TILE elements, as wide as the rows are, but no wider than MAX_BLOCK_N."""
    block_n = max(2, min(MAX_BLOCK_N, triton.next_power_of_2(N)))
    return TILE // block_n, block_n


def _check(x: Tensor, **others: Tensor | None) -> None:
    """InputError for a tensor whose size is not that of the call."""
    N = x.shape[-1]
    for name, tensor in others.items():
        if tensor is not None:
            elements = x.numel() if name == "grad_y" else 1 if tensor.numel() == 1 else N
            check("activation", name, tensor, x.dtype, x.device.type, elements)


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See ``orthokern.ops.activations``; tensors are contiguous, identity returns x itself."""
    if activation == "identity":
        return x
    _check(x, act_param=act_param)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        N = x.shape[-1]
        R = x.numel() // N
        block_r, block_n = blocks(R, N)
        grid = (triton.cdiv(R, block_r), triton.cdiv(N, block_n))
        with torch.cuda.device_of(x):
            activation_fwd_kernel[grid](
                x,
                act_param,
                y,
                R,
                N=N,
                ACTIVATION=activation,
                PARAM=parameter_kind(act_param),
                BLOCK_R=block_r,
                BLOCK_N=block_n,
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See ``orthokern.ops.activations``."""
    _check(x, grad_y=grad_y, act_param=act_param)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return grad_x, x.new_zeros(0 if act_param is None else act_param.shape)
    N = x.shape[-1]
    R = x.numel() // N
    block_r, block_n = blocks(R, N)
    row_tiles = triton.cdiv(R, block_r)
    tiles = triton.cdiv(row_tiles, MAX_PARTIALS) if act_param is not None else 1
    programs = triton.cdiv(row_tiles, tiles)
    partial = None if act_param is None else torch.empty(programs, N, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        activation_bwd_kernel[(programs, triton.cdiv(N, block_n))](
            grad_y,
            x,
            act_param,
            grad_x,
            partial,
            R,
            tiles,
            N=N,
            ACTIVATION=activation,
            PARAM=parameter_kind(act_param),
            BLOCK_R=block_r,
            BLOCK_N=block_n,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    if act_param is None or partial is None:
        return grad_x, x.new_empty(0)
    return grad_x, partial.sum_to_size(act_param.shape) if act_param.numel() == 1 else partial.sum(0)
