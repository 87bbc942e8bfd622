"""linear_cross_entropy on the CPU; the kernel: ``csrc/cpu/linear_cross_entropy.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._elements import check_readout
from orthokern._products import add_product, ieee_products, product
from orthokern._scan_contract import LinearLoss, Readout
from orthokern.cpu._call import call, new


def linear_cross_entropy_fwd(hidden: Tensor, readout: Readout, *, need_grad: bool = True) -> LinearLoss:
    """See ``orthokern.ops.linear_cross_entropy``. For a weight that does not fit into a cache, `product` is used
    over chunks of rows: the kernel would read the weight again for every group of rows."""
    weight, bias, target, reduction = readout
    if weight.numel() * weight.element_size() > _LARGE_READOUT:
        return _large_readout(hidden, readout, need_grad)
    dtype = hidden.dtype

    def like(tensor: Tensor | None) -> Tensor | None:
        return new(*tensor.shape, dtype=dtype) if tensor is not None and need_grad else None

    result = LinearLoss(torch.empty((), dtype=dtype, device="cpu"), like(hidden), like(weight), like(bias))
    (R, N), C = hidden.shape, weight.shape[0]
    tensors = {"hidden": hidden, "weight": weight, "bias": bias, "target": target, "loss": result.loss}
    grads = {"grad_hidden": result.hidden, "grad_weight": result.weight, "grad_bias": result.bias}
    sizes = {"rows": R, "N": N, "C": C, "mean": int(reduction == "mean")}
    call("linear_cross_entropy_fwd", dtype, sizes, {**tensors, **grads})
    return result


_LARGE_READOUT = 6 << 20  # bytes of weight
_LOGITS = 32 << 20  # bytes of a chunk's logits, about


@ieee_products()
def _large_readout(hidden: Tensor, readout: Readout, need_grad: bool) -> LinearLoss:
    """`linear_cross_entropy_fwd` for many classes; every chunk of logits is overwritten by its gradient."""
    check_readout(hidden, readout)
    weight, bias, target, reduction = readout
    rows, classes = hidden.shape[0], weight.shape[0]
    scale = 1.0 / rows if reduction == "mean" else 1.0
    chunk = max(64, _LOGITS // (classes * weight.element_size()))
    chunk = -(-rows // -(-rows // chunk))  # chunks of nearly equal size
    loss = torch.zeros((), dtype=torch.float64, device="cpu")
    grad_hidden, grad_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if need_grad else (None, None)
    grad_bias = torch.zeros_like(bias) if need_grad and bias is not None else None
    for begin in range(0, rows, chunk):
        h, t = hidden[begin : begin + chunk], target[begin : begin + chunk, None]
        logits = product(h, weight.mT, bias)
        d = torch.log_softmax(logits, 1, out=logits)
        loss -= d.gather(1, t).sum(dtype=torch.float64)
        if grad_hidden is not None and grad_weight is not None:
            d.exp_().scatter_add_(1, t, d.new_full((len(t), 1), -1.0))
            if scale != 1.0:
                d.mul_(scale)
            grad_hidden[begin : begin + chunk] = product(d, weight)
            add_product(grad_weight, d, h)
            if grad_bias is not None:
                grad_bias += d.sum(0)
    return LinearLoss((loss * scale).to(hidden.dtype), grad_hidden, grad_weight, grad_bias)
