"""Checks of values that were read from a file. An InputError has the name, the value and the accepted values."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor

from orthokern.errors import InputError


def shown(value: Any) -> str:
    """A short text for any value."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(value).split())


def misfit(name: str, value: Any, expected: str) -> InputError:
    """Build (not raise) the error for a value that does not fit."""
    return InputError(f"{name} is {shown(value)}; expected: {expected}")
