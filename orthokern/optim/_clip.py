"""Clipping of large singular values by matrix products alone: the host reads no values of the matrix.

Note [Clipping by products]
    G = W^T W has the eigenvalues lambda = sigma^2. With t the threshold and S = sign(G - t^2 I), P = (I + S) / 2 is the
    projector on the singular vectors above t, and C = t^2 I + P (G - t^2 I) has the eigenvalues max(lambda, t^2), so

        W' = W - W P (I - limit C^-1/2)

    has singular value `limit` where sigma > t and sigma elsewhere. S and C^-1/2 come from Newton and Schulz:

        X <- X (3 I - X^2) / 2,  X_0 = (G - t^2 I) / c,  c a bound of its norm:  X -> S;
        Y <- Y T,  Z <- T Z,  T = (3 I - Z Y) / 2,  Y_0 = C / c',  Z_0 = I:      Z -> (C / c')^-1/2.

    An eigenvalue near zero grows by a factor of 3/2 in a step of the first iteration, so after SIGN_STEPS those of G
    within about rounding times c of t^2 are undecided. There C and, with limit = t, W' have the right value either way.
    Of the second one, eigenvalues are in [t^2 / c', 1] and grow by 9/4: ROOT_STEPS are enough for sigma up to 1e5 t.

    The number of products is fixed (2 SIGN_STEPS + 3 ROOT_STEPS of K x K), so that a CUDA graph can contain them. NaN
    and infinity give NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIGN_STEPS = {torch.float32: 40, torch.float64: 88}
ROOT_STEPS = 30


def _norm_bound(a: Tensor) -> Tensor:
    """A bound [..., 1, 1] of the 2-norm of each symmetric matrix [..., K, K], above 0."""
    rows = a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    bound = torch.minimum(rows, torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True))
    return bound.clamp_min(torch.finfo(a.dtype).tiny)


def clipped(w: Tensor, trigger: float, limit: float) -> Tensor:
    """w [M, K] or [R, M, K], M >= K, with every singular value above ``trigger`` set to ``limit``; see Note [Clipping
    by products].

    Values that differ from the trigger by no more than rounding may be treated either way.
    """
    square = trigger**2
    add_product = torch.addmm if w.ndim == 2 else torch.baddbmm
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1)
    beyond = w.mT @ w - square * identity
    x = beyond / _norm_bound(beyond)
    for _ in range(SIGN_STEPS[w.dtype]):
        x = add_product(x, x, x @ x, beta=1.5, alpha=-0.5)
    projector = (identity + x) / 2
    c = projector @ beyond
    c = square * identity + (c + c.mT) / 2
    scale = _norm_bound(c)
    y, z = c / scale, identity
    for _ in range(ROOT_STEPS):
        t = add_product(identity, z, y, beta=1.5, alpha=-0.5)
        y, z = y @ t, t @ z
    return w - (w @ projector) @ (identity - limit * scale.rsqrt() * z)


def clip_(matrices: list[Tensor], trigger: float, limit: float) -> None:
    """`clipped` in place, with one call for all matrices of equal shapes; a wide matrix is transposed."""
    alike: dict[Any, list[Tensor]] = {}
    for w in matrices:
        tall = w.mT if w.shape[0] < w.shape[1] else w
        alike.setdefault((tall.shape, tall.dtype, tall.device), []).append(tall)
    for group in alike.values():
        if len(group) == 1:
            group[0].copy_(clipped(group[0], trigger, limit))
            continue
        for w, result in zip(group, clipped(torch.stack(group), trigger, limit), strict=True):
            w.copy_(result)
