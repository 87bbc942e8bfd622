"""The CUDA leaf: native kernels behind the signatures of :mod:`orthokern.reference`.

Each function checks what the kernels rely on (dtype, device, contiguity), makes the results, and puts the kernels on
the current stream of the tensors' device. Nothing here waits for the device. Shapes and the meaning of arguments are
documented once, in ``orthokern/ops/<op>.py``; B batch, T time, N hidden, K rank, D input features or token ids.

Importing never fails: :data:`AVAILABLE` says whether the kernels were built and :data:`REASON` why not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The native entry points and the device type that they take. The tests put the host harness and "cpu" here.
_native: Any = None
_DEVICE = "cuda"

try:
    from orthokern import _C

    _native = getattr(_C, "cuda", None)
    REASON = "" if _native is not None else f"not in this build: {json.loads(_C.build_info())['cuda_reason']}"
except ImportError as error:
    REASON = f"the native module is not built ({error}): run `pip install -e .` with a C++17 compiler and nvcc at hand"
AVAILABLE = _native is not None

_DTYPES = {torch.float32: 0, torch.float64: 1}
_ACTIVATIONS = {"identity": 0, "tanh": 1, "relu": 2, "prelu": 3, "leaky_relu": 3, "modrelu": 4, "oplu": 5}


def _ready(tensor: Tensor | None, dtype: torch.dtype, device: torch.device, name: str) -> Tensor | None:
    """`tensor` as the kernels read it: on this device, of this dtype, contiguous."""
    if tensor is None:
        return None
    if tensor.device != device or device.type != _DEVICE:
        raise ValueError(f"{name} is on {tensor.device}: the cuda backend takes tensors of one CUDA device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    return tensor.contiguous()


def _call(name: str, device: torch.device, sizes: Mapping[str, float], tensors: dict[str, Tensor | None]) -> None:
    """Call the native function `name` on the current stream of `device`. Absent tensors are null pointers there."""
    arguments: dict[str, float] = dict(sizes)
    for key, tensor in tensors.items():
        if tensor is not None:
            arguments[key] = tensor.data_ptr()
    if device.type != "cuda":
        getattr(_native, name)(arguments)
        return
    with torch.cuda.device(device):
        arguments["device"] = device.index
        arguments["stream"] = torch.cuda.current_stream(device).cuda_stream
        getattr(_native, name)(arguments)


def _workspace(
    name: str, device: torch.device, sizes: Mapping[str, int], tensors: Mapping[str, Tensor | None]
) -> Tensor:
    """Scratch memory for the kernels of one call, as large as the native function `name` says of its arguments."""
    arguments = {key: tensor.data_ptr() for key, tensor in tensors.items() if tensor is not None}
    size = getattr(_native, name)({**sizes, **arguments, "device": device.index or 0})
    return torch.empty(size, dtype=torch.uint8, device=device)


# ---------------------------------------------------------------------------------------------------------- activations


def activation_fwd(x: Tensor, act_param: Tensor | None, *, activation: str) -> Tensor:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    y = torch.empty_like(x)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    _call("activation_fwd", x.device, sizes, {**tensors, "y": y})
    return y


def activation_bwd(grad_y: Tensor, x: Tensor, act_param: Tensor | None, *, activation: str) -> tuple[Tensor, Tensor]:
    """See :mod:`orthokern.ops.activations`."""
    x = _ready(x, x.dtype, x.device, "x")  # type: ignore[assignment]
    grad_x = torch.empty_like(x)
    grad_act_param = torch.empty(0 if act_param is None else act_param.shape, dtype=x.dtype, device=x.device)
    sizes, tensors = _activation_inputs(x, act_param, activation)
    tensors |= {"grad_y": _ready(grad_y, x.dtype, x.device, "grad_y"), "grad_x": grad_x}
    if act_param is not None:
        tensors["grad_act_param"] = grad_act_param
        tensors["workspace"] = _workspace("activation_workspace", x.device, sizes, tensors)
    _call("activation_bwd", x.device, sizes, tensors)
    return grad_x, grad_act_param


def _activation_inputs(
    x: Tensor, act_param: Tensor | None, activation: str
) -> tuple[dict[str, int], dict[str, Tensor | None]]:
    n = x.shape[-1]
    sizes = {
        "rows": x.numel() // n if n else 0,
        "N": n,
        "dtype": _DTYPES[x.dtype],
        "activation": _ACTIVATIONS[activation],
        "act_param_size": 0 if act_param is None else act_param.numel(),
    }
    return sizes, {"x": x, "act_param": _ready(act_param, x.dtype, x.device, "act_param")}


# --------------------------------------------------------------------------------------------------------------- cayley


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See :mod:`orthokern.ops.cayley`."""
    m = _ready(m, m.dtype, m.device, "m")  # type: ignore[assignment]
    out = torch.empty_like(m)
    if not m.numel():
        return out
    n, k = m.shape[-2:]
    sizes = {"batch": m.numel() // (n * k), "N": n, "K": k, "dtype": _DTYPES[m.dtype]}
    tensors = {"m": m, "g": _ready(g, m.dtype, m.device, "g"), "out": out}
    options: dict[str, float] = {}
    if isinstance(lr, Tensor):
        tensors["lr"] = lr.to(m.device, torch.float64).expand(m.shape[:-2]).contiguous()
    else:
        options["rate"] = float(lr)
    tensors["workspace"] = _workspace("cayley_workspace", m.device, sizes, tensors)
    _call("cayley", m.device, {**sizes, **options}, tensors)
    return out
