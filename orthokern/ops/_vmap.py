"""Rules of the ops for torch.func.vmap, see ``CustomOp.register_vmap``.

A rule gets the size of the vmapped dimension, its position in every argument (None for an argument without it) and the
arguments, as plain tensors. It returns the results and the position of the dimension in them. In the scans the
dimension becomes R, see ``_replicas``; in an op with leading batch dimensions it becomes one of these; every other op
is called for each model, and the results are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

Rule = Callable[..., tuple[Any, Any]]


def only_level() -> VmapInterpreter | None:
    """The vmap that is active, if it is the only transform and nothing else has to see the call of an op."""
    if (
        torch.compiler.is_compiling()
        or not torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or len(torch._C._functorch.get_interpreter_stack() or ()) != 1
    ):
        return None
    level = retrieve_current_functorch_interpreter()
    return level if isinstance(level, VmapInterpreter) else None


def apply(level: VmapInterpreter, op: Callable[..., Any], rule: Rule, given: tuple[Any, ...]) -> Any:
    """Call an op under vmap by its rule. The dispatcher does the same, and converts all arguments several times."""
    functorch, number = torch._C._functorch, level.level()
    pairs = [functorch._unwrap_batched(a, number) if isinstance(a, Tensor) else (a, None) for a in given]
    values, places = zip(*pairs, strict=True)
    with level.lower():
        if all(place is None for place in places):
            return op(*values)
        info = VmapInfo(batch_size=level.batch_size(), randomness=level.randomness())
        results, found = rule(info, places, *values)
    if isinstance(results, Tensor):
        return functorch._add_batch_dim(results, found, number)
    return tuple(
        result if place is None else functorch._add_batch_dim(result, place, number)
        for result, place in zip(results, found, strict=True)
    )


def one_by_one(op: Callable[..., Any], wanted: int | None = None) -> Rule:
    """The rule that calls the op for each model, and returns the first ``wanted`` results, or all; the others, which
    the derivative of each call saves, are empty."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        # The derivative of unbind writes the gradient of all models once; that of R selects would write it R times.
        given = [
            (a,) * info.batch_size if place is None else a.unbind(place)
            for a, place in zip(arguments, in_dims, strict=True)
        ]
        found = [op(*of_one) for of_one in zip(*given, strict=True)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        results = [torch.stack(of_all) for of_all in list(zip(*found, strict=True))[:wanted]]
        kept = [result.new_empty(0) for result in found[0][len(results) :]]
        return (*results, *kept), (0,) * len(results) + (None,) * len(kept)

    return rule


def batched(op: Callable[..., Any], places: tuple[int, ...], results: tuple[int, ...]) -> Rule:
    """The rule of an op on batches of matrices. places, results: the positions of R in the first arguments, which are
    tensors, and in the results. An argument without R is expanded."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        tensors = [
            _expanded(tensor, place, info.batch_size, at)
            for tensor, place, at in zip(arguments, in_dims, places, strict=False)
        ]
        found = op(*tensors, *arguments[len(places) :])
        return (found, results[0]) if isinstance(found, Tensor) else (tuple(found), results)

    return rule


def cayley(op: Callable[..., Any]) -> Rule:
    """The rule of (m [..., N, K], g, lr [] or [...], backend): R in front of the batch of bases."""

    def rule(
        info: Any, in_dims: tuple[Any, ...], m: Tensor, g: Tensor, lr: Tensor, backend: str | None
    ) -> tuple[Tensor, int]:
        batch = m.shape[:-2] if in_dims[0] is None else m.movedim(in_dims[0], 0).shape[1:-2]
        m, g = (_expanded(tensor, place, info.batch_size, 0) for tensor, place in zip((m, g), in_dims, strict=False))
        if in_dims[2] is not None or lr.ndim:
            lr = _expanded(lr, in_dims[2], info.batch_size, 0)
            lr = lr.view(info.batch_size, *(1,) * len(batch)).expand(-1, *batch) if lr.ndim == 1 else lr
        return op(m, g, lr, backend), 0

    return rule


def _expanded(tensor: Tensor, place: int | None, R: int, at: int) -> Tensor:
    """The tensor with R as dimension `at`."""
    if place is not None:
        return tensor.movedim(place, at)
    shape = list(tensor.shape)
    return tensor.unsqueeze(at).expand(*shape[:at], R, *shape[at:])


def scan(op: Any, start: int, factors: int, *, saved: int = 0, behind_time: int = 1) -> Rule:
    """The rule of a scan's forward or backward: one call for R models.

    Args:
        op: the op.
        start, factors: the position of the first tensor of the recurrent map, and their number.
        saved: the number of first arguments [T, R, B, ...] that exist for each model and are expanded.
        behind_time: the number of first results in which R follows T.
    """
    each, of_map, time_first = one_by_one(op), range(start, start + factors), op.indices("x", "resets")

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        last = of_map[-1]
        if arguments[last].ndim - (in_dims[last] is not None) == 3:  # it already has R, in a vmap inside a vmap
            return each(info, in_dims, *arguments)
        given = list(arguments)
        for index, (tensor, place) in enumerate(zip(arguments, in_dims, strict=True)):
            if index in of_map:
                given[index] = _expanded(tensor, place, info.batch_size, 0)
            elif index < saved and tensor.ndim > 1:  # an empty pre was not kept
                given[index] = _expanded(tensor, place, info.batch_size, 1)
            elif place is not None:
                given[index] = tensor.movedim(place, 1 if index in time_first else 0)
        results = tuple(op(*given))
        # an empty tensor means no result
        return results, tuple(int(i < behind_time) if r.ndim > 1 else None for i, r in enumerate(results))

    return rule
