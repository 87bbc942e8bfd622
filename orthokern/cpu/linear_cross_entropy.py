"""linear_cross_entropy on the CPU; the kernel: ``csrc/cpu/linear_cross_entropy.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern.cpu._call import call, new


def linear_cross_entropy_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    need_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.linear_cross_entropy`. A weight that no cache holds goes through torch's products over as
    many rows as there is room for: the kernel would read it anew for every group of its rows."""
    if weight.numel() * weight.element_size() > _LARGE_READOUT:
        return _large_readout(hidden, weight, bias, target, reduction=reduction, need_grad=need_grad)
    dtype = hidden.dtype
    loss = torch.empty((), dtype=dtype)
    grad_hidden = new(*hidden.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_weight = torch.empty(weight.shape, dtype=dtype) if need_grad else loss.new_empty(0)
    grad_bias = torch.empty(bias.shape, dtype=dtype) if need_grad and bias is not None else loss.new_empty(0)
    sizes = {
        "rows": hidden.shape[0],
        "N": hidden.shape[1],
        "C": weight.shape[0],
        "mean": int(reduction == "mean"),
    }
    tensors: dict[str, Tensor | None] = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "loss": loss,
        "grad_hidden": grad_hidden if need_grad else None,
        "grad_weight": grad_weight if need_grad else None,
        "grad_bias": grad_bias if need_grad and bias is not None else None,
    }
    call("linear_cross_entropy_fwd", dtype, sizes, tensors)
    return loss, grad_hidden, grad_weight, grad_bias


_LARGE_READOUT = 6 << 20  # bytes of weight
_LOGITS = 32 << 20  # bytes of a chunk's logits, about


@ieee_products()
def _large_readout(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, reduction: str, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_cross_entropy_fwd` for many classes; every chunk of logits becomes its own gradient, in place."""
    rows, classes = hidden.shape[0], weight.shape[0]
    scale = 1.0 / rows if reduction == "mean" else 1.0
    chunk = max(64, _LOGITS // (classes * weight.element_size()))
    chunk = -(-rows // -(-rows // chunk))  # all about alike
    loss = torch.zeros((), dtype=torch.float64)
    grad_hidden = torch.empty_like(hidden) if need_grad else hidden.new_empty(0)
    grad_weight = torch.empty_like(weight) if need_grad else hidden.new_empty(0)
    grad_bias = torch.zeros_like(bias) if need_grad and bias is not None else hidden.new_empty(0)
    for begin in range(0, rows, chunk):
        h, t = hidden[begin : begin + chunk], target[begin : begin + chunk, None]
        logits = h @ weight.mT if bias is None else torch.addmm(bias, h, weight.mT)
        d = torch.log_softmax(logits, 1, out=logits)
        loss -= d.gather(1, t).sum(dtype=torch.float64)
        if need_grad:
            d.exp_().scatter_add_(1, t, d.new_full((len(t), 1), -1.0))
            if scale != 1.0:
                d.mul_(scale)
            torch.mm(d, weight, out=grad_hidden[begin : begin + chunk])
            torch.addmm(grad_weight, d.mT, h, beta=float(begin > 0), out=grad_weight)
            if bias is not None:
                grad_bias += d.sum(0)
    return (loss * scale).to(hidden.dtype), grad_hidden, grad_weight, grad_bias
