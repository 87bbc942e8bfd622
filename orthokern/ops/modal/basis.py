"""The eigenbasis of a recurrent matrix in real form: computed once, then refined after each change of the matrix.

Note [Modes of a recurrent matrix]
    Let W = Q Lambda Q^-1 be real [N, N], with P pairs of conjugate eigenvalues and N - 2P real ones. There are
    M = N - P modes: a pair is one mode, with the eigenvalue lambda = a + ib with b > 0. A state is
    h = sum_j Re(q_j z_j), in real numbers h = R z with z = [Re z_1 ... Re z_M, Im z_1 ... Im z_M] and
    R = [Re q_1 ..., -Im q_1 ...] [N, 2M], and W maps z_j to lambda_j z_j: h_t = W h_{t-1} + e_t becomes
    z_t = lambda z_{t-1} + R^-1 e_t, mode by mode. The imaginary part of a real mode's z is always 0: its column of R
    and its row of R^-1 are zeros. Without these, R and R^-1 are inverse to each other.

    q_j has the norm sqrt(2) for a pair and 1 for a real eigenvalue, so that R of a normal W, such as an orthogonal one,
    is orthogonal.

Note [Refining a basis]
    A training step changes W little. In the basis R of an earlier W, D = R^-1 W R is nearly diagonal. As a map of
    complex vectors it is z -> A z + B conj(z), and for the change of basis z -> z + E z + F conj(z) the terms of first
    order cancel where

        E_jk = A_jk / (lambda_k - lambda_j),      F_jk = B_jk / (conj(lambda_k) - lambda_j),

    with lambda the diagonal of D. R <- R (1 + E) then leaves terms of second order: convergence is quadratic. Elements
    below the rounding of D are ignored, so that equal eigenvalues with good eigenvectors cause no error. The result
    depends on W and the start R only; started from its own result, the refinement takes no step and returns the same
    bits.

    W = U diag(s) V^T of rank K < N has N - K eigenvalues 0, whose eigenvectors may be any basis of the null space of
    V^T. These modes come last; among them D vanishes, lambda is 0 by definition, and no E is needed.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

MAX_STEPS = 6  # of a refinement; quadratic convergence from 0.1 takes four
FARTHEST = 0.3  # largest element of E from which the refinement may converge
REFINED = {torch.float32: 2.0**-27, torch.float64: 2.0**-40}  # largest element of E at the end, by dtype of the call
EPSILON = torch.finfo(torch.float64).eps


class NoBasis(Exception):
    """W has no usable eigenbasis; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Basis:
    """The eigenbasis of a W [N, N], see Note [Modes of a recurrent matrix]; all float64, on the device of W."""

    re: Tensor  # [M], of the eigenvalues
    im: Tensor  # [M], above 0, or 0 for a real eigenvalue
    right: Tensor  # R [N, 2M]
    left: Tensor  # R^-1 [2M, N]
    nulls: int  # number of modes, the last ones, in the null space of a factored W
    condition: float  # |R|_F |R^-1|_F / N, by which R enlarges a rounding error on average: 1 for a normal W
    steps: int  # of the refinement

    @property
    def values(self) -> Tensor:
        """The eigenvalues [M], complex128."""
        return torch.complex(self.re, self.im)

    def neglected(self, w: Tensor, T: int) -> float:
        """The relative change of a state in T steps by the part of w [N, N] outside its diagonal form, at most.

        The largest of |A_jk| and |B_jk|, divided by the distance of the two eigenvalues, but at least 1 / T. Near a
        defective W it is large even where A and B are rounding errors, since these are large too.
        """
        values, pairs = self.values, self.right.shape[0] - len(self.re)
        a, b = (part.abs() for part in to_complex(self.left @ (w @ self.right)))
        a.fill_diagonal_(0)
        b.diagonal()[pairs:] = 0
        null = slice(len(values) - self.nulls, len(values))
        a[null, null] = 0
        b[null, null] = 0
        same, crossed = (values - values[:, None]).abs(), (values.conj() - values[:, None]).abs()
        return float(torch.maximum(a / same.clamp(min=1 / T), b / crossed.clamp(min=1 / T)).max())


