"""The parts of the spectral-norm projection on the CPU; the kernels: ``csrc/cpu/spectral.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.cpu._call import call


def gram(w: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``."""
    M, K = w.shape
    out = torch.empty(K, K, dtype=w.dtype, device="cpu")
    call("gram", w.dtype, {"M": M, "K": K}, {"w": w, "out": out})
    return out


def is_definite(a: Tensor, diagonal: Tensor) -> bool:
    """See ``orthokern.ops.spectral``."""
    definite = torch.empty(1, dtype=torch.int64, device="cpu")
    tensors = {"a": a, "diagonal": diagonal, "definite": definite}
    call("is_definite", a.dtype, {"K": a.shape[0]}, tensors)
    return bool(definite)


def distance(w: Tensor, other: Tensor | None = None) -> float:
    """See ``orthokern.ops.spectral``."""
    found = torch.empty(1, dtype=torch.float64, device="cpu")
    tensors = {"w": w, "other": other, "distance": found}
    call("distance", w.dtype, {"M": w.shape[0], "K": w.shape[1]}, tensors)
    return float(found)


def wide_product(w: Tensor, v: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``."""
    image = torch.empty(w.shape[0], v.shape[1], dtype=torch.float64, device="cpu")
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    call("wide_product", w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": image})
    return image


def subtract_product(w: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """See ``orthokern.ops.spectral``."""
    out = torch.empty_like(w, memory_format=torch.contiguous_format)
    sizes = {"M": w.shape[0], "K": w.shape[1], "S": v.shape[1]}
    call("subtract_product", w.dtype, sizes, {"w": w, "v_rows": v.mT, "image": t, "out": out})
    return out
