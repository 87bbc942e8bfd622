"""The gradients of the factors of W = U diag(s) V^T, from sums over steps of products with delta_t.

With M = dL/dW = sum_t delta_t h_{t-1}^T, they are dU = M V diag(s), ds = diag(U^T M V) and dV = M^T U diag(s): Note
[Factored scan backward] in ``orthokern/reference/factored_scan.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern._scan_contract import ScanArgs


def without_m(rows: int, N: int, K: int) -> bool:
    """Whether M V and M^T U [N, K] take less time as sums of products with V^T h_{t-1} and U^T delta_t, 6 to 8 N K
    operations per row, than from M [N, N], 2 N^2 per row and 4 N^2 K at the end: for a low rank, or few rows if N is
    not small."""
    return (N >= 64 and 8 * K <= N) or (N >= 256 and 4 * rows <= N)


def map_gradients(args: ScanArgs, m: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of first, scale and second from M [N, N], which may be None."""
    if m is None or args.first is None:
        return None, None, m
    with ieee_products():
        m_v, mt_u = torch.mm(m, args.first), torch.mm(m.mT, args.second)
    return gradients_of_products(args, m_v, mt_u)


def gradients_of_products(args: ScanArgs, m_v: Tensor, mt_u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same from M V and M^T U [N, K], in any dtype."""
    s, u = args.scale, args.second
    assert s is not None
    return (mt_u * s).to(u.dtype), (u * m_v).sum(0).to(u.dtype), (m_v * s).to(u.dtype)