def to_complex(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A real map [2M, 2M] of modal coordinates as z -> A z + B conj(z): A, B [M, M], complex."""
    M = blocks.shape[0] // 2
    rr, ri, ir, ii = blocks[:M, :M], blocks[:M, M:], blocks[M:, :M], blocks[M:, M:]
    return torch.complex(rr + ii, ir - ri) / 2, torch.complex(rr - ii, ir + ri) / 2


def to_real(a: Tensor, b: Tensor) -> Tensor:
    """The inverse of ``to_complex``."""
    top = torch.cat([a.real + b.real, b.imag - a.imag], 1)
    return torch.cat([top, torch.cat([a.imag + b.imag, a.real - b.real], 1)])


def diagonalise(
    w: Tensor, start: Tensor | None = None, *, v: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Basis:
    """The eigenbasis of w [N, N], float64, by refinement of ``start`` where that converges, else by an eigensolver. It
    depends on the arguments only. NoBasis if w is not finite, or has no basis in which it is diagonal to rounding.

    Args:
        start: R [N, 2M] of an earlier call, or None.
        v: [N, K], float64, of w = U diag(s) V^T with K < N; None: w may have any rank.
        dtype: of the call that uses the basis; a basis for float32 is less accurate. (The error of the eigenvalues is
            of second order, 1e-16 for float32 too.)
    """
    nulls = 0 if v is None else v.shape[0] - v.shape[1]
    if not bool(w.isfinite().all()):
        raise NoBasis("W is not finite")
    if start is not None:
        try:
            return _refined(w, start, nulls, REFINED[dtype])
        except NoBasis:
            pass
    return _refined(w, _solved(w, v, nulls), nulls, REFINED[dtype])


def _solved(w: Tensor, v: Tensor | None, nulls: int) -> Tensor:
    """R from LAPACK's eigensolver, on the host."""
    device, w = w.device, w.cpu()
    N = w.shape[0]
    if nulls:
        # W = C V^T, C = U diag(s): W C y = C (V^T C) y, so the other eigenvectors are C y with y of V^T C [K, K].
        # (V V^+ replaces V V^T, since the columns of V are orthonormal in float32 precision only.)
        assert v is not None
        v = v.cpu()
        q, r = torch.linalg.qr(v, mode="complete")
        core = w @ torch.linalg.solve_triangular(r[: N - nulls].mT, q[:, : N - nulls], upper=False, left=False)
        null = q[:, N - nulls :]
        w = v.mT @ core
    try:
        values, vectors = torch.linalg.eig(w)
    except RuntimeError as error:  # LAPACK's iteration did not converge
        raise NoBasis(f"the eigensolver failed: {' '.join(str(error).split())}") from None
    pairs, real = values.imag > 0, values.imag == 0
    if nulls:
        vectors = core.to(vectors.dtype) @ vectors
    columns = [vectors[:, pairs], vectors[:, real].real.to(vectors.dtype)]
    if nulls:
        columns.append(null.to(vectors.dtype))
    q = torch.cat(columns, 1)
    right = torch.cat([q.real, -q.imag], 1)
    return _normed(right, int(pairs.sum())).to(device)


def _normed(right: Tensor, pairs: int) -> Tensor:
    """R with columns of the norms in Note [Modes of a recurrent matrix]; the first ``pairs`` modes are pairs."""
    M = right.shape[1] // 2
    norms = (right[:, :M].square() + right[:, M:].square()).sum(0).sqrt()
    norms[:pairs] /= math.sqrt(2.0)
    return right / norms.repeat(2)


@dataclasses.dataclass(frozen=True)
class _Look:
    """One evaluation of Note [Refining a basis]."""

    left: Tensor  # R^-1 [2M, N], with rows of zeros for the imaginary parts of real modes
    values: Tensor  # [M], complex128, the eigenvalues
    e: Tensor  # E [M, M]
    f: Tensor  # F [M, M]
    largest: float  # the largest element of E and F
    condition: float  # of R; infinite where it is singular
    null_space: bool  # the last modes span the null space
    paired: bool  # no pair of eigenvalues has become real


def _look(w: Tensor, right: Tensor, nulls: int) -> _Look:
    N, M = right.shape[0], right.shape[1] // 2
    pairs = N - M
    bound = (w.abs().sum(0).max() * w.abs().sum(1).max()).sqrt()  # of |W|_2
    null = slice(M - nulls, M)
    inverse, info = torch.linalg.inv_ex(right[:, :N])
    left = torch.cat([inverse, inverse.new_zeros(M - pairs, N)])
    a, b = to_complex(left @ (w @ right))
    values = a.diagonal().clone()
    values[pairs:] += b.diagonal()[pairs:]  # for a real mode, A and B hold half each
    values[null] = 0
    a.fill_diagonal_(0)
    b.diagonal()[pairs:] = 0
    remains = (a[null, null] + b[null, null]).abs()
    a[null, null] = 0
    b[null, null] = 0
    sizes = left.square().sum(1).view(2, M).sum(0).sqrt(), right.square().sum(0).view(2, M).sum(0).sqrt()
    condition = torch.where(info == 0, left.norm() * right.norm() / N, torch.inf)
    rounding = EPSILON * bound * condition * torch.outer(*sizes)  # of D, mostly from the inverse
    e = torch.where(a.abs() <= rounding, 0, a / (values - values[:, None]))
    f = torch.where(b.abs() <= rounding, 0, b / (values.conj() - values[:, None]))
    facts = (
        torch.maximum(e.abs().max(), f.abs().max()),
        condition,
        (remains <= 1e3 * rounding[null, null]).all(),
        (values.imag[:pairs] > 0).all(),
    )
    largest, size, null_space, paired = torch.stack([fact.double() for fact in facts]).tolist()  # one synchronisation
    return _Look(left, values, e, f, largest, size, bool(null_space), bool(paired))


def _refined(w: Tensor, right: Tensor, nulls: int, enough: float) -> Basis:
    """Note [Refining a basis]."""
    N, M = right.shape[0], right.shape[1] // 2
    right = torch.cat([right[:, :N], torch.zeros_like(right[:, N:])], 1)  # no imaginary parts of real modes
    last = math.inf
    for step in range(MAX_STEPS + 1):
        look = _look(w, right, nulls)
        if not math.isfinite(look.condition):
            raise NoBasis("its eigenvectors are linearly dependent (W is defective)")
        if look.largest <= enough:
            if not look.null_space:
                raise NoBasis("the null space of V^T is not where the basis has it")
            if not look.paired:
                raise NoBasis("a pair of its eigenvalues has become real")
            im = look.values.imag.clone()
            im[N - M :] = 0
            return Basis(look.values.real.clone(), im, right, look.left, nulls, look.condition, step)
        if not look.largest < min(FARTHEST, last):
            raise NoBasis(
                f"it is not diagonal in its eigenvectors (what remains is {look.largest:.1g}, their condition "
                f"{look.condition:.1g}): W is defective, or eigenvalues are nearly equal"
            )
        last = look.largest
        right = _normed(right + right @ to_real(look.e, look.f), N - M)
    raise NoBasis(f"the refinement of its eigenvectors has not converged in {MAX_STEPS} steps")
