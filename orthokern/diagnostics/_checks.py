"""Checks of tensors that the diagnostics share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orthokern.errors import InputError
from orthokern.ops._checks import strided


def exact(name: str, value: Any, accepted: str, fits: bool) -> Tensor:
    """The value in float64 on the CPU, if it is a tensor of real numbers and `fits`; InputError otherwise."""
    if not isinstance(value, Tensor) or value.is_complex() or not fits:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} must be {accepted} of real numbers, got {got}")
    strided(name, value)
    return value.detach().double().cpu()


def vector(name: str, value: Any) -> Tensor:
    """`exact` of a tensor [N], N at least 1."""
    return exact(name, value, "a tensor [N], N at least 1,", getattr(value, "ndim", 0) == 1 and len(value) > 0)


def square(name: str, value: Any) -> Tensor:
    """`exact` of a square matrix [N, N], N at least 1."""
    shape = tuple(getattr(value, "shape", ()))
    return exact(name, value, "a square matrix [N, N]", len(shape) == 2 and 0 < shape[0] == shape[1])
