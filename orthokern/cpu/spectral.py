"""The parts of the spectral-norm projection on the CPU; the kernels: ``csrc/cpu/spectral.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.cpu._call import call


def gram(w: Tensor) -> Tensor:
    """W^T W [K, K] for w [M, K], float32 or float64, in half of a product's operations. Exactly symmetric."""
    m, k = w.shape
    out = torch.empty(k, k, dtype=w.dtype)
    call("gram", w.dtype, {"M": m, "K": k}, {"w": w, "out": out})
    return out


def is_definite(a: Tensor, diagonal: Tensor) -> bool:
    """Whether a has a Cholesky factorisation with `diagonal` in place of its own; NaN and infinity have none.

    a: [K, K], float32 or float64, symmetric: only what stands above the diagonal is read. diagonal: [K].
    """
    definite = torch.empty(1, dtype=torch.int64)
    tensors = {"a": a, "diagonal": diagonal, "definite": definite}
    call("is_definite", a.dtype, {"K": a.shape[0]}, tensors)
    return bool(definite)


def distance(w: Tensor, other: Tensor | None = None) -> float:
    """||w - other||_F, or ||w||_F: rows summed in their dtype, these sums in float64.

    w, other: [M, K], float32 or float64.
    """
    found = torch.empty(1, dtype=torch.float64)
    tensors = {"w": w, "other": other, "distance": found}
    call("distance", w.dtype, {"M": w.shape[0], "K": w.shape[1]}, tensors)
    return float(found)


def wide_product(w: Tensor, v: Tensor) -> Tensor:
    """W V [M, S], float64, for w [M, K], float32 or float64, and v [K, S], float64, S small."""
    image = torch.empty(w.shape[0], v.shape[1], dtype=torch.float64)
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    call("wide_product", w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": image})
    return image


def subtract_product(w: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """W - T V^T [M, K] in w's dtype, rounded once.

    w: [M, K], float32 or float64. t: [M, S] and v: [K, S], float64, S small.
    """
    out = torch.empty_like(w, memory_format=torch.contiguous_format)
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    call("subtract_product", w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": t, "out": out})
    return out
