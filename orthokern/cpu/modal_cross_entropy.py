"""modal_cross_entropy on the CPU; the kernel: ``csrc/cpu/modal_cross_entropy.cpp``."""

from __future__ import annotations

import torch

from orthokern._scan_contract import ModalInputs, ModalLoss, Readout
from orthokern.cpu._call import as_bytes, call, new
from orthokern.cpu.modal_scan import modal_arguments, modal_gradients, named


def modal_cross_entropy_fwd(inputs: ModalInputs, readout: Readout, *, need_grad: bool = True) -> ModalLoss:
    """See ``orthokern.ops.modal_cross_entropy``."""
    weight, bias, target, reduction = readout
    dtype, (T, _), lengths, x = inputs.z0.dtype, target.shape, inputs.lengths, inputs.x
    sizes, tensors = modal_arguments(inputs, T)
    count = target.numel() if lengths is None else int(lengths.sum())
    loss = ModalLoss(torch.empty((), dtype=dtype, device="cpu"), torch.empty(T, dtype=torch.int64, device="cpu"))
    if need_grad:
        grad_x = None if x is None or inputs.table is not None else new(*x.shape, dtype=dtype)
        loss = loss._replace(
            inputs=modal_gradients(inputs, grad_x),
            weight=new(*weight.shape, dtype=dtype),
            bias=None if bias is None else new(*bias.shape, dtype=dtype),
        )
    sizes |= {
        "C": weight.shape[0],
        "scale": 1.0 / count if reduction == "mean" else 1.0,
        "need_grad": int(need_grad),
        "target_bytes": target.element_size(),
    }
    tensors |= {"readout": weight, "bias": bias, "target_ids": as_bytes(target)}
    tensors |= {"loss": loss.loss, "hits": loss.hits, "grad_readout": loss.weight, "grad_bias": loss.bias}
    call("modal_cross_entropy_fwd", dtype, sizes, {**tensors, **named(loss.inputs)})
    return loss
