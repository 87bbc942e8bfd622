"""Activations on the CPU; the kernels: ``csrc/cpu/activations.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern.cpu._call import call, new
from orthokern.errors import InputError


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See ``orthokern.ops.activations``."""
    y = new(*x.shape, dtype=x.dtype)
    tensors = {"x": x, "act_param": act_param, "y": y}
    call("activation_fwd", x.dtype, _sizes(x, act_param, activation), tensors)
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See ``orthokern.ops.activations``."""
    grad_x = new(*x.shape, dtype=x.dtype)
    grad_act_param = None if act_param is None else torch.empty(act_param.shape, dtype=x.dtype, device="cpu")
    tensors = {"grad_y": grad_y, "x": x, "act_param": act_param, "grad_x": grad_x, "grad_act_param": grad_act_param}
    call("activation_bwd", x.dtype, _sizes(x, act_param, activation), tensors)
    return grad_x, x.new_empty(0) if grad_act_param is None else grad_act_param


def _sizes(x: Tensor, act_param: Tensor | None, activation: str) -> dict[str, int]:
    N = x.shape[-1]
    if ACTIVATIONS[activation].pairs and N % 2:
        raise InputError(f"N is {N}: activation {activation!r} works on pairs and needs an even N")
    return {
        "rows": x.numel() // N if N else 0,
        "N": N,
        "activation": ACTIVATIONS[activation].number,
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
