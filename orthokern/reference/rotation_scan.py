"""rotation_scan: a linear recurrence with a diagonal matrix of complex eigenvalues.

Note [Rotation scan backward]
    M modes have the eigenvalues lambda = re + i im, float64 [M]. A vector of M modes is real, [2M]: the real parts of
    all modes, then their imaginary parts. The states are z_t = lambda z_{t-1} + x_t, mode by mode.

    With g_t = dL/dz_t from outside the recurrence, delta_t, which includes all later steps, is
    delta_t = conj(lambda) delta_{t+1} + g_t with delta_{T+1} = 0: the same recurrence from the last step to the first.

        grad_x_t = delta_t,   grad_z0 = conj(lambda) delta_1,   grad_lambda = sum of delta_t conj(z_{t-1}).
"""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import RotationArgs, RotationGradients


def turn(z: Tensor, re: Tensor, im: Tensor) -> Tensor:
    """Each mode of z [..., 2M] times re + i im."""
    turned = torch.complex(*z.chunk(2, -1)) * torch.complex(re, im)
    return torch.cat([turned.real, turned.imag], -1)


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, resets: Tensor | None = None
) -> Tensor:
    """The states z [T, B, 2M] of x [T, B, 2M] and z0 [B, 2M], in the dtype of x.

    reverse: from the last step to the first, with the conjugate eigenvalues; then z0 is the state after the last step.
    resets: bool [T, B], steps t whose z_{t-1} counts as zero; with reverse, z_t counts as zero for the step t - 1.
    """
    steps = x.to(re.dtype).unbind(0)
    z, states = z0.to(re.dtype), []
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        ends = t + 1 if reverse else t  # the step that may not continue
        if resets is not None and ends < len(steps):
            z = z.masked_fill(resets[ends].unsqueeze(1), 0)
        z = turn(z, re, -im if reverse else im) + steps[t]
        states.append(z)
    return torch.stack(states[::-1] if reverse else states).to(x.dtype)


def states_before(z: Tensor, z0: Tensor, resets: Tensor | None) -> Tensor:
    """z_{t-1} of every step [T, B, 2M], zeros at resets."""
    before = torch.cat([z0[None], z[:-1]])
    return before if resets is None else before.masked_fill(resets.unsqueeze(2), 0)


def eigenvalue_gradients(delta: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The real and imaginary parts of the sum of delta_t conj(z_{t-1}), [M]; before: the states z_{t-1}."""
    (d_re, d_im), (z_re, z_im) = delta.chunk(2, -1), before.double().chunk(2, -1)
    return (d_re * z_re + d_im * z_im).sum((0, 1)), (d_im * z_re - d_re * z_im).sum((0, 1))


def rotation_scan_fwd(args: RotationArgs) -> Tensor:
    """The states hs [T, B, 2M]."""
    x, weight = args.x, args.weight
    assert x is not None
    terms = x if weight is None else torch.nn.functional.linear(x, weight, args.bias)
    return scan(terms, args.re, args.im, args.h0, resets=args.resets)


def rotation_scan_bwd(args: RotationArgs, grad_hs: Tensor, hs: Tensor, *, need_x: bool) -> RotationGradients:
    """See Note [Rotation scan backward]."""
    x, re, im, h0, weight, bias, resets, _ = args
    wide = scan(grad_hs.double(), re, im, torch.zeros_like(h0), reverse=True, resets=resets)
    grad_re, grad_im = eigenvalue_gradients(wide, states_before(hs, h0, resets))
    first = wide[0] if resets is None else wide[0].masked_fill(resets[0].unsqueeze(1), 0)
    grad_h0, delta = turn(first, re, -im).to(h0.dtype), wide.to(hs.dtype)
    if x is None or weight is None:
        return RotationGradients(delta, grad_re, grad_im, grad_h0)
    rows = delta.flatten(0, 1)
    of_x, of_bias = delta @ weight if need_x else None, None if bias is None else rows.sum(0)
    return RotationGradients(of_x, grad_re, grad_im, grad_h0, rows.mT @ x.flatten(0, 1), of_bias)
