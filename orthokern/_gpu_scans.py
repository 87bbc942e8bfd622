"""Functions in torch that the GPU leaves run before and after the kernels of a scan, for one model or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern._gru_parameters import parameter_gradients
from orthokern._products import add_product
from orthokern._scan_contract import GruInputs, GruOptions, Map, ScanInputs, ScanOptions


class Models:
    """The models of a call. The kernels see their rows as rows of one batch, one model after the other.

    Args:
        matrix: ``second`` of a map or w of a GRU, [R, N, K] for R models. Attribute ``count``: R, or 1 for a call of
            one model, whose tensors are not changed.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.several = matrix.ndim == 3
        self.count = matrix.shape[0] if self.several else 1

    def joined(self, tensor: Any, dim: int = 1) -> Any:
        """[..., R, B, ...] with R at ``dim`` as [..., R * B, ...]."""
        return tensor if tensor is None or not self.several else tensor.flatten(dim, dim + 1)

    def apart(self, tensor: Any, dim: int = 1) -> Any:
        """The inverse of ``joined``."""
        return tensor if tensor is None or not self.several else tensor.unflatten(dim, (self.count, -1))

    def of(self, tensor: Tensor, r: int, dim: int = 1) -> Tensor:
        """The rows of model r from R * B rows at ``dim``, as a view."""
        return tensor.unflatten(dim, (self.count, -1)).select(dim, r) if self.several else tensor

    def rows(self, inputs: ScanInputs, options: ScanOptions) -> tuple[ScanInputs, ScanOptions]:
        """The same call with R * B rows. x becomes features [T, R * B, D]; ids [T, R * B] into the concatenated tables
        of the models, -1 for an id out of range; or, without a weight, [T, R * B, N]."""
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
        return self._joined(inputs._replace(x=x), options)

    def _joined(self, inputs: Any, options: Any) -> tuple[Any, Any]:
        return (
            inputs._replace(h0=self.joined(inputs.h0, 0), reset_state=self.joined(inputs.reset_state, 0)),
            dataclasses.replace(
                options, lengths=self.joined(options.lengths, 0), resets=self.joined(options.resets, 1)
            ),
        )

    def gru_rows(self, inputs: GruInputs, options: GruOptions) -> tuple[GruInputs, GruOptions]:
        """The same call with R * B rows; w and bias keep R in front."""
        return self._joined(inputs._replace(x=self.joined(inputs.x)), options)

    def inputs_of(self, inputs: ScanInputs, r: int) -> ScanInputs:
        """The inputs of one model, from the result of ``rows``, with ids of its own table."""
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
    """resets [T, B] shifted to the previous step, bool [T, B]."""
    return torch.cat([resets[1:], torch.zeros_like(resets[:1])])


def token_table(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The input term for each id, [D, N], from weight [N, D] and bias [N]; for models the concatenation [R D, N]."""
    table = weight.mT if bias is None else weight.mT + bias.unsqueeze(-2)
    return table.flatten(0, -2).contiguous()


def composed(map_: Map) -> Tensor:
    """W [N, N] in float64, or W of each model [R, N, N]."""
    first, scale, second = map_
    if first is None or scale is None:
        return second.double()
    return (second.double() * scale.unsqueeze(-2)) @ first.double().mT


def transposed_product(map_: Map, rows: Tensor) -> Tensor:
    """W^T applied to rows [B, N]; for models [R, B, N], each W^T to the rows of its model."""
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


def gru_parameter_gradients(
    models: Models, inputs: GruInputs, options: GruOptions, hs: Tensor, grad_x: Tensor, factor: Tensor,
    add: Callable[[Tensor, Tensor, Tensor], None] = add_product,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`parameter_gradients` of each model, from tensors with the rows of all; inputs, options: from ``gru_rows``."""
    each = []
    for r in range(models.count):
        h0, w, bias = models.of(inputs.h0, r, 0), inputs.w, inputs.bias
        state, resets = inputs.reset_state, options.resets
        if models.several:
            w, bias = w[r], None if bias is None else bias[r]
            state, resets = (None if t is None else models.of(t, r, dim) for t, dim in ((state, 0), (resets, 1)))
        one = GruInputs(None, w, h0, bias, state)
        own = GruOptions(options.variant, resets=resets)
        of_states, of_x, of_factor = (models.of(t, r) for t in (hs, grad_x, factor))
        each.append(parameter_gradients(one, own, of_states, of_x, of_factor, add))
    if not models.several:
        return each[0]
    return tuple(None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*each, strict=True))
