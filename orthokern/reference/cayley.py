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

    I + lr/2 A has symmetric part I, so it is never singular, whatever lr.

    Thin form, K < N. With [M, G] = B [M', G'], where B [N, min(N, 2K)] has orthonormal columns (a QR decomposition), A
    is B A' B^T with A' = G' M'^T - M' G'^T, and the step needs a 2K x 2K system only. It is the step for M' and G':

        M_new = M - lr B (I + lr/2 A')^-1 A' M'.

    I + lr/2 A' is as well conditioned as I + lr/2 A, even if columns of [M, G] are dependent. The system is solved in
    float64, so that M_new is orthonormal after a step of any size. The kernels solve a system of the same size with
    P = [G, M], Q = [M, -G], A = P Q^T and (I + c P Q^T)^-1 P = P (I + c Q^T P)^-1:

        M_new = M - lr P (I + lr/2 Q^T P)^-1 (Q^T M).

    This form needs no decomposition, but its error grows with the square of the step: ``orthokern.ops.cayley`` uses it
    up to LARGE_TURN, on a GPU for every step. A decomposition has no derivative if columns are dependent, so a
    differentiated step uses the form with A, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of lr max|A|. A larger step would lose I in I + lr/2 A, which is then singular for a singular A.
LARGEST_TURN = {torch.float32: 2.0**22, torch.float64: 2.0**26}


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See ``orthokern.ops.cayley`` and Note [Cayley step]."""
    N, K = m.shape[-2:]
    if K == N:
        return m - _correction(m, g, lr.to(m)[..., None, None] if isinstance(lr, Tensor) else lr)
    rate = lr.to(m.device, torch.float64)[..., None, None] if isinstance(lr, Tensor) else lr
    if torch.is_grad_enabled() and (m.requires_grad or g.requires_grad):
        return m - _correction(m.double(), g.double(), rate).to(m.dtype)
    basis, coordinates = torch.linalg.qr(torch.cat([m, g], dim=-1))
    small_m, small_g = coordinates.double().split(K, dim=-1)
    return m - basis @ _correction(small_m, small_g, rate).to(m.dtype)


def _correction(m: Tensor, g: Tensor, rate: float | Tensor) -> Tensor:
    """lr (I + lr/2 A)^-1 A M [..., N, K]."""
    skew = g @ m.mT - m @ g.mT
    eye = torch.eye(m.shape[-2], dtype=m.dtype, device=m.device)
    size = skew.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(m.dtype).tiny)
    largest = LARGEST_TURN[m.dtype] / size
    rate = torch.as_tensor(rate, dtype=m.dtype, device=m.device).clamp(-largest, largest)
    correction: Tensor = rate * torch.linalg.solve(eye + rate / 2 * skew, skew @ m)
    return correction
