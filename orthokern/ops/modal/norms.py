"""Norms through time of a loss in the modal form: ||h_t|| and ||dL/dh_t|| at the steps ``profile_steps(T)``.

A modal call does not store its states. Between two of these steps the recurrence computes the state z, with PIECE bytes
of states at a time, so that memory does not grow with T. Let c_i be dL/dz through all steps after the i-th of these
steps:

    c_i = dL_i/dz + conj(lambda)^n c_{i+1},

where L_i is the loss of the n steps up to the next of them, whose gradient the kernel of the loss computes. The loss of
the i-th step itself adds readout^T dL/dlogits. Then h = R z and dL/dh = R^-T dL/dz.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import Readout
from orthokern.ops._taps import profile_steps
from orthokern.ops.modal.basis import Basis
from orthokern.ops.modal.reference import Inputs, entering

PIECE = 2**22  # bytes of states between two roundings of the state to the dtype of the call


def _advance(backend: Any, inputs: Inputs, start: int, stop: int, z: Tensor) -> Tensor:
    """The state [B, 2M] after the steps [start, stop), from the state z before them."""
    for part in inputs.x[start:stop].split(max(1, PIECE // (z.numel() * z.element_size()))):
        # a copy, and not a view, which would keep all states of the part
        z = backend.scan(entering(part, inputs.table, None), inputs.re, inputs.im, z)[-1].clone()
    return z


def _error(z: Tensor, readout: Readout, t: int) -> Tensor:
    """The gradient of the cross-entropy of step t, summed over sequences, with respect to the logits [B, C]."""
    gradient = torch.softmax(torch.nn.functional.linear(z, readout.weight, readout.bias), 1)
    return gradient.scatter_add_(1, readout.target[t].long()[:, None], gradient.new_full((len(z), 1), -1.0))


def norms_through_time(backend: Any, inputs: Inputs, readout: Readout, basis: Basis) -> tuple[Tensor, Tensor]:
    """(norms of h_t, norms of dL/dh_t): Frobenius norms over [B, N], [T], in the dtype of z0, NaN except at
    ``profile_steps(T)``. inputs, readout: those of the loss, without lengths and pairs."""
    T, z = len(inputs.x), inputs.z0
    scale = 1.0 / readout.target.numel() if readout.reduction == "mean" else 1.0
    steps = profile_steps(T)
    state_norms, grad_norms = (z.new_full((T,), torch.nan) for _ in range(2))
    states: list[Tensor] = []
    for before, t in zip([-1, *steps], steps, strict=False):
        z = _advance(backend, inputs, before + 1, t + 1, z)
        states.append(z)
    right, left = basis.right.to(z.dtype), basis.left.to(z.dtype)
    turn = basis.values.conj()
    later = torch.zeros(len(z), len(turn), dtype=turn.dtype, device=z.device)
    for i in reversed(range(len(steps))):
        t, z = steps[i], states[i]
        if i + 1 < len(steps):
            span = slice(t + 1, steps[i + 1] + 1)
            part = inputs._replace(x=inputs.x[span].contiguous(), z0=z)
            segment = readout._replace(target=readout.target[span].contiguous(), reduction="sum")
            grad_z0 = backend.loss(part, segment, True).grads.z0
            later = turn ** (steps[i + 1] - t) * later + scale * torch.complex(*grad_z0.double().chunk(2, 1))
        delta = scale * (_error(z, readout, t) @ readout.weight)
        delta = delta + torch.cat([later.real, later.imag], 1).to(z.dtype)
        state_norms[t] = (z @ right.mT).double().norm()
        grad_norms[t] = (delta @ left).double().norm()
    return state_norms, grad_norms


def last_step_norms(backend: Any, inputs: Inputs, readout: Readout, basis: Basis) -> Tensor:
    """||dL/dh_t|| [T], NaN except at ``profile_steps(T)``, for L the mean cross-entropy of the last step alone.

    Arguments as those of ``norms_through_time``. Here dL/dz_t = conj(lambda)^(T - 1 - t) dL/dz_{T-1}.
    """
    T = len(inputs.x)
    z = _advance(backend, inputs, 0, T, inputs.z0)
    last = _error(z, readout, -1).double() @ readout.weight.double() / len(z)
    delta = torch.complex(*last.chunk(2, 1))
    norms, turn = z.new_full((T,), torch.nan), basis.values.conj()
    for t in profile_steps(T):
        here = turn ** (T - 1 - t) * delta
        norms[t] = (torch.cat([here.real, here.imag], 1) @ basis.left).norm()
    return norms
