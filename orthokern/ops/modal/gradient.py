"""dL/dW of a linear recurrence from sums in its modes.

Note [Divided differences]
    In modal coordinates (Note [Modes of a recurrent matrix] in ``basis.py``), z_t = L z_{t-1} + x_t, and
    delta_t, the gradient of the loss with respect to z_t by way of this step and all later ones, is delta_t =
    L^T delta_{t+1} + g_t with g_t from outside the recurrence. With a constant R, W = R L R^-1 gives

        dL/dW = R^-T M R^T,     M = sum_t delta_t z_{t-1}^T     [2M, 2M].

    That sum takes N^2 multiply-adds a step, but nearly all of it follows from sums that are computed anyway. Write
    S = sum_t delta_t z_t^T, once with the recursion of z_t, once with that of delta_t:

        S = M L^T + X,     S = G + L^T (M - delta_1 z_0^T);     X = sum_t delta_t x_t^T,  G = sum_t g_t z_t^T,

        M L^T - L^T M = G - X - Z =: H,     Z = (L^T delta_1) z_0^T = dL/dz_0^T z_0.

    With a linear readout C, G = C^T dL/dC; with a table E of inputs, X = (dL/dE)^T E; else they are one product over
    all steps. The 2 x 2 block of modes j and k is, in complex numbers, Q_jk = sum_t delta_t[j] conj(z_{t-1}[k]) and
    P_jk = sum_t delta_t[j] z_{t-1}[k]; delta_t[j] is multiplied by conj(lambda_j) in each step, so

        Q_jk = Q(H)_jk / (conj(lambda_k) - conj(lambda_j)),     P_jk = P(H)_jk / (lambda_k - conj(lambda_j)).

    The diagonal of Q is the gradient of the eigenvalues, summed directly: grad_re + i grad_im.

Note [Close pairs]
    A difference of eigenvalues d in the denominator enlarges the rounding of H. Let eps be the relative rounding of a
    sum over time. One input x at time s and one gradient g at time u, n = u - s steps later, make |X|, |G| <= |g| |x|
    r^n with r^2 = |lambda_j lambda_k|, so the quotient is wrong by up to 2 eps |g| |x| r^n / |d|. The direct sum has n
    terms of |g| |x| r^(n-1), so it is wrong by eps n |g| |x| r^(n-1): the quotient loses by the factor 2 r / (n |d|).
    What counts in M is the n at which n r^n is largest, n = 1 / (1 - r) for r < 1, though no more than T. A pair is
    summed directly if the quotient would lose by more than a factor LOSS = 16:

        |d| < 2 / (LOSS n),     n = min(T, 1 / (1 - r)) for r < 1, else T;  1 / n = max(1 - r, 1 / T),

    with the smaller of the two |d| of the pair. Other pairs are wrong by at most that factor more than the diagonal,
    which is as large as any element of M. Among evenly spread eigenvalues on the unit circle about M^2 / (8 T) pairs
    are close: of 64 modes and 1000 steps, half a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.ops.modal.basis import Basis, to_complex, to_real

LOSS = 16.0


def close_pairs(basis: Basis, sizes: Tensor, T: int) -> Tensor:
    """Whether two modes are to be summed directly, bool [M, M]; Note [Close pairs]. sizes: |eigenvalues| [M].

    (j, j) is a close pair if a mode's eigenvalue is close to its conjugate; for a real mode, P_jj is Q_jj. Pairs of
    modes in the null space of a factored W are not needed: their block of M is multiplied by V^T R = 0 or R^-1 U = 0 in
    the gradients of U, s and V.
    """
    r = torch.outer(sizes, sizes).sqrt_()
    return basis.distances.amin(0) < (1.0 - r).clamp_(min=1.0 / T).mul_(2.0 / LOSS)


def gradient_of_w(
    basis: Basis, h: Tensor, grad_re: Tensor, grad_im: Tensor, pairs: Tensor | None, grad_pairs: Tensor | None
) -> Tensor:
    """dL/dW [N, N], Note [Divided differences], from H [2M, 2M] and the gradients of the eigenvalues [M], all float64.

    pairs: [P, 2], both orders of every close pair; grad_pairs: [P, 2, 2], their blocks of M; None: no pairs.
    """
    M = len(basis.values)
    real, modes = len(basis.right) - M, M - basis.nulls  # the modes from real to modes have real eigenvalues
    # to_complex gives half of (rr + ii) + i (ir - ri), which is Q, and of (rr - ii) + i (ir + ri), which is P; a gap of
    # 0 is that of a close pair
    both = (to_complex(h) / basis.gaps.conj()).masked_fill_(basis.settled, 0)
    diagonal = torch.complex(grad_re, grad_im) / 2
    both[0].diagonal()[:modes] = diagonal[:modes]
    both[1].diagonal()[real:modes] = diagonal[real:modes]
    m = to_real(both)
    if pairs is not None and grad_pairs is not None:
        j, k = pairs.unbind(1)
        m.view(2, M, 2, M)[:, j, :, k] = grad_pairs
    return basis.left.mT @ m @ basis.right.mT
