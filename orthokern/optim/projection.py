"""Spectral-norm constraints by projection after every step of an optimizer (Kanai et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orthokern import _autocast
from orthokern._gru_parameters import constrained_weights
from orthokern._products import ieee_products
from orthokern._state import check_integer, misfit
from orthokern.errors import InputError, unknown_name
from orthokern.ops import spectral
from orthokern.ops._checks import own_parameter
from orthokern.optim._checks import check_certificate, check_constrained, check_matrix
from orthokern.optim._clip import clip_

THRESHOLDS = ("2-delta", "2")
METHODS = ("auto", "proof", "products")
# Up to this many columns a full decomposition costs less than the methods that avoid it.
_SMALL = 96
# If sigma_1 is more than this many times the limit, W itself is decomposed, not its square.
_RANGE = 100.0
_ROUNDING = 1e-13  # of float64 products and factorisations of a few thousand columns, relative
# A certificate has the directions of singular values above this fraction of the threshold, within limits.
_WATCHED = 0.9
_FEWEST = 16
_BLOCK = 8
_MOST_ROUNDS = 7
_MOST_GROWN = 12
# Degrees of the polynomials that rotate V after a large step: they leave hardly a residual.
_DEGREES = (4, 6, 6)
_MOST_ITERATIONS = 8  # of conjugate gradients in a round
# The rounding of float32 next to an eigenvalue of G this many times the threshold's can hide other eigenvalues.
_FAR = 2.0
# The relative margin of a proved level, above the rounding of a float32 Gram matrix and its Cholesky factorisation.
_MARGIN = 1e-2


@dataclass
class _Certificate:
    """A proved bound for one constrained matrix (transposed to M >= K): ||W_0 (I - V V^T)||_2 <= level.

    anchor: W_0 [M, K]. v: V [K, k] orthonormal. image: W_0 V [M, k]. All in the matrix's dtype. whole: ||W_0||_F.
    served: the number of steps for which it was sufficient.
    """

    anchor: Tensor
    v: Tensor
    image: Tensor
    level: float
    whole: float
    served: int = 0

    def replaced(self, w: Tensor, v: Tensor, level: float) -> _Certificate:
        """A certificate of w [M, K] and v [K, k]. It reuses the memory of this one, which becomes invalid."""
        return _Certificate(self.anchor.copy_(w), v, w @ v, level, spectral.distance(w))

    def complement(self, w: Tensor, image: Tensor) -> float:
        """A bound of ||W (I - V V^T)||_2 for another W [M, K] and its W V: the level plus the change outside of V."""
        rounding = 8 * torch.finfo(w.dtype).eps * self.whole
        if image is self.image:  # then W is W_0
            return self.level + rounding
        change, inside = spectral.distance(w, self.anchor), spectral.distance(image, self.image)
        squares = max(change**2 - inside**2, 0.0) + 4 * _relative(w) * change**2
        return self.level + math.sqrt(squares + rounding * (change + inside + rounding))


class SpectralNormProjection:
    """P_delta of Kanai et al. 2017 (eq. 11 to 15): after a step, large singular values are set to 2 - delta.

    For every constrained matrix W, the nearest matrix in Frobenius norm whose singular values are all at most 2 - delta
    (lemma 5): W - sum over sigma_i > 2 - delta of (sigma_i - (2 - delta)) u_i v_i^T. With method "proof", the default
    on a CPU, a result is only accepted with a proof that no singular value is above the threshold, see Note [Work].
    Method "products", the default on other devices, has no proof; its errors are in Note [Clipping by products].

    Note [Work]
        Let W_0 be the matrix at its last check and b a proved bound of sigma_1(W_0). By lemma 6 (Weyl's inequality),
        sigma_1(W) <= c = b + ||W - W_0||_F for any change of W. If c is at most the threshold t, nothing is done; this
        costs two passes over W. Otherwise:

        1. A certificate states for an older W_0: ||W_0 (I - V V^T)||_2 <= l, with orthonormal V [K, k] of a few dozen
           columns. Hence ||W (I - V V^T)||_2 <= m = l + ||(W - W_0) (I - V V^T)||_F: while m is below t, nothing
           outside of V is above t. The Rayleigh-Ritz method in V (G = W^T W, G y_i ~ theta_i y_i, residuals r_i) gives
           the directions y_i above t, which are removed. If r_i is too large, V is rotated by the difference of y_i
           from an eigenvector, and m grows by the size of the rotation; a large correction is added to V as a new
           column. Convergence is cubic: one or two rounds are enough.
        2. Proof that nothing was missed: after the removal, G' is diag(theta'_i) on V, at most m^2 outside of V, and
           the r_i couple both parts. Its eigenvalues are at most t'^2, t' = t (1 + rounding), if those of R^T R are at
           most t'^2 - m^2, with R = [r_i / (t'^2 - theta'_i)^1/2] (Schur's complement). Residuals enter squared, so few
           expansions are needed. New columns of V may have large residuals themselves. Then the same is checked for
           the k Ritz vectors alone that contain least of them, and m grows by the part of V outside of their span.
        3. If the proof fails, V no longer covers W, and a new certificate is needed; with steps as large as t, this
           happens in every step. A polynomial of G rotates V towards the leading directions of W. The Cholesky
           factorisation of l^2 I - (I - V V^T) G (I - V V^T) exists if and only if the certificate holds. l is between
           the lowest value in V and t or, if certificates are used for several steps, close to the largest value
           outside of V; subspace iteration finds this value, and directions that V lacks.

        A full decomposition is used if that fails too, in the first check, for matrices with at most 96 columns or
        rows, and while more than a quarter of all values are near the threshold: that of G, which also gives a
        certificate, or the SVD of W where squares would lose digits. Bounds and the removed parts are float64;
        directions are computed in the dtype of the matrix.

    It has references to the parameters: if a model gets new ones, as by ``load_state_dict(..., assign=True)``, it needs
    a new projection. After a model was moved to another device or dtype, all matrices are checked again.

    Args:
        constrained: a module: every orthokern.nn.GRU and torch.nn.GRU in it, with W_hn of all layers and directions and
            the candidate's input matrices W_in that ``inputs`` selects (also any module with a method
            ``spectral_constraints(inputs)``). Or an iterable of matrices, or of pairs (matrix, slice of its rows).
            float32 or float64. A tensor [R, M, K] has the matrices of R stacked models: each is constrained.
        delta: in (0, 2).
        threshold: which singular values are set to 2 - delta. "2-delta": those above 2 - delta, as in eq. 13. "2":
            those above 2, as section 3.3 proposes to save work; values between the two stay.
        inputs: "upper", the input matrices of the layers above the first; "all", as in eq. 10; or "none".
        method: "proof", as in Note [Work], which reads values of the matrix on the host; "products", matrix products
            in every step without a proof (Note [Clipping by products] in ``orthokern/optim/_clip.py``), without a
            synchronisation, so that a CUDA graph can contain them; "auto": "proof" on the CPU, else "products".

    Attributes:
        counts: the number of "steps", "checks" (matrices whose bound was not sufficient), "projections" (changed
            matrices), "certificates" (found by step 3 of the note) and "decompositions". The method "products" counts
            only steps and checks.

    Raises:
        InputError: for a delta outside (0, 2), for arguments that are not matrices, for weights of a GRU that are
            pruned or parametrized, and from ``step`` for NaN or infinity, which "products" turns into a matrix of NaN.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        SpectralNormProjection(model, delta=0.2).attach(optimizer)   # or call its step() after optimizer.step()

    Example::

        >>> w = torch.nn.Parameter(10 * torch.eye(8))
        >>> SpectralNormProjection([w], delta=0.5).step()
        >>> bool(torch.linalg.matrix_norm(w, 2) <= 1.5)
        True
    """

    def __init__(
        self,
        constrained: nn.Module | Iterable[Any],
        delta: float = 0.2,
        *,
        threshold: str = "2-delta",
        inputs: str = "upper",
        method: str = "auto",
    ) -> None:
        if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 2:
            raise InputError(f"delta is {delta!r}: accepted is a number in (0, 2), the bound is 2 - delta")
        if threshold not in THRESHOLDS:
            raise unknown_name("threshold", threshold, THRESHOLDS)
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        self.method = method
        self.delta, self.threshold = float(delta), threshold
        self.limit = 2 - self.delta  # the new value of large singular values
        self.trigger = self.limit if threshold == "2-delta" else 2.0
        given: Any = constrained
        if not isinstance(given, (nn.Module, Iterable)):
            kind = type(given).__name__
            raise InputError(f"constrained is a {kind}: accepted is a module with a GRU, or several matrices")
        found = _of_module(constrained, inputs) if isinstance(constrained, nn.Module) else list(constrained)
        if not found:
            raise InputError("constrained has no matrix: accepted is a module with a GRU, or matrices")
        self._matrices = [one for index, item in enumerate(found) for one in check_constrained(index, item)]
        self._before: list[Tensor | None] = [None] * len(self._matrices)
        self._bounds = [math.inf] * len(self._matrices)
        self._certificates: list[_Certificate | None] = [None] * len(self._matrices)
        self.counts = {"steps": 0, "checks": 0, "projections": 0, "certificates": 0, "decompositions": 0}

    @property
    def matrices(self) -> list[Tensor]:
        """The constrained matrices, as views of their parameters."""
        return [parameter.detach()[place] for parameter, place in self._matrices]

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Run ``step`` after every step of the optimizer, until ``remove()`` of the returned handle is called."""
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return optimizer.register_step_post_hook(lambda *_: self.step())

    @torch.no_grad()
    @_autocast.off()
    @ieee_products()
    def step(self) -> None:
        """Project every constrained matrix whose bound is above the threshold."""
        self.counts["steps"] += 1
        by_proof, by_products = [], []
        for index, w in enumerate(self.matrices):
            if self.method == "proof" or (self.method == "auto" and w.device.type == "cpu"):
                by_proof.append(index)
                continue
            check_constrained(index, w)
            self.counts["checks"] += 1
            by_products.append(w)
        clip_(by_products, self.trigger, self.limit)
        for index, bound in zip(by_proof, self._upper_bounds(by_proof), strict=True):
            if math.isfinite(bound) and bound <= self.trigger:
                continue
            self.counts["checks"] += 1
            w = self.matrices[index]
            if not math.isfinite(bound) and not w.isfinite().all():
                raise InputError(f"constrained matrix {index} (shape {list(w.shape)}) holds NaN or infinity")
            self._project(index, bound)

    def state_dict(self) -> dict[str, Any]:
        """The bounds and certificates. With them a resumed training has the same bits as an uninterrupted one."""
        return {
            "before": [None if w is None else w.clone() for w in self._before],
            "bounds": list(self._bounds),
            "certificates": [
                None if c is None else (c.anchor.clone(), c.v, c.image, c.level, c.whole, c.served)
                for c in self._certificates
            ],
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError if the state is of other matrices, or not of a projection."""
        self._check_state(state)
        devices = [w.device for w in self.matrices]
        self._before = [
            None if w is None else w.to(device, copy=True) for w, device in zip(state["before"], devices, strict=True)
        ]
        self._bounds = list(state["bounds"])
        self._certificates = [
            None if c is None else _Certificate(*(x.to(device, copy=True) for x in c[:3]), *c[3:])
            for c, device in zip(state["certificates"], devices, strict=True)
        ]
        self.counts = dict(state["counts"])

    def _check_state(self, state: Any) -> None:
        """Raises InputError unless names, types, shapes and ranges of a state match these matrices."""
        if not isinstance(state, dict) or state.keys() != {"before", "bounds", "certificates", "counts"}:
            raise misfit("state", state, "a dict of before, bounds, certificates and counts")
        n = len(self._matrices)
        for name in ("before", "bounds", "certificates"):
            if not isinstance(state[name], list):
                raise misfit(name, state[name], "a list")
            if len(state[name]) != n:
                raise InputError(f"the state is of {len(state[name])} matrices: accepted is one of {n}")
        if not isinstance(state["counts"], dict) or state["counts"].keys() != self.counts.keys():
            raise misfit("counts", state["counts"], f"a dict of {', '.join(self.counts)}")
        for name, count in state["counts"].items():
            check_integer(f"counts.{name}", count)
        for index, w in enumerate(self.matrices):
            before, bound, certificate = (state[name][index] for name in ("before", "bounds", "certificates"))
            if before is not None:
                check_matrix(f"before.{index}", before, tuple(w.shape))
            if type(bound) is not float or not bound >= 0:
                raise misfit(f"bounds.{index}", bound, "a number of at least 0")
            if certificate is not None:
                check_certificate(f"certificates.{index}", certificate, max(w.shape), min(w.shape))

    def _upper_bounds(self, indices: Iterable[int] | None = None) -> list[float]:
        """Lemma 6 for some matrices, or all: sigma_1 at the last check plus the Frobenius norm of the change since."""
        bounds = []
        for index in range(len(self._matrices)) if indices is None else indices:
            w = self.matrices[index]
            before = self._before[index]
            if before is None or before.dtype != w.dtype or before.device != w.device:
                check_constrained(index, w)  # its dtype may have changed
                self._before[index] = self._certificates[index] = None
                bounds.append(math.inf)
            else:
                bounds.append(self._bounds[index] + spectral.distance(w, before) * (1 + _relative(w)))
        return bounds

    def _project(self, index: int, bound: float) -> None:
        """Project one matrix, whose largest singular value is at most `bound`."""
        matrix = self.matrices[index]
        flat = matrix.shape[0] < matrix.shape[1]
        w = (matrix.mT if flat else matrix).contiguous()  # [M, K], M >= K
        rounding = max(2 * torch.finfo(matrix.dtype).eps, _ROUNDING)
        result: tuple[Tensor | None, float] | None = None
        certificate = self._certificates[index]
        if certificate is not None and bound <= _RANGE * self.trigger:
            moved = bound - self._bounds[index]
            if moved < self.trigger - certificate.level:  # a larger change could exceed the threshold outside of V
                result = self._within(w, certificate, rounding)
            if result is None:
                # a tighter level costs more to find, which is worth it if the certificate is used for several steps
                certificate, gram = self._certify(w, certificate, tight=certificate.served > 1)
                if certificate is not None:
                    self.counts["certificates"] += 1
                    self._certificates[index] = certificate
                    result = self._within(w, certificate, rounding, gram)
        if result is None:
            self.counts["decompositions"] += 1
            result, self._certificates[index] = self._decompose(w)
        projected, largest = result
        if projected is not None:
            self.counts["projections"] += 1
            matrix.copy_(projected.mT if flat else projected)
        before = self._before[index]
        if before is None:
            self._before[index] = matrix.clone()
        else:
            before.copy_(matrix)
        self._bounds[index] = largest * (1 + 4 * rounding)  # includes the rounding to the matrix's dtype

    def _decompose(self, w: Tensor) -> tuple[tuple[Tensor | None, float], _Certificate | None]:
        """((the projection of w [M, K] or None if it is w, largest singular value of it), a certificate of w)."""
        exact = w.double()
        K = w.shape[1]
        far = _RANGE * self.limit
        square = spectral.distance(w) <= far * math.sqrt(K)  # else the largest is above `far`
        if square:
            theta, v = torch.linalg.eigh(exact.mT @ exact)  # ascending
            s, v = theta.flip(0).clamp_min(0).sqrt(), v.flip(1)
            square = float(s[0]) <= far
        if not square:  # squares, and differences of such large values, would lose too many digits near the threshold
            u, s, vh = torch.linalg.svd(exact, full_matrices=False)
            kept = torch.where(s > self.trigger, self.limit, s)
            return ((u * kept) @ vh, float(kept.max())), None
        certificate = None
        if K > _SMALL:
            watched = min(max(int((s > _WATCHED * self.trigger).sum()), _FEWEST), K // 4)
            directions = v[:, :watched].contiguous().to(w.dtype)
            level = float(s[watched]) * (1 + 1e-6) + 1e-7 * float(s[0])
            if level < (1 - 2 * _MARGIN) * self.trigger:  # else it would not outlive the next step
                certificate = _Certificate(w.clone(), directions, w @ directions, level, spectral.distance(w))
        count = int((s > self.trigger).sum())
        if count == 0:
            return (None, float(s[0])), certificate
        large = v[:, :count]
        taken = (exact @ large) * (1 - self.limit / s[:count])
        rest = float(s[count]) if count < K else 0.0
        return (exact - taken @ large.mT, max(self.limit, rest)), certificate

    def _within(
        self, w: Tensor, certificate: _Certificate, rounding: float, gram: Tensor | None = None
    ) -> tuple[Tensor | None, float] | None:
        """As ``_decompose`` by steps 1 and 2 of Note [Work]; None if the certificate is not sufficient.

        gram: W^T W [K, K] if it is known.
        """
        basis = certificate.v
        # W V [M, k]
        image = w @ basis if gram is None else certificate.image
        outside = certificate.complement(w, image) ** 2
        top = self.trigger**2
        above = top * (1 + rounding)
        bound = top * (1 + 4 * rounding)
        # allowed error of the removed part, per direction: below the rounding of a row of the result
        allowed = max(rounding * self.limit, torch.finfo(w.dtype).eps / 2 * certificate.whole)
        if not outside < top * (1 - _MARGIN):
            return None
        exact = w  # in the dtype of the computations in V
        # G V [K, k]; W^T X as (X^T W)^T costs a third, and G is symmetric
        gram_basis = (image.mT @ w).mT if gram is None else (basis.mT @ gram).mT
        for _ in range(_MOST_ROUNDS):
            added = basis.shape[1] - certificate.v.shape[1]
            theta, y = torch.linalg.eigh((image.mT @ image).double())  # ascending
            rotation = y.to(basis.dtype)
            vectors = basis @ rotation
            residuals = gram_basis @ rotation - vectors * theta.to(basis.dtype)
            products = (residuals.mT @ residuals).double()
            size = products.diagonal().clamp_min(0)
            large = theta > above
            left = torch.where(large, self.limit**2, theta)
            # the error of the projection caused by directions outside of V, per removed direction
            sigma = theta.clamp_min(0).sqrt()
            wrong = torch.where(large, (sigma - self.limit) * size.sqrt() / (theta - outside), 0.0)
            inexact, most = wrong > allowed, float(wrong.max())
            room = (bound - left).clamp_min(rounding * top).sqrt()
            coupling = products / (room * room[:, None])
            level, proved = outside, False
            if most <= allowed:
                proved = _at_most(coupling, bound - outside)
                if not proved and added:  # without the Ritz vectors that contain most of the new columns
                    new = torch.zeros_like(large)
                    new[rotation[-added:].square().sum(0).topk(added).indices] = True
                    level = _outside_of_others(image, rotation[:, new], added, math.sqrt(outside)) ** 2
                    proved = not bool((large & new).any()) and _at_most(coupling[~new][:, ~new], bound - level)
            if proved:
                certificate.served += 1
                # Weyl's inequality for the remainder, if it gives a smaller bound
                largest = math.sqrt(min(bound, max(float(left.max()), outside) + float(size.sum().sqrt())))
                if not bool(large.any()):
                    return None, largest
                return self._without(w, vectors[:, large].double()), largest
            near = 1e3 if float(theta[-1]) > _FAR * top else 4.0  # times the rounding of float32
            if basis.dtype != torch.float64 and allowed < most < near * allowed:
                exact, basis = w.double(), torch.linalg.qr(basis.double())[0]
                image = exact @ basis
                gram_basis = (image.mT @ exact).mT
                continue
            grown = inexact.clone()
            half = (bound - (level if level < bound else outside)) / 2
            if not (added and most > allowed) and not _at_most(coupling[~grown][:, ~grown], half):
                # as many as needed for the sum of the others to be at most half
                share = coupling.diagonal().masked_fill(inexact, 0.0)
                share[:added] = 0.0
                share, order = share.sort()
                grown[order[share.cumsum(0) > half]] = True
            # a new certificate costs less than many new directions for an old one
            most_grown = _MOST_GROWN if gram is None else w.shape[1] - _BLOCK - basis.shape[1]
            if not 0 < int(grown.sum()) <= min(most_grown, w.shape[1] - _BLOCK - basis.shape[1]):
                return None
            tolerance = min(max(0.3 * allowed / max(most, allowed), 1e-3), 3e-3)
            more = _solve_outside(w, gram, vectors.to(w.dtype), residuals.to(w.dtype), theta, grown, tolerance)
            more = more.to(basis.dtype)
            # a small correction is added to V; as new columns, its directions would be mostly rounding errors
            turned = _outside_of_turned(more, theta[grown], math.sqrt(outside)) ** 2
            if not added and turned <= min(outside + half / 2, top * (1 - _MARGIN)):
                outside = turned
                vectors[:, grown] += more
                basis = torch.linalg.qr(vectors)[0]
                image = exact @ basis
                gram_basis = (image.mT @ exact).mT
                continue
            for _ in range(2):
                more = torch.linalg.qr(more - basis @ (basis.mT @ more))[0]
            more_image = exact @ more
            basis, image = torch.cat([basis, more], 1), torch.cat([image, more_image], 1)
            gram_basis = torch.cat([gram_basis, (more_image.mT @ exact).mT], 1)
        return None

    def _without(self, w: Tensor, v: Tensor) -> Tensor:
        """w [M, K] with its singular values in the directions v [K, s], float64, set to the limit."""
        v = torch.linalg.qr(v)[0]
        u, sigma, vh = torch.linalg.svd(spectral.wide_product(w, v), full_matrices=False)
        return spectral.subtract_product(w, (u * (sigma - self.limit)) @ vh, v)

    def _certify(self, w: Tensor, older: _Certificate, tight: bool) -> tuple[_Certificate | None, Tensor]:
        """(a certificate for w [M, K] by step 3 of Note [Work], or None without a proof; W^T W). It starts from the
        directions of an older certificate, and reuses its memory."""
        K = w.shape[1]
        gram = spectral.gram(w)
        v = older.v
        if tight:  # V has hardly changed
            for _ in range(2):
                v = torch.linalg.qr((v.mT @ gram).mT)[0]
        else:
            # for a matrix of low rank, or zero, the level would be so small that the polynomials overflow
            level = max(older.level**2, _MARGIN * self.trigger**2, 3e-5 * float(gram.diagonal().sum()))
            for degree in _DEGREES:
                v = _filtered(gram, v, degree, level)
        highest = (1 - 2 * _MARGIN) * self.trigger**2
        while v.shape[1] <= K // 4:
            product = (v.mT @ gram).mT
            inner = v.mT @ product
            theta = torch.linalg.eigvalsh(inner.double())
            if float(theta[-1]) * 8 * math.sqrt(K) * torch.finfo(w.dtype).eps > _MARGIN * self.trigger**2:
                break  # the rounding errors in G are too large
            half = product - v @ (inner / 2)
            # -(I - V V^T) G (I - V V^T)
            minus = torch.addmm(gram, torch.cat([v, half], 1), torch.cat([half, v], 1).mT, beta=-1)
            diagonal = minus.diagonal().clone()
            if not tight:  # between the smallest value in V and the highest useful one
                level = (min(float(theta[0]), highest) + highest) / 2
                if spectral.is_definite(minus, diagonal + level):
                    return older.replaced(w, v, math.sqrt(level * (1 + _MARGIN))), gram
                minus.diagonal().copy_(diagonal)
            block, largest = _leading_block(minus)
            for level in (largest * (1 + 2 * _MARGIN), largest * (1 + 6 * _MARGIN)):
                if level <= highest and spectral.is_definite(minus, diagonal + level):
                    return older.replaced(w, v, math.sqrt(level * (1 + _MARGIN))), gram
            v = torch.linalg.qr(torch.cat([v, block], 1))[0]
        return None, gram


def _filtered(gram: Tensor, v: Tensor, degree: int, level: float) -> Tensor:
    """V [K, k] rotated towards the eigenvectors of the largest eigenvalues of G [K, K]: an orthonormal basis of p(G) V,
    where p is the Chebyshev polynomial of the degree, which is at most 1 on [0, c] and grows fastest above c.

    c: V's lowest Ritz value, which is at most G's k-th eigenvalue, limited to 0.3 to 1 times `level`. The polynomial is
    applied to Ritz vectors: each grows as a whole, so that the rounding error of one that grows by 10^7 does not exceed
    another vector.
    """
    rows = v.mT.contiguous()  # see _solve_outside
    product = rows @ gram
    theta, y = torch.linalg.eigh(product @ v)
    c = min(max(float(theta[0]), 0.3 * level), level)
    y = y.mT
    before, product = y @ rows, y @ product
    now = torch.sub(product * (2 / c), before)
    for _ in range(degree - 1):
        before, now = now, torch.addmm(now, now, gram, beta=-2.0, alpha=4 / c).sub_(before)
    now /= torch.linalg.vector_norm(now, dim=1, keepdim=True)
    # For nearly orthogonal rows, the Cholesky factor of their products is twice as fast as QR and as accurate. Its
    # error grows with the square of their condition number.
    factor, failed = torch.linalg.cholesky_ex(now @ now.mT)
    if not int(failed) and float(factor.diagonal().min()) > 0.9:
        return torch.linalg.solve_triangular(factor, now, upper=False).mT
    return torch.linalg.qr(now.mT)[0]


def _relative(a: Tensor) -> float:
    """The relative rounding error of the sum of a row's squares, in any order. a: [M, K]."""
    return a.shape[1] * torch.finfo(a.dtype).eps


def _outside_of_others(image: Tensor, new: Tensor, added: int, level: float) -> float:
    """A bound of ||W u|| for unit vectors u that are orthogonal to k of the k + s Ritz vectors of W^T W in [V, Z].

    The part of u outside of V adds at most ||W (I - V V^T)||_2, and V^T u is in the range of V^T D, where D are the
    other s Ritz vectors, and |V^T D| <= |D|.

    Args:
        image: W [V, Z] [M, k + s]. new: [k + s, s], D in [V, Z]. added: s. level: of ||W (I - V V^T)||_2, a bound.
    """
    inside = image[:, :-added] @ new[:-added]  # W V V^T D
    return level + float(torch.linalg.vector_norm(inside, dtype=torch.float64)) * (1 + 1e-6)


def _outside_of_turned(x: Tensor, theta: Tensor, level: float) -> float:
    """A bound of ||W u|| for unit vectors u that are orthogonal to V after some of its Ritz vectors Y became Y + X.

    Outside of V, ||W (I - V V^T)||_2 is a bound; the part of u in V is Y^T u = -X^T u, at most |X|, times |W Y|.

    Args:
        x: X [K, s]. theta: [s], the Ritz values, squares of |W y|. level: of ||W (I - V V^T)||_2, a bound.
    """
    return level + float(torch.linalg.vector_norm(x, dtype=torch.float64)) * math.sqrt(float(theta.sum())) * (1 + 1e-6)


def _at_most(a: Tensor, bound: float) -> bool:
    """Whether no eigenvalue of a positive semi-definite matrix [k, k] is above the bound."""
    norm = float(torch.linalg.vector_norm(a))
    return norm <= bound or (math.isfinite(norm) and float(torch.linalg.eigvalsh(a)[-1]) <= bound)


def _solve_outside(
    w: Tensor, gram: Tensor | None, vectors: Tensor, residuals: Tensor, theta: Tensor, chosen: Tensor, tolerance: float
) -> Tensor:
    """The components outside of V of eigenvectors of G = W^T W, for some of V's Ritz vectors.

    With y_i in V and its residual r_i outside of it, y_i + x_i is an eigenvector to second order if
    (theta_i I - P G P - sum_j r_j r_j^T / (theta_i - theta_j)) x_i = r_i, P = I - V V^T, j the others. By conjugate
    gradients, for all chosen i at once. An approximation is enough: the proof does not depend on it.

    Args:
        w: W [M, K]. gram: G [K, K] if it is known. vectors: Y [K, k], orthonormal. residuals: [K, k], G Y - Y
            theta. theta: [k] float64. chosen: [k] bool, s of them. tolerance: of the residual, relative.

    Returns:
        [K, s].
    """
    shift = theta[chosen].unsqueeze(1)
    # a lower bound, so that it is positive definite where two values are close
    gap = (shift - theta).clamp_min(float(theta[-1]) / 32)
    weight = torch.where(chosen, 0.0, -1 / gap).to(w.dtype)  # [s, k]
    shift = shift.to(w.dtype)
    both = torch.cat([vectors, residuals], 1).mT  # [2 k, K]
    r = residuals[:, chosen].mT.contiguous()  # as rows: products with few columns cost two or three times as much
    r = r - (r @ vectors) @ vectors.mT  # otherwise rounding errors inside of V would rotate every direction
    x, p = torch.zeros_like(r), r
    square = start = (r * r).sum(1, keepdim=True)
    for _ in range(_MOST_ITERATIONS):
        image = p @ gram if gram is not None else (p @ w.mT) @ w
        c = p @ residuals  # Y^T G p, for p outside of V
        image = p * shift - image + torch.cat([c, c * weight], 1) @ both
        curvature = (p * image).sum(1, keepdim=True)
        step = torch.where(curvature > 0, square / curvature, 0.0)
        x, r = x + step * p, r - step * image
        square, before = (r * r).sum(1, keepdim=True), square
        if not bool((square > tolerance**2 * start).any()):
            break
        p = r + (square / before) * p
    return x.mT


def _leading_block(gram: Tensor) -> tuple[Tensor, float]:
    """Approximate eigenvectors [K, 8] of the largest eigenvalues of a positive semi-definite matrix [K, K], and the
    largest eigenvalue, by subspace iteration."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(gram), _BLOCK, dtype=gram.dtype, device="cpu", generator=generator).to(gram.device)
    for _ in range(8):
        block = gram @ torch.linalg.qr(block)[0]
    return block, float(torch.linalg.matrix_norm(block, 2))


def _of_module(module: nn.Module, inputs: str) -> list[Any]:
    """The constrained matrices of a module's GRUs."""
    found: list[Any] = []
    for part in module.modules():
        constraints = getattr(part, "spectral_constraints", None)
        if callable(constraints):
            found += constraints(inputs)
        elif isinstance(part, nn.GRU):
            rows = slice(2 * part.hidden_size, 3 * part.hidden_size)
            ways = ("", "_reverse") if part.bidirectional else ("",)
            suffixes = [f"l{layer}{way}" for layer in range(part.num_layers) for way in ways]
            found += [(own_parameter(part, name), rows) for name in constrained_weights(suffixes, inputs)]
    return found
