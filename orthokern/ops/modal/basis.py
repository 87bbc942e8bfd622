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
    depends on W and the start R only; started from its own result, the refinement takes no step and returns it
    unchanged.

    W = U diag(s) V^T of rank K < N has N - K eigenvalues 0, whose eigenvectors may be any basis of the null space of
    V^T. These modes come last; among them D vanishes, lambda is 0 by definition, and no E is needed.
"""

from __future__ import annotations

import dataclasses
import functools
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

    values: Tensor  # the eigenvalues [M], complex128; the imaginary part is above 0, or 0 for a real eigenvalue
    right: Tensor  # R [N, 2M]
    left: Tensor  # R^-1 [2M, N]
    rest: Tensor  # |A| and |B| [2, M, M] of Note [Refining a basis], for this basis
    gaps: Tensor  # lambda_k - lambda_j and conj(lambda_k) - lambda_j [2, M, M]
    distances: Tensor  # |gaps|, infinite where ``settled``
    settled: Tensor  # bool [2, M, M], see ``_settled``
    nulls: int  # number of modes, the last ones, in the null space of a factored W
    condition: float  # |R|_F |R^-1|_F / N, by which R enlarges a rounding error on average: 1 for a normal W
    steps: int  # of the refinement

    @functools.cached_property
    def re(self) -> Tensor:
        return self.values.real.contiguous()

    @functools.cached_property
    def im(self) -> Tensor:
        return self.values.imag.contiguous()

    def neglected(self, T: int) -> Tensor:
        """A bound of the relative change of a state in T steps by the part of W outside its diagonal form; 0-dim.

        The largest of |A_jk| and |B_jk|, divided by the distance of the two eigenvalues, but at least 1 / T. Near a
        defective W it is large even where A and B are rounding errors, since these are large too.
        """
        return (self.rest / self.distances.clamp(min=1 / T)).max()


def size_of(values: Tensor) -> Tensor:
    """|values| of complex numbers. The first ``abs`` of complex numbers on a GPU takes a second to compile."""
    return torch.hypot(values.real, values.imag)


def to_complex(blocks: Tensor) -> Tensor:
    """A real map [2M, 2M] of modal coordinates as z -> A z + B conj(z): A and B, complex [2, M, M]."""
    M = blocks.shape[0] // 2
    of_re, of_im = (torch.complex(blocks[:M], blocks[M:]) / 2).view(M, 2, M).unbind(1)
    both = of_re.new_empty(2, M, M)
    torch.add(of_re, of_im, alpha=-1j, out=both[0])
    torch.add(of_re, of_im, alpha=1j, out=both[1])
    return both


def to_real(both: Tensor) -> Tensor:
    """The inverse of ``to_complex``."""
    M = both.shape[1]
    columns = both.new_empty(M, 2, M)
    torch.add(both[0], both[1], out=columns[:, 0])
    torch.sub(both[0], both[1], out=columns[:, 1]).mul_(1j)
    return torch.view_as_real(columns).permute(3, 0, 1, 2).reshape(2 * M, 2 * M)


@functools.lru_cache(maxsize=16)
def _settled(M: int, pairs: int, nulls: int, device: torch.device) -> Tensor:
    """The elements of A and B that belong to the diagonal form, bool [2, M, M]: the diagonal of A, that of B for a real
    mode, and those of two modes in the null space. The tensor is constant, and is kept for the next calls."""
    settled = torch.zeros(2, M, M, dtype=torch.bool, device="cpu")  # the copy is complete for every stream
    settled[0].fill_diagonal_(True)
    settled[1].diagonal()[pairs:] = True
    settled[:, M - nulls :, M - nulls :] = True
    return settled.to(device)


def diagonalise(
    w: Tensor, start: Tensor | None = None, *, v: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Basis:
    """The eigenbasis of w [N, N], float64, by refinement of ``start`` if that converges, else by an eigensolver. It
    depends on the arguments only. NoBasis if w is not finite, or has no basis in which it is diagonal to rounding.

    Args:
        start: R [N, 2M] of an earlier call, or None.
        v: [N, K], float64, of w = U diag(s) V^T with K < N; None: w may have any rank.
        dtype: of the call that uses the basis; a basis for float32 is less accurate. (The error of the eigenvalues is
            of second order, 1e-16 for float32 too.)
    """
    nulls = 0 if v is None else v.shape[0] - v.shape[1]
    if start is not None:
        try:
            return _refined(w, start, nulls, REFINED[dtype])
        except NoBasis:
            pass
    return _refined(w, _solved(w, v, nulls), nulls, REFINED[dtype])


def _solved(w: Tensor, v: Tensor | None, nulls: int) -> Tensor:
    """R from LAPACK's eigensolver, on the host."""
    device, w = w.device, w.cpu()
    if not bool(w.isfinite().all()):
        raise NoBasis("W is not finite")
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
    parts = right.view(len(right), 2, -1)
    norms = torch.linalg.vector_norm(parts, dim=(0, 1))
    norms[:pairs] /= math.sqrt(2.0)
    return (parts / norms).view_as(right)


