"""Disables autocast: recurrences, Cayley steps and constraints on singular values keep the dtype of their tensors.

Inside ``torch.autocast`` every matrix product of torch rounds its factors to 16 bits, also products inside an op, its
backward or an optimizer. This is not accurate enough for a recurrence over thousands of steps, or for a basis that must
be orthogonal up to rounding; and a kernel would read 16-bit results as 32-bit numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_P = ParamSpec("_P")
_R = TypeVar("_R")

_KINDS = ("cpu", "cuda")
is_on_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_on(kind: str) -> bool:
    """Whether autocast is enabled for a type of device; False for "meta", for which torch raises."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def widened(value: Any, dtype: torch.dtype) -> Any:
    """Converts a tensor or packed sequence of 16-bit floats to ``dtype``; returns anything else unchanged."""
    floats = value.data if isinstance(value, PackedSequence) else value
    if isinstance(floats, Tensor) and floats.dtype in (torch.bfloat16, torch.float16):
        return value.to(dtype)
    return value


def widened_inside(value: Any, like: Tensor) -> Any:
    """Inside autocast, `widened` to the dtype of a parameter; the value itself elsewhere."""
    return widened(value, like.dtype) if is_on(like.device.type) else value


def keeps_dtype(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function with autocast off. A backward inside autocast rounds the products of torch's own operations in it,
    not those of this package's ops. As torch recommends, run backward outside of autocast."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return call(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Disables autocast for all devices, for functions of several tensors. The cost is negligible if it is disabled
    already."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
