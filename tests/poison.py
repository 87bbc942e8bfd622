"""Allocations whose memory is poisoned until it is written.

A module of its own: Dynamo finds the globals of a function that it traces through the name of the module, and
``conftest`` is the name of several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or, for integers, with the smallest value that the type holds."""
    if type(tensor) is not torch.Tensor or tensor.device.type == "meta" or tensor.dtype == torch.bool:
        return  # fake and meta tensors have no memory
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def poisoned(
    allocate: Callable[..., torch.Tensor], traced: Callable[..., torch.Tensor] | None = None, only: str = "orthokern"
) -> Callable[..., torch.Tensor]:
    """``allocate``, but with poisoned memory if code of the module or package ``only`` is the caller.

    A compiler that traces the caller sees ``traced`` alone: by default, ``allocate``.
    """
    traced = traced or allocate

    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == only or caller.startswith(f"{only}."):
            poison(tensor)
        return tensor

    return allocate_poisoned
