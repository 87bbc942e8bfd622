"""Checks of values that were read from a file. An InputError has the name, the value and what is expected."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor

from orthokern._files import LARGEST_INTEGER
from orthokern.errors import InputError


def shown(value: Any) -> str:
    """A short text for any value."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(value).split())


def misfit(name: str, value: Any, expected: str) -> InputError:
    """Build (not raise) the error for a value that does not fit."""
    return InputError(f"{name} is {shown(value)}; expected: {expected}")


def check_integer(name: str, value: Any, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> int:
    """The value, if it is an integer in [minimum, maximum]; InputError otherwise."""
    if type(value) is not int or not minimum <= value <= maximum:
        most = "" if maximum == LARGEST_INTEGER else f" and at most {maximum}"
        raise misfit(name, value, f"an integer of at least {minimum}{most}")
    return value
