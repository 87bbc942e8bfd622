"""The CUDA leaf: native kernels behind the signatures of :mod:`orthokern.reference`.

Each function checks what the kernels rely on (dtype, device, contiguity), makes the results, and puts the kernels on the
current stream of the tensors' device. Nothing here waits for the device. Shapes and the meaning of arguments are
documented once, in ``orthokern/ops/<op>.py``; B batch, T time, N hidden, K rank, D input features or token ids.

Importing never fails: :data:`AVAILABLE` says whether the kernels were built and :data:`REASON` why not.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

# The native entry points and the device type that they take. The tests put the host harness and "cpu" here.
_native: Any = None
_DEVICE = "cuda"

try:
    from orthokern import _C

    _native = getattr(_C, "cuda", None)
    REASON = "" if _native is not None else f"no CUDA kernels in this build: {json.loads(_C.build_info())['cuda_reason']}"
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


def _call(name: str, device: torch.device, sizes: dict[str, int], tensors: dict[str, Tensor | None]) -> None:
    """Call the native function `name` on the current stream of `device`. Absent tensors are null pointers there."""
    arguments = dict(sizes)
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
