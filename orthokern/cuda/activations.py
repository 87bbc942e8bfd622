"""Activations on CUDA; the kernels: ``csrc/cuda/activations.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._activations import ACTIVATIONS
from orthokern.cuda import _call as native
from orthokern.cuda._call import DTYPES


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See ``orthokern.ops.activations``."""
    x = native.ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    y = torch.empty_like(x)
    sizes, tensors = _inputs(x, act_param, activation)
    native.call("activation_fwd", x.device, sizes, {**tensors, "y": y})
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See ``orthokern.ops.activations``."""
    x = native.ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    grad_x = torch.empty_like(x)
    grad_act_param = torch.empty(0 if act_param is None else act_param.shape, dtype=x.dtype, device=x.device)
    sizes, tensors = _inputs(x, act_param, activation)
    tensors |= {"grad_y": native.ready(grad_y, x.dtype, x.device, "grad_y"), "grad_x": grad_x}
    tensors["grad_act_param"] = None if act_param is None else grad_act_param
    space = None if act_param is None else native.workspace("activation_workspace", x.device, sizes, tensors)
    native.call("activation_bwd", x.device, sizes, {**tensors, "workspace": space})
    return grad_x, grad_act_param


def _inputs(x: Tensor, act_param: Tensor | None, activation: str) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    N = x.shape[-1]
    sizes = {
        "rows": x.numel() // N if N else 0,
        "N": N,
        "dtype": DTYPES[x.dtype],
        "activation": ACTIVATIONS[activation].number,
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    return sizes, {"x": x, "act_param": native.ready(act_param, x.dtype, x.device, "act_param")}
