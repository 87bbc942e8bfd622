"""A stand-in for torch's compiler, in processes that compile nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

NAME = "torch._dynamo"


class _StandIn(types.ModuleType):
    """The two functions of ``torch._dynamo`` that torch's optimizers call in each step. Both mean nothing outside of a
    compilation. Any other attribute, and any submodule, imports the compiler."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.marked: list[Callable[..., Any]] = []

    def graph_break(self, *args: Any, **options: Any) -> None:
        pass

    def disable(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        self.marked.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(NAME), name)

    def remove(self) -> None:
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], torch._dynamo
            for fn in self.marked:  # `torch._disable_dynamo` stores what `disable` returns
                vars(fn).pop("__dynamo_disable", None)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Within the context torch's optimizers do not import ``torch._dynamo``, which takes a second and 140 MB."""
    if NAME in sys.modules:
        yield
        return
    stand_in = _StandIn()
    sys.modules[NAME] = torch._dynamo = stand_in
    try:
        yield
    finally:
        stand_in.remove()
