"""Initialisations of the recurrent matrix, in place, all reproducible through `generator`.

Conventions. Matrices act on columns, h_t = W h_{t-1}. "Block (0, s; -s, 0)" is the skew
matrix A = [[0, s], [-s, 0]], whose exponential is the rotation [[cos s, sin s], [-sin s, cos s]]. Angles are in
radians.

Numbers are drawn on the CPU in float64 and then rounded to the dtype and moved to the device of the tensor, so one
seed gives one matrix everywhere, and a float32 basis is orthonormal to the last bit that float32 holds.
`generator=None` uses torch's global CPU generator; a generator that is given must live on the CPU. Tensors on the
meta device are left alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern.errors import InputError, unknown_name

__all__ = [
    "INITS",
    "SKEW_INITS",
    "cayley_",
    "glorot_",
    "haar_orthogonal_",
    "haar_rotation_",
    "henaff_",
    "identity_",
    "initialize_",
    "skew_generator_",
]


def _check(t: Tensor, name: str, *, square: bool = False) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise InputError(f"{name}: t must be a floating point tensor, got {getattr(t, 'dtype', type(t).__name__)}")
    if t.dim() < 2 or t.numel() == 0:
        raise InputError(f"{name}: t has shape {tuple(t.shape)}; accepted: [..., N, K] with N and K at least 1")
    if square and t.shape[-1] != t.shape[-2]:
        raise InputError(f"{name}: t has shape {tuple(t.shape)}; accepted: square matrices [..., N, N]")


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * (high - low) + low


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _haar(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Haar-distributed float64 [..., N, K]; orthonormal columns if N >= K, else orthonormal rows."""
    if shape[-2] < shape[-1]:
        return _haar((*shape[:-2], shape[-1], shape[-2]), generator).mT
    q, r = torch.linalg.qr(_normal(shape, generator))
    # the QR algorithm, not chance, fixes the signs of R's diagonal: without this factor Q is not Haar (Mezzadri 2007)
    diagonal = torch.diagonal(r, dim1=-2, dim2=-1)
    return q * torch.where(diagonal < 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)


def _rotations(angle: Tensor, n: int) -> Tensor:
    """blockdiag([[cos a, sin a], [-sin a, cos a]], ...) [..., n, n] from angle [..., n // 2]; an odd n ends in a 1."""
    w = torch.eye(n, dtype=torch.float64, device="cpu").repeat(*angle.shape[:-1], 1, 1)
    even = torch.arange(0, n - 1, 2, device="cpu")
    w[..., even, even] = angle.cos()
    w[..., even + 1, even + 1] = angle.cos()
    w[..., even, even + 1] = angle.sin()
    w[..., even + 1, even] = -angle.sin()
    return w


