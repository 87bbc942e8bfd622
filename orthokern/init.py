"""Initialisations of the recurrent matrix, in place, all reproducible through `generator`.

Conventions. Matrices act on columns, h_t = W h_{t-1}. "Block (0, s; -s, 0)" is the skew-symmetric matrix
A = [[0, s], [-s, 0]], whose exponential is the rotation [[cos s, sin s], [-sin s, cos s]]. Angles are in radians.

Numbers are drawn on the CPU in float64, then rounded to the dtype and copied to the device of the tensor. A seed
therefore gives the same matrix on every device, and a float32 basis is orthonormal up to float32 rounding.
`generator=None` uses torch's global CPU generator; a given generator must be on the CPU. Tensors on the meta device are
not changed. Every function but `learned_orthogonal_` returns its tensor t, [..., N, K] or for square matrices [..., N,
N], and raises InputError for a tensor that is not of this shape or not floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from orthokern._decompositions import robust_svd
from orthokern._learned_orthogonal import LearnedOrthogonality, check_matrices, learned_orthogonal_
from orthokern.errors import InputError, cpu_generator, number, one_of

__all__ = [
    "INITS",
    "SKEW_INITS",
    "LearnedOrthogonality",
    "cayley_",
    "glorot_",
    "glorot_uniform_",
    "haar_orthogonal_",
    "haar_rotation_",
    "henaff_",
    "identity_",
    "initialize_",
    "learned_",
    "learned_orthogonal_",
    "normal_",
    "skew_generator_",
]


def _fill(t: Tensor, name: str, draw: Callable[[], Tensor], *, square: bool = False) -> Tensor:
    """Fill t with what `draw` returns, after the checks."""
    check_matrices(t, name, square=square)
    return t if t.is_meta else t.copy_(draw())


def _checked_angle(value: Any) -> float:
    accepted = "an angle in radians, above 0 and at most pi"
    return number("max_angle", value, accepted, lambda angle: 0.0 < angle <= math.pi)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=cpu_generator(generator), dtype=torch.float64, device="cpu") * (high - low) + low


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=cpu_generator(generator), dtype=torch.float64, device="cpu")


def _haar(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Haar-distributed float64 [..., N, K]; orthonormal columns if N >= K, else orthonormal rows."""
    if shape[-2] < shape[-1]:
        return _haar((*shape[:-2], shape[-1], shape[-2]), generator).mT
    q, r = torch.linalg.qr(_normal(shape, generator))
    # QR fixes the signs of the diagonal of R: without this factor the distribution of Q is not Haar (Mezzadri 2007)
    diagonal = torch.diagonal(r, dim1=-2, dim2=-1)
    return q * torch.where(diagonal < 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)


def _rotations(angle: Tensor, n: int) -> Tensor:
    """blockdiag([[cos a, sin a], [-sin a, cos a]], ...) [..., n, n] from angle [..., n // 2]; an odd n ends in a 1."""
    w = torch.eye(n, dtype=torch.float64, device="cpu").repeat(*angle.shape[:-1], 1, 1)
    even = torch.arange(0, n - 1, 2, device="cpu")
    w[..., even, even] = w[..., even + 1, even + 1] = angle.cos()
    w[..., even, even + 1] = angle.sin()
    w[..., even + 1, even] = -angle.sin()
    return w


