"""Spectral-norm constraints that are kept by projection after every step of an optimizer (Kanai et al. 2017)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orthokern.errors import InputError, unknown_name

__all__ = ["SpectralNormProjection"]

THRESHOLDS = ("2-delta", "2")
# Up to this many columns a full SVD costs less than what avoids it.
_SMALL = 96
_BLOCK = 8
_ROUNDING = 1e-13  # of float64 products and factorisations of a few thousand columns, relative
_MOST_BLOCKS = 12


class SpectralNormProjection:
    """P_delta of Kanai et al. 2017 (eq. 11 to 15): after a step, large singular values are set to 2 - delta.

    For every constrained matrix W, the nearest matrix in Frobenius norm whose singular values are all at most 2 - delta
    (lemma 5): W - sum over sigma_i > 2 - delta of (sigma_i - (2 - delta)) u_i v_i^T. Exact: no result is accepted
    without a proof that nothing above the threshold is left, see Note [Work].

    Note [Work]
        With W_0 the matrix at its last check and b a proved bound of sigma_1(W_0), lemma 6 (Weyl's inequality) gives
        sigma_1(W) <= c = b + ||W - W_0||_F, whatever optimizer made the change. While c is at most the threshold,
        nothing is done: two passes over W. Otherwise, in float64 and with G = W^T W:

        1. c^2 I - G is positive definite by the lemma. Its Cholesky factor drives a block Krylov iteration with the
           inverse, which amplifies the singular directions near c: a few blocks of 8 vectors. It ends when every Ritz
           pair of G above the threshold has a residual ||G v - theta v|| at the level of rounding.
        2. These directions, few of them, are taken out: W's new value, and G' = W'^T W' from them.
        3. Proof: the Cholesky factorisation of t^2 I - G' exists if and only if sigma_1(W') < t. It is tried just above
           the largest singular value that is left, which becomes the new b, and else at the threshold.

        If any of the three fails, and for the first check and for matrices with at most 96 columns or rows, a full SVD
        takes over. What comes out depends on W alone, not on the history: there is no state to save.

    Args:
        constrained: a module: every orthokern.nn.GRU and torch.nn.GRU in it, with W_hn of all layers and directions and
            the candidate's input matrices W_in that ``inputs`` names (or anything with a method
            ``spectral_constraints(inputs)``). Or an iterable of matrices, or of pairs (matrix, slice of its rows).
            float32 or float64.
        delta: in (0, 2).
        threshold: which singular values are set to 2 - delta. "2-delta": those above 2 - delta, as eq. 13 has it. "2":
            those above 2, as section 3.3 proposes to save work; values between the two stay.
        inputs: "upper", the input matrices of the layers above the first; "all", as eq. 10; or "none".

    Attributes:
        counts: of "steps", "checks" (matrices whose bound did not suffice), "projections" (matrices changed), "svds".

    Raises:
        InputError: for a delta outside (0, 2), for what is no matrix, and from ``step`` for NaN or infinity.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        SpectralNormProjection(model, delta=0.2).attach(optimizer)   # or call its step() after optimizer.step()
    """

    def __init__(
        self,
        constrained: nn.Module | Iterable[Any],
        delta: float = 0.2,
        *,
        threshold: str = "2-delta",
        inputs: str = "upper",
    ) -> None:
        if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 2:
            raise InputError(f"delta is {delta!r}: accepted is a number in (0, 2), the bound is 2 - delta")
        if threshold not in THRESHOLDS:
            raise unknown_name("threshold", threshold, THRESHOLDS)
        self.delta, self.threshold = float(delta), threshold
        self.limit = 2 - self.delta  # what large singular values become
        self.trigger = self.limit if threshold == "2-delta" else 2.0
        found = _of_module(constrained, inputs) if isinstance(constrained, nn.Module) else list(constrained)
        if not found:
            raise InputError("constrained has no matrix: accepted is a module with a GRU, or matrices")
        self._matrices = [_checked(index, item) for index, item in enumerate(found)]
        self._before: list[Tensor | None] = [None] * len(self._matrices)
        self._bounds = [math.inf] * len(self._matrices)
        self.counts = {"steps": 0, "checks": 0, "projections": 0, "svds": 0}

    @property
    def matrices(self) -> list[Tensor]:
        """The constrained matrices, as views of their parameters."""
        return [parameter.detach()[rows] for parameter, rows in self._matrices]

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Run ``step`` after every step of the optimizer; the handle's ``remove()`` ends that."""
        return optimizer.register_step_post_hook(lambda *_: self.step())

    @torch.no_grad()
    def step(self) -> None:
        """Project every constrained matrix, where its bound does not show that there is nothing to do."""
        self.counts["steps"] += 1
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for index, bound in enumerate(self._upper_bounds()):
            if math.isfinite(bound) and bound <= self.trigger:
                continue
            self.counts["checks"] += 1
            self._bounds[index] = bound
            w = self.matrices[index]
            if not w.isfinite().all():
                raise InputError(f"constrained matrix {index} (shape {list(w.shape)}) holds NaN or infinity")
            by_kind[(min(w.shape), max(w.shape), w.dtype, w.device)].append(index)
        for indices in by_kind.values():
            self._project(indices)

    def _upper_bounds(self) -> list[float]:
        """Lemma 6 for all matrices: sigma_1 at the last check plus the Frobenius norm of the change since."""
        known = {i: before for i, before in enumerate(self._before) if before is not None}
        bounds = [math.inf] * len(self._matrices)
        if known:
            moved = torch.stack(
                [
                    torch.linalg.vector_norm(self.matrices[i] - before, dtype=torch.float64)
                    for i, before in known.items()
                ]
            )
            for i, distance in zip(known, moved.tolist(), strict=True):
                # the norm is rounded too
                bounds[i] = self._bounds[i] + distance * (1 + 1e-6)
        return bounds

    def _project(self, indices: list[int]) -> None:
        """Matrices of one shape (or its transpose), dtype and device."""
        matrices = [self.matrices[i] for i in indices]
        tall = torch.stack([(w if w.shape[0] >= w.shape[1] else w.mT).double() for w in matrices])  # [L, M, K], M >= K
        bounds = [self._bounds[i] for i in indices]
        rounding = max(2 * torch.finfo(matrices[0].dtype).eps, _ROUNDING)
        results = self._few_directions(tall, bounds, rounding)
        for index, w, whole, result in zip(indices, matrices, tall, results, strict=True):
            if result is None:
                self.counts["svds"] += 1
                result = self._by_svd(whole)
            projected, bound = result
            if projected is not None:
                self.counts["projections"] += 1
                w.copy_(projected if w.shape[0] >= w.shape[1] else projected.mT)
            self._before[index] = w.clone()
            self._bounds[index] = bound * (1 + 4 * rounding)  # of what was rounded to the matrix's dtype

    def _by_svd(self, w: Tensor) -> tuple[Tensor | None, float]:
        """(the projection of w [M, K] or None if it is w, largest singular value of it)."""
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        large = s > self.trigger
        count = int(large.sum())
        if count == 0:
            return None, float(s[0])
        rest = float(s[count]) if count < len(s) else 0.0
        return w - (u[:, :count] * (s[:count] - self.limit)) @ vh[:count], max(self.limit, rest)

    def _few_directions(
        self, w: Tensor, bounds: list[float], rounding: float
    ) -> list[tuple[Tensor | None, float] | None]:
        """As ``_by_svd`` for each of w [L, M, K], by Note [Work]; None where that fails or does not pay."""
        found: list[tuple[Tensor | None, float] | None] = [None] * len(w)
        usable = [i for i, bound in enumerate(bounds) if math.isfinite(bound)]
        K = w.shape[2]
        if K <= _SMALL or not usable:
            return found
        w = w[usable] if len(usable) < len(w) else w
        gram = w.mT @ w  # [L, K, K]
        eye = torch.eye(K, dtype=w.dtype, device=w.device)
        squares = w.new_tensor([bounds[i] ** 2 * (1 + 1e-9) for i in usable])
        factors, info = torch.linalg.cholesky_ex(squares[:, None, None] * eye - gram)
        cleaned, projected, levels, kept = [], [], [], []
        for j, failed in enumerate(info.tolist()):
            pairs = None if failed else _pairs_above(gram[j], factors[j], self.trigger**2 * (1 + rounding), rounding)
            if pairs is None:
                continue
            theta, v, rest = pairs
            if len(theta):
                wv = w[j] @ v
                sigma = torch.linalg.vector_norm(wv, dim=0)
                projected.append(w[j] - (wv * ((sigma - self.limit) / sigma)) @ v.mT)
                cleaned.append(gram[j] - (v * (theta - self.limit**2)) @ v.mT)
            else:
                projected.append(None)
                cleaned.append(gram[j])
            largest = max(math.sqrt(max(rest, 0.0)), self.limit if len(theta) else 0.0)
            levels.append(min(largest * (1 + 1e-3), self.trigger))
            kept.append(usable[j])
        if not kept:
            return found
        # The proof, at a level as low as it may be, and where that fails at the threshold.
        left = torch.stack(cleaned)
        level = left.new_tensor(levels) * (1 + 2 * rounding)
        _, info = torch.linalg.cholesky_ex(level.square()[:, None, None] * eye - left)
        for j, failed in enumerate(info.tolist()):
            bound = float(level[j])
            if failed and levels[j] < self.trigger:
                bound = self.trigger * (1 + 2 * rounding)
                failed = int(torch.linalg.cholesky_ex(bound**2 * eye - left[j])[1])
            if not failed:
                found[kept[j]] = (projected[j], bound)
        return found


