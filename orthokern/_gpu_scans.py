"""Functions in torch that the GPU leaves run before and after the kernels of a scan."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import ScanArgs


def started(h: Tensor, resets: Tensor | None, reset_state: Tensor | None) -> Tensor:
    """h [..., B, N] with reset_state [B, N], or zeros for None, where resets [..., B] is true."""
    if resets is None:
        return h
    return torch.where(resets.unsqueeze(-1), h.new_zeros(()) if reset_state is None else reset_state, h)


def before_resets(resets: Tensor) -> Tensor:
    """resets [T, B] shifted to the previous step, bool [T, B]."""
    return torch.cat([resets[1:], torch.zeros_like(resets[:1])])


def token_table(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The input term for each id, [D, N], from weight [N, D] and bias [N]."""
    table = weight.mT if bias is None else weight.mT + bias.unsqueeze(-2)
    return table.contiguous()


def composed(args: ScanArgs) -> Tensor:
    """W [N, N] in float64."""
    first, scale, second = args.first, args.scale, args.second
    if first is None or scale is None:
        return second.double()
    return (second.double() * scale.unsqueeze(-2)) @ first.double().mT


def transposed_product(args: ScanArgs, rows: Tensor) -> Tensor:
    """W^T applied to rows [B, N]."""
    first, scale, second = args.first, args.scale, args.second
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
