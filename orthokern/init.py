# Longer than 600 lines: a third of them are docstrings.
"""Initialisations of the recurrent matrix, in place, all reproducible through `generator`.

Conventions. Matrices act on columns, h_t = W h_{t-1}. "Block (0, s; -s, 0)" is the skew-symmetric matrix
A = [[0, s], [-s, 0]], whose exponential is the rotation [[cos s, sin s], [-sin s, cos s]]. Angles are in radians.

Numbers are drawn on the CPU in float64, then rounded to the dtype and copied to the device of the tensor. A seed
therefore gives the same matrix on every device, and a float32 basis is orthonormal up to float32 rounding.
`generator=None` uses torch's global CPU generator; a given generator must be on the CPU. Tensors on the meta device are
not changed. Every function returns its tensor t, [..., N, K] or for square matrices [..., N, N], and raises InputError
for a tensor that is not of this shape, not floating point, or not writable element by element.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from orthokern._decompositions import robust_svd
from orthokern._products import ieee_products
from orthokern.errors import InputError, unknown_name
from orthokern.ops._checks import strided

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


def _check_writable(t: Tensor, name: str, argument: str) -> None:
    """Rejects a tensor that cannot be filled: one that is not strided, or whose elements share memory."""
    strided(f"{name}: {argument}", t)
    span = 0  # of the dimensions so far, in elements, from the smallest stride on
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= span:
            raise InputError(
                f"{name}: elements of {argument} share memory (shape {list(t.shape)}, strides {list(t.stride())}, as "
                "of an expanded tensor); accepted: a tensor whose elements each have a place"
            )
        span += (size - 1) * stride


def _check(t: Tensor, name: str, *, square: bool = False) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise InputError(f"{name}: t must be a floating point tensor, got {getattr(t, 'dtype', type(t).__name__)}")
    if t.dim() < 2 or t.numel() == 0:
        raise InputError(f"{name}: t has shape {tuple(t.shape)}; accepted: [..., N, K] with N and K at least 1")
    if square and t.shape[-1] != t.shape[-2]:
        raise InputError(f"{name}: t has shape {tuple(t.shape)}; accepted: square matrices [..., N, N]")
    _check_writable(t, name, "t")


def _checked_angle(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < float(value) <= math.pi:
        raise InputError(f"max_angle must be an angle in radians, above 0 and at most pi, got {value!r}")
    return float(value)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * (high - low) + low


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


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
    w[..., even, even] = angle.cos()
    w[..., even + 1, even + 1] = angle.cos()
    w[..., even, even + 1] = angle.sin()
    w[..., even + 1, even] = -angle.sin()
    return w


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
    _check(t, "haar_orthogonal_")
    return t if t.is_meta else t.copy_(_haar(tuple(t.shape), generator))


@torch.no_grad()
def henaff_(t: Tensor, generator: torch.Generator | None = None, *, max_angle: float = math.pi) -> Tensor:
    """Fill t [..., N, N] with W = exp(A), A block-diagonal with blocks (0, s; -s, 0), s ~ U(-max_angle, max_angle)
    (Henaff, Szlam and LeCun 2016, with pi).

    W is a block rotation by independent angles s, computed in closed form. An odd N ends in a 1 (a zero block of
    side one). Some released code draws s from U(-pi, 0): the eigenvalue pairs exp(+-is) have the same distribution.
    max_angle is in (0, pi]; Note [The largest angle].

    Example::

        >>> w = henaff_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    _check(t, "henaff_", square=True)
    angle = _checked_angle(max_angle)
    if t.is_meta:
        return t
    n = t.shape[-1]
    return t.copy_(_rotations(_uniform((*t.shape[:-2], n // 2), -angle, angle, generator), n))


@torch.no_grad()
def cayley_(t: Tensor, generator: torch.Generator | None = None, *, max_angle: float = math.pi / 2) -> Tensor:
    """Fill t [..., N, N] with W = (I + A)^-1 (I - A), A with blocks (0, s; -s, 0), s = -tan(u/2), u ~ U(0, max_angle)
    (Helfrich, Willmott and Ye 2018, with pi/2).

    s = -sqrt((1 - cos u) / (1 + cos u)), and this Cayley map turns it into a rotation by exactly u: every block
    rotates by an angle in (0, max_angle), so W has eigenvalues exp(+-iu), and with pi/2 none near -1. With the same s
    in the exponential, as in expRNN, the angle is tan(u/2). An odd N ends in a 1. max_angle is in (0, pi]; Note [The
    largest angle].

    Example::

        >>> w = cayley_(torch.empty(4, 4))
        >>> bool(((w.mT @ w - torch.eye(4)).abs() < 1e-5).all())
        True
    """
    _check(t, "cayley_", square=True)
    angle = _checked_angle(max_angle)
    if t.is_meta:
        return t
    n = t.shape[-1]
    return t.copy_(_rotations(_uniform((*t.shape[:-2], n // 2), 0.0, angle, generator), n))


@torch.no_grad()
def identity_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with ones on the diagonal and zeros elsewhere (Le, Jaitly and Hinton 2015). Draws nothing;
    `generator` is ignored.

    Example::

        >>> identity_(torch.empty(2, 2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    _check(t, "identity_")
    return t if t.is_meta else t.copy_(torch.eye(t.shape[-2], t.shape[-1], device="cpu"))


@torch.no_grad()
def glorot_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent normals of variance 2 / (N + K) (Glorot and Bengio 2010, the normal variant).

    For a square W the singular values fill (0, 2): no orthogonality.

    Example::

        >>> glorot_(torch.empty(64, 32)).shape
        torch.Size([64, 32])
    """
    _check(t, "glorot_")
    if t.is_meta:
        return t
    return t.copy_(_normal(tuple(t.shape), generator) * math.sqrt(2.0 / (t.shape[-1] + t.shape[-2])))


@torch.no_grad()
def glorot_uniform_(t: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent uniforms in +- sqrt(6 / (N + K)) (Glorot and Bengio 2010, the "normalized
    initialization"): the variance of `glorot_`.

    Example::

        >>> bool((glorot_uniform_(torch.empty(3, 3)).abs() <= 1.0).all())
        True
    """
    _check(t, "glorot_uniform_")
    if t.is_meta:
        return t
    limit = math.sqrt(6.0 / (t.shape[-1] + t.shape[-2]))
    return t.copy_(_uniform(tuple(t.shape), -limit, limit, generator))


@torch.no_grad()
def normal_(t: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill t [..., N, K] with independent normals of mean 0 and standard deviation `std`.

    Raises InputError for a std that is no number, not finite or not above 0.

    Example::

        >>> normal_(torch.empty(64, 32), 0.01).shape
        torch.Size([64, 32])
    """
    _check(t, "normal_")
    try:
        accepted = 0.0 < std < math.inf
    except TypeError:  # no number
        accepted = False
    if not accepted:
        raise InputError(f"normal_: std must be finite and above 0, got {std!r}")
    return t if t.is_meta else t.copy_(_normal(tuple(t.shape), generator) * std)


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
    _check(t, "learned_")
    if t.is_meta:
        return t
    w = torch.empty(t.shape, dtype=torch.float64, device="cpu")
    w = glorot_uniform_(w, generator) if std is None else normal_(w, std, generator)
    found = learned_orthogonal_(w, tol=8.0 * min(t.shape[-2:]) * torch.finfo(w.dtype).eps ** 2)
    missed = int((~found.converged).sum())
    if missed:
        start = "Glorot's" if std is None else f"std {std:g}, which is too small to grow from"
        raise InputError(
            f"learned_: {missed} of {found.converged.numel()} matrices did not become orthogonal from {start}"
        )
    return t.copy_(w)


@dataclass(frozen=True)
class LearnedOrthogonality:
    """The result of `learned_orthogonal_` for matrices W [..., n, m]; every tensor has the shape [...], on W's device.

    Attributes:
        steps: int64, number of steps.
        error: dtype of W, ||W W^T - I||_F^2 (of the smaller Gram matrix) of the result.
        converged: bool, whether the error is below the tolerance.
        diverged: bool, whether a step left the region of convergence; W is then unchanged.
        scale: dtype of W, the factor by which the guard scaled W before the first step; 1 if it was not needed.
    """

    steps: Tensor
    error: Tensor
    converged: Tensor
    diverged: Tensor
    scale: Tensor


@torch.no_grad()
@ieee_products()
def learned_orthogonal_(
    W: Tensor, lr: float = 0.1, tol: float = 1e-6, max_steps: int = 1000, *, guard: bool = True
) -> LearnedOrthogonality:
    """Make matrices orthogonal by gradient descent on ||W W^T - I||_F^2, each until it is below the tolerance (Manchev
    and Spratling, section II-A, eq. 16 to 18).

        W <- W - 4 lr (W W^T - I) W          (n <= m; else W <- W - 4 lr W (W^T W - I): the smaller Gram matrix)

    Args:
        W: [..., n, m] float32 or float64, in place; every matrix on its own. Rows become orthonormal if n <= m, columns
            otherwise.
        lr: the rate, above 0 and below 0.25 (from there on an orthogonal matrix repels).
        tol: a matrix is done when ||W W^T - I||_F^2 is below it.
        max_steps: largest number of steps per matrix.
        guard: first scale down a matrix that may be outside of the region from which the descent converges. False is
            the published rule, which may diverge.

    Returns:
        A `LearnedOrthogonality` with the steps, error and convergence of every matrix. All entries stay finite.

    Raises:
        InputError: W is not a float32 or float64 [..., n, m] or has an entry that is not finite; a matrix is zero (and
            would stay zero); lr, tol or max_steps is out of range; or tol is below rounding.

    Cost: 4 n m min(n, m) flops per step and matrix. A finished matrix is replaced by another one of the batch, so the
    cost of a batch is proportional to the sum of all steps, not to those of the slowest matrix. One synchronisation
    with the device per step.

    Example::

        >>> w = 0.3 * torch.eye(4, 6)
        >>> bool(learned_orthogonal_(w).converged), bool(((w @ w.mT - torch.eye(4)).abs() < 1e-3).all())
        (True, True)

    Note [Convergence of learned orthogonality]
        With c = 4 lr and W = U S V^T a step does not change U and V, and maps every singular value
            s -> s (1 + c - c s^2),
        whose fixed points are 0, which repels, and 1 and -1, which attract for c < 1 (a negative s is a flipped column
        of U). |s| grows without end as soon as s^2 > 1 + 2 / c, and for lr = 0.1 that is |s| > 2.45: "always converges"
        (section II-A) holds inside that region only, which normal matrices of standard deviation 0.1 leave near
        n = 150.
        The certificate of divergence. For k singular values, sum (s^2 - 1)^2 > k (2 / c)^2 means that one is outside.
        The guard. G = W W^T has the eigenvalues s^2, so max s^2 <= ||G^8||_F^(1/8): an upper bound, where a power
        iteration would give a lower one, and at most k^(1/16) too large. If it is above nine tenths of 1 + 2 / c, W is
        scaled so that the bound is (1 + c) / (2 c). From there a step multiplies every s by more than a half: the first
        by at least (1 + c) / 2, and the others, since no step ends above s^2 = 4 (1 + c)^3 / (27 c), by at least
        (1 + c) (1 - 4 (1 + c)^2 / 27). So every s stays away from the repelling 0, and converges to 1.
        A singular value 0 stays 0: a matrix of deficient rank ends unconverged, unless rounding lifts it.
    """
    _check_learned(W, lr, tol, max_steps)
    n, m = W.shape[-2:]
    shape = W.shape[:-2]
    count = math.prod(shape)
    matrices = W.reshape(count, n, m)  # a view where strides allow one
    wide = matrices if n <= m else matrices.mT
    factory: dict[str, Any] = {"device": W.device}
    result = LearnedOrthogonality(
        steps=torch.zeros(count, dtype=torch.int64, **factory),
        error=torch.zeros(count, dtype=W.dtype, **factory),
        converged=torch.zeros(count, dtype=torch.bool, **factory),
        diverged=torch.zeros(count, dtype=torch.bool, **factory),
        scale=torch.ones(count, dtype=W.dtype, **factory),
    )
    if not W.is_meta:
        if guard:
            _guard(wide, 4.0 * lr, result.scale)
        _descend(wide, 4.0 * lr, tol, max_steps, result)
        if matrices.data_ptr() != W.data_ptr():
            W.copy_(matrices.view(W.shape))
    return LearnedOrthogonality(*(getattr(result, f.name).view(shape) for f in fields(result)))


def _check_learned(W: Tensor, lr: float, tol: float, max_steps: int) -> None:
    if not isinstance(W, Tensor) or W.dtype not in (torch.float32, torch.float64):
        given = getattr(W, "dtype", type(W).__name__)
        raise InputError(f"learned_orthogonal_: W must be a tensor of torch.float32 or torch.float64, got {given}")
    if W.dim() < 2 or W.numel() == 0:
        raise InputError(f"learned_orthogonal_: W has shape {list(W.shape)}; accepted: [..., n, m], no side 0")
    _check_writable(W, "learned_orthogonal_", "W")
    for name, value in (("lr", lr), ("tol", tol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"learned_orthogonal_: {name} must be a number, got {value!r}")
    if not 0.0 < lr < 0.25:
        raise InputError(f"learned_orthogonal_: lr must be above 0 and below 0.25, got {lr!r}")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise InputError(f"learned_orthogonal_: max_steps must be an integer of at least 1, got {max_steps!r}")
    # Below an s^2 - 1 of eps / (8 lr) a step is rounded away, and the Gram matrix has a rounding of its own: measured
    # at lr = 0.1, the descent ends between 1 and 4 k eps^2 for k singular values.
    lowest = min(W.shape[-2:]) * (torch.finfo(W.dtype).eps * max(2.0, 0.25 / lr)) ** 2
    if not lowest < tol < math.inf:
        raise InputError(
            f"learned_orthogonal_: tol must be finite and above {lowest:.2g}, the rounding of {W.dtype} matrices "
            f"{list(W.shape[-2:])}, got {tol!r}"
        )
    if W.is_meta:
        return
    largest = W.abs().amax(dim=(-2, -1))
    for wrong, what in (
        (~largest.isfinite(), "has an entry that is not finite"),
        (largest == 0, "is zero, and stays so"),
    ):
        if wrong.any():
            index = wrong.nonzero()[0].tolist()
            which = f"the matrix W[{', '.join(map(str, index))}]" if index else "W"
            raise InputError(f"learned_orthogonal_: {which} {what}; accepted: finite matrices other than zero")


def _slots(w: Tensor) -> int:
    """The number of matrices w [count, k, l] to process at a time: as many as fit into the cache of a core or, on a
    GPU, as many as occupy it."""
    numbers = 2**18 if w.device.type == "cpu" else 2**25
    return max(1, min(w.shape[0], numbers // (w.shape[1] * w.shape[2])))


def _guard(w: Tensor, c: float, scale: Tensor) -> None:
    """Writes the factors [count] that scale w [count, k, l], k <= l, into the region of convergence to `scale`."""
    slots = _slots(w)
    for start in range(0, len(w), slots):
        part = w[start : start + slots]
        largest = part.abs().amax(dim=(-2, -1), keepdim=True)
        part = part / largest  # so that squares neither overflow nor vanish
        power, log = part @ part.mT, torch.zeros_like(largest)
        for _ in range(3):  # power exp(log) is G, G^2, G^4, G^8 in turn
            norm = torch.linalg.matrix_norm(power, keepdim=True)
            power, log = power / norm, log + norm.log()
            power, log = power @ power, 2.0 * log
        log = (log + torch.linalg.matrix_norm(power, keepdim=True).log()) / 8.0 + 2.0 * largest.log()
        outside = log > math.log(0.9 * (1.0 + 2.0 / c))
        factor = torch.where(outside, (0.5 * (math.log((1.0 + c) / (2.0 * c)) - log)).exp(), 1.0)
        scale[start : start + slots] = factor.flatten()


def _descend(w: Tensor, c: float, tol: float, max_steps: int, result: LearnedOrthogonality) -> None:
    """Descends from w [count, k, l], k <= l, to orthonormal rows, in place, and fills the result's tensors [count].

    A pool of slots holds the matrices in progress. The slot of a finished matrix is given to the next one; when there
    are no more, the pool shrinks.
    """
    count, k, _ = w.shape
    lost = k * (2.0 / c) ** 2  # an error above it certifies divergence
    slots = _slots(w)
    taken = torch.arange(slots, device=w.device)  # which matrix is in which slot
    next_in_line = slots

    def load(which: Tensor) -> Tensor:
        return w[which] * result.scale[which].view(-1, 1, 1)

    pool = load(taken).contiguous()
    steps = torch.zeros_like(taken)
    while len(taken):
        gram = torch.bmm(pool, pool.mT)
        gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        error = torch.linalg.matrix_norm(gram).square()
        good = error < tol
        bad = ~(error <= lost)
        done = (good | bad | (steps >= max_steps)).nonzero().flatten()
        if len(done):
            ended = taken[done]
            result.steps[ended] = steps[done]
            result.error[ended] = error[done]
            result.converged[ended] = good[done]
            result.diverged[ended] = bad[done]
            kept = done[~bad[done]]
            w[taken[kept]] = pool[kept]
        pool = torch.baddbmm(pool, gram, pool, alpha=-c)
        steps += 1
        if len(done):
            fresh = min(len(done), count - next_in_line)
            refilled = done[:fresh]
            taken[refilled] = torch.arange(next_in_line, next_in_line + fresh, device=w.device)
            next_in_line += fresh
            steps[refilled] = 0
            pool[refilled] = load(taken[refilled])
            if fresh < len(done):
                stays = torch.ones(len(taken), dtype=torch.bool, device=w.device)
                stays[done[fresh:]] = False
                taken, steps, pool = taken[stays], steps[stays], pool[stays]
    _restore_errors(w, result)


def _restore_errors(w: Tensor, result: LearnedOrthogonality) -> None:
    """The errors of diverged matrices, for their unchanged w [count, k, l], in float64 to avoid overflow."""
    for index in result.diverged.nonzero().flatten().tolist():
        x = w[index].double()
        gram = x @ x.mT
        gram.diagonal().sub_(1.0)
        result.error[index] = gram.square().sum()


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
# start after 2 pi / a steps. Inputs that hardly change in this time cancel. So where neighbouring inputs are nearly
# equal, as pixels that are read in order, small angles at the start store more, and such a network learns far faster
# (docs/training.md, "Rotation angles"). The published distributions have no such parameter.
ROTATIONS = {"henaff": henaff_, "cayley": cayley_}


def check_rotations(name: str | None, max_angle: float, names: Collection[str | None] = ROTATIONS) -> None:
    """Raises InputError for a max_angle that is not one, or if the initialisation is not one of `names`."""
    _checked_angle(max_angle)
    if name not in names:
        raise InputError(f"max_angle={max_angle} with init {name!r}; accepted with init {', '.join(map(repr, names))}")


UNCONSTRAINED = ("glorot", "glorot-uniform")  # not orthogonal: a margin of the singular values does not admit them
LOWER_RANK = ("orthogonal", *UNCONSTRAINED)  # defined for W = U S V^T of rank K < N


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
        InputError: another name, a max_angle that the initialisation does not have, or a t that it does not fill.

    Example::

        >>> initialize_(torch.empty(2, 2), "identity")
        tensor([[1., 0.],
                [0., 1.]])
    """
    if name not in INITS:
        raise unknown_name("init", name, list(INITS))
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

    orthogonal: U and V independent Haar, s = 1. For K < N, W is a partial isometry of rank K.
    henaff, cayley, identity, learned: V Haar, U = W0 V with W0 the named orthogonal matrix, s = 1, so that
        W = W0 V V^T = W0. A Haar V rather than V = I because V fixes the directions that s may later scale: with V = I
        they would be the coordinate axes. Needs K = N.
    glorot, glorot-uniform: the K leading singular triplets of such a matrix, so W is that matrix (K = N) or its best
        approximation of rank K.

    Args:
        u, v: [N, K] float, K <= N; written with orthonormal columns.
        s: [K] float; written with the singular values themselves, not with the parameter of a bounded spectrum.
        name: one of INITS.
        generator: CPU generator, or None for torch's global one.
        max_angle: as in `initialize_`.

    Raises InputError for an unknown name, for K < N with henaff, cayley, identity and learned, and for a max_angle that
    the initialisation does not have.
    """
    if name not in INITS:
        raise unknown_name("init", name, list(INITS))
    n, k = u.shape
    if k < n and name not in LOWER_RANK:
        raise InputError(
            f"init {name!r} needs K = N = {n}, got K = {k}; "
            f"accepted for a lower rank: {', '.join(map(repr, LOWER_RANK))}"
        )
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
    v64 = _haar((n, k), generator)
    if name == "orthogonal":
        u64 = _haar((n, k), generator)
    else:
        w64 = torch.empty(n, n, dtype=torch.float64, device="cpu")
        u64 = initialize_(w64, name, generator, max_angle=max_angle) @ v64
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

    For recurrences with the matrix exp(A): each block turns its plane by the angle s.

    henaff: s ~ U(-pi, 0), as expRNN's first release and nnRNN's draw it. torus: s ~ U(-pi, pi), uniform on the maximal
    torus of rotations, as geotorch and the later expRNN have it (there also under the name "henaff"); the eigenvalue
    pairs exp(+-is) have the same distribution for both. cayley: s = -tan(u/2), u ~ U(0, pi/2), the generator of
    `cayley_` in the exponential, as in expRNN and nnRNN: angles in (-1, 0), where `cayley_` turns by u.
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
    _check(t, "skew_generator_", square=True)
    if name not in SKEW_INITS:
        raise unknown_name("init", name, SKEW_INITS)
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
    """Fill t [..., N, N] with Haar-distributed rotations: orthogonal matrices of determinant +1, the ones that are an
    exponential of a skew matrix. `haar_orthogonal_` has both signs.

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
    _check(t, "haar_rotation_", square=True)
    if t.is_meta:
        return t
    q = _haar(tuple(t.shape), generator)
    q[..., 0] *= torch.linalg.det(q).sign().unsqueeze(-1)
    return t.copy_(q)
