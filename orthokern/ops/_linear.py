"""A linear map of many rows, with the products of ``orthokern._products``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import _products
from orthokern._autocast import keeps_dtype
from orthokern.cpu import _call
from orthokern.ops._common import by_reference, recording
from orthokern.ops._dispatcher import can_bypass_dispatcher, one_cotangent_at_a_time


@keeps_dtype
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D], weight [N, D], bias [N] -> x W^T + b [..., N], outside of autocast, of float32 in IEEE float32.

    It is torch's product, except for large products on a CPU (``is_large_on_cpu``), and if the process allows a lower
    precision. In both cases its gradients are such products too: with the order of factors that torch uses for the
    gradient of the weight, MKL takes up to ten times as long. Under torch.compile, torch.func and forward mode, and in
    the reference, it is always torch's product.
    """
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or by_reference(None)
    if traced or not (_products.is_large_on_cpu(x, weight.shape[0]) or _may_round(x)):
        return torch.nn.functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(torch.atleast_2d(x), weight, bias)
    return result if x.dim() > 1 else result.squeeze(0)


def _may_round(x: Tensor) -> bool:
    """Whether torch's products of x may round their factors."""
    return x.dtype == torch.float32 and not _products.are_ieee()


class _Linear(torch.autograd.Function):
    @staticmethod
    @_products.ieee_products()
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        pooled = x.is_cpu and _call.AVAILABLE and can_bypass_dispatcher((x, weight, bias))
        if not pooled or _products.onednn_serves(x, len(weight)):
            return _products.linear(x, weight, bias)
        # in memory that is kept between iterations: with few features, new pages cost more than the product
        result = _call.new(*x.shape[:-1], len(weight), dtype=x.dtype)
        rows, out = x.flatten(0, -2), result.flatten(0, -2)
        if bias is None:
            torch.mm(rows, weight.mT, out=out)
        else:
            torch.addmm(bias, rows, weight.mT, out=out)
        return result

    @staticmethod
    @one_cotangent_at_a_time
    @_products.ieee_products()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not recording():
            return _products.linear_gradients(grad, x, weight, ctx.needs_input_grad)
        # torch's products, since the gradients are to be differentiated
        rows, (to_x, to_weight, to_bias) = grad.flatten(0, -2), ctx.needs_input_grad
        of_weight = rows.mT @ x.flatten(0, -2) if to_weight else None
        return grad @ weight if to_x else None, of_weight, rows.sum(0) if to_bias else None
