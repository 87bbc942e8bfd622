"""Orthogonality by gradient descent: `orthokern.init.learned_orthogonal_`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._products import ieee_products
from orthokern.errors import InputError, integer, is_number, require
from orthokern.ops._checks import strided


def check_matrices(t: Tensor, name: str, argument: str = "t", *, square: bool = False) -> None:
    """Rejects a tensor that cannot be filled with matrices."""
    label = f"{name}: {argument}"
    is_float = isinstance(t, Tensor) and t.is_floating_point()
    require(is_float, label, "a floating point tensor", t.dtype if isinstance(t, Tensor) else type(t).__name__)
    sides = "square matrices [..., N, N]" if square else "matrices [..., N, K] with N and K at least 1"
    fits = t.dim() >= 2 and t.numel() > 0 and (not square or t.shape[-1] == t.shape[-2])
    require(fits, label, sides, f"shape {list(t.shape)}")
    strided(label, t)


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
@keeps_dtype
@ieee_products()
def learned_orthogonal_(
    W: Tensor, lr: float = 0.1, tol: float = 1e-6, max_steps: int = 1000, *, guard: bool = True
) -> LearnedOrthogonality:
    """Make matrices orthogonal by gradient descent on ||W W^T - I||_F^2, until this value is below `tol` for each
    (Manchev and Spratling, section II-A, eq. 16 to 18).

        W <- W - 4 lr (W W^T - I) W          (n <= m; else W <- W - 4 lr W (W^T W - I): the smaller Gram matrix)

    Args:
        W: [..., n, m] float32 or float64, in place; every matrix on its own. Rows become orthonormal if n <= m, columns
            otherwise.
        lr: the rate, above 0 and below 0.25 (from 0.25 on, orthogonal matrices are unstable fixed points).
        tol: a matrix is done when ||W W^T - I||_F^2 is below it.
        max_steps: largest number of steps per matrix.
        guard: first scale down a matrix that may be outside of the region from which the descent converges. False is
            the published rule, which may diverge.

    Returns:
        A `LearnedOrthogonality` with the steps, error and convergence of every matrix. All entries of W stay finite.

    Raises:
        InputError: W is not a float32 or float64 [..., n, m] or has an entry that is not finite; a matrix is zero (and
            would stay zero); lr, tol or max_steps is out of range; or tol is below rounding.

    Cost: 4 n m min(n, m) flops per step and matrix that has not finished; one synchronisation with the device per step.

    Example::

        >>> w = 0.3 * torch.eye(4, 6)
        >>> bool(learned_orthogonal_(w).converged), bool(((w @ w.mT - torch.eye(4)).abs() < 1e-3).all())
        (True, True)

    Note [Convergence of learned orthogonality]
        With c = 4 lr and W = U S V^T a step does not change U and V, and maps every singular value
            s -> s (1 + c - c s^2),
        whose fixed points are 0, which repels, and 1 and -1, which attract for c < 1 (a negative s is a flipped column
        of U). |s| grows without bound as soon as s^2 > 1 + 2 / c, which is |s| > 2.45 for lr = 0.1: "always converges"
        (section II-A) holds inside that region only. Matrices of normal numbers with standard deviation 0.1 leave it
        near n = 150.
        The certificate of divergence. For k singular values, sum (s^2 - 1)^2 > k (2 / c)^2 means that one is outside.
        The guard. G = W W^T has the eigenvalues s^2, so max s^2 <= ||G^8||_F^(1/8): an upper bound, whereas a power
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
    result = LearnedOrthogonality(
        steps=torch.zeros(count, dtype=torch.int64, device=W.device),
        error=torch.zeros(count, dtype=W.dtype, device=W.device),
        converged=torch.zeros(count, dtype=torch.bool, device=W.device),
        diverged=torch.zeros(count, dtype=torch.bool, device=W.device),
        scale=torch.ones(count, dtype=W.dtype, device=W.device),
    )
    if not W.is_meta:
        matrices = W.reshape(count, n, m)  # a view if strides allow one
        wide = matrices if n <= m else matrices.mT
        if guard:
            result.scale.copy_(_guard(wide, 4.0 * lr))
        _descend(wide, 4.0 * lr, tol, max_steps, result)
        W.copy_(matrices.view(W.shape))
    return LearnedOrthogonality(*(getattr(result, f.name).view(shape) for f in fields(result)))


