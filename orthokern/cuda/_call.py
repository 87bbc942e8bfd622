"""Calls of the CUDA kernels. This is the only module that passes addresses to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern import _native
from orthokern._elements import checked

# The native functions, and the device type of their tensors. The tests replace them by the host harness and "cpu".
kernels: Any = getattr(_native.module, "cuda", None)
DEVICE = "cuda"

AVAILABLE, REASON = kernels is not None, _native.REASON
if not AVAILABLE and not REASON:
    REASON = f"not in this build: {_native.build['cuda_reason']}"

DTYPES = {torch.float32: 0, torch.float64: 1}
# Planner overrides for tests: the fields of ScanOverrides and GruOverrides in csrc/cuda.
overrides: dict[str, int] = {}


def ready(tensor: Tensor, dtype: torch.dtype, name: str, device: torch.device) -> Tensor:
    """`tensor` in the form that kernels need: on this device, of this dtype, contiguous, with its first element at a
    multiple of 16 bytes (that of a contiguous view may be anywhere, and a GPU has no unaligned vector accesses)."""
    if tensor.device != device or device.type != DEVICE:
        raise ValueError(f"{name} is on {tensor.device}: the cuda backend takes tensors of one CUDA device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    tensor = tensor.contiguous()  # the tensor itself if it is
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def ready_args(args: Any, steps: int, **saved: Tensor | None) -> tuple[Any, list[Any]]:
    """`checked` for these kernels."""
    device = args.h0.device
    return checked(args, steps, torch.float32, functools.partial(ready, device=device), **saved)


def address(tensor: Tensor) -> int:
    """The address of a tensor, for functions of other libraries."""
    return tensor.data_ptr()


def addressed(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The arguments of a native function: numbers, and the addresses of tensors; None is a null pointer."""
    return {**sizes, **{key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}}


def stream(device: torch.device) -> int | None:
    """The address of the current stream. ``torch.cuda.current_stream`` also makes an object, at many times the cost."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else None


def call(name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
    """Call the native function `name` on the current stream of `device`; None is a null pointer.

    The native functions restore the current device (csrc/cuda/launch.h, DeviceGuard).
    """
    getattr(kernels, name)({**addressed(sizes, tensors), "device": device.index or 0, "stream": stream(device)})


def prepared(
    name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
) -> Callable[..., None]:
    """The native function `name` with these arguments, for calls that differ in a few sizes."""
    function = getattr(kernels, name)
    args = {**addressed(sizes, tensors), "device": device.index or 0, "stream": stream(device)}
    return lambda **own: function({**args, **own})


def workspace(
    name: str, device: torch.device, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
) -> Tensor:
    """Scratch memory for the kernels of one call; the native function `name` computes its size."""
    launch = {"device": device.index or 0, "stream": None, "workspace": None}
    size = getattr(kernels, name)({**addressed(sizes, tensors), **launch})
    return torch.empty(size, dtype=torch.uint8, device=device)


def plan(name: str, device: torch.device, sizes: Mapping[str, int]) -> dict[str, int]:
    """The result of the native planner `name` for a scan of these sizes: the launch parameters, and the workspace size.

    Results are cached, since a planner queries the driver.
    """
    return _planned(name, device.index or 0, tuple(overrides.items()), **sizes)


@functools.lru_cache(maxsize=1024)
def _planned(name: str, device: int, overridden: tuple[tuple[str, int], ...], **sizes: int) -> dict[str, int]:
    planned: dict[str, int] = getattr(kernels, name)({**sizes, "overrides": dict(overridden), "device": device})
    return planned


def forget_plans() -> None:
    """Clear the cache. For tests that replace the kernels or the simulated device."""
    _planned.cache_clear()
