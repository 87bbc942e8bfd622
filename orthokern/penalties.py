"""Soft constraints and priors on recurrent matrices, to be added to a loss."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from orthokern.errors import InputError, unknown_name

__all__ = [
    "composite_weight_decay",
    "modulus_penalty",
    "orthogonal_penalty",
    "spectrum_prior",
    "triangular_decay",
]


@runtime_checkable
class HasSpectra(Protocol):
    """A module with factorized recurrences; orthokern.nn.FactorizedRNN is one."""

    hidden_size: int  # N, the side of every W

    def spectra(self) -> list[Tensor]:
        """s [K] of every recurrence, differentiable."""
        ...


@runtime_checkable
class HasRecurrentMatrices(Protocol):
    """A module with dense recurrences; orthokern.nn.RNN is one."""

    def recurrent_matrices(self) -> list[Tensor]:
        """W [N, N] of every recurrence, differentiable."""
        ...


@runtime_checkable
class HasSchurForms(Protocol):
    """A module with recurrences in Schur form; orthokern.nn.NonNormalRNN is one."""

    def moduli(self) -> list[Tensor]:
        """gamma [ceil(N / 2)] of every recurrence, differentiable."""
        ...

    def triangles(self) -> list[Tensor]:
        """T [N, N] of every recurrence as far as it acts, differentiable; empty where there is none."""
        ...


def modulus_penalty(module: nn.Module, norm: str = "l2") -> Tensor:
    """The sum of (gamma_i - 1)^2, or of |gamma_i - 1|, over all Schur forms in a module: eigenvalues near the circle.

    Kerg et al. 2019 (nnRNN) add delta times the former; the reproducibility report of 2019, section 5, also the latter.

    Args:
        module: a NonNormalRNN, or any module that contains some.
        norm: "l2" for squares, "l1" for magnitudes.

    Returns:
        The sum, a 0-dim tensor with a gradient for the moduli.

    Raises:
        InputError: a module without a Schur form, or an unknown norm.
    """
    if norm not in ("l1", "l2"):
        raise unknown_name("norm", norm, ("l1", "l2"))
    found = [gamma - 1 for part in module.modules() if isinstance(part, HasSchurForms) for gamma in part.moduli()]
    values = [off.square().sum() if norm == "l2" else off.abs().sum() for off in found]
    return _total(values, module, "Schur form; accepted: a NonNormalRNN")


def triangular_decay(module: nn.Module) -> Tensor:
    """The sum of ||T||_F^2 over all Schur forms in a module: the non-normal part is kept small.

    nnRNN trains with an optimizer's weight_decay = c on T alone, which adds c T to the gradient: c / 2 times this.

    Args:
        module: a NonNormalRNN, or any module that contains some.

    Returns:
        The sum, a 0-dim tensor with a gradient for T.

    Raises:
        InputError: a module without a Schur form.
    """
    values = [
        t.square().sum() for part in module.modules() if isinstance(part, HasSchurForms) for t in part.triangles()
    ]
    return _total(values, module, "Schur form; accepted: a NonNormalRNN")


def orthogonal_penalty(recurrence: nn.Module | Tensor) -> Tensor:
    """The sum of ||W^T W - I||_F^2 over all recurrences in a module, or of one matrix: a soft orthogonality constraint.

    Vorontsov et al. 2017, eq. 7 and section 3.2; lambda, its strength, is the caller's factor. For a factorized W it is
    sum_i (s_i^2 - 1)^2 + N - K, and W is never formed.

    Args:
        recurrence: an RNN, a FactorizedRNN, or any module that contains some; or a matrix W [n, m].

    Returns:
        The sum, a 0-dim tensor; for factorized recurrences with a gradient for the spectrum parameters only.

    Raises:
        InputError: a module without a recurrence, or a tensor that is no floating matrix.

    Cost: O(K) for a factorized recurrence; one product of O(n m min(n, m)) for a matrix.

    Note [Orthogonality penalty]
        Value. With U^T U = V^T V = I,
            W^T W = V S U^T U S V^T = V S^2 V^T,
        whose eigenvalues are the s_i^2, and N - K zeros; so ||W^T W - I||_F^2 = sum_i (s_i^2 - 1)^2 + N - K.
        Gradients of the full expression at orthonormal U and V. With dL/dW = 4 W (W^T W - I),
            dL/dU = dL/dW V S = 4 U S V^T (V S^2 V^T - I) V S = U D,   D = 4 S^2 (S^2 - I) diagonal,
            dL/dV = (dL/dW)^T U S = V D,
        normal to the manifold: the direction of the Cayley step is A = G U^T - U G^T = U D U^T - U D U^T = 0. It must
        be, since a rotation of U or of V leaves the eigenvalues of W^T W where they are. Only s feels the penalty, so
        the gradients for U and V are left out, for the reasons in Note [Weight decay of the composite].
        A matrix. W^T W and W W^T have the same eigenvalues but for |n - m| zeros, so the smaller of the two serves: for
        n < m, ||W^T W - I_m||^2 = ||W W^T - I_n||^2 + m - n.
    """
    if isinstance(recurrence, Tensor):
        return _gram_distance(recurrence)
    values: list[Tensor] = []
    for module in recurrence.modules():
        if isinstance(module, HasSpectra):
            for s in module.spectra():
                values.append((s * s - 1).square().sum() + (module.hidden_size - len(s)))
        elif isinstance(module, HasRecurrentMatrices):
            values.extend(_gram_distance(w) for w in module.recurrent_matrices())
    return _total(values, recurrence, "recurrence; accepted: an RNN or a FactorizedRNN, or a matrix")


def spectrum_prior(module: nn.Module) -> Tensor:
    """The sum of (s_i - 1)^2 over all recurrences in a module: a Gaussian prior of mean one on the singular values.

    Vorontsov et al. 2017, end of section 2 and section 3.2; gamma, its strength, is the caller's factor (for a variance
    of v, gamma = 1 / (2 v)).

    Args:
        module: a FactorizedRNN, whose s_i are signed for a margin above 1 or None, and are drawn to +1; or an RNN,
            whose singular values are computed; or any module that contains some.

    Returns:
        The sum, a 0-dim tensor; for factorized recurrences with a gradient for the spectrum parameters only.

    Raises:
        InputError: a module without a recurrence.

    Cost: O(K) for a factorized recurrence; a singular value decomposition, O(N^3), for a dense one.
    """
    values: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, HasSpectra):
            values.extend((s - 1).square().sum() for s in part.spectra())
        elif isinstance(part, HasRecurrentMatrices):
            values.extend((torch.linalg.svdvals(w) - 1).square().sum() for w in part.recurrent_matrices())
    return _total(values, module, "recurrence; accepted: an RNN or a FactorizedRNN")


def _gram_distance(w: Tensor) -> Tensor:
    """||W^T W - I||_F^2 of w [n, m]."""
    if w.ndim != 2 or not w.is_floating_point():
        raise InputError(
            f"W has shape {list(w.shape)} and dtype {str(w.dtype).removeprefix('torch.')}; "
            "accepted: a floating matrix [n, m]"
        )
    n, m = w.shape
    gram = w.mT @ w if n >= m else w @ w.mT
    return (gram - torch.eye(min(n, m), dtype=w.dtype, device=w.device)).square().sum() + max(m - n, 0)


def _total(values: list[Tensor], module: nn.Module, missing: str) -> Tensor:
    if not values:
        raise InputError(f"a module of type {type(module).__name__} has no {missing}")
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
        InputError: when there is no factorized recurrence in the module.

    Cost: O(K) per recurrence.

    Note [Weight decay of the composite]
        Value. With U^T U = V^T V = I,
            ||U S V^T||_F^2 = tr(V S U^T U S V^T) = tr(S^2 V^T V) = sum_i s_i^2.
        Gradients of the full expression, without using orthonormality:
            dL/dU = 2 U S (V^T V) S,   dL/dV = 2 V S (U^T U) S,   dL/ds_i = 2 s_i (U^T U)_ii (V^T V)_ii  (+ cross
            terms),
        and at orthonormal U, V: dL/dU = 2 U S^2, dL/dV = 2 V S^2, dL/ds = 2 s.
        The first two are not zero, but they are normal to the manifold, where stretching U is no allowed motion: the
        direction of the Cayley step vanishes,
            A = G U^T - U G^T = 2 U S^2 U^T - 2 U S^2 U^T = 0.
        Only s feels the decay, so the gradients for U and V are left out. What they would change: the norm by which
        GeodesicSGD clips, which they would inflate by a force that moves nothing; and an optimizer that lets U and V
        leave the manifold, for which sum s^2 is no longer ||W||_F^2, and which should penalise recurrent_matrix().
    """
    values = [(s * s).sum() for module in rnn.modules() if isinstance(module, HasSpectra) for s in module.spectra()]
    return _total(values, rnn, "factorized recurrence; accepted: a FactorizedRNN")
