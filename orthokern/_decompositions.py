"""Decompositions that do not depend on one LAPACK driver.

A driver can fail for matrices that occur in training. With 120 equal singular values, as after clipping, the
divide-and-conquer driver of some builds of MKL fails to converge with one number of threads and succeeds with another.
Training must not end because of that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = torch._C._LinAlgError  # type: ignore[attr-defined]
# Largest error of an accepted decomposition, relative to the rounding error of one number and the number of columns.
_ACCURACY = 32.0

Svd = tuple[Tensor, Tensor, Tensor]


def robust_svd(a: Tensor) -> Svd:
    """``torch.linalg.svd(a, full_matrices=False)``: (U [..., M, R], S [..., R] descending, V^T [..., R, K]).

    If torch's driver raises, or its result is not finite or not accurate, the function tries the decomposition of the
    transposed matrix, and one from the eigenvectors of the Gram matrix.

    Args:
        a: [..., M, K], finite, float32 or float64.

    Raises:
        LinAlgError: all of them fail.
    """
    for method in _METHODS:
        try:
            result = method(a)
        except LinAlgError:
            continue
        if _is_accurate(a, *result):
            return result
    raise LinAlgError(f"no decomposition of a matrix of shape {list(a.shape)} is accurate")


def polar(w: Tensor) -> Tensor:
    """The matrix with orthonormal columns (rows, if there are fewer) that is nearest to w [..., N, K]."""
    u, _, vh = robust_svd(w)
    return u @ vh


def robust_svdvals(a: Tensor) -> Tensor:
    """``torch.linalg.svdvals(a)``, differentiable once if the driver fails."""
    try:
        return torch.linalg.svdvals(a)
    except LinAlgError:
        u, _, vh = robust_svd(a.detach())
        return (u * (a @ vh.mT)).sum(-2)  # the derivative of s_i is u_i v_i^T


def robust_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh(a)``; from the other triangle, with other rounding errors, if the driver fails."""
    try:
        values, vectors = torch.linalg.eigh(a)
    except LinAlgError:
        values, vectors = torch.linalg.eigh(a, UPLO="U")
    return values, vectors


def _direct(a: Tensor) -> Svd:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u, s, vh


def _of_transposed(a: Tensor) -> Svd:
    u, s, vh = torch.linalg.svd(a.mT.contiguous(), full_matrices=False)
    return vh.mT, s, u.mT


def _of_gram_matrix(a: Tensor) -> Svd:
    """A V has orthogonal columns for the eigenvectors V of A^T A; their QR decomposition is U S. In float64. Not
    accurate if singular values of all sizes down to rounding occur, which squares cannot represent."""
    if a.shape[-2] < a.shape[-1]:
        u, s, vh = _of_gram_matrix(a.mT)
        return vh.mT, s, u.mT
    scale = a.abs().amax((-2, -1), keepdim=True).double()
    scaled = a / torch.where(scale > 0, scale, torch.ones_like(scale))
    v = torch.linalg.eigh(scaled.mT @ scaled)[1].flip(-1)
    q, r = torch.linalg.qr(scaled @ v)
    s = r.diagonal(dim1=-2, dim2=-1)
    order = s.abs().argsort(dim=-1, descending=True)
    u = (q * torch.where(s < 0, -1.0, 1.0).unsqueeze(-2)).take_along_dim(order.unsqueeze(-2), -1)
    s, v = s.abs().take_along_dim(order, -1) * scale.squeeze(-1), v.take_along_dim(order.unsqueeze(-2), -1)
    return u.to(a.dtype), s.to(a.dtype), v.mT.to(a.dtype)


def _is_accurate(a: Tensor, u: Tensor, s: Tensor, vh: Tensor) -> bool:
    """Whether U S V^T is A, and U and V are orthonormal, up to rounding."""
    if a.numel() == 0:
        return True
    largest = s.amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    eye = torch.eye(s.shape[-1], dtype=a.dtype, device=a.device)
    errors = (
        ((u * (s / unit).unsqueeze(-2)) @ vh - a / unit.unsqueeze(-1)).abs().amax(),
        (u.mT @ u - eye).abs().amax(),
        (vh @ vh.mT - eye).abs().amax(),
    )
    limit = _ACCURACY * s.shape[-1] ** 0.5 * torch.finfo(a.dtype).eps
    return all(float(error) <= limit for error in errors)  # False for NaN


_METHODS: tuple[Callable[[Tensor], Svd], ...] = (_direct, _of_transposed, _of_gram_matrix)
