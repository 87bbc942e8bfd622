"""Norms through time of a loss in the modal form: ||h_t|| and ||dL/dh_t|| at the steps ``profile_steps(T)``.

A modal call does not store its states. Between two of these steps modal_scan computes the state z, with PIECE bytes of
states at a time, so that memory does not grow with T. Let c_i be dL/dz through all steps after the i-th of these steps:

    c_i = dL_i/dz + conj(lambda)^n c_{i+1},

where L_i is the loss of the n steps up to the next of them, whose gradient modal_cross_entropy computes. The loss of
the i-th step itself adds readout^T dL/dlogits. Then h = R z and dL/dh = R^-T dL/dz.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import ModalInputs, Readout
from orthokern.ops._modal_basis import Basis
from orthokern.ops._taps import profile_steps
from orthokern.ops.modal_cross_entropy import run_fwd as loss_fwd
from orthokern.ops.modal_scan import run_fwd as scan_fwd

PIECE = 2**22  # bytes of states between two roundings of the state to the dtype of the call


def _advance(inputs: ModalInputs, start: int, stop: int, z: Tensor, backend: str | None) -> Tensor:
    """The state [B, 2M] after the steps [start, stop), from the state z before them."""
    assert inputs.x is not None
    for part in inputs.x[start:stop].split(max(1, PIECE // (z.numel() * z.element_size()))):
        # a copy, and not a view, which would keep all states of the part
        z = scan_fwd(inputs._replace(x=part, z0=z), backend)[-1].clone()
    return z


def _error(z: Tensor, readout: Readout, t: int) -> Tensor:
    """The gradient of the cross-entropy of step t, summed over sequences, with respect to the logits [B, C]."""
    gradient = torch.softmax(torch.nn.functional.linear(z, readout.weight, readout.bias), 1)
    return gradient.scatter_add_(1, readout.target[t].long()[:, None], gradient.new_full((len(z), 1), -1.0))


def norms_through_time(
    inputs: ModalInputs, readout: Readout, basis: Basis, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(norms of h_t, norms of dL/dh_t): Frobenius norms over [B, N], [T], in the dtype of z0, NaN except at
    ``profile_steps(T)``. inputs, readout: those of modal_cross_entropy, without lengths and pairs."""
    assert inputs.x is not None
    T, z = len(inputs.x), inputs.z0
    scale = 1.0 / readout.target.numel() if readout.reduction == "mean" else 1.0
    steps = profile_steps(T)
    state_norms, grad_norms = (z.new_full((T,), torch.nan) for _ in range(2))
    states: list[Tensor] = []
    for before, t in zip([-1, *steps], steps, strict=False):
        z = _advance(inputs, before + 1, t + 1, z, backend)
        states.append(z)
    right, left = basis.right.to(z.dtype), basis.left.to(z.dtype)
    turn = basis.values.conj()
    later = torch.zeros(len(z), len(turn), dtype=turn.dtype, device=z.device)
    for i in reversed(range(len(steps))):
        t, z = steps[i], states[i]
        if i + 1 < len(steps):
            span = slice(t + 1, steps[i + 1] + 1)
            part = inputs._replace(x=inputs.x[span], z0=z)
            segment = loss_fwd(part, readout._replace(target=readout.target[span], reduction="sum"), True, backend)
            later = turn ** (steps[i + 1] - t) * later + scale * torch.complex(*segment[5].double().chunk(2, 1))
        delta = scale * (_error(z, readout, t) @ readout.weight)
        delta = delta + torch.cat([later.real, later.imag], 1).to(z.dtype)
        state_norms[t] = (z @ right.mT).double().norm()
        grad_norms[t] = (delta @ left).double().norm()
    return state_norms, grad_norms


def last_step_norms(inputs: ModalInputs, readout: Readout, basis: Basis, backend: str | None) -> Tensor:
    """||dL/dh_t|| [T], NaN except at ``profile_steps(T)``, for L the mean cross-entropy of the last step alone.

    Arguments as those of ``norms_through_time``. Here dL/dz_t = conj(lambda)^(T - 1 - t) dL/dz_{T-1}.
    """
    assert inputs.x is not None
    T = len(inputs.x)
    z = _advance(inputs, 0, T, inputs.z0, backend)
    last = _error(z, readout, -1).double() @ readout.weight.double() / len(z)
    delta = torch.complex(*last.chunk(2, 1))
    norms, turn = z.new_full((T,), torch.nan), basis.values.conj()
    for t in profile_steps(T):
        here = turn ** (T - 1 - t) * delta
        norms[t] = (torch.cat([here.real, here.imag], 1) @ basis.left).norm()
    return norms
