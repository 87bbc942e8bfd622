"""Spectral-norm constraints by projection after every step of an optimizer (Kanai et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orthokern import _autocast
from orthokern._decompositions import robust_eigh, robust_svd
from orthokern._gru_parameters import constrained_weights
from orthokern._products import ieee_products
from orthokern.errors import InputError, number, one_of
from orthokern.ops._checks import own_parameter
from orthokern.optim._checks import check_constrained, misfit

THRESHOLDS = ("2-delta", "2")
# If sigma_1 is more than this many times the limit, W itself is decomposed: squares would lose digits.
_RANGE = 10.0
# Up to this many columns, all eigenvectors of W^T W cost less than the leading ones.
_SMALL = 32
# The block has the directions of singular values above this fraction of the threshold, and some more.
_WATCHED = 0.9
_SPARE, _FEWEST = 8, 16
# The polynomials of a search for the leading directions, and their degree. In the first rounds the products are those
# of the matrix's dtype, then float64.
_ROUNDS, _ROUGH_ROUNDS, _DEGREE = 7, 2, 8


class SpectralNormProjection:
    """P_delta of Kanai et al. 2017 (eq. 11 to 15): after a step, large singular values are set to 2 - delta.

    For every constrained matrix W, the nearest matrix in Frobenius norm whose singular values are all at most 2 - delta
    (lemma 5): W - sum over sigma_i > 2 - delta of (sigma_i - (2 - delta)) u_i v_i^T. A result of the first steps below
    is accepted only with a proof, up to the rounding of float64, that no singular value is above the threshold; the
    singular value decomposition of the last step has none.

    Note [Work]
        With G = W^T W in float64 and t the threshold:

        1. The Cholesky factorisation of t^2 I - G exists if and only if sigma_1 < t. Then nothing is done. It is
           skipped if a direction of step 2 shows that sigma_1 > t.
        2. A block V [K, k] of a few dozen orthonormal vectors, which is kept from step to step, is rotated towards the
           leading eigenvectors of G: by a Chebyshev polynomial of G, damped below the lowest Rayleigh-Ritz value of V,
           and the Rayleigh-Ritz method in V. This is repeated until the residuals of the eigenvectors above t^2 change
           the result by less than its rounding.
        3. W' = W - U (S - limit) V^T for these vectors, with W V = U S from a decomposition of an [M, s] matrix. G' of
           W' differs from G by products with s columns, and a Cholesky factorisation of t^2 I - G' proves the result.
        4. If step 2 does not converge, or if V lacked a direction so that the proof fails, all eigenvectors of G
           replace V; if that fails too, or squares would lose digits, the singular vectors of W replace it.

        A factorisation of A [K, K] in floating point proves A + E > 0, where E is a rounding error. So the threshold of
        a proof is t (1 + e), with e = max(2 eps of W's dtype, 4 K eps of float64), which is above usual rounding errors
        of G and its factorisation (worst cases grow with K |W|_F^2, not with |W|_2^2). Step 2 costs 2 K^2 k flops for
        each degree of a polynomial, a factorisation K^3 / 3 and G 2 M K^2.

    A projection holds references to the parameters. If they are replaced, as by ``load_state_dict(..., assign=True)``,
    create a new projection. On a GPU every step synchronises with the host, so it cannot be captured in a CUDA graph.

    Args:
        constrained: a module: every orthokern.nn.GRU and torch.nn.GRU in it, with W_hn of all layers and directions and
            the candidate's input matrices W_in that ``inputs`` selects (also any module with a method
            ``spectral_constraints(inputs)``). Or an iterable of matrices, or of pairs (matrix, slice of its rows).
            float32 or float64.
        delta: in (0, 2).
        threshold: which singular values are set to 2 - delta. "2-delta": those above 2 - delta, as in eq. 13. "2":
            those above 2, as section 3.3 proposes to save work; values from 2 - delta to 2 are not changed.
        inputs: "upper", the input matrices of the layers above the first; "all"; or "none". They get the bound of
            W_hn; eq. 10 bounds those of all layers by 2.

    Attributes:
        counts: the number of "steps", "checks" (matrices for which step 1 of Note [Work] had no proof), "projections"
            (changed matrices) and "decompositions" (step 4).

    Raises:
        InputError: for a delta outside (0, 2), for arguments that are not matrices, for weights of a GRU that are
            pruned or parametrized, and from ``step`` for NaN or infinity.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        SpectralNormProjection(model, delta=0.2).attach(optimizer)   # or call its step() after optimizer.step()

    Example::

        >>> w = torch.nn.Parameter(10 * torch.eye(8))
        >>> SpectralNormProjection([w], delta=0.5).step()
        >>> bool(torch.linalg.matrix_norm(w, 2) <= 1.5 + 1e-6)
        True
    """

    def __init__(
        self,
        constrained: nn.Module | Iterable[Any],
        delta: float = 0.2,
        *,
        threshold: str = "2-delta",
        inputs: str = "upper",
    ) -> None:
        self.delta = number("delta", delta, "a number in (0, 2)", lambda value: 0 < value < 2)
        self.threshold = one_of("threshold", threshold, THRESHOLDS)
        constrained_weights((), inputs)  # an unknown name is an error for matrices too
        self.limit = 2 - self.delta  # the new value of large singular values
        self.trigger = self.limit if threshold == "2-delta" else 2.0
        args: Any = constrained
        if isinstance(args, Tensor) or not isinstance(args, (nn.Module, Iterable)):
            raise InputError(f"constrained must be a module or a list of matrices, got {type(args).__name__}")
        whole = isinstance(args, nn.Module) and not isinstance(args, nn.ParameterList)
        items = _of_module(constrained, inputs) if whole else list(constrained)  # type: ignore[arg-type]
        if not items:
            raise InputError("constrained must be a module with a GRU or several matrices, got no matrix")
        self._matrices = [check_constrained(index, item) for index, item in enumerate(items)]
        self._blocks: list[Tensor | None] = [None] * len(self._matrices)  # V of Note [Work], float64
        self.counts = {"steps": 0, "checks": 0, "projections": 0, "decompositions": 0}

    @property
    def matrices(self) -> list[Tensor]:
        """The constrained matrices, as views of their parameters."""
        return [parameter.detach()[place] for parameter, place in self._matrices]

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Run ``step`` after every step of the optimizer, until ``remove()`` of the returned handle is called."""
        return optimizer.register_step_post_hook(lambda *_: self.step())

    @torch.no_grad()
    @_autocast.off()
    @ieee_products()
    def step(self) -> None:
        """Project every constrained matrix that has a singular value above the threshold."""
        self.counts["steps"] += 1
        for index, matrix in enumerate(self.matrices):
            check_constrained(index, matrix)  # its dtype may have changed
            flat = matrix.shape[0] < matrix.shape[1]
            w = (matrix.mT if flat else matrix).double().contiguous()  # [M, K], M >= K
            norm = float(torch.linalg.vector_norm(w))
            if not math.isfinite(norm) and not bool(w.isfinite().all()):
                raise InputError(f"constrained matrix {index} (shape {list(matrix.shape)}) has NaN or infinite entries")
            projected = self._projected(index, w, norm, matrix.dtype)
            if projected is not None:
                self.counts["projections"] += 1
                matrix.copy_(projected.mT if flat else projected)

    def state_dict(self) -> dict[str, Any]:
        """The blocks and counts. With them, a resumed run is bit-identical to an uninterrupted one."""
        return {"blocks": list(self._blocks), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError if the state is of other matrices, or not of a projection."""
        if not isinstance(state, dict) or state.keys() != {"blocks", "counts"}:
            raise misfit("state", state, "a dict of blocks and counts")
        blocks, counts = state["blocks"], state["counts"]
        if not isinstance(blocks, list) or len(blocks) != len(self._matrices):
            raise misfit("blocks", blocks, f"a list of {len(self._matrices)}, one for each matrix")
        if not isinstance(counts, dict) or counts.keys() != self.counts.keys():
            raise misfit("counts", counts, f"a dict of {', '.join(self.counts)}")
        for index, (v, w) in enumerate(zip(blocks, self.matrices, strict=True)):
            rows = min(w.shape)
            if v is not None and not (isinstance(v, Tensor) and v.ndim == 2 and v.shape[0] == rows >= v.shape[1]):
                raise misfit(f"blocks.{index}", v, f"a tensor [{rows}, k] with k of at most {rows}")
        self._blocks = [
            None if v is None else v.to(w.device, torch.float64) for v, w in zip(blocks, self.matrices, strict=True)
        ]
        self.counts = dict(counts)

    def _projected(self, index: int, w: Tensor, norm: float, dtype: torch.dtype) -> Tensor | None:
        """The projection of w [M, K], float64, or None if it is w. norm: |W|_F. dtype: of the result."""
        K = w.shape[1]
        rounding = max(2 * torch.finfo(dtype).eps, 4 * K * torch.finfo(torch.float64).eps)
        bound, far = self.trigger * (1 + rounding), _RANGE * self.limit
        block = self._blocks[index]
        if norm <= far * math.sqrt(K):  # else sigma_1 is above `far`
            gram = w.mT @ w
            above = False
            if block is not None:
                block = block.to(w.device)
                above = float(torch.linalg.vector_norm(w @ block, dim=0).max()) > bound
            if not above and _is_bounded(gram, bound):
                return None
            self.counts["checks"] += 1
            if block is not None:
                directions = _leading(gram, block, self.limit, bound, dtype)
                result = None if directions is None else self._clipped(index, w, gram, *directions, bound)
                if result is not None:
                    return result
            self.counts["decompositions"] += 1
            theta, vectors = _eigenvectors(gram)
            if float(theta[0]) <= bound**2:  # the factorisation failed because of rounding
                return None
            result = self._clipped(index, w, gram, theta, vectors, bound) if float(theta[0]) <= far**2 else None
            if result is not None:
                return result
        else:
            self.counts["checks"] += 1
            self.counts["decompositions"] += 1
        u, s, vh = robust_svd(w)
        self._blocks[index] = self._next_block(s.square(), vh.mT)
        return (u * torch.where(s > self.trigger, self.limit, s)) @ vh

    def _clipped(
        self, index: int, w: Tensor, gram: Tensor, theta: Tensor, vectors: Tensor, bound: float
    ) -> Tensor | None:
        """Step 3 of Note [Work]: w [M, K] with its singular values above the bound set to the limit; None without a
        proof. theta: [k], descending, and vectors: [K, k], eigenvalues and eigenvectors of gram."""
        v = vectors[:, theta > bound**2]
        u, s, rotation = robust_svd(w @ v)
        v = v @ rotation.mT  # W V = U S
        excess = s - self.limit
        # W'^T W' for W' = W - U D V^T is G - X V^T - V X^T with X = W^T U D - V D^2 / 2
        x = (w.mT @ u) * excess - v * (excess.square() / 2)
        remaining = torch.addmm(gram, torch.cat([x, v], 1), torch.cat([v, x], 1).mT, alpha=-1.0)
        if not _is_bounded(remaining, bound):
            return None
        self._blocks[index] = self._next_block(theta, vectors)
        return torch.addmm(w, u * excess, v.mT, alpha=-1.0)

    def _next_block(self, theta: Tensor, vectors: Tensor) -> Tensor | None:
        """V for the next step, from eigenvalues [k] and eigenvectors [K, k] of W^T W; random directions are added if
        there are too few, and there is none if too many would be needed."""
        K, k = vectors.shape
        if K <= _SMALL:
            return None
        watched = max(int((theta > (_WATCHED * self.trigger) ** 2).sum()) + _SPARE, _FEWEST)
        if watched > K // 4:
            return None
        if watched > k:
            generator = torch.Generator().manual_seed(watched)
            more = torch.randn(K, watched - k, dtype=torch.float64, device="cpu", generator=generator)
            vectors = torch.linalg.qr(torch.cat([vectors, more.to(vectors.device)], 1))[0]
        return vectors[:, :watched].contiguous()


def _is_bounded(gram: Tensor, bound: float) -> bool:
    """Whether bound^2 I - gram has a Cholesky factorisation: no eigenvalue of gram [K, K] is above bound^2."""
    shift = torch.eye(len(gram), dtype=gram.dtype, device=gram.device).mul_(bound**2)
    factor, failed = torch.linalg.cholesky_ex(shift.sub_(gram))
    return bool((failed == 0) & factor.diagonal().isfinite().all())


def _eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of a symmetric gram [..., K, K]."""
    theta, vectors = robust_eigh(gram)
    return theta.flip(-1), vectors.flip(-1)


def _leading(gram: Tensor, v: Tensor, limit: float, bound: float, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Step 2 of Note [Work]: Ritz values [k], descending, and vectors [K, k] of gram [K, K] in a block that is rotated
    from v [K, k]. Those above bound^2 are eigenvectors up to what rounding to `dtype` hides; None without convergence.
    """
    allowed = limit * max(torch.finfo(dtype).eps, 1e-13)
    top = bound**2
    rough = gram.to(dtype)
    for turn in range(_ROUNDS):
        image = (v.mT @ gram).mT  # a product with few rows costs less than one with few columns
        theta, y = _eigenvectors(v.mT @ image)
        vectors = v @ y
        large = theta > top
        if bool(large.all()) or float(theta[0]) > (_RANGE * limit) ** 2:
            return None
        # the error of the result by an error r / (theta - lowest) in the direction of a removed vector
        sizes = torch.linalg.vector_norm(image @ y - vectors * theta, dim=0)
        errors = (theta.clamp_min(0).sqrt() - limit) * sizes / (theta - theta[-1])
        if bool(large.any()) and float(errors[large].max()) <= allowed:
            return theta, vectors
        v = _filtered(rough if turn < _ROUGH_ROUNDS else gram, vectors, theta, top)
    return None


def _filtered(gram: Tensor, vectors: Tensor, theta: Tensor, top: float) -> Tensor:
    """An orthonormal basis [K, k], float64, of p(G) V for Ritz vectors V [K, k] with the values theta [k], descending,
    and the Chebyshev polynomial p that is at most 1 on [0, c] and grows fastest above. c: the lowest Ritz value, within
    limits. Every Ritz vector grows as a whole, so that the rounding error of one does not exceed another vector."""
    c = min(max(float(theta[-1]), 0.3 * top), top)
    before = vectors.to(gram.dtype).mT.contiguous()
    now = torch.addmm(before, before, gram, beta=-1.0, alpha=2 / c)
    for _ in range(_DEGREE - 1):
        before, now = now, torch.addmm(now, now, gram, beta=-2.0, alpha=4 / c).sub_(before)
    rows = now.double()
    rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.linalg.qr(rows.mT)[0]


def _of_module(module: nn.Module, inputs: str) -> list[Any]:
    """The constrained matrices of a module's GRUs."""
    items: list[Any] = []
    for part in module.modules():
        constraints = getattr(part, "spectral_constraints", None)
        if callable(constraints):
            items += constraints(inputs)
        elif isinstance(part, nn.GRU):
            rows = slice(2 * part.hidden_size, 3 * part.hidden_size)
            ways = ("", "_reverse") if part.bidirectional else ("",)
            suffixes = [f"l{layer}{way}" for layer in range(part.num_layers) for way in ways]
            items += [(own_parameter(part, name), rows) for name in constrained_weights(suffixes, inputs)]
    return items
