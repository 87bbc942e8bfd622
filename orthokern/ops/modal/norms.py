"""Norms through time of a loss in the modal form: ||h_t|| and ||dL/dh_t|| at the steps ``profile_steps(T)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import Readout
from orthokern.ops._taps import profile_steps
from orthokern.ops.modal.basis import Basis
from orthokern.ops.modal.reference import Inputs


def norms_through_time(
    T: int, steps: Sequence[int], states: Tensor, adjoints: Tensor, basis: Basis
) -> tuple[Tensor, Tensor]:
    """(norms of h_t, norms of dL/dh_t): Frobenius norms over [B, N], [T], in the dtype of the call, NaN except at
    ``steps``. states, adjoints: z_t and dL/dz_t [K, B, 2M] at these steps; then h = R z and dL/dh = R^-T dL/dz."""
    right, left = basis.right.to(states.dtype), basis.left.to(states.dtype)
    return _spread(T, steps, states @ right.mT), _spread(T, steps, adjoints @ left)


def last_step_norms(backend: Any, inputs: Inputs, readout: Readout, basis: Basis) -> Tensor:
    """||dL/dh_t|| [T], NaN except at ``profile_steps(T)``, for L the mean cross-entropy of the last step alone.

    inputs, readout: those of the loss, without lengths and pairs. Here dL/dz_t = conj(lambda)^(T - 1 - t) dL/dz_{T-1}.
    """
    T = len(inputs.x)
    z = backend.loss(inputs, readout, False, [T - 1]).states[0]
    error = torch.softmax(torch.nn.functional.linear(z, readout.weight, readout.bias), 1)
    error.scatter_add_(1, readout.target[-1].long()[:, None], error.new_full((len(z), 1), -1.0))
    last = error.double() @ readout.weight.double() / len(z)
    steps = profile_steps(T)
    turned = basis.values.conj() ** (T - 1 - torch.tensor(steps, device=z.device))[:, None]
    delta = turned[:, None] * torch.complex(*last.chunk(2, 1))
    return _spread(T, steps, torch.cat([delta.real, delta.imag], 2) @ basis.left).to(z.dtype)


def _spread(T: int, steps: Sequence[int], values: Tensor) -> Tensor:
    """The norms of values [K, B, N] over its last dimensions at ``steps`` of [T], NaN elsewhere."""
    norms = values.new_full((T,), torch.nan)
    norms[steps] = torch.linalg.vector_norm(values, dim=(1, 2), dtype=torch.float64).to(norms.dtype)
    return norms