def _refined(w: Tensor, right: Tensor, nulls: int, enough: float) -> Basis:
    """Note [Refining a basis]. Every evaluation is read by the host as a whole, since a read waits for the device."""
    N, M = right.shape[0], right.shape[1] // 2
    pairs, null = N - M, slice(M - nulls, M)
    settled = _settled(M, pairs, nulls, w.device)
    if pairs < M:
        right = torch.nn.functional.pad(right[:, :N], (0, M - pairs))  # no imaginary parts of real modes
    bound = torch.linalg.vector_norm(w) * (EPSILON / N)
    last = math.inf
    for step in range(MAX_STEPS + 1):
        left = torch.nn.functional.pad(torch.linalg.inv_ex(right[:, :N])[0], (0, 0, 0, M - pairs))
        both = to_complex(left @ (w @ right))
        values = both[0].diagonal().clone()
        values[pairs:].add_(both[1].diagonal()[pairs:])  # for a real mode, A and B hold half each
        values[null] = 0
        gaps = torch.stack([values, values.conj()])[:, None] - values[:, None]
        rest, distances = size_of(both), size_of(gaps).masked_fill_(settled, torch.inf)
        facts = rest.new_zeros(5)  # written in place: one tensor for one transfer
        rows, columns = left.view(2, M, N), right.view(N, 2, M)
        sizes = torch.outer(*(torch.linalg.vector_norm(t, dim=d) for t, d in ((rows, (0, 2)), (columns, (0, 1)))))
        torch.linalg.vector_norm(sizes, out=facts[0])
        torch.mul(facts[0], bound, out=facts[1])
        rounding = sizes * facts[1]  # of the elements of D, mostly from the inverse
        small = rest <= rounding
        torch.amax((rest / distances).masked_fill_(small, 0), (0, 1, 2), out=facts[2])
        torch.amin(values.imag[: pairs or M], 0, out=facts[3])
        if nulls:
            torch.amax(size_of(both[:, null, null].sum(0)) - 1e3 * rounding[null, null], (0, 1), out=facts[4])
        norm, scale, largest, lowest, outside = facts.tolist()
        if not math.isfinite(scale):
            raise NoBasis("its eigenvectors are linearly dependent (W is defective)")
        if largest <= enough:
            if outside > 0:
                raise NoBasis("the null space of V^T is not where the basis has it")
            if pairs and not lowest > 0:
                raise NoBasis("a pair of its eigenvalues has become real")
            return Basis(values, right, left, rest, gaps, distances, settled, nulls, norm / N, step)
        if not largest < min(FARTHEST, last):
            raise NoBasis(
                f"it is not diagonal in its eigenvectors (what remains is {largest:.1g}, their condition "
                f"{norm / N:.1g}): W is defective, or eigenvalues are nearly equal"
            )
        last = largest
        change = (both / gaps).masked_fill_(small.logical_or_(settled), 0)
        right = _normed(torch.addmm(right, right, to_real(change)), pairs)
    raise NoBasis(f"the refinement of its eigenvectors has not converged in {MAX_STEPS} steps")
