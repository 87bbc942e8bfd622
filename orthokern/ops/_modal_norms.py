"""Norms through time of a loss in the modal form: ||h_t|| and ||dL/dh_t|| at the steps that a record keeps.

The states of a modal call do not exist one by one. Between two kept steps modal_scan takes the state z on, PIECE bytes
of states at a time, so that memory does not grow with T. Of the gradient, c_i = dL/dz by way of the steps behind the
i-th kept one obeys

    c_i = dL_i/dz + conj(lambda)^n c_{i+1},

where L_i is the loss of the n steps up to the next kept one, with a gradient from modal_cross_entropy; the loss of the
kept step itself adds readout^T dL/dlogits. Then h = R z and dL/dh = R^-T dL/dz.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.ops._modal_basis import Basis
from orthokern.ops._taps import profile_steps

PIECE = 2**22  # bytes of states between two roundings of the state to the dtype of the call


def _advance(x: Tensor, table: Tensor | None, z: Tensor, basis: Basis, backend: str | None) -> Tensor:
    """The state [B, 2M] behind the steps of x, from the state z before them."""
    for part in x.split(max(1, PIECE // (z.numel() * z.element_size()))):
        # a copy, and not a view, which would keep all states of the part
        z = torch.ops.orthokern.modal_scan_fwd(part, basis.re, basis.im, z, table, backend, None)[-1].clone()
    return z


def _error(z: Tensor, readout: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The gradient of a step's cross-entropy, summed over sequences, with respect to the logits [B, C]."""
    gradient = torch.softmax(torch.nn.functional.linear(z, readout, bias), 1)
    return gradient.scatter_add_(1, target.long()[:, None], gradient.new_full((len(z), 1), -1.0))


def norms_through_time(
    x: Tensor,
    table: Tensor | None,
    z0: Tensor,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    basis: Basis,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Frobenius norms over [B, N], both [T] in the dtype of z0, NaN but at ``profile_steps(T)``.

    Args:
        x, table, z0, readout, bias, target: those of modal_cross_entropy, all of the same length.
        basis: of W.
        scale: what the sum of the cross-entropy is multiplied by.

    Returns:
        (of h_t, of dL/dh_t).
    """
    steps = profile_steps(len(x))
    state_norms, grad_norms = (z0.new_full((len(x),), torch.nan) for _ in range(2))
    states: list[Tensor] = []
    z, done = z0, 0
    for t in steps:
        z = _advance(x[done : t + 1], table, z, basis, backend)
        states.append(z)
        done = t + 1
    right, left = basis.right.to(z0.dtype), basis.left.to(z0.dtype)
    turn = basis.values.conj()
    later = torch.zeros(z0.shape[0], len(turn), dtype=turn.dtype, device=z0.device)
    for i in reversed(range(len(steps))):
        t, z = steps[i], states[i]
        if i + 1 < len(steps):
            span = slice(t + 1, steps[i + 1] + 1)
            segment = torch.ops.orthokern.modal_cross_entropy_fwd(
                x[span], basis.re, basis.im, z, table, readout, bias, target[span], None, "sum", True, backend, None
            )
            later = turn ** (steps[i + 1] - t) * later + scale * torch.complex(*segment[5].double().chunk(2, 1))
        delta = scale * (_error(z, readout, bias, target[t]) @ readout)
        delta = delta + torch.cat([later.real, later.imag], 1).to(z.dtype)
        state_norms[t] = (z @ right.mT).norm()
        grad_norms[t] = (delta @ left).norm()
    return state_norms, grad_norms


def last_step_norms(
    x: Tensor,
    table: Tensor | None,
    z0: Tensor,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    basis: Basis,
    backend: str | None,
) -> Tensor:
    """||dL/dh_t|| [T], NaN but at ``profile_steps(T)``, for L the last step's cross-entropy, its mean over sequences.

    Arguments as those of ``norms_through_time``. Nothing but the recurrence stands between h_t and the last state, so
    dL/dz_t = conj(lambda)^(T - 1 - t) dL/dz_{T-1}.
    """
    z = _advance(x, table, z0, basis, backend)
    last = _error(z, readout, bias, target[-1]).double() @ readout.double() / len(z)
    delta = torch.complex(*last.chunk(2, 1))
    norms, turn = z0.new_full((len(x),), torch.nan), basis.values.conj()
    for t in profile_steps(len(x)):
        here = turn ** (len(x) - 1 - t) * delta
        norms[t] = (torch.cat([here.real, here.imag], 1) @ basis.left).norm()
    return norms
