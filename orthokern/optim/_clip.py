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
    Where all of G - t^2 I is rounding, its skew part is as large as the rest. Skew parts grow as small eigenvalues do,
    and on imaginary eigenvalues the first iteration diverges. So G - t^2 I and every eighth X are made symmetric.
    Of the second one, eigenvalues are in [t^2 / c', 1] and grow by 9/4: ROOT_STEPS are enough for sigma up to 1e5 t.

    Rounding moves the eigenvalues of G by eps sigma_1^2, in float32 more than t^2 from sigma_1 of 3e3 t. So in float32
    PASSES earlier passes clip to max(2 t, |W|_F / 300), which they can resolve. They leave values below 2 t alone, and
    never put one at t, where the last pass could not tell it from the values below. With a > 1 the steps

        X <- a X (3 I - a^2 X^2) / 2,   T = a (3 I - a^2 Z Y) / 2

    grow small eigenvalues faster and keep the others in (0, 1]; BOOSTED of them and then PLAIN ones with a = 1 decide
    the ratios of these passes, up to 300^2. Largest errors measured in float32, in units of t: 1e-4 at sigma_1 of
    100 t, 2e-3 at 1e3 t, 3e-3 at 1e4 t, 3e-2 at 1e5 t; the next step clips what is left above t. In float64: 1e-7 up to
    1e4 t, 0.1 at 1e5 t.

    The number of products is fixed (2 SIGN_STEPS + 3 ROOT_STEPS of K x K, and 79 in each earlier pass), so that a CUDA
    graph can contain them. On a CPU, where reading is no wait, `clip_` leaves the earlier passes out for matrices that
    need none. NaN and infinity give NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIGN_STEPS = {torch.float32: 40, torch.float64: 88}
ROOT_STEPS = 30
PASSES = {torch.float32: 2, torch.float64: 0}
RANGE = 300.0  # of |W|_F / trigger in a pass
BOOST, BOOSTED, PLAIN = 1.6, (14, 8), (6, 5)  # of the signs and of the roots


def _norm_bound(a: Tensor) -> Tensor:
    """A bound [..., 1, 1] of the 2-norm of each symmetric matrix [..., K, K], above 0."""
    rows = a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    bound = torch.minimum(rows, torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True))
    return bound.clamp_min(torch.finfo(a.dtype).tiny)


def _frobenius(w: Tensor) -> Tensor:
    """|W|_F [..., 1, 1] of each matrix."""
    return torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)


def _symmetric(a: Tensor) -> Tensor:
    """Each matrix without the skew part that rounding leaves."""
    return (a + a.mT) / 2


def clipped(w: Tensor, trigger: float, limit: float, passes: int | None = None) -> Tensor:
    """w [M, K] or [R, M, K], M >= K, with every singular value above ``trigger`` set to ``limit``; see Note [Clipping
    by products]. passes: the earlier ones; None for PASSES.

    Values that differ from the trigger by no more than rounding may be treated either way.
    """
    for _ in range(PASSES[w.dtype] if passes is None else passes):
        above = (_frobenius(w) / RANGE).clamp_min(2 * trigger)
        signs, roots = ([BOOST] * fast + [1.0] * plain for fast, plain in zip(BOOSTED, PLAIN, strict=True))
        w = _one_pass(w, above, above, signs, roots)
    return _one_pass(w, trigger, limit, [1.0] * SIGN_STEPS[w.dtype], [1.0] * ROOT_STEPS)


def _one_pass(
    w: Tensor, trigger: float | Tensor, limit: float | Tensor, signs: list[float], roots: list[float]
) -> Tensor:
    """`clipped` by one pass; signs, roots: the factor a of each step. A trigger or limit may be [..., 1, 1]."""
    square = trigger**2
    add_product = torch.addmm if w.ndim == 2 else torch.baddbmm
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1)
    beyond = _symmetric(w.mT @ w - square * identity)
    x = beyond / _norm_bound(beyond)
    for step, a in enumerate(signs, 1):
        x = add_product(x, x, x @ x, beta=1.5 * a, alpha=-0.5 * a**3)
        x = _symmetric(x) if step % 8 == 0 else x
    projector = (identity + x) / 2
    c = projector @ beyond
    c = square * identity + _symmetric(c)
    scale = _norm_bound(c)
    y, z = c / scale, identity
    for a in roots:
        t = add_product(identity, z, y, beta=1.5 * a, alpha=-0.5 * a**3)
        y, z = y @ t, t @ z
    return w - (w @ projector) @ (identity - limit * scale.rsqrt() * z)


def _passes(w: Tensor, trigger: float) -> int | None:
    """0 for matrices on a CPU that need no earlier passes, else None."""
    return 0 if w.device.type == "cpu" and bool((_frobenius(w) <= RANGE * trigger).all()) else None


def clip_(matrices: list[Tensor], trigger: float, limit: float) -> None:
    """`clipped` in place, with one call for all matrices of equal shapes; a wide matrix is transposed."""
    alike: dict[Any, list[Tensor]] = {}
    for w in matrices:
        tall = w.mT if w.shape[0] < w.shape[1] else w
        alike.setdefault((tall.shape, tall.dtype, tall.device), []).append(tall)
    for group in alike.values():
        if len(group) == 1:
            group[0].copy_(clipped(group[0], trigger, limit, _passes(group[0], trigger)))
            continue
        stacked = torch.stack(group)
        for w, result in zip(group, clipped(stacked, trigger, limit, _passes(stacked, trigger)), strict=True):
            w.copy_(result)
