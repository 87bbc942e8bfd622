"""A linear map of many rows, with the products of ``orthokern._products``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._products import add_product, ieee_products, onednn_serves, product
from orthokern.ops import _route


@keeps_dtype
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D], weight [N, D], bias [N] -> x W^T + b [..., N], outside of autocast.

    It is torch's, except for products that oneDNN computes faster (``onednn_serves``). Then its gradients are such
    products too. Under torch.compile, torch.func and forward mode it is torch's always.
    """
    traced = torch.compiler.is_compiling() or _route.by_reference(None, x, weight)
    if traced or not onednn_serves(x, weight.shape[0]):
        return torch.nn.functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def _product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of two matrices with many rows. The narrower one comes first in the product: the other order copies
    the wider one."""
    if left.shape[1] > right.shape[1]:
        return _product_over_rows(right, left).mT.contiguous()
    result = left.new_zeros(left.shape[1], right.shape[1])
    add_product(result, left, right)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    @ieee_products()
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight.mT, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @ieee_products()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, features, (to_x, to_weight, to_bias) = grad.flatten(0, -2), x.flatten(0, -2), ctx.needs_input_grad
        grad_x = grad_weight = None
        if _route.recording():  # torch's products, since the gradients are to be differentiated
            grad_x = rows @ weight if to_x else None
            grad_weight = rows.mT @ features if to_weight else None
        else:
            if to_x:
                grad_x = product(rows, weight)
            if to_weight:
                grad_weight = _product_over_rows(rows, features)
        if grad_x is not None:
            grad_x = grad_x.unflatten(0, x.shape[:-1])
        return grad_x, grad_weight, rows.sum(0) if to_bias else None
