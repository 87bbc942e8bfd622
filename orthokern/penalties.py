"""Soft constraints and priors on recurrent matrices, to be added to a loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import _autocast
from orthokern._decompositions import robust_svdvals
from orthokern.errors import number, one_of, require
from orthokern.ops._checks import strided
from orthokern.ops._linear import linear

__all__ = [
    "LAYERS",
    "OrthogonalPenalty",
    "composite_weight_decay",
    "modulus_penalty",
    "orthogonal_penalty",
    "spectrum_prior",
    "triangular_decay",
]

LAYERS = ("recurrent", "feedforward")
_svdvals = _autocast.keeps_dtype(robust_svdvals)


def modulus_penalty(module: nn.Module, norm: str = "l2") -> Tensor:
    """The sum of (gamma_i - 1)^2, or of |gamma_i - 1|, over all NonNormalRNNs in a module.

    Kerg et al. 2019 (nnRNN) add delta times the former; the reproducibility report of 2019, section 5, also the latter.

    Args:
        module: a NonNormalRNN, or any module that contains some.
        norm: "l2" for squares, "l1" for magnitudes.

    Returns:
        The sum, a 0-dim tensor with a gradient for the moduli.

    Raises:
        InputError: no module, or one without a Schur form; or an unknown norm.

    Example::

        >>> from orthokern.nn import NonNormalRNN
        >>> modulus_penalty(NonNormalRNN(3, 8)).item()
        0.0
    """
    one_of("norm", norm, ("l1", "l2"))
    moduli = [gamma for part in _modules(module) if hasattr(part, "moduli") for gamma in part.moduli()]
    values = [((gamma - 1).square() if norm == "l2" else (gamma - 1).abs()).sum() for gamma in moduli]
    return _total(values, module, "Schur form, as a NonNormalRNN")


def triangular_decay(module: nn.Module) -> Tensor:
    """The sum of ||T||_F^2 over all NonNormalRNNs in a module: the non-normal part is kept small.

    nnRNN uses an optimizer's weight_decay = c on T only, which adds c T to the gradient. This equals c / 2 times this
    sum in the loss.

    Args:
        module: a NonNormalRNN, or any module that contains some.

    Returns:
        The sum, a 0-dim tensor with a gradient for T.

    Raises:
        InputError: no module, or one without a Schur form that has a T.

    Example::

        >>> from orthokern.nn import NonNormalRNN
        >>> triangular_decay(NonNormalRNN(3, 8)).ndim
        0
    """
    values = [t.square().sum() for part in _modules(module) if hasattr(part, "triangles") for t in part.triangles()]
    return _total(values, module, "Schur form that has a triangle, as a NonNormalRNN with triangular=True")


def orthogonal_penalty(recurrence: nn.Module | Tensor) -> Tensor:
    """The sum of ||W^T W - I||_F^2 over all recurrences in a module, or of one matrix: a soft orthogonality constraint.

    Vorontsov et al. 2017, eq. 7 and section 3.2; lambda, its strength, is the caller's factor. For a factorized W it is
    sum_i (s_i^2 - 1)^2 + N - K, and W is never formed.

    Args:
        recurrence: an RNN, FactorizedRNN, ExpRNN, NonNormalRNN or GRU (of which W_hn counts) of orthokern.nn, or any
            module that contains some; or a matrix W [n, m].

    Returns:
        The sum, a 0-dim tensor; for factorized recurrences with a gradient for the spectrum parameters only.

    Raises:
        InputError: a module without a recurrence, or a tensor that is not a floating-point matrix.

    Cost: O(K) for a factorized recurrence; one product of O(n m min(n, m)) for a matrix.

    Note [Orthogonality penalty]
        Value. With U^T U = V^T V = I,
            W^T W = V S U^T U S V^T = V S^2 V^T,
        whose eigenvalues are the s_i^2, and N - K zeros; so ||W^T W - I||_F^2 = sum_i (s_i^2 - 1)^2 + N - K.
        Gradients of the full expression at orthonormal U and V: with dL/dW = 4 W (W^T W - I) they are U D and V D,
        D = 4 S^2 (S^2 - I) diagonal, and normal to the manifold. They are left out, for the reasons in Note [Weight
        decay of the composite].
        A matrix. W^T W and W W^T have the same eigenvalues except for |n - m| zeros, so the smaller of the two is used:
        for n < m, ||W^T W - I_m||^2 = ||W W^T - I_n||^2 + m - n.

    Example::

        >>> orthogonal_penalty(2 * torch.eye(3)).item()
        27.0
    """
    if isinstance(recurrence, Tensor):
        n, m = _check_matrix(recurrence).shape
        return _distance(recurrence) + max(m - n, 0)
    values = [distance for module in _modules(recurrence) for distance in _recurrent(module)]
    return _total(values, recurrence, "recurrence, as orthokern.nn.RNN or FactorizedRNN, or a matrix")


class OrthogonalPenalty:
    """lambda ||W W^T - I||_F^2 of chosen layers, a term of the loss (Manchev and Spratling, section II-B, "OPEN", eq.
    29 and 30): ``loss = loss + penalty(rnn)``.

    With plain SGD this is W <- W - lr (dE/dW + 4 lambda (W W^T - I) W), the changed update of eq. 31. The factors are
    in this order, not in the order of the published eq. 31, W (W W^T - I), which is not a gradient unless W is normal.

    The Gram matrix is the smaller one: W W^T of W [n, m] if n <= m, else W^T W, so that the penalty is zero if the
    rows, or else the columns, are orthonormal. The gradient of the square is the same for both, since
    (W W^T - I) W = W (W^T W - I). A factorized recurrence is penalised through its singular values, without forming W:
    Note [Orthogonality penalty].

    Args:
        strength: lambda, at least 0.
        squared: False for lambda ||W W^T - I||_F. The code released with the paper computes this form for recurrent
            networks; the paper's text squares it. The strengths of its Tables I and II are for this form. Its gradient,
            2 lambda (W W^T - I) W / ||W W^T - I||_F, does not vanish as W becomes orthogonal; at an orthogonal W it is
            taken as zero.
        on: which matrices of a module are penalised, one or both of LAYERS. "recurrent": W [N, N] of every
            recurrence that `orthogonal_penalty` knows. "feedforward": the attribute `weight` [n, m] of every other
            module, except embeddings and norms. Others, as those of torch.nn.GRU, are not penalised.

    Raises:
        InputError: a strength that is negative or not finite, unknown or no layers.

    Example::

        >>> penalty = OrthogonalPenalty(0.5)
        >>> penalty(2 * torch.eye(3)).item()  # 0.5 times ||3 I||_F^2
        13.5
        >>> _ = penalty(torch.nn.Linear(8, 8))  # the weight of a layer
    """

    def __init__(
        self, strength: float = 1.0, *, squared: bool = True, on: str | Iterable[str] = ("recurrent", "feedforward")
    ) -> None:
        self.strength = number("strength", strength, "a finite number of at least 0", lambda value: value >= 0.0)
        require(isinstance(squared, bool), "squared", "True or False", repr(squared))
        self.squared = squared
        accepted = f"one or both of {', '.join(LAYERS)}"
        require(isinstance(on, Iterable) and on, "on", accepted, repr(on))
        self.on = (on,) if isinstance(on, str) else tuple(on)
        for layer in self.on:
            one_of("layer", layer, LAYERS)

    def __call__(self, *parts: nn.Module | Tensor) -> Tensor:
        """The penalty, a 0-dim tensor with gradients; the sum over all matrices in `parts`.

        Args:
            parts: modules, and matrices [n, m], which are used regardless of `on`.

        Raises:
            InputError: a module without such a layer, or a tensor that is not a floating-point matrix.
        """
        require(parts, "parts", "modules and matrices [n, m]", "nothing")
        distances = []
        for part in parts:
            values = list(self._of_module(part)) if isinstance(part, nn.Module) else [_distance(part)]
            layers = " or ".join(self.on)
            require(values, "parts", f"modules with matrices ({layers})", f"{type(part).__name__}")
            distances += values
        return torch.stack([self._value(distance) for distance in distances]).sum()

    def _value(self, squared: Tensor) -> Tensor:
        if self.squared:
            return self.strength * squared
        zero = squared == 0  # there the root has no gradient
        return self.strength * torch.where(zero, 0.0, torch.where(zero, 1.0, squared).sqrt())

    def _of_module(self, whole: nn.Module) -> Iterator[Tensor]:
        """||W W^T - I||_F^2 of the chosen matrices."""
        for module in whole.modules():
            if "recurrent" in self.on:
                yield from _recurrent(module)
            weight = getattr(module, "weight", None)
            if "feedforward" in self.on and isinstance(weight, Tensor) and weight.ndim == 2:
                if not isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)):
                    yield _distance(weight)


def _recurrent(module: Any) -> Iterator[Tensor]:
    """||W W^T - I||_F^2 of the recurrent matrices of one module itself. A factorized recurrence has `spectra`, others
    `recurrent_matrices`: methods whose results are differentiable."""
    if hasattr(module, "spectra"):
        yield from ((s * s - 1).square().sum() + (module.hidden_size - len(s)) for s in module.spectra())
    elif hasattr(module, "recurrent_matrices"):
        yield from map(_distance, module.recurrent_matrices())


@_autocast.keeps_dtype
def _distance(w: Tensor) -> Tensor:
    """||W^T W - I||_F^2 of w [n, m] if n >= m, else ||W W^T - I||_F^2."""
    n, m = _check_matrix(w).shape
    gram = linear(w.mT, w.mT) if n >= m else linear(w, w)
    return (gram - torch.eye(min(n, m), dtype=w.dtype, device=w.device)).square().sum()


def spectrum_prior(module: nn.Module) -> Tensor:
    """The sum of (s_i - 1)^2 over all recurrences in a module: a Gaussian prior of mean one on the singular values.

    Vorontsov et al. 2017, end of section 2 and section 3.2; gamma, its strength, is the caller's factor (for a variance
    of v, gamma = 1 / (2 v)).

    Args:
        module: a FactorizedRNN, whose s_i may be negative for a margin above 1 or None, and whose prior mean is then +1
            too; or an RNN, whose singular values are computed; or any module that contains some.

    Returns:
        The sum, a 0-dim tensor; for factorized recurrences with a gradient for the spectrum parameters only.

    Raises:
        InputError: no module, or one without a recurrence.

    Cost: O(K) for a factorized recurrence; a singular value decomposition, O(N^3), for a dense one.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> spectrum_prior(FactorizedRNN(3, 8)).item()
        0.0
    """
    spectra: list[Tensor] = []
    for part in _modules(module):
        if hasattr(part, "spectra"):
            spectra += part.spectra()
        elif hasattr(part, "recurrent_matrices"):
            spectra += map(_svdvals, part.recurrent_matrices())
    return _total([(s - 1).square().sum() for s in spectra], module, "recurrence, as orthokern.nn.RNN or FactorizedRNN")


def _modules(whole: nn.Module) -> Iterator[Any]:
    require(isinstance(whole, nn.Module), "module", "a torch.nn.Module with recurrences", type(whole).__name__)
    return whole.modules()


def _check_matrix(w: Tensor) -> Tensor:
    accepted = "a module or a floating point matrix [n, m]"
    require(isinstance(w, Tensor), "W", accepted, type(w).__name__)
    require(w.ndim == 2 and w.is_floating_point(), "W", accepted, f"shape {list(w.shape)} and {w.dtype}")
    strided("W", w)
    return w


def _total(values: list[Tensor], module: nn.Module, missing: str) -> Tensor:
    require(values, "module", f"one with a {missing}", type(module).__name__)
    return torch.stack(values).sum()


def composite_weight_decay(rnn: nn.Module) -> Tensor:
    """The sum of ||U S V^T||_F^2 over all factorized recurrences in a module, without forming any W.

    Vorontsov et al. 2017 train with weight decay of 1e-4 on the composite matrix: loss + 1e-4 * this, whose gradient
    is 2e-4 times the weight. (A torch optimizer's weight_decay=c adds c times the weight: it is c/2 times this.)

    Args:
        rnn: a FactorizedRNN, or any module that contains some.

    Returns:
        sum of s^2 over all recurrences, a 0-dim tensor with a gradient for the spectrum parameters only.

    Raises:
        InputError: no module, or one without a factorized recurrence.

    Cost: O(K) per recurrence.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> composite_weight_decay(FactorizedRNN(3, 4, margin=0.0)).item()  # four singular values of 1
        4.0

    Note [Weight decay of the composite]
        Value. With U^T U = V^T V = I,
            ||U S V^T||_F^2 = tr(V S U^T U S V^T) = tr(S^2 V^T V) = sum_i s_i^2.
        Gradients of the full expression, without using orthonormality:
            dL/dU = 2 U S (V^T V) S,   dL/dV = 2 V S (U^T U) S,   dL/ds_i = 2 s_i (U^T U)_ii (V^T V)_ii  (+ cross
            terms),
        and at orthonormal U, V: dL/dU = 2 U S^2, dL/dV = 2 V S^2, dL/ds = 2 s.
        The first two are not zero, but they are normal to the manifold, so that the direction of the Cayley step
        vanishes,
            A = G U^T - U G^T = 2 U S^2 U^T - 2 U S^2 U^T = 0.
        The decay affects s only, so the gradients for U and V are left out. With them, the gradient norm that
        GeodesicSGD clips would increase without any effect on the step. With an optimizer for which U and V leave the
        manifold, penalise recurrent_matrix() instead, since sum s^2 is then not ||W||_F^2.
    """
    values = [(s * s).sum() for module in _modules(rnn) if hasattr(module, "spectra") for s in module.spectra()]
    return _total(values, rnn, "factorized recurrence, as a FactorizedRNN")
