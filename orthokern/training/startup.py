"""Faster start of a command line."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_MARK = "__dynamo_disable"  # the module in which torch's decorators look up the function that they call


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Context manager in which torch's optimizers do not import the front end of torch.compile, an import that takes as
    long as that of torch itself.

    The methods of optimizers are decorated for tracing, and the decorators import the front end at the first call. A
    command line does not compile, so that the undecorated functions are called. All changes are undone at the end. If
    the front end is imported already, or torch has no such decorators, nothing is changed.
    """
    with contextlib.ExitStack() as undo:
        if "torch._dynamo" not in sys.modules:
            _spare(undo)
        yield


def _spare(undo: contextlib.ExitStack) -> None:
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        place = getattr(getattr(method, "__code__", None), "co_filename", "")
        if plain is not None and place.endswith("_compile.py") and not hasattr(plain, _MARK):
            setattr(plain, _MARK, plain)
            undo.callback(_forget, plain)
    for kind in {value for value in vars(torch.optim).values() if isinstance(value, type)}:
        step = vars(kind).get("step")
        plain = _below_hooks(step)
        if step is not None and plain is not None:
            setattr(kind, "step", _without_grad(plain))  # noqa: B010
            undo.callback(setattr, kind, "step", step)


def _forget(plain: Any) -> None:
    with contextlib.suppress(AttributeError):
        delattr(plain, _MARK)


def _below_hooks(step: Any) -> Callable[..., Any] | None:
    """The undecorated step of an optimizer, if its decorator imports the front end."""
    names = getattr(getattr(step, "__code__", None), "co_names", ())
    return getattr(step, "__wrapped__", None) if "graph_break" in names else None


def _without_grad(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *arguments, **options)

    return step
