"""modal_scan on the CPU; the kernel: ``csrc/cpu/modal_scan.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._scan_contract import ModalGradients, ModalInputs
from orthokern.cpu._call import as_bytes, call, new


def modal_arguments(inputs: ModalInputs, T: int) -> tuple[dict[str, float], dict[str, Tensor | None]]:
    """The common arguments of the modal kernels. Ids are passed as bytes, with their width."""
    table, pairs = inputs.table, inputs.pairs
    ids = inputs.x if table is not None else None
    D, P = 0 if table is None else table.shape[0], 0 if pairs is None else pairs.shape[0]
    sizes: dict[str, float] = {"B": inputs.z0.shape[0], "T": T, "M": inputs.re.shape[0], "D": D, "P": P}
    sizes["id_bytes"] = 0 if ids is None else ids.element_size()
    own = {"x": inputs.x if table is None else None, "ids": None if ids is None else as_bytes(ids)}
    return sizes, {**inputs._asdict(), **own}


def modal_gradients(inputs: ModalInputs, grad_x: Tensor | None) -> ModalGradients:
    """Memory for the gradients except that of x."""
    z0, table, pairs = inputs.z0, inputs.table, inputs.pairs
    return ModalGradients(
        x=grad_x,
        re=torch.empty_like(inputs.re),
        im=torch.empty_like(inputs.im),
        z0=new(*z0.shape, dtype=z0.dtype),
        table=None if table is None else new(*table.shape, dtype=z0.dtype),
        pairs=None if pairs is None else inputs.re.new_empty(pairs.shape[0], 2, 2),
    )


def named(grads: ModalGradients | None) -> dict[str, Tensor | None]:
    """The gradients, or None, by the names of the kernels' arguments."""
    found = dict.fromkeys(ModalGradients._fields) if grads is None else grads._asdict()
    return {f"grad_{name}": grad for name, grad in found.items()}


def modal_scan_fwd(inputs: ModalInputs) -> Tensor:
    """See ``orthokern.ops.modal_scan``."""
    assert inputs.x is not None
    T, z0 = inputs.x.shape[0], inputs.z0
    sizes, tensors = modal_arguments(inputs, T)
    z = new(T, *z0.shape, dtype=z0.dtype)
    call("modal_scan_fwd", z0.dtype, sizes, {**tensors, "z": z})
    return z


def modal_scan_bwd(inputs: ModalInputs, grad_z: Tensor, z: Tensor, *, need_x: bool = True) -> ModalGradients:
    """See ``orthokern.ops.modal_scan``."""
    sizes, tensors = modal_arguments(inputs, z.shape[0])
    grad_x = new(*grad_z.shape, dtype=z.dtype) if inputs.table is None and need_x else None
    grads = modal_gradients(inputs, grad_x)
    call("modal_scan_bwd", z.dtype, sizes, {**tensors, "x": None, "grad_z": grad_z, "states": z, **named(grads)})
    return grads
