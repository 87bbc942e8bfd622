"""spectral, the reference: products, norms and a test of definiteness in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gram(w: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``. Three quarters of a product's operations."""
    half = w.shape[1] // 2
    left, right = w[:, :half], w[:, half:]
    found = w.new_empty(w.shape[1], w.shape[1])
    found[:half, :half] = left.mT @ left
    found[half:, half:] = right.mT @ right
    found[:half, half:] = left.mT @ right
    found[half:, :half] = found[:half, half:].mT
    return found


def is_definite(a: Tensor, diagonal: Tensor) -> bool:
    """See ``orthokern.ops.spectral``."""
    a.diagonal().copy_(diagonal)
    factor, failed = torch.linalg.cholesky_ex(a, upper=True)
    return bool((failed == 0) & factor.diagonal().isfinite().all())


def distance(w: Tensor, other: Tensor | None = None) -> float:
    """See ``orthokern.ops.spectral``."""
    rows = torch.linalg.vector_norm(w if other is None else w - other, dim=1)
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64))


def wide_product(w: Tensor, v: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``."""
    return w.double() @ v


def subtract_product(w: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``."""
    return torch.addmm(w.double(), t, v.mT, alpha=-1).to(w.dtype)
