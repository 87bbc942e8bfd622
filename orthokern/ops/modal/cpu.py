"""The modal form on the CPU; the kernels: ``csrc/cpu/modal.cpp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orthokern._scan_contract import Readout
from orthokern.cpu._call import call, new
from orthokern.cpu.rotation_scan import scan as scan
from orthokern.ops.modal.reference import Gradients, Inputs, Loss


def loss(inputs: Inputs, readout: Readout, need_grad: bool, profile: Sequence[int] = ()) -> Loss:
    """See ``reference.loss``."""
    x, re, im, z0, table, lengths, pairs = inputs
    weight, bias, target, reduction = readout
    (T, B), dtype, ids = target.shape, z0.dtype, None if table is None else x
    count = target.numel() if lengths is None else int(lengths.sum())
    result = Loss(z0.new_empty(()), z0.new_empty(T, dtype=torch.int64), None, z0.new_zeros(len(profile), *z0.shape))
    named: dict[str, Tensor | None] = dict.fromkeys(Gradients._fields)
    if need_grad:
        grads = Gradients(
            x=None if ids is not None else new(*x.shape, dtype=dtype),
            re=torch.empty_like(re),
            im=torch.empty_like(im),
            z0=new(*z0.shape, dtype=dtype),
            table=None if table is None else new(*table.shape, dtype=dtype),
            pairs=None if pairs is None else re.new_empty(len(pairs), 2, 2),
            weight=new(*weight.shape, dtype=dtype),
            bias=None if bias is None else new(*bias.shape, dtype=dtype),
        )
        result, named = result._replace(grads=grads, adjoints=z0.new_zeros(len(profile), *z0.shape)), grads._asdict()
    D, P = (0 if tensor is None else len(tensor) for tensor in (table, pairs))
    sizes = {"scale": 1.0 / count if reduction == "mean" else 1.0, "need_grad": int(need_grad), "K": len(profile)}
    sizes |= {"T": T, "B": B, "M": len(re), "D": D, "C": len(weight), "P": P}
    named["readout"] = named.pop("weight")
    tensors = {
        **inputs._asdict(),
        "x": x if ids is None else None,
        "tokens": None if ids is None else ids.to(torch.int64),
        "readout": weight,
        "bias": bias,
        "target": target.to(torch.int64),
        "loss": result.loss,
        "hits": result.hits,
        "steps": torch.tensor(profile, dtype=torch.int64, device="cpu"),
        "step_states": result.states,
        "step_adjoints": result.adjoints,
    }
    call("modal_loss", dtype, sizes, tensors | {f"grad_{name}": grad for name, grad in named.items()})
    return result
