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
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.nn.utils.rnn import PackedSequence

_P = ParamSpec("_P")
_R = TypeVar("_R")

_KINDS = ("cpu", "cuda")
is_on_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled
# torch frees a chain of nodes that Python code has looked at recursively; 40 000 of them overflow a stack of 8 MB.
_MAX_HOOKED_NODES = 8000


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
    """Run a function that returns tensors, and the backward of the operations that autograd records in it, with
    autocast off. torch.compile traces it; a compiled backward inside autocast rounds torch's own products (not those of
    this package's ops), so run backward outside of autocast, as torch recommends.

    Autograd evaluates each node in the thread state of the call to backward() and restores that state afterwards, so
    that a hook before a node that turns autocast off does so for this node only. Graphs of more nodes than
    _MAX_HOOKED_NODES have no hooks: their backward keeps the dtype outside of autocast only.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return call(*args, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        first = _get_sequence_nr()  # number of the next node
        result = function(*args, **kwargs)
        if _get_sequence_nr() - first > _MAX_HOOKED_NODES:
            return result
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                _keep_dtype_from(tensor.grad_fn, first)
        return result

    return call


def _keep_dtype_from(node: Any, first: int) -> None:
    """Turn autocast off in a node, and in all nodes from number `first` on that get gradients from it."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        # the node that accumulates a leaf's gradient has the largest possible number
        if node is None or node in seen or not first <= node._sequence_nr() < 2**63:
            continue
        seen.add(node)
        node.register_prehook(_turn_off)
        waiting += (following for following, _ in node.next_functions)


def _turn_off(grads: Any) -> None:
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a backward of an autograd Function with autocast off."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_on_anywhere():
            with off():
                return function(*args, **kwargs)
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
