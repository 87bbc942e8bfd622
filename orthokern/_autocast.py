"""Autocast stops here: recurrences, Cayley steps and constraints on singular values keep the dtype of their tensors.

Inside ``torch.autocast`` every matrix product of torch rounds its factors to 16 bits, also those that an op, its
backward or an optimizer makes for itself. A recurrence over thousands of steps and a basis that has to stay orthogonal
to rounding bear no such thing, and a kernel would read 16-bit results as the 32-bit ones that it asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_KINDS = ("cpu", "cuda")


def is_on(kind: str) -> bool:
    """Whether autocast is on for a type of device; torch raises for "meta", which knows none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def keeps_dtype(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function whose first argument is a tensor with autocast off for that tensor's device. torch.compile traces
    through."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        kind = args[0].device.type  # type: ignore[attr-defined]
        if not is_on(kind):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Autocast off for all devices, for what works on several tensors; costs nothing worth naming where it is off."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
