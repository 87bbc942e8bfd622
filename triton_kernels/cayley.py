"""cayley: M - lr (I + lr/2 A)^-1 A M, by blocked elimination with pivots, batched over matrices.

The system is S by S: S = N for the full form, 2K for the thin one (2K < N), which never forms N by N. Products are
torch's; a step of the elimination takes the next BLOCK_C columns:

    program i  ->  matrix i:   <- BLOCK_C ->  remaining columns and right-hand sides
                       rows   +-----------+-----------------------------+
      panel [rows, BLOCK_C]   |  L11\\U11  |  U12 = L11^-1 (rows moved)   |   triangular solve
      in registers: pivots,   +-----------+-----------------------------+
      rows moved, L and U     |    L21    |  A22 - L21 U12               |   one product, the next step's matrix
                              +-----------+-----------------------------+

Why pivoting: I + lr/2 A has symmetric part I, so no pivot is ever zero. But its first pivot is 1 for any size of A, and
elimination without pivoting multiplies rounding errors by |lr/2 A|^2. With pivoting, a step of any length is as
accurate as that of the reference. The thin system has no such symmetric part.

No device synchronization and no atomics: bit-identical results in every run. Limits: a panel has 16384 words, a quarter
of the registers of an SM, so BLOCK_C decreases from 64 as S grows. K is at most 1024, so S is at most 2048, where
BLOCK_C is 8 (float64: 4). Products are IEEE float32 even if the process allows TF32 elsewhere, which would reduce
orthogonality. Bound by the latency of S sequential pivot searches, each a few reductions over a whole program.
"""

# Triton compiles the kernel below; its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern._products import ieee_products

# 32-bit words of a panel, and its widest
PANEL_WORDS = 16384
MAX_BLOCK_C = 64
# 32-bit words of a panel for each warp: 32 a thread. An update needs three times as many registers as the panel.
WARP_WORDS = 1024


