"""Soft constraints and priors on recurrent matrices, to be added to a loss."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from orthokern.errors import InputError

__all__ = ["composite_weight_decay"]


@runtime_checkable
class HasSpectra(Protocol):
    """A module with factorized recurrences; orthokern.nn.FactorizedRNN is one."""

    def spectra(self) -> list[Tensor]:
        """s [K] of every recurrence, differentiable."""
        ...


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
    if not values:
        raise InputError(f"rnn of type {type(rnn).__name__} has no factorized recurrence; accepted: a FactorizedRNN")
    return torch.stack(values).sum()
