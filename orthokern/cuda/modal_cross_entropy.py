"""modal_cross_entropy on CUDA, with the kernels of ``csrc/cuda/modal_cross_entropy.cu`` and of modal_scan. How a call
is divided into launches: Note [Spans of the loss] in ``_modal_chunks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._modal_chunks import run_cross_entropy
from orthokern._scan_contract import ModalInputs, ModalLoss, Readout
from orthokern.cuda import _call as native
from orthokern.cuda._call import DTYPES
from orthokern.cuda.modal_scan import KERNELS, ready, tensors_ready


def _loss(
    logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, lengths: Tensor | None, first: int, grad: bool
) -> tuple[Tensor, Tensor]:
    """See ``run_cross_entropy``."""
    T, B = target.shape
    loss, right = scale.new_empty(T * B), torch.empty(T * B, dtype=torch.int32, device=logits.device)
    sizes = {"dtype": DTYPES[logits.dtype], "T": T, "B": B, "C": logits.shape[1], "first": first, "grad": int(grad)}
    tensors = {"logits": logits, "bias": bias, "target": target, "scale": scale, "lengths": lengths}
    native.call(
        "modal_loss", logits.device, sizes | {"target_bytes": target.element_size()},
        {**tensors, "loss": loss, "right": right},
    )  # fmt: skip
    return loss, right


def modal_cross_entropy_fwd(inputs: ModalInputs, readout: Readout, *, need_grad: bool = True) -> ModalLoss:
    """See ``orthokern.ops.modal_cross_entropy``."""
    tensors = {"readout": readout.weight, "bias": readout.bias, "target": readout.target}
    weight, bias, target = tensors_ready(inputs.re.device, tensors)
    readout = Readout(weight, bias, target, readout.reduction)
    return run_cross_entropy(KERNELS, _loss, ready(inputs), readout, need_grad)