@triton.jit(do_not_specialize=["ROWS", "COLUMNS", "WIDTH"])
def cayley_panel_kernel(
    p_matrix,  # [batch, ROWS, COLUMNS]; the panel is its first WIDTH columns
    p_panel,  # [batch, ROWS, WIDTH]: L below the diagonal, which is 1, and U on and above it, rows in the new order
    p_order,  # int64 [batch, ROWS]: where each row of the new order was
    ROWS,
    COLUMNS,
    WIDTH,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o_r, o_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    m = (o_r < ROWS)[:, None] & (o_c < WIDTH)[None, :]
    b_a = tl.load(p_matrix + i * ROWS * COLUMNS + o_r[:, None] * COLUMNS + o_c[None, :], mask=m, other=0.0)
    b_order = o_r
    for k in range(WIDTH):
        # registers cannot be indexed: a row or column is selected by a mask and a sum
        b_column = tl.sum(tl.where((o_c == k)[None, :], b_a, 0.0), axis=1)
        # A NaN counts as the largest: of a NaN and a number, the compiled argmax takes whichever it reads last, which
        # may be a row beyond ROWS.
        b_size = tl.where(b_column == b_column, tl.abs(b_column), float("inf"))
        b_size = tl.where((o_r >= k) & (o_r < ROWS), b_size, -1.0)
        i_pivot = tl.argmax(b_size, axis=0)
        b_row = tl.sum(tl.where((o_r == k)[:, None], b_a, 0.0), axis=0)
        b_pivot_row = tl.sum(tl.where((o_r == i_pivot)[:, None], b_a, 0.0), axis=0)
        pivot = tl.sum(tl.where(o_c == k, b_pivot_row, 0.0), axis=0)
        above = tl.sum(tl.where(o_c == k, b_row, 0.0), axis=0)
        # exchange rows k and i_pivot, even if they are the same
        b_a = tl.where((o_r == i_pivot)[:, None], b_row[None, :], b_a)
        b_a = tl.where((o_r == k)[:, None], b_pivot_row[None, :], b_a)
        order_k = tl.sum(tl.where(o_r == k, b_order, 0), axis=0)
        order_pivot = tl.sum(tl.where(o_r == i_pivot, b_order, 0), axis=0)
        b_order = tl.where(o_r == k, order_pivot, tl.where(o_r == i_pivot, order_k, b_order))
        # eliminate below
        b_factor = tl.where(o_r > k, tl.where(o_r == i_pivot, above, b_column) / pivot, 0.0)
        b_a -= b_factor[:, None] * tl.where(o_c > k, b_pivot_row, 0.0)[None, :]
        b_a = tl.where((o_r > k)[:, None] & (o_c == k)[None, :], b_factor[:, None], b_a)
    tl.store(p_panel + i * ROWS * WIDTH + o_r[:, None] * WIDTH + o_c[None, :], b_a, mask=m)
    tl.store(p_order + i * ROWS + o_r, b_order.to(tl.int64), mask=o_r < ROWS)


def panel_blocks(S: int, itemsize: int) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_C, num_warps) of a panel of S rows. BLOCK_C of the first and largest panel is used for all."""
    block_r = max(16, triton.next_power_of_2(S))
    block_c = max(1, min(MAX_BLOCK_C, block_r, PANEL_WORDS // (block_r * itemsize // 4)))
    words = block_r * block_c * itemsize // 4
    return block_r, block_c, max(1, min(16, words // WARP_WORDS))


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """X [batch, S, C] with matrix X = right, for matrix [batch, S, S] and right [batch, S, C]."""
    batch, S, C = right.shape
    rest = torch.cat([matrix, right], dim=-1)  # the remaining rows and columns, and the right-hand sides
    width = panel_blocks(S, matrix.element_size())[1]
    done = []
    for first in range(0, S, width):
        rows, columns = rest.shape[1:]
        w = min(width, S - first)
        block_r, _, warps = panel_blocks(rows, matrix.element_size())
        panel = torch.empty(batch, rows, w, dtype=matrix.dtype, device=matrix.device)
        order = torch.empty(batch, rows, dtype=torch.int64, device=matrix.device)
        with torch.cuda.device_of(matrix):
            cayley_panel_kernel[(batch,)](
                rest,
                panel,
                order,
                rows,
                columns,
                w,
                BLOCK_R=block_r,
                BLOCK_C=triton.next_power_of_2(width),
                num_warps=warps,
                enable_fp_fusion=True,
            )
        moved = rest[:, :, w:].gather(1, order.unsqueeze(-1).expand(-1, -1, columns - w))
        upper = torch.linalg.solve_triangular(panel[:, :w], moved[:, :w], upper=False, unitriangular=True)
        rest = torch.baddbmm(moved[:, w:], panel[:, w:], upper, alpha=-1).contiguous()
        done.append((first, panel[:, :w], upper))
    x = torch.empty_like(right)
    for first, corner, upper in reversed(done):
        w = corner.shape[1]
        known = S - first - w  # unknowns below, already computed
        y = upper[:, :, known:]
        if known:
            y = torch.baddbmm(y, upper[:, :, :known], x[:, first + w :], alpha=-1)
        x[:, first : first + w] = torch.linalg.solve_triangular(corner, y, upper=True)
    return x


@ieee_products()
def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See ``orthokern.ops.cayley``; tensors are contiguous."""
    N, K = m.shape[-2:]
    if not m.numel():
        return torch.empty_like(m)
    rate: float | Tensor = lr
    if isinstance(lr, Tensor):
        rate = lr.to(m).expand(m.shape[:-2]).reshape(-1, 1, 1)
    bases, grads = m.reshape(-1, N, K), g.reshape(-1, N, K)
    if 2 * K >= N:
        half = grads @ bases.mT
        skew = half - half.mT
        system, right = skew, skew @ bases
        out = None
    else:
        out = torch.cat([grads, bases], dim=-1)  # P
        q = torch.cat([bases, -grads], dim=-1)
        system, right = q.mT @ out, q.mT @ bases
    eye = torch.eye(system.shape[-1], dtype=m.dtype, device=m.device)
    solved = solve(eye + rate / 2 * system, right)
    stepped: Tensor = bases - rate * (solved if out is None else out @ solved)
    return stepped.view(m.shape)