def _check_learned(W: Tensor, lr: float, tol: float, max_steps: int) -> None:
    name = "learned_orthogonal_"
    check_matrices(W, name, "W")
    require(W.dtype in (torch.float32, torch.float64), f"{name}: W", "a tensor of float32 or float64", W.dtype)
    require(is_number(lr) and 0.0 < lr < 0.25, f"{name}: lr", "a number above 0 and below 0.25", repr(lr))
    integer(f"{name}: max_steps", max_steps)
    # Below an s^2 - 1 of eps / (8 lr) a step is rounded away, and the Gram matrix has its own rounding error: measured
    # at lr = 0.1, the descent ends between 1 and 4 k eps^2 for k singular values.
    lowest = min(W.shape[-2:]) * (torch.finfo(W.dtype).eps * max(2.0, 0.25 / lr)) ** 2
    accepted = f"a finite number above {lowest:.2g}, the rounding of {W.dtype} matrices {list(W.shape[-2:])}"
    require(is_number(tol) and lowest < tol < math.inf, f"{name}: tol", accepted, repr(tol))
    if W.is_meta:
        return
    largest = W.abs().amax(dim=(-2, -1))
    for wrong, what in ((~largest.isfinite(), "has an entry that is not finite"), (largest == 0, "is zero")):
        if wrong.any():
            index = ", ".join(map(str, wrong.nonzero()[0].tolist()))
            raise InputError(
                f"{name}: W{f'[{index}]' if index else ''} {what}; accepted: finite matrices other than zero"
            )


def _guard(w: Tensor, c: float) -> Tensor:
    """The factors [count] that scale w [count, k, l], k <= l, into the region of convergence."""
    largest = w.abs().amax(dim=(-2, -1), keepdim=True)
    w = w / largest  # so that squares neither overflow nor underflow
    power, log = w @ w.mT, torch.zeros_like(largest)
    for _ in range(3):  # power exp(log) is G, G^2, G^4, G^8 in turn
        norm = torch.linalg.matrix_norm(power, keepdim=True)
        power, log = power / norm, log + norm.log()
        power, log = power @ power, 2.0 * log
    log = (log + torch.linalg.matrix_norm(power, keepdim=True).log()) / 8.0 + 2.0 * largest.log()
    outside = log > math.log(0.9 * (1.0 + 2.0 / c))
    return torch.where(outside, (0.5 * (math.log((1.0 + c) / (2.0 * c)) - log)).exp(), 1.0).flatten()


def _descend(w: Tensor, c: float, tol: float, max_steps: int, result: LearnedOrthogonality) -> None:
    """Descends from w [count, k, l], k <= l, to orthonormal rows, in place, and fills the result's tensors [count]. A
    matrix that has finished takes no more steps."""
    lost = w.shape[1] * (2.0 / c) ** 2  # an error above it certifies divergence
    active = torch.arange(len(w), device=w.device)
    x = w * result.scale.view(-1, 1, 1)
    for steps in range(max_steps + 1):
        gram = x @ x.mT
        gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        error = torch.linalg.matrix_norm(gram).square()
        good, bad = error < tol, ~(error <= lost)
        done = good | bad | (steps == max_steps)
        if bool(done.any()):
            ended, keep = active[done], done & ~bad
            result.steps[ended] = steps
            result.error[ended] = error[done]
            result.converged[ended] = good[done]
            result.diverged[ended] = bad[done]
            w[active[keep]] = x[keep]
            active, x, gram = active[~done], x[~done], gram[~done]
            if not len(active):
                break
        x = torch.baddbmm(x, gram, x, alpha=-c)
    for index in result.diverged.nonzero().flatten().tolist():
        gram = w[index].double() @ w[index].double().mT  # of the unchanged matrix, in float64 to avoid overflow
        gram.diagonal().sub_(1.0)
        result.error[index] = gram.square().sum()
