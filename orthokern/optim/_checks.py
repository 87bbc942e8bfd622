"""Checks shared by the optimizers of the package."""

from __future__ import annotations

import math
import reprlib
import sys
from typing import Any

import torch
from torch import Tensor

from orthokern.errors import InputError, is_number, require
from orthokern.ops._checks import whole


def shown(value: Any) -> str:
    """A short text for any value."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(value).split())


def misfit(name: str, value: Any, expected: str) -> InputError:
    """Build (not raise) the error for a value that does not fit."""
    return InputError(f"{name} is {shown(value)}; expected: {expected}")


def check_range(name: str, value: Any, low: float = 0.0, *, above: bool = False) -> None:
    """InputError unless a number, or a tensor with one, is finite and at least low (or above it)."""
    is_scalar = is_number(value) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    # as a Python number: numpy would cast the largest float64 to the float32 of a value
    plain = value.item() if is_scalar and hasattr(value, "item") else value
    fits = is_scalar and (plain > low if above else plain >= low) and plain <= sys.float_info.max
    require(fits, name, f"a finite number {'above' if above else 'of at least'} {low:g}", shown(value))


def check_rate(index: int, group: dict[str, Any]) -> None:
    """InputError unless a group's learning rate is a finite number, 0 or more. One on a GPU is not read, since that
    would synchronise. A rate below 0 by rounding (as with LinearLR(end_factor=0.0), which multiplies) counts as 0."""
    rate = group.get("lr", 0.0)
    if isinstance(rate, Tensor):
        if rate.is_cuda or rate.is_meta:
            return
        rate = float(rate.detach()) if rate.numel() == 1 else rate
    lowest = -1e-12 * abs(float(group.get("initial_lr", 1.0)))
    fits = is_number(rate) and lowest <= rate < math.inf
    role = f" ({group['role']})" if "role" in group else ""
    accepted = "a finite number of at least 0"
    require(fits, f"lr of group {index}{role}", accepted, f"{rate!r}; no parameter was changed")


def parameter_label(group: dict[str, Any], index: int) -> str:
    """A parameter in the text of an error: its place in the group, and its name if the group has names."""
    names = group.get("param_names")
    return f"parameter {index}" + (f" ({names[index]})" if names else "")


def check_constrained(index: int, item: Any) -> tuple[Tensor, slice]:
    """(parameter, rows of the matrix in it) of one element of `constrained`."""
    pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], slice)
    parameter, rows = item if pair else (item, slice(None))
    label = f"constrained[{index}]"
    require(isinstance(parameter, Tensor), label, "a matrix", type(parameter).__name__)
    whole(label, parameter)
    fits = parameter.ndim == 2 and 0 not in parameter.detach()[rows].shape
    require(fits, label, "a matrix with elements", f"shape {list(parameter.shape)}")
    require(parameter.dtype in (torch.float32, torch.float64), label, "float32 or float64", parameter.dtype)
    return parameter, rows
