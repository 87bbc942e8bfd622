"""modal_cross_entropy on CUDA; the kernels: ``csrc/cuda/modal_cross_entropy.cu`` and those of modal_scan, what they
make a call of: Note [Spans of the loss] in ``_modal_chunks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._modal_chunks import run_cross_entropy
from orthokern.cuda import _call as native
from orthokern.cuda._call import DTYPES
from orthokern.cuda.modal_scan import KERNELS, ready


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


def modal_cross_entropy_fwd(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    z0: Tensor,
    table: Tensor | None,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pairs: Tensor | None,
    *,
    reduction: str = "mean",
    need_grad: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :mod:`orthokern.ops.modal_cross_entropy`."""
    x_, im_, z0_, readout_, target_, table_, bias_, pairs_, lengths_, re_ = ready(
        re, x=x, im=im, z0=z0, readout=readout, target=target, table=table, bias=bias, pairs=pairs, lengths=lengths
    )
    assert x_ is not None and im_ is not None and z0_ is not None and readout_ is not None
    assert target_ is not None and re_ is not None
    return run_cross_entropy(
        KERNELS, _loss, x_, re_, im_, z0_, table_, readout_, bias_, target_, pairs_, reduction, need_grad, lengths_
    )
