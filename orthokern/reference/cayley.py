"""The Cayley step on matrices with orthonormal columns: the reference.

Note [Cayley step]
    The step of Wisdom et al. 2016 and Vorontsov et al. 2017 (their eq. 9, whose printed "+" is a typo), for a basis M
    with orthonormal columns, the gradient G = dL/dM and the rate lr:

        A = G M^T - M G^T,     M_new = (I + lr/2 A)^-1 (I - lr/2 A) M.

    A is skew, so the factor is orthogonal and M_new^T M_new = M^T M exactly. Its derivative at lr = 0 is -A M, and
    <G, -A M> = -1/2 |A|_F^2 <= 0 because A is skew and M^T M = I (<G, A M> = <G M^T, A>, whose skew half is A / 2):
    a small step lowers the loss.

    Drift-least form. With X = lr/2 A: (I + X)^-1 (I - X) = I - 2 (I + X)^-1 X, hence

        M_new = M - lr (I + lr/2 A)^-1 A M.

    The two forms are the same matrix, but this one rounds against a correction of size lr |A| instead of against M:
    the rounding error per step, and so the drift away from orthogonality, shrinks with the step.

    Thin form, K < N. A = P Q^T with P = [G, M] and Q = [M, -G], both N x 2K. By the push-through identity
    (I + c P Q^T)^-1 P = P (I + c Q^T P)^-1, the step needs a 2K x 2K system only:

        M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M).

    I + lr/2 A has symmetric part I, so it is never singular, whatever lr; I + c Q^T P has the same determinant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See ``orthokern.ops.cayley`` and Note [Cayley step]."""
    rate = lr.to(m)[..., None, None] if isinstance(lr, Tensor) else lr
    N, K = m.shape[-2:]
    if K == N:
        skew = g @ m.mT - m @ g.mT
        eye = torch.eye(N, dtype=m.dtype, device=m.device)
        return m - rate * torch.linalg.solve(eye + rate / 2 * skew, skew @ m)
    p = torch.cat([g, m], dim=-1)
    q = torch.cat([m, -g], dim=-1)
    eye = torch.eye(2 * K, dtype=m.dtype, device=m.device)
    return m - rate * (p @ torch.linalg.solve(eye + rate / 2 * (q.mT @ p), q.mT @ m))


def cayley_of_many(steps: Sequence[tuple[Tensor, Tensor, float | Tensor]]) -> list[Tensor]:
    """`cayley` of each (m, g, lr), one after the other."""
    return [cayley(*step) for step in steps]