def _pairs_above(gram: Tensor, factor: Tensor, level: float, rounding: float) -> tuple[Tensor, Tensor, float] | None:
    """Eigenpairs of a Gram matrix above a level, by Krylov blocks of the inverse that a Cholesky factor stands for.

    Args:
        gram: G [K, K]. factor: of c I - G, with c above all eigenvalues.
        level: what counts as above.
        rounding: residuals are to be below this times the largest eigenvalue.

    Returns:
        (theta [s], v [K, s] orthonormal, the largest Ritz value that is not above), or None without convergence.
    """
    K = len(gram)
    generator = torch.Generator().manual_seed(K)
    block = torch.randn(K, _BLOCK, dtype=gram.dtype, generator=generator).to(gram.device)
    basis, images = gram.new_empty(K, 0), gram.new_empty(K, 0)
    for count in range(1, _MOST_BLOCKS + 1):
        block = torch.cholesky_solve(block, factor)
        for _ in range(2):
            block = torch.linalg.qr(block - basis @ (basis.mT @ block))[0]
        basis, images = torch.cat([basis, block], 1), torch.cat([images, gram @ block], 1)
        if count == 1:
            continue
        small = basis.mT @ images
        theta, y = torch.linalg.eigh((small + small.mT) / 2)  # ascending
        number = int((theta > level).sum())
        if number > basis.shape[1] // 2:
            continue
        first = len(theta) - number
        # the next one below is watched as well: one that is about to rise above the level is seen in time
        vectors = basis @ y[:, first - 1 :]
        residual = torch.linalg.vector_norm(images @ y[:, first - 1 :] - vectors * theta[first - 1 :], dim=0)
        near = float(residual[0]) <= max(level - float(theta[first - 1]), 1e-3 * level)
        if near and bool((residual[1:] <= rounding * theta[-1]).all()):
            return (
                theta[first:],
                torch.linalg.qr(vectors[:, 1:])[0] if number else vectors[:, 1:],
                float(theta[first - 1]),
            )
    return None


