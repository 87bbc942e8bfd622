"""spectral: the matrix functions of the spectral-norm projection, without a torch.library op and a derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern.dispatch import Support

_SAME = "the reference is as fast: it consists of torch's products and factorisations"

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(missing=_SAME),
    "cuda": Support(missing=_SAME),
}
dispatch.register("spectral", SUPPORT)

FUNCTIONS = ("gram", "is_definite", "distance", "wide_product", "subtract_product")  # of a leaf


def gram(w: Tensor, backend: str | None = None) -> Tensor:
    """W^T W [K, K] for w [M, K], float32 or float64, in fewer operations than a product.

    The result of the CPU kernel is exactly symmetric, that of the reference up to rounding.
    """
    found: Tensor = _leaf(w, backend).gram(w)
    return found


def is_definite(a: Tensor, diagonal: Tensor, backend: str | None = None) -> bool:
    """Whether a, with `diagonal` as its diagonal, has a Cholesky factorisation; False if it holds NaN or infinity.

    a: [K, K], float32 or float64, symmetric. Only the part above the diagonal is read. It may be overwritten.
    diagonal: [K].
    """
    return bool(_leaf(a, backend).is_definite(a, diagonal))


def distance(w: Tensor, other: Tensor | None = None, backend: str | None = None) -> float:
    """||w - other||_F, or ||w||_F: rows summed in their dtype, these sums in float64.

    w, other: [M, K], float32 or float64.
    """
    return float(_leaf(w, backend).distance(w, other))


def wide_product(w: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """W V [M, S], float64, for w [M, K], float32 or float64, and v [K, S], float64, S small."""
    image: Tensor = _leaf(w, backend).wide_product(w, v)
    return image


def subtract_product(w: Tensor, t: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """W - T V^T [M, K] in w's dtype, rounded once.

    w: [M, K], float32 or float64. t: [M, S] and v: [K, S], float64, S small.
    """
    rest: Tensor = _leaf(w, backend).subtract_product(w, t, v)
    return rest


def _leaf(w: Tensor, backend: str | None) -> Any:
    return dispatch.resolve("spectral", backend, device=w.device, dtype=w.dtype, K=w.shape[1])
