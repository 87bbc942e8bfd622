"""What the leaves on a GPU compute in torch around the kernels of a scan, for one model or several in one launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import Map, ScanInputs, ScanOptions


class Models:
    """How many models a call has, and where the rows of each are: one model after the other, as rows of one batch.

    Args:
        map_: with R in front of second [R, N, K] for R models. Attribute ``count``: R, or 1 for a call of one model,
            whose tensors are left as they are.
    """

    def __init__(self, map_: Map) -> None:
        self.several = map_.second.ndim == 3
        self.count = map_.second.shape[0] if self.several else 1

    def joined(self, tensor: Any, dim: int = 1) -> Any:
        """[..., R, B, ...] with R at ``dim`` as [..., R * B, ...]."""
        return tensor if tensor is None or not self.several else tensor.flatten(dim, dim + 1)

    def apart(self, tensor: Any, dim: int = 1) -> Any:
        """The other way round."""
        return tensor if tensor is None or not self.several else tensor.unflatten(dim, (self.count, -1))

    def of(self, tensor: Tensor, r: int, dim: int = 1) -> Tensor:
        """The rows of model r, of R * B rows at ``dim``. A view."""
        return tensor.unflatten(dim, (self.count, -1)).select(dim, r) if self.several else tensor

    def rows(self, inputs: ScanInputs, options: ScanOptions) -> tuple[ScanInputs, ScanOptions]:
        """The same call with R * B rows. x: features [T, R * B, D]; ids [T, R * B] of the models' tables one after the
        other, -1 where an id is out of range; without a weight [T, R * B, N]."""
        if not self.several:
            return inputs, options
        x, weight = inputs.x, inputs.weight
        if x is not None:
            features = x.is_floating_point()
            if x.ndim == (3 if features else 2):  # shared
                x = x.unsqueeze(1).expand(-1, self.count, *x.shape[1:])
            if weight is not None and not features:
                D = weight.shape[-1]
                shift = D * torch.arange(self.count, device=x.device).unsqueeze(-1)
                x = torch.where((x >= 0) & (x < D), x + shift, -1)
            x = x.flatten(1, 2).contiguous()
        return (
            inputs._replace(x=x, h0=inputs.h0.flatten(0, 1), reset_state=self.joined(inputs.reset_state, 0)),
            dataclasses.replace(
                options, lengths=self.joined(options.lengths, 0), resets=self.joined(options.resets, 1)
            ),
        )

    def inputs_of(self, inputs: ScanInputs, r: int) -> ScanInputs:
        """Those of one model, of what ``rows`` returned; ids count from 0 in each."""
        if not self.several:
            return inputs
        x, h0, weight, bias, act_param, reset_state = inputs
        if x is not None:
            x = self.of(x, r)
            x = x if x.is_floating_point() or weight is None else x - r * weight.shape[-1]
        weight, bias, act_param = (None if t is None else t[r] for t in (weight, bias, act_param))
        state = None if reset_state is None else self.of(reset_state, r, 0)
        return ScanInputs(x, self.of(h0, r, 0), weight, bias, act_param, state)


def started(h: Tensor, resets: Tensor | None, reset_state: Tensor | None) -> Tensor:
    """h [..., B, N] with reset_state [B, N], or zeros for None, where resets [..., B] is true."""
    if resets is None:
        return h
    return torch.where(resets.unsqueeze(-1), h.new_zeros(()) if reset_state is None else reset_state, h)


def before_resets(resets: Tensor) -> Tensor:
    """The steps before those that reset, as bool [T, B], of resets [T, B]."""
    return torch.cat([resets[1:], torch.zeros_like(resets[:1])])


def token_table(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[D, N], what a step adds for each id: weight [N, D] and bias [N]; of models [R D, N], one after the other."""
    table = weight.mT if bias is None else weight.mT + bias.unsqueeze(-2)
    return table.flatten(0, -2).contiguous()


def composed(map_: Map) -> Tensor:
    """W [N, N] in float64, or W of each model [R, N, N]."""
    first, scale, second = map_
    if first is None or scale is None:
        return second.double()
    return (second.double() * scale.unsqueeze(-2)) @ first.double().mT


def transposed_product(map_: Map, rows: Tensor) -> Tensor:
    """W^T applied to rows [B, N], or each of the models' to its rows [R, B, N]."""
    first, scale, second = map_
    return rows @ second if first is None or scale is None else ((rows @ second) * scale.unsqueeze(-2)) @ first.mT


def power(w: Tensor, exponent: int) -> Tensor:
    """w^exponent [..., N, N] in float64, by repeated squaring; exponent > 0."""
    square, found = w.double(), None
    while exponent:
        if exponent & 1:
            found = square if found is None else found @ square
        exponent >>= 1
        if exponent:
            square = square @ square
    assert found is not None
    return found
