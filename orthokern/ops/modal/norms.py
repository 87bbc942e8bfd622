"""Norms through time of a loss in the modal form: ||h_t|| and ||dL/dh_t|| at the steps ``profile_steps(T)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orthokern.ops.modal.basis import Basis


def norms_through_time(
    T: int, steps: Sequence[int], states: Tensor, adjoints: Tensor, basis: Basis
) -> tuple[Tensor, Tensor]:
    """(norms of h_t, norms of dL/dh_t): Frobenius norms over [B, N], [T], in the dtype of the call, NaN except at
    ``steps``. states, adjoints: z_t and dL/dz_t [K, B, 2M] at these steps; then h = R z and dL/dh = R^-T dL/dz."""
    right, left = basis.right.to(states.dtype), basis.left.to(states.dtype)
    return _spread(T, steps, states @ right.mT), _spread(T, steps, adjoints @ left)


def _spread(T: int, steps: Sequence[int], values: Tensor) -> Tensor:
    """The norms of values [K, B, N] over its last dimensions at ``steps`` of [T], NaN elsewhere."""
    norms = values.new_full((T,), torch.nan)
    norms[steps] = torch.linalg.vector_norm(values, dim=(1, 2), dtype=torch.float64).to(norms.dtype)
    return norms
