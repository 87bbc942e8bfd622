"""The launches of the scans' kernels (``_scan.py``): how they multiply, and the sizes of their tiles."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import ScanArgs
from orthokern.triton_kernels._scan import scan_bwd_kernel, scan_fwd_kernel
from orthokern.triton_kernels.activations import parameter_kind


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one launch multiplies: the ``way`` and the sizes of its tiles."""

    way: str
    block_b: int
    block_n: int
    block_k: int
    num_warps: int


# Warps by the larger of BLOCK_N and BLOCK_K, where the matrices stay in registers. With fewer, the compiler prefers a
# layout in which a warp spans 32 columns, and the sum over threads costs 5 shuffles per row instead of 3.
ROWS_WARPS = ((32, 2), (64, 4), (128, 8))
# 32-bit words of the matrices that may stay in registers: half of the 65536 of an SM. With 8-byte elements every
# intermediate needs twice the words as well, so the limit is half of that.
ROWS_WORDS = {torch.float32: 32768, torch.float64: 16384}
# Warps by the elements of the matrices, for the tensor cores, up to what fits into the 163 KiB of shared memory of an
# sm_80. "tf32x3" stores every factor as a high and a low part.
DOT_WARPS = {
    "bf16": ((4096, 4), (32768, 8)),
    "tf32": ((4096, 4), (32768, 16)),
    "tf32x3": ((4096, 4), (16384, 8)),
}
# Warps by BLOCK_N where the matrices are read in every step.
PANEL_WARPS = ((64, 4), (128, 8))
# Below this many rows a tile of 16 for the tensor cores is mostly padding.
DOT_ROWS = 5
DOT_BLOCK_B = 16

# W as the kernels read it: (first [K, N], scale [K], second [N, K]) with a row per output, or (None, None, W)
Matrices = tuple[Tensor | None, Tensor | None, Tensor]

TRITON_PRECISION = {"ieee": "ieee", "tf32": "tf32", "3xtf32": "tf32x3", "bf16": "bf16"}


def look_up(table: tuple[tuple[int, int], ...], size: int) -> int | None:
    """The entry of the first row of the table whose bound is at least size; None if there is no such row."""
    return next((entry for bound, entry in table if size <= bound), None)


