"""Activations and their derivatives: the reference. The equations are in ``orthokern/ops/activations.py``.

Note [Activation derivatives]
    prelu:    dy/dx = 1 if x > 0 else slope;                 dy/dslope = min(x, 0).
    modrelu:  dy/dx = 1 if |x| + bias > 0 and x != 0 else 0; dy/dbias = sign(x) where |x| + bias > 0.
              A unit passes iff y != 0, and then sign(y) = sign(x): both derivatives follow from the output alone.
    tanh:     dy/dx = 1 - y^2.   relu: dy/dx = 1 - 1[y <= 0].    Both follow from the output alone.
    softsign: dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2, from the output too.
    oplu:     a permutation of each pair, so the backward is the same permutation of the gradient (it is its own
              inverse). Which one cannot be read from the output, so oplu (and prelu, whose slope may be 0 or negative)
              needs the input.

At the kinks the derivative is the one-sided value written above.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _swap_pairs(x: Tensor, swap: Tensor) -> Tensor:
    """Exchange the members of the pairs of x [..., N] where swap [..., N/2] is True."""
    pairs = x.unflatten(-1, (-1, 2))
    return torch.where(swap.unsqueeze(-1), pairs.flip(-1), pairs).flatten(-2)


def _oplu_swaps(x: Tensor) -> Tensor:
    """True [..., N/2] where the second member of a pair of x [..., N] is the larger one; False on a tie."""
    pairs = x.unflatten(-1, (-1, 2))
    return pairs[..., 1] > pairs[..., 0]


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See ``orthokern.ops.activations``; any floating dtype, identity returns x itself."""
    if activation == "identity":
        return x
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "relu":
        return torch.relu(x)
    if activation == "softsign":
        return x / (1 + x.abs())
    if activation == "oplu":
        return _swap_pairs(x, _oplu_swaps(x))
    assert act_param is not None
    if activation in ("prelu", "leaky_relu"):
        return torch.where(x > 0, x, act_param * x)
    if activation == "modrelu":
        return torch.sign(x) * torch.relu(torch.abs(x) + act_param)
    raise ValueError(f"unknown activation {activation!r}")


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See ``orthokern.ops.activations`` and Note [Activation derivatives]."""
    y = activation_fwd(x, act_param, activation=activation)
    grad_x, elementwise = chain(grad_y, y, x, act_param, activation=activation)
    if elementwise is None:
        return grad_x, x.new_empty(0)
    assert act_param is not None
    return grad_x, elementwise.sum_to_size(act_param.shape)


def chain(
    grad_y: Tensor, y: Tensor, x: Tensor | None, act_param: Tensor | None, *, activation: str
) -> tuple[Tensor, Tensor | None]:
    """One step of the chain rule through an activation: grad_x [..., N], a new tensor; and the gradient of act_param
    before the sum over rows [..., N], or None. y: the output; x: the input, which may be None unless the activation
    needs it."""
    if activation == "identity":
        return grad_y.clone(), None
    if activation == "tanh":
        return grad_y * (1 - y * y), None
    if activation == "relu":
        return grad_y.masked_fill(y <= 0, 0.0), None
    if activation == "softsign":
        left = 1 - y.abs()
        return grad_y * left * left, None
    if activation == "modrelu":
        grad_x = grad_y.masked_fill(y == 0, 0.0)
        return grad_x, grad_x * torch.sign(y)
    assert x is not None
    if activation == "oplu":
        return _swap_pairs(grad_y, _oplu_swaps(x)), None
    if activation in ("prelu", "leaky_relu"):
        assert act_param is not None
        return torch.where(x > 0, grad_y, act_param * grad_y), torch.where(x > 0, 0.0, grad_y * x)
    raise ValueError(f"unknown activation {activation!r}")