def _fill_rotations(t: Tensor, name: str, low: float, high: float, generator: torch.Generator | None) -> Tensor:
    """Fill t [..., N, N] with rotations by angles U(low, high)."""

    def draw() -> Tensor:
        n = t.shape[-1]
        return _rotations(_uniform((*t.shape[:-2], n // 2), low, high, generator), n)

    return _fill(t, name, draw, square=True)


@torch.no_grad()
def haar_orthogonal_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with Haar-distributed (uniform) orthogonal matrices.

    QR of a standard normal matrix, with the signs of the diagonal of R moved into Q. The distribution of Q is then the
    Haar measure: det = +1 and det = -1 are equally likely (Mezzadri 2007, "How to generate random matrices from the
    classical compact groups").

    K <= N gives orthonormal columns (uniform on the Stiefel manifold), K > N orthonormal rows.

    Example::

        >>> w = haar_orthogonal_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    return _fill(t, "haar_orthogonal_", lambda: _haar(tuple(t.shape), generator))


@torch.no_grad()
def henaff_(t: Tensor, generator: torch.Generator | None = None, *, max_angle: float = math.pi) -> Tensor:
    """Fill t [..., N, N] with W = exp(A), A block-diagonal with blocks (0, s; -s, 0), s ~ U(-max_angle, max_angle)
    (Henaff, Szlam and LeCun 2016, with pi).

    W is a block rotation by independent angles s, computed in closed form. For an odd N the last diagonal entry is 1 (a
    zero block of side one). Some released code draws s from U(-pi, 0): the eigenvalue pairs exp(+-is) have the same
    distribution. max_angle is in (0, pi]; Note [The largest angle].

    Example::

        >>> w = henaff_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    angle = _checked_angle(max_angle)
    return _fill_rotations(t, "henaff_", -angle, angle, generator)


@torch.no_grad()
def cayley_(t: Tensor, generator: torch.Generator | None = None, *, max_angle: float = math.pi / 2) -> Tensor:
    """Fill t [..., N, N] with W = (I + A)^-1 (I - A), A with blocks (0, s; -s, 0), s = -tan(u/2), u ~ U(0, max_angle)
    (Helfrich, Willmott and Ye 2018, with pi/2).

    s = -sqrt((1 - cos u) / (1 + cos u)), and its Cayley map is a rotation by exactly u. Every angle is in (0,
    max_angle), so W has the eigenvalues exp(+-iu). With pi/2, none is near -1. With the same s in the exponential, as
    in expRNN, the angle is tan(u/2). For an odd N the last diagonal entry is 1. max_angle is in (0, pi]; Note [The
    largest angle].

    Example::

        >>> w = cayley_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    return _fill_rotations(t, "cayley_", 0.0, _checked_angle(max_angle), generator)


@torch.no_grad()
def identity_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with ones on the diagonal and zeros elsewhere (Le, Jaitly and Hinton 2015). Draws nothing;
    `generator` is ignored.

    Example::

        >>> identity_(torch.empty(2, 2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    return _fill(t, "identity_", lambda: torch.eye(t.shape[-2], t.shape[-1], device="cpu"))


@torch.no_grad()
def glorot_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent normals of variance 2 / (N + K) (Glorot and Bengio 2010, the normal variant).

    The singular values of a square W fill (0, 2): W is not orthogonal.

    Example::

        >>> glorot_(torch.empty(64, 32)).shape
        torch.Size([64, 32])
    """
    return _fill(t, "glorot_", lambda: _normal(tuple(t.shape), generator) * math.sqrt(2.0 / sum(t.shape[-2:])))


@torch.no_grad()
def glorot_uniform_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent uniforms in +- sqrt(6 / (N + K)) (Glorot and Bengio 2010, the "normalized
    initialization"): the variance of `glorot_`.

    Example::

        >>> bool((glorot_uniform_(torch.empty(3, 3)).abs() <= 1.0).all())
        True
    """

    def draw() -> Tensor:
        limit = math.sqrt(6.0 / sum(t.shape[-2:]))
        return _uniform(tuple(t.shape), -limit, limit, generator)

    return _fill(t, "glorot_uniform_", draw)


@torch.no_grad()
def normal_(t: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent normals of mean 0 and standard deviation `std`.

    Raises InputError for a std that is not a number, not finite or not above 0.

    Example::

        >>> normal_(torch.empty(64, 32), 0.01).shape
        torch.Size([64, 32])
    """
    number("normal_: std", std, "finite and above 0", lambda value: value > 0.0)
    return _fill(t, "normal_", lambda: _normal(tuple(t.shape), generator) * std)


@torch.no_grad()
def learned_(t: Tensor, generator: torch.Generator | None = None, *, std: float | None = None) -> Tensor:
    """Fill t [..., N, K] with matrices that start at random and are then made orthogonal by `learned_orthogonal_`
    (Manchev and Spratling, "OINIT", section II-A).

    The initial values are Glorot-uniform (their section III-A), or, if std is given, independent normals of standard
    deviation std (their sections III-B and III-C). The descent runs in float64 until rounding stops it, about twenty
    steps beyond the 1e-6 of the paper, so that the result is orthonormal up to the rounding of its dtype. Raises
    InputError for a std that is not finite or not above 0, and if the descent does not converge; t is then unchanged.

    Example::

        >>> w = learned_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    check_matrices(t, "learned_")
    if t.is_meta:
        return t
    w = torch.empty(t.shape, dtype=torch.float64, device="cpu")
    w = glorot_uniform_(w, generator) if std is None else normal_(w, std, generator)
    result = learned_orthogonal_(w, tol=8.0 * min(t.shape[-2:]) * torch.finfo(w.dtype).eps ** 2)
    missed = int((~result.converged).sum())
    if missed:
        start = "the Glorot-uniform start" if std is None else f"std {std:g}"
        raise InputError(
            f"learned_: {missed} of {result.converged.numel()} matrices did not become orthogonal from {start}; "
            "accepted: another seed, or a larger std"
        )
    return t.copy_(w)


INITS = {
    "orthogonal": haar_orthogonal_,
    "henaff": henaff_,
    "cayley": cayley_,
    "identity": identity_,
    "glorot": glorot_,
    "glorot-uniform": glorot_uniform_,
    "learned": learned_,
}


# Note [The largest angle]
# A plane that rotates by the angle a per step adds up its inputs, each rotated by a times its age, and is back at its
# start after 2 pi / a steps. Inputs that hardly change in this time cancel. So if neighbouring inputs are nearly equal,
# such as pixels that are read in order, small initial angles store more, and such a network learns far faster
# (docs/choosing.md, "The start"). The published distributions have no such parameter.
ROTATIONS = {"henaff": henaff_, "cayley": cayley_}


def check_rotations(name: str | None, max_angle: float, names: Collection[str | None] = ROTATIONS) -> None:
    """Raises InputError for an invalid max_angle, or if the initialisation is not one of `names`."""
    _checked_angle(max_angle)
    if name not in names:
        raise InputError(f"max_angle={max_angle} with init {name!r}; accepted with init {', '.join(map(repr, names))}")


UNCONSTRAINED = ("glorot", "glorot-uniform")  # not orthogonal: not accepted with a margin of the singular values


def initialize_(
    t: Tensor, name: str, generator: torch.Generator | None = None, *, max_angle: float | None = None
) -> Tensor:
    """Fill t by the initialisation called `name`, one of INITS.

    Args:
        t: [..., N, K] float.
        name: one of INITS.
        generator: CPU generator, or None for torch's global one.
        max_angle: for "henaff" and "cayley", their largest angle in radians; None: the published one, pi and pi/2.

    Returns:
        t.

    Raises:
        InputError: an unknown name, a max_angle that the initialisation does not have, or a t that it cannot fill.

    Example::

        >>> initialize_(torch.empty(2, 2), "identity")
        tensor([[1., 0.],
                [0., 1.]])
    """
    one_of("init", name, INITS)
    if max_angle is None:
        return INITS[name](t, generator)
    check_rotations(name, max_angle)
    return ROTATIONS[name](t, generator, max_angle=max_angle)


@torch.no_grad()
def factorized_(
    u: Tensor,
    s: Tensor,
    v: Tensor,
    name: str,
    generator: torch.Generator | None = None,
    *,
    max_angle: float | None = None,
) -> None:
    """Fill the factors of W = U diag(s) V^T so that W is the matrix that `name` stands for.

    orthogonal: U and V independent Haar, s = 1.
    henaff, cayley, identity, learned: V Haar, U = W0 V with W0 the named orthogonal matrix, s = 1, so that
        W = W0 V V^T = W0. V is Haar rather than I because V fixes the directions that s may later scale: with V = I
        they would be the coordinate axes.
    glorot, glorot-uniform: the K leading singular triplets of such a matrix, so W is that matrix (K = N) or its best
        approximation of rank K, whose eigenvalues are small: the spaces of U and V are nearly orthogonal.

    For K < N, the orthogonal starts are those of K units, U_K and V_K, in the subspace of a Haar basis P [N, K]:
    U = P U_K and V = P V_K. W has N - K eigenvalues 0, and K on the unit circle. If U and V were independent, V^T U and
    with it the spectral radius of W would be about sqrt(K/N), and the states would be forgotten in a few steps.

    Args:
        u, v: [N, K] float, K <= N; written with orthonormal columns.
        s: [K] float; written with the singular values themselves, not with the parameter of a bounded spectrum.
        name, generator, max_angle: as in `initialize_`, with its errors.
    """
    one_of("init", name, INITS)
    n, k = u.shape
    if max_angle is not None:
        check_rotations(name, max_angle)
    if u.is_meta:
        return
    if name in UNCONSTRAINED:
        w = torch.empty(n, n, dtype=torch.float64, device="cpu")
        left, values, right = robust_svd(INITS[name](w, generator))
        u.copy_(left[:, :k])
        s.copy_(values[:k])
        v.copy_(right[:k].mT)
        return
    v64 = _haar((k, k), generator)
    if name == "orthogonal":
        u64 = _haar((k, k), generator)
    else:
        w64 = torch.empty(k, k, dtype=torch.float64, device="cpu")
        u64 = initialize_(w64, name, generator, max_angle=max_angle) @ v64
    if k < n:
        basis = _haar((n, k), generator)
        u64, v64 = basis @ u64, basis @ v64
    u.copy_(u64)
    s.fill_(1.0)
    v.copy_(v64)


SKEW_ANGLES = {"henaff": math.pi, "cayley": 1.0, "torus": math.pi}  # the largest ones, as published
SKEW_INITS = (*SKEW_ANGLES, "identity")


@torch.no_grad()
def skew_generator_(
    t: Tensor, name: str, generator: torch.Generator | None = None, *, max_angle: float | None = None
) -> Tensor:
    """Fill t [..., N, N] with a strictly lower triangular L whose A = L - L^T has the blocks (0, s; -s, 0) of an
    initialisation.

    For recurrences with the matrix exp(A): each block rotates its plane by the angle s.

    henaff: s ~ U(-pi, 0), as in the first release of expRNN and in nnRNN. torus: s ~ U(-pi, pi), uniform on the maximal
    torus of rotations, as in geotorch and the later expRNN (there also under the name "henaff"); the eigenvalue pairs
    exp(+-is) have the same distribution for both. cayley: s = -tan(u/2), u ~ U(0, pi/2), the generator of `cayley_` in
    the exponential, as in expRNN and nnRNN: the angles are in (-1, 0), whereas `cayley_` rotates by u.
    identity: s = 0.

    With max_angle, in (0, pi], s is in [-max_angle, 0] or, for torus, in [-max_angle, max_angle]; Note [The largest
    angle]. For cayley, u ~ U(0, 2 atan(max_angle)).

    An odd N ends in a zero block of side one.

    Args:
        t: [..., N, N] float.
        name: one of SKEW_INITS.
        generator: CPU generator, or None for torch's global one.
        max_angle: the largest angle; None: the published one.

    Returns:
        t.

    Raises:
        InputError: t is not float [..., N, N], the name is not one of SKEW_INITS, or max_angle is given for identity or
            out of range.

    Example::

        >>> l = skew_generator_(torch.empty(4, 4), "cayley")
        >>> w = torch.matrix_exp(l - l.mT)
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    check_matrices(t, "skew_generator_", square=True)
    one_of("init", name, SKEW_INITS)
    if max_angle is not None:
        check_rotations(name, max_angle, SKEW_ANGLES)
    if t.is_meta:
        return t
    n, shape = t.shape[-1], (*t.shape[:-2], t.shape[-1] // 2)
    angle = SKEW_ANGLES.get(name, 0.0) if max_angle is None else max_angle
    if name == "henaff":
        s = _uniform(shape, -angle, 0.0, generator)
    elif name == "torus":
        s = _uniform(shape, -angle, angle, generator)
    elif name == "cayley":
        s = -(_uniform(shape, 0.0, 2 * math.atan(angle), generator) / 2).tan()
    else:
        s = torch.zeros(shape, dtype=torch.float64, device="cpu")
    lower = torch.zeros(t.shape, dtype=torch.float64, device="cpu")
    even = torch.arange(0, n - 1, 2, device="cpu")
    lower[..., even + 1, even] = -s
    return t.copy_(lower)


@torch.no_grad()
def haar_rotation_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, N] with Haar-distributed rotations: orthogonal matrices of determinant +1, which are the
    exponentials of skew matrices. `haar_orthogonal_` has both signs.

    Args:
        t: [..., N, N] float.
        generator: CPU generator, or None for torch's global one.

    Returns:
        t.

    Raises:
        InputError: t is not float [..., N, N].

    Example::

        >>> w = haar_rotation_(torch.empty(4, 4))
        >>> bool((w.det() - 1).abs() < 1e-5)
        True
    """

    def draw() -> Tensor:
        q = _haar(tuple(t.shape), generator)
        q[..., 0] *= torch.linalg.det(q).sign().unsqueeze(-1)
        return q

    return _fill(t, "haar_rotation_", draw, square=True)