def plan(N: int, K: int, rows: int, *, factored: bool, dtype: torch.dtype, precision: str) -> Plan:
    """The way to multiply with maps of N and K (K = N in the dense scan), from shapes alone. rows: B, or the number of
    virtual sequences. Precisions have Triton's names; a way without a product of one uses a more accurate one."""
    block_n, block_k = (max(32, triton.next_power_of_2(size)) for size in (N, K))
    words = block_n * block_k * (2 if factored else 1)
    if dtype == torch.float32 and precision != "ieee" and rows >= DOT_ROWS:
        warps = look_up(DOT_WARPS[precision], words)
        if warps:
            return Plan("dot", DOT_BLOCK_B, block_n, block_k, warps)
    warps = look_up(ROWS_WARPS, max(block_n, block_k) * (dtype.itemsize // 4))
    if warps and words * dtype.itemsize // 4 <= ROWS_WORDS[dtype]:
        return Plan("rows", 1, block_n, block_k, warps)
    return Plan("panels", 1, block_n, block_k, look_up(PANEL_WARPS, block_n) or 8)


def as_rows(args: ScanArgs, *, transposed: bool = False) -> Matrices:
    """W, or W^T, as the kernels read it, contiguous."""
    first, second = args.first, args.second
    if first is None:
        return None, None, second.mT.contiguous() if transposed else second
    if transposed:
        first, second = second, first
    return first.mT.contiguous(), args.scale, second


def launch_forward(
    args: ScanArgs,
    matrices: Matrices,
    x: Tensor,
    table: Tensor | None,
    h0: Tensor,
    *,
    chunk: int | None = None,
    hs: Tensor | None = None,
    pre: Tensor | None = None,
    last: Tensor | None = None,
    first: int = 0,
    cut: Tensor | None = None,
) -> None:
    """Run ``scan_fwd_kernel`` from h0 [P B, N]; x is the input term [T, B, N], or ids [T, B] with table [D, N].

    args: for the activation, precision, lengths and reset_state. chunk: its steps; None for all. ``first``: the step of
    the sequences that is the first one here. cut: bool [T, B], the steps after which a reset follows, or None.
    """
    T, B = x.shape[:2]
    (N, K), R, factored, precision = (
        matrices[2].shape,
        h0.shape[0],
        matrices[0] is not None,
        TRITON_PRECISION[args.precision],
    )
    restart = None
    if cut is not None:
        restart = torch.zeros_like(args.h0) if args.reset_state is None else args.reset_state
    way = plan(N, K, R, factored=factored, dtype=h0.dtype, precision=precision)
    with torch.cuda.device_of(h0):
        scan_fwd_kernel[(triton.cdiv(R, way.block_b),)](
            x,
            table,
            *matrices,
            h0,
            args.act_param,
            hs,
            pre,
            last,
            args.lengths,
            None if cut is None else cut.view(torch.uint8),
            restart,
            T,
            B,
            R,
            chunk or T,
            first,
            0 if table is None else table.shape[0],
            N=N,
            K=K,
            FACTORED=factored,
            TOKENS=table is not None,
            ACTIVATION=args.activation,
            PARAM=parameter_kind(args.act_param),
            STORE_HS=hs is not None,
            STORE_PRE=pre is not None,
            STORE_LAST=last is not None,
            LENGTHS=args.lengths is not None,
            CUTS=cut is not None,
            WAY=way.way,
            PRECISION=precision,
            BLOCK_B=way.block_b,
            BLOCK_N=way.block_n,
            BLOCK_K=way.block_k,
            num_warps=way.num_warps,
            enable_fp_fusion=True,
        )


def launch_backward(
    args: ScanArgs,
    matrices: Matrices,
    grad_hs: Tensor,
    hs: Tensor | None,
    pre: Tensor | None,
    carry: Tensor,
    *,
    delta: Tensor | None,
    left: Tensor,
    square: Tensor | None,
    by_row: Tensor | None = None,
    chunk: int | None = None,
    first: int = 0,
    cut: Tensor | None = None,
) -> None:
    """Run ``scan_bwd_kernel`` from carry [P B, N] to left [P B, N]; cut: the resets of these steps or None; the others
    as in ``launch_forward``."""
    T, B = grad_hs.shape[:2]
    (N, K), R, factored, precision = (
        matrices[2].shape,
        carry.shape[0],
        matrices[0] is not None,
        TRITON_PRECISION[args.precision],
    )
    clip = carry.new_full((1,), args.message_clip) if args.message_clip > 0 else None
    way = plan(N, K, R, factored=factored, dtype=carry.dtype, precision=precision)
    reads = ACTIVATIONS[args.activation].reads
    from_hs, from_pre = reads == "output", reads == "input"
    with torch.cuda.device_of(carry):
        scan_bwd_kernel[(triton.cdiv(R, way.block_b),)](
            grad_hs,
            hs if from_hs else None,
            pre if from_pre else None,
            *matrices,
            carry,
            args.act_param,
            delta,
            left,
            square,
            by_row,
            args.lengths,
            clip,
            None if cut is None else cut.view(torch.uint8),
            T,
            B,
            R,
            chunk or T,
            first,
            N=N,
            K=K,
            FACTORED=factored,
            ACTIVATION=args.activation,
            PARAM=parameter_kind(args.act_param),
            STORE_DELTA=delta is not None,
            STORE_SUM=by_row is not None,
            FROM_HS=from_hs,
            FROM_PRE=from_pre,
            LENGTHS=args.lengths is not None,
            CLIP=clip is not None,
            CUTS=cut is not None,
            WAY=way.way,
            PRECISION=precision,
            BLOCK_B=way.block_b,
            BLOCK_N=way.block_n,
            BLOCK_K=way.block_k,
            num_warps=way.num_warps,
            enable_fp_fusion=True,
        )