@torch.no_grad()
def haar_orthogonal_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t with Haar-distributed (uniform) orthogonal matrices.

    QR of a standard normal matrix with the signs of R's diagonal moved into Q, which makes the law of Q the Haar
    measure: both components of O(N), det = +1 and det = -1, are equally likely (Mezzadri 2007, "How to generate random
    matrices from the classical compact groups").

    Args:
        t: [..., N, K] float. K <= N gives orthonormal columns (uniform on the Stiefel manifold), K > N orthonormal
            rows.
        generator: CPU generator, or None for torch's global one.

    Returns:
        t. Raises InputError for a tensor that is not a floating point [..., N, K].
    """
    _check(t, "haar_orthogonal_")
    return t if t.is_meta else t.copy_(_haar(tuple(t.shape), generator))


@torch.no_grad()
def henaff_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t with W = exp(A), A block-diagonal with blocks (0, s; -s, 0), s ~ U(-pi, pi) (Henaff, Szlam and LeCun
    2016).

    W is a block rotation by independent angles s, computed in closed form. An odd N ends in a 1 (a zero block of
    side one). Some released code draws s from U(-pi, 0): the eigenvalue pairs exp(+-is) have the same law.

    Args:
        t: [..., N, N] float.
        generator: CPU generator, or None for torch's global one.

    Returns:
        t. Raises InputError for a matrix that is not square.
    """
    _check(t, "henaff_", square=True)
    if t.is_meta:
        return t
    n = t.shape[-1]
    return t.copy_(_rotations(_uniform((*t.shape[:-2], n // 2), -math.pi, math.pi, generator), n))


@torch.no_grad()
def cayley_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t with W = (I + A)^-1 (I - A), A with blocks (0, s; -s, 0), s = -tan(u/2), u ~ U(0, pi/2) (Helfrich,
    Willmott and Ye 2018).

    s = -sqrt((1 - cos u) / (1 + cos u)), and this Cayley map turns it into a rotation by exactly u: every block
    rotates by an angle in (0, pi/2), so W has eigenvalues exp(+-iu) and none near -1. Code that puts the same s
    through the exponential gets the angle tan(u/2) in (0, 1) instead (expRNN does). An odd N ends in a 1.

    Args:
        t: [..., N, N] float.
        generator: CPU generator, or None for torch's global one.

    Returns:
        t. Raises InputError for a matrix that is not square.
    """
    _check(t, "cayley_", square=True)
    if t.is_meta:
        return t
    n = t.shape[-1]
    return t.copy_(_rotations(_uniform((*t.shape[:-2], n // 2), 0.0, math.pi / 2, generator), n))


@torch.no_grad()
def identity_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with ones on the diagonal and zeros elsewhere (Le, Jaitly and Hinton 2015). Draws nothing;
    `generator` is ignored."""
    _check(t, "identity_")
    return t if t.is_meta else t.copy_(torch.eye(t.shape[-2], t.shape[-1], device="cpu"))


@torch.no_grad()
def glorot_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent normals of variance 2 / (N + K) (Glorot and Bengio 2010, the normal variant).

    For a square W the singular values fill (0, 2): no orthogonality. Raises InputError for a tensor that is not a
    floating point [..., N, K].
    """
    _check(t, "glorot_")
    if t.is_meta:
        return t
    return t.copy_(_normal(tuple(t.shape), generator) * math.sqrt(2.0 / (t.shape[-1] + t.shape[-2])))


INITS = {
    "orthogonal": haar_orthogonal_,
    "henaff": henaff_,
    "cayley": cayley_,
    "identity": identity_,
    "glorot": glorot_,
}


def initialize_(t: Tensor, name: str, generator: torch.Generator | None = None) -> Tensor:
    """Fill t by the initialisation called `name`: "orthogonal", "henaff", "cayley", "identity" or "glorot";
    InputError for another name."""
    if name not in INITS:
        raise unknown_name("init", name, list(INITS))
    return INITS[name](t, generator)


@torch.no_grad()
def factorized_(u: Tensor, s: Tensor, v: Tensor, name: str, generator: torch.Generator | None = None) -> None:
    """Fill the factors of W = U diag(s) V^T so that W is the matrix that `name` stands for.

    orthogonal: U and V independent Haar, s = 1. For K < N, W is a partial isometry of rank K.
    henaff, cayley, identity: V Haar, U = W0 V with W0 the named orthogonal matrix, s = 1, so that W = W0 V V^T = W0.
        A Haar V rather than V = I because V fixes the directions that s may later scale: with V = I they would be
        the coordinate axes. Needs K = N.
    glorot: the K leading singular triplets of a Glorot-normal matrix, so W is that matrix (K = N) or its best
        approximation of rank K.

    Args:
        u, v: [N, K] float, K <= N; written with orthonormal columns.
        s: [K] float; written with the singular values themselves, not with the parameter of a bounded spectrum.
        name: one of INITS.
        generator: CPU generator, or None for torch's global one.

    Raises InputError for an unknown name and for K < N with henaff, cayley and identity.
    """
    if name not in INITS:
        raise unknown_name("init", name, list(INITS))
    n, k = u.shape
    if k < n and name not in ("orthogonal", "glorot"):
        raise InputError(
            f"init {name!r} needs K = N = {n}, got K = {k}; accepted for a lower rank: 'orthogonal', 'glorot'"
        )
    if u.is_meta:
        return
    if name == "glorot":
        w = torch.empty(n, n, dtype=torch.float64, device="cpu")
        left, values, right = torch.linalg.svd(glorot_(w, generator))
        u.copy_(left[:, :k])
        s.copy_(values[:k])
        v.copy_(right[:k].mT)
        return
    v64 = _haar((n, k), generator)
    if name == "orthogonal":
        u64 = _haar((n, k), generator)
    else:
        u64 = INITS[name](torch.empty(n, n, dtype=torch.float64, device="cpu"), generator) @ v64
    u.copy_(u64)
    s.fill_(1.0)
    v.copy_(v64)


SKEW_INITS = ("henaff", "cayley", "torus", "identity")


@torch.no_grad()
def skew_generator_(t: Tensor, name: str, generator: torch.Generator | None = None) -> Tensor:
    """Fill t with a strictly lower triangular L whose A = L - L^T has the blocks (0, s; -s, 0) of an initialisation.

    For recurrences with the matrix exp(A): each block turns its plane by the angle s.

    henaff: s ~ U(-pi, 0), as expRNN's first release and nnRNN's draw it. torus: s ~ U(-pi, pi), uniform on the maximal
    torus of rotations, as geotorch and the later expRNN have it (there also under the name "henaff"); the eigenvalue
    pairs exp(+-is) have one law for both. cayley: s = -tan(u/2), u ~ U(0, pi/2), the generator of `cayley_` put through
    the exponential, as expRNN and nnRNN do: angles in (-1, 0), where `cayley_` turns by u. identity: s = 0.

    Args:
        t: [..., N, N] float; an odd N ends in a zero block of side one.
        name: one of SKEW_INITS.
        generator: CPU generator, or None for torch's global one.

    Returns:
        t. Raises InputError for a matrix that is not square or an unknown name.
    """
    _check(t, "skew_generator_", square=True)
    if name not in SKEW_INITS:
        raise unknown_name("init", name, SKEW_INITS)
    if t.is_meta:
        return t
    n, shape = t.shape[-1], (*t.shape[:-2], t.shape[-1] // 2)
    if name == "henaff":
        s = _uniform(shape, -math.pi, 0.0, generator)
    elif name == "torus":
        s = _uniform(shape, -math.pi, math.pi, generator)
    elif name == "cayley":
        s = -(_uniform(shape, 0.0, math.pi / 2, generator) / 2).tan()
    else:
        s = torch.zeros(shape, dtype=torch.float64, device="cpu")
    lower = torch.zeros(t.shape, dtype=torch.float64, device="cpu")
    even = torch.arange(0, n - 1, 2, device="cpu")
    lower[..., even + 1, even] = -s
    return t.copy_(lower)


@torch.no_grad()
def haar_rotation_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, N] with Haar-distributed rotations: orthogonal matrices of determinant +1, the ones that are an
    exponential of a skew matrix. `haar_orthogonal_` has both signs."""
    _check(t, "haar_rotation_", square=True)
    if t.is_meta:
        return t
    q = _haar(tuple(t.shape), generator)
    q[..., 0] *= torch.linalg.det(q).sign().unsqueeze(-1)
    return t.copy_(q)
