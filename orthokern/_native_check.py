"""The check of a tensor whose address is passed to a native kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.errors import InputError


def check(kernel: str, name: str, tensor: Tensor, dtype: torch.dtype, device_type: str, elements: int) -> None:
    """Raise an InputError unless the tensor is of this dtype, on such a device, and has this many elements.

    A tensor can differ from those of the call's other tensors if its ``data`` was exchanged after the call was checked,
    for example between forward and backward.
    """
    if tensor.device.type != device_type:
        raise InputError(f"{kernel}: {name} must be on a {device_type} device, got {tensor.device}")
    if tensor.dtype is not dtype:
        raise InputError(f"{kernel}: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.numel() != elements:
        shape = tuple(tensor.shape)
        raise InputError(f"{kernel}: {name} must have {elements} elements, got {tensor.numel()} of shape {shape}")
