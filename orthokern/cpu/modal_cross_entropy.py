"""modal_cross_entropy on the CPU; the kernel: ``csrc/cpu/modal_cross_entropy.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.cpu._call import call, new
from orthokern.cpu.modal_scan import modal_arguments


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
    dtype, steps = z0.dtype, target.shape[0]
    sizes, tensors = modal_arguments(x, re, im, z0, table, pairs, lengths, steps)
    count = target.numel() if lengths is None else int(lengths.sum())

    def like(tensor: Tensor | None) -> Tensor | None:
        return new(*tensor.shape, dtype=tensor.dtype) if tensor is not None and need_grad else None

    loss, hits = torch.empty((), dtype=dtype), torch.empty(steps, dtype=torch.int64)
    grads = {
        "grad_x": like(x if table is None else None),
        "grad_re": like(re),
        "grad_im": like(im),
        "grad_z0": like(z0),
        "grad_table": like(table),
        "grad_readout": like(readout),
        "grad_bias": like(bias),
        "grad_pairs": None if pairs is None or not need_grad else torch.empty(pairs.shape[0], 2, 2, dtype=re.dtype),
    }
    sizes |= {
        "C": readout.shape[0],
        "scale": 1.0 / count if reduction == "mean" else 1.0,
        "need_grad": int(need_grad),
        "target_bytes": target.element_size(),
    }
    inputs = {"readout": readout, "bias": bias, "target_ids": target.view(torch.uint8)}
    call("modal_cross_entropy_fwd", dtype, sizes, {**tensors, **inputs, "loss": loss, "hits": hits, **grads})
    wide = ("grad_re", "grad_im", "grad_pairs")
    return (
        loss,
        hits,
        *(
            torch.empty(0, dtype=re.dtype if name in wide else dtype) if grad is None else grad
            for name, grad in grads.items()
        ),
    )