def _of_module(module: nn.Module, inputs: str) -> list[Any]:
    """What a module's GRUs have to keep constrained."""
    accepted = ("upper", "all", "none")
    if inputs not in accepted:
        raise unknown_name("inputs", inputs, accepted)
    found: list[Any] = []
    for part in module.modules():
        constraints = getattr(part, "spectral_constraints", None)
        if callable(constraints):
            found += constraints(inputs)
        elif isinstance(part, nn.GRU):
            rows = slice(2 * part.hidden_size, 3 * part.hidden_size)
            for name, parameter in part.named_parameters():
                layer = name.split("_l")[1].removesuffix("_reverse") if "_l" in name else ""
                upper = name.startswith("weight_ih") and (inputs == "all" or (inputs == "upper" and layer != "0"))
                if name.startswith("weight_hh") or upper:
                    found.append((parameter, rows))
    return found


def _checked(index: int, item: Any) -> tuple[Tensor, slice]:
    """(matrix, slice of its rows) of one element of what the user gave."""
    pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], slice)
    parameter, rows = item if pair else (item, slice(None))
    if not isinstance(parameter, Tensor):
        raise InputError(f"constrained[{index}] is a {type(parameter).__name__}: accepted is a matrix (a torch.Tensor)")
    if parameter.ndim != 2 or 0 in parameter.detach()[rows].shape:
        raise InputError(f"constrained[{index}] has shape {list(parameter.shape)}: accepted is a matrix with elements")
    if parameter.dtype not in (torch.float32, torch.float64):
        raise InputError(f"constrained[{index}] has dtype {parameter.dtype}: accepted are float32 and float64")
    return parameter, rows
