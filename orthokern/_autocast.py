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

_P = ParamSpec("_P")
_R = TypeVar("_R")

_KINDS = ("cpu", "cuda")


def is_on(kind: str) -> bool:
    """Whether autocast is enabled for a type of device; False for "meta", for which torch raises."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def keeps_dtype(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function that returns tensors with autocast off, and so the backward of what autograd records in it,
    wherever that is run. torch.compile traces through; a backward of its making that runs inside autocast rounds the
    products that are torch's own (not those of this package's ops): run it outside, as torch recommends.

    The backward: autograd evaluates each node in the thread state of the call to backward() and restores that state
    afterwards, so a hook that runs before a node and turns autocast off does so for that node alone.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return call(*args, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        first = _get_sequence_nr()  # of the nodes to come
        result = function(*args, **kwargs)
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                _keep_dtype_from(tensor.grad_fn, first)
        return result

    return call


def _keep_dtype_from(node: Any, first: int) -> None:
    """Turn autocast off in the nodes of this thread from number `first` on that a node's gradients go to, and in it."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        # a leaf's gradient is collected by a node without a number (the largest there is)
        if node is None or node in seen or not first <= node._sequence_nr() < 2**63:
            continue
        seen.add(node)
        node.register_prehook(_turn_off)
        waiting += (following for following, _ in node.next_functions)


def _turn_off(grads: Any) -> None:
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Disables autocast for all devices, for functions of several tensors. The cost is negligible if it is disabled
    already."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
