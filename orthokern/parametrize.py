"""Constraints on the weight of any torch layer, through torch.nn.utils.parametrize.

    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Exponential(layer.weight))

Each class takes the tensor to constrain, of which it reads the shape, dtype and device. `right_inverse` computes the
parameters of the nearest matrix that satisfies the constraint (for SchurForm see there), so that a layer keeps its
weight as far as possible, and ``layer.weight = w`` works. It runs at every assignment, in float64; only `forward` is
used in training.
An object holds the base or the signs of one weight: create one for every layer. The parameters are
``layer.parametrizations.weight.original``, or ``original0``, ``original1``, ... in the order of `forward`.

Raises InputError, one line: for a weight of another kind, or on the meta device; when a state is loaded whose base is
not orthogonal or whose signs are not 1 or -1; and, on a CPU, in `forward` of Exponential and SchurForm if A is not
finite or too large, and of Householder and FactorizedSpectrum if a reflection vector is zero.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import _autocast, functional
from orthokern._decompositions import polar, robust_svd
from orthokern.errors import InputError, integer, one_of, require
from orthokern.nn._checks import check_exponential, check_loaded_orthogonal, readable
from orthokern.nn.exprnn import exponential, skew_from
from orthokern.nn.nonnormal import schur_product, triangular_mask
from orthokern.ops._checks import strided
from orthokern.ops._linear import linear

__all__ = ["Cayley", "Exponential", "FactorizedSpectrum", "Householder", "SchurForm"]

INSIDE = 1e-3  # distance of a spectrum from the ends of its range, relative to the margin: keeps its parameter finite
DEFECTIVE = 1e-6  # accepted size of entries above Theta's blocks, relative to |W|_F

# Eigenvectors whose smallest singular value is below this are dependent: rounding to float32 or float64 splits those of
# a Jordan block of two by about the root of eps, those of larger blocks by less.
DEPENDENT = 1e-7
NOT_DIAGONALISABLE = "SchurForm: weight has (almost) dependent eigenvectors; accepted: a diagonalisable one"


def _check_weight(name: str, weight: Tensor, shape: tuple[int, ...] | None = None, *, square: bool = False) -> Tensor:
    """The weight in float64, if it is a matrix with values, and finite. shape: the accepted one, None for any."""
    label = f"{name}: weight"
    is_float = isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.float64)
    shown = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
    require(is_float, label, "a float32 or float64 tensor", shown)
    strided(label, weight)
    require(not weight.is_meta, label, "a tensor with values, as after Module.to_empty", "one on the meta device")
    fits = weight.dim() == 2 and weight.numel() > 0 and (not square or weight.shape[0] == weight.shape[1])
    fits = tuple(weight.shape) == shape if shape is not None else fits
    sides = list(shape) if shape is not None else "[N,N]" if square else "[N,M]"
    require(fits, label, f"of the shape {sides}, nothing empty", f"shape {list(weight.shape)}")
    if shape is not None:
        require(bool(weight.isfinite().all()), label, "finite", "NaN or infinity")
    return weight.detach().double()


class _Based(nn.Module):
    """An orthogonal matrix B [N,N] as a buffer, checked when it is loaded."""

    base: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        n = len(_check_weight(type(self).__name__, weight, square=True))
        self.register_buffer("base", torch.eye(n, dtype=weight.dtype, device=weight.device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_loaded_orthogonal(f"{prefix}base", state_dict.get(f"{prefix}base"), self.base)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Trivialized(_Based):
    """W = B f(A), A = L - L^T from the strictly lower triangle L of the parameter [N,N], f(0) = I; det W = det B."""

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """Zeros [N,N], with the orthogonal matrix nearest to weight [N,N] as the base."""
        self.base.copy_(polar(_check_weight(type(self).__name__, weight, tuple(self.base.shape))))
        return torch.zeros_like(self.base)


def _exponential(name: str, x: Tensor) -> Tensor:
    """`exponential` of a parameter x [N,N]; an error with its name if x is too large or not finite."""
    p = exponential(x)
    check_exponential(f"{name}: the parameter", x, p)
    return p


class Exponential(_Trivialized):
    """Orthogonal W = B exp(A) [N,N] by orthokern.functional.skew_exp (Lezcano-Casado and Martinez-Rubio 2019).

    A = L - L^T is skew-symmetric, L the strictly lower triangle of the parameter [N,N]; B, a buffer, is the orthogonal
    matrix nearest to the weight at registration, and A is then 0.

    Args:
        weight: the tensor [N,N] to constrain, float32 or float64.

    Example::

        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = torch.nn.Linear(8, 8)
        >>> w = register_parametrization(layer, "weight", Exponential(layer.weight)).weight
        >>> bool(((w.mT @ w - torch.eye(8)).abs() < 1e-5).all())
        True
    """

    @_autocast.keeps_dtype
    def forward(self, x: Tensor) -> Tensor:
        """x [N,N] -> W [N,N]; of x only the strictly lower triangle is used."""
        return linear(self.base, _exponential("Exponential", x).mT)


class Cayley(_Trivialized):
    """Orthogonal W = B (I - A/2)^-1 (I + A/2) [N,N]: the Cayley map as in torch and geotorch, with the derivative of
    exp(A) at A = 0.

    A and B are those of Exponential. B^T W rotates by angles below pi: no A gives a W for which B^T W has the
    eigenvalue -1.

    Args:
        weight: the tensor [N,N] to constrain, float32 or float64.

    Example::

        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = torch.nn.Linear(8, 8)
        >>> w = register_parametrization(layer, "weight", Cayley(layer.weight)).weight
        >>> bool(((w.mT @ w - torch.eye(8)).abs() < 1e-5).all())
        True
    """

    @_autocast.keeps_dtype
    def forward(self, x: Tensor) -> Tensor:
        """x [N,N] -> W [N,N]; of x only the strictly lower triangle is used."""
        a = skew_from(x)
        eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
        # I + (I - A/2)^-1 A is the same matrix, and rounds against the correction only
        return self.base + linear(self.base, torch.linalg.solve(eye - a / 2, a).mT)


class Householder(nn.Module):
    """W [N,K] with orthonormal columns for K <= N, or orthonormal rows for K > N.

    The columns are the first K of a product of K reflections I - 2 v v^T / v^T v, each times a sign, 1 or -1.

    Compact WY form: with unit columns v_i of V, H_1 ... H_K = I - V T^-1 V^T, T = triu(V^T V, 1) + I/2 (Joffrain et al.
    2006; Mhammedi et al. 2017 for networks). O(N K^2) operations; no matrix of size N x N is formed. The signs
    [min(N, K)] are a buffer.

    Args:
        weight: the tensor [N,K] to constrain, float32 or float64.

    Example::

        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = torch.nn.Linear(8, 8)
        >>> register_parametrization(layer, "weight", Householder(layer.weight)).weight.shape
        torch.Size([8, 8])
    """

    signs: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        n, k = _check_weight("Householder", weight).shape
        self.shape, self.wide = (n, k), k > n
        self.register_buffer("signs", torch.ones(min(n, k), dtype=weight.dtype, device=weight.device))

    @_autocast.keeps_dtype
    def forward(self, x: Tensor) -> Tensor:
        """x [N,K] -> W [N,K]. The reflection vectors are the columns of the lower trapezoid of x, or for K > N the rows
        of its upper trapezoid, of any length above 0.

        Raises InputError for a column of zeros on a CPU; elsewhere W is NaN.
        """
        q = self._columns(x.mT) if self.wide else self._columns(x)
        return q.mT if self.wide else q

    def _columns(self, x: Tensor) -> Tensor:
        n, k = x.shape
        x = x.tril()
        with torch.no_grad():
            largest = x.abs().amax(0)
            if readable(largest) and not bool(largest.all()):
                which = f"{'row' if self.wide else 'column'} {int((largest == 0).nonzero()[0])}"
                raise InputError(f"Householder: {which} of the parameter must not be zero from its diagonal on")
        v = torch.nn.functional.normalize(x / largest, dim=0, eps=0.0)  # the squares of x may leave the range of x
        eye = torch.eye(k, dtype=x.dtype, device=x.device)
        t = linear(v.mT, v.mT).triu(1) + eye / 2
        first = torch.eye(n, k, dtype=x.dtype, device=x.device)
        return (first - linear(v, torch.linalg.solve_triangular(t, v[:k].mT, upper=True).mT)) * self.signs

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """Reflection vectors [N,K] of the nearest matrix with orthonormal columns (or rows)."""
        rest = polar(_check_weight("Householder", weight, self.shape))
        # LAPACK's reflections, with a 1 on the diagonal; tau is 0 instead of the reflection of a unit vector
        packed, tau = torch.geqrf(rest.mT if self.wide else rest)
        signs = packed.diagonal().sign()
        vectors = packed.tril(-1) + torch.eye(*packed.shape, dtype=packed.dtype, device=packed.device)
        vectors = torch.nn.functional.normalize(vectors, dim=0)
        self.signs.copy_(torch.where(tau == 0, -signs, signs))
        return (vectors.mT if self.wide else vectors).to(self.signs.dtype).contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        signs = state_dict.get(f"{prefix}signs")
        if isinstance(signs, Tensor) and not signs.is_meta:
            require(bool((signs.abs() == 1).all()), f"{prefix}signs", "numbers 1 and -1", "others")
        super()._load_from_state_dict(state_dict, prefix, *args)


class FactorizedSpectrum(nn.Module):
    """W = U diag(s) V^T [N,M] with orthonormal U [N,K], V [M,K] and s within a margin of 1 (Vorontsov et al. 2017).

    U and V are products of K reflections (see Householder); s is orthokern.functional.spectrum of its parameter.

    Args:
        weight: the tensor [N,M] to constrain, float32 or float64.
        margin: m >= 0: s in (1 - m, 1 + m). None: s is free.
        spectrum_map: "sigmoid" or "tanh", as in orthokern.functional.spectrum.
        rank: K, at most min(N, M); None: min(N, M).

    Example::

        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = torch.nn.Linear(8, 8)
        >>> register_parametrization(layer, "weight", FactorizedSpectrum(layer.weight)).weight.shape
        torch.Size([8, 8])
    """

    def __init__(
        self, weight: Tensor, margin: float | None = 0.1, spectrum_map: str = "sigmoid", rank: int | None = None
    ) -> None:
        super().__init__()
        n, m = _check_weight("FactorizedSpectrum", weight).shape
        self.shape, self.rank = (n, m), min(n, m) if rank is None else integer("rank", rank, 1, min(n, m))
        self.margin, self.spectrum_map = margin, one_of("spectrum_map", spectrum_map, functional.SPECTRUM_MAPS)
        functional.spectrum(weight.new_zeros(1), margin)  # its check of the margin
        self.left = Householder(weight.new_empty(n, self.rank))
        self.right = Householder(weight.new_empty(m, self.rank))

    @_autocast.keeps_dtype
    def forward(self, left: Tensor, p: Tensor, right: Tensor) -> Tensor:
        """left [N,K], p [K], right [M,K] -> W [N,M]."""
        s = functional.spectrum(p, self.margin, self.spectrum_map)
        u: Tensor = self.left(left)
        return linear(u * s, self.right(right))

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(left, p, right) of the nearest matrix of this kind: the K largest singular values are kept, and moved into
        the margin."""
        w = _check_weight("FactorizedSpectrum", weight, self.shape)
        u, s, vh = robust_svd(w)
        u, s, v = u[:, : self.rank], s[: self.rank], vh[: self.rank].mT
        if self.margin is None:
            p = s
        elif self.margin == 0:
            p = torch.zeros_like(s)
        else:
            p = ((s - 1) / self.margin).clamp(INSIDE - 1, 1 - INSIDE).atanh()
            p = 2 * p if self.spectrum_map == "sigmoid" else p
        dtype = self.left.signs.dtype
        return self.left.right_inverse(u.to(dtype)), p.to(dtype), self.right.right_inverse(v.to(dtype))


