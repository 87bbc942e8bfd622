"""Calls into the CUDA kernels: the only module that passes addresses to them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern.errors import InputError

# The native entry points and the device type that they take. The tests put the host harness and "cpu" here.
kernels: Any = None
DEVICE = "cuda"

try:
    from orthokern import _C

    kernels = getattr(_C, "cuda", None)
    REASON = "" if kernels is not None else f"not in this build: {json.loads(_C.build_info())['cuda_reason']}"
except ImportError as error:
    REASON = f"the native module is not built ({error}): run `pip install -e .` with a C++17 compiler and nvcc at hand"
AVAILABLE = kernels is not None

DTYPES = {torch.float32: 0, torch.float64: 1}
# Planner overrides, which only tests set: the fields of ScanOverrides and GruOverrides in csrc/cuda.
overrides: dict[str, int] = {}


def ready(tensor: Tensor | None, dtype: torch.dtype, device: torch.device, name: str) -> Tensor | None:
    """`tensor` as the kernels read it: on this device, of this dtype, contiguous, its first element at a multiple of 16
    bytes (a contiguous view may begin anywhere, and a misaligned vector access is an error on a GPU)."""
    if tensor is None:
        return None
    if tensor.device != device or device.type != DEVICE:
        raise ValueError(f"{name} is on {tensor.device}: the cuda backend takes tensors of one CUDA device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def addressed(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The arguments of a native function: numbers, and the addresses of tensors; a null pointer is None."""
    return {**sizes, **{key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}}


def call(name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
    """Call the native function `name` on the current stream of `device`. Tensors that are None are null pointers there.

    The native functions leave the current device as it was (csrc/cuda/launch.h, DeviceGuard).
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    getattr(kernels, name)({**addressed(sizes, tensors), "device": device.index or 0, "stream": stream})


def workspace(
    name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
) -> Tensor:
    """Scratch memory for the kernels of one call, as large as the native function `name` says of its arguments."""
    launch = {"device": device.index or 0, "stream": None, "workspace": None}
    size = getattr(kernels, name)({**addressed(sizes, tensors), **launch})
    return torch.empty(size, dtype=torch.uint8, device=device)


def plan(name: str, device: torch.device, sizes: Mapping[str, int]) -> dict[str, int]:
    """What the native planner `name` answers for a scan of these sizes: how to launch it, and its workspace.

    Answers are kept, since a planner asks the driver what fits on the device. Of the planner overrides, a user may set
    one: ORTHOKERN_CUDA_GRAPHS=0 sets ``graph_steps`` to 0.
    """
    setting = os.environ.get("ORTHOKERN_CUDA_GRAPHS", "").strip()
    if setting not in ("", "0", "1"):
        raise InputError(
            f"the environment variable ORTHOKERN_CUDA_GRAPHS is {setting!r}; accepted: 1 (the default: steps go to the "
            "GPU in CUDA graphs) or 0 (kernel by kernel)"
        )
    asked = {"graph_steps": 0, **overrides} if setting == "0" else overrides
    return _planned(name, device.index or 0, tuple(sizes.items()), tuple(asked.items()))


@functools.lru_cache(maxsize=1024)
def _planned(
    name: str, device: int, sizes: tuple[tuple[str, int], ...], asked: tuple[tuple[str, int], ...]
) -> dict[str, int]:
    planned: dict[str, int] = getattr(kernels, name)({**dict(sizes), "overrides": dict(asked), "device": device})
    return planned


def forget_plans() -> None:
    """Ask the planners anew. For tests that exchange the kernels or the device that they pretend."""
    _planned.cache_clear()