class SchurForm(_Based):
    """W = P Theta P^T [N,N] as in orthokern.nn.NonNormalRNN: eigenvalues gamma_i exp(+-i theta_i), free T below.

    P = B exp(A), as in Exponential; its base B is a buffer. Parameters: that of A [N,N], gamma [ceil(N/2)],
    theta [floor(N/2)] in radians, T [N,N].

    `right_inverse` computes this form of any matrix that has a full set of eigenvectors; real eigenvalues are paired by
    size. A 2 x 2 block that is not a rotation times a scalar is replaced by the nearest one of this kind, with a
    warning if its eigenvalues have opposite signs (as one pair of an orthogonal W with determinant -1). Rotations are
    represented up to rounding, and so are matrices that this class has computed, unless an angle theta is exactly 0 or
    pi, and the angle of a later block is not.

    Args:
        weight: the tensor [N,N] to constrain, float32 or float64.

    Raises:
        InputError: a matrix whose eigenvectors are linearly dependent or nearly so.

    Example::

        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> layer = torch.nn.Linear(8, 8)
        >>> _ = torch.nn.init.eye_(layer.weight)
        >>> register_parametrization(layer, "weight", SchurForm(layer.weight)).weight.shape
        torch.Size([8, 8])
    """

    @_autocast.keeps_dtype
    def forward(self, x: Tensor, gamma: Tensor, theta: Tensor, triangle: Tensor) -> Tensor:
        """x [N,N], gamma [ceil(N/2)], theta [floor(N/2)], triangle [N,N] -> W [N,N]."""
        p = linear(self.base, _exponential("SchurForm", x).mT)
        return schur_product(p, gamma, theta, triangle * triangular_mask(len(p), p.device))

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(zeros, gamma, theta, T), with P as the base; see the class."""
        w = _check_weight("SchurForm", weight, tuple(self.base.shape))
        n = len(w)
        p = torch.linalg.qr(_real_eigenbasis(w.mT)).Q
        form = p.mT @ w @ p
        above = form[triangular_mask(n, w.device).mT]
        if float(torch.linalg.vector_norm(above)) > DEFECTIVE * float(torch.linalg.matrix_norm(w)):
            raise InputError(NOT_DIAGONALISABLE)
        diagonal, end = form.diagonal(), n // 2 * 2
        real = (diagonal[:end:2] + diagonal[1:end:2]) / 2
        imaginary = (form.diagonal(-1)[:end:2] - form.diagonal(1)[:end:2]) / 2
        gamma, theta = torch.cat([torch.hypot(real, imaginary), diagonal[end:]]), torch.atan2(imaginary, real)
        if (gamma[: n // 2] < DEFECTIVE * w.norm()).any() and float(
            torch.linalg.svdvals(w).min()
        ) > DEFECTIVE * w.norm():
            warnings.warn(
                "SchurForm: two real eigenvalues of opposite sign became a pair of modulus 0, which makes the weight "
                "singular; accepted without loss: real eigenvalues in pairs of equal ones",
                stacklevel=2,
            )
        self.base.copy_(p)
        dtype, triangle = self.base.dtype, form * triangular_mask(n, w.device)
        return torch.zeros_like(self.base), gamma.to(dtype), theta.to(dtype), triangle.to(dtype)


def _real_eigenbasis(w: Tensor) -> Tensor:
    """Eigenvectors of w [N,N] in real columns: real and imaginary part of one of each complex pair, then the real ones,
    by size of their eigenvalue.

    Whether a 2 x 2 block of the Schur form only rotates and scales depends on the order of the pairs: it does if
    z^T z = 0 outside of the span of the pairs before. The pair that is nearest to that is always next.
    """
    values, vectors = torch.linalg.eig(w)  # unit columns
    if float(torch.linalg.svdvals(vectors)[-1]) < DEPENDENT:
        raise InputError(NOT_DIAGONALISABLE)
    real = values.imag == 0
    pairs = vectors[:, values.imag > 0]
    columns = [w.new_zeros(len(w), 0)]
    for _ in range(pairs.shape[1]):
        pairs = pairs / torch.linalg.vector_norm(pairs, dim=0)
        best = int((pairs * pairs).sum(0).abs().argmin())
        z = pairs[:, best]
        plane = torch.linalg.qr(torch.stack([z.real, z.imag], 1)).Q
        columns.append(plane)
        pairs = torch.cat([pairs[:, :best], pairs[:, best + 1 :]], 1)
        pairs = pairs - plane.to(pairs.dtype) @ (plane.mT.to(pairs.dtype) @ pairs)
    sizes, order = values.real[real].sort()
    if len(order) % 2:  # the last of an odd number has no partner: the one without which the others pair best
        gaps = sizes.diff().square()
        costs = [float(gaps[:i:2].sum() + gaps[i + 1 :: 2].sum()) for i in range(0, len(order), 2)]
        single = 2 * costs.index(min(costs))
        order = torch.cat([order[:single], order[single + 1 :], order[single : single + 1]])
    return torch.cat([*columns, vectors.real[:, real][:, order]], dim=1)
