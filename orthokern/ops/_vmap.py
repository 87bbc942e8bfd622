"""What torch.func.vmap does with the ops: rules for ``CustomOp.register_vmap``.

A rule is called with the size of the vmapped dimension, its place in every argument (None where the argument has none)
and the arguments, and calls the op once more with tensors that vmap does not see. It returns the results and the place
of the dimension in them. The scans take it as R, see ``_replicas``; an op whose tensors have leading batch dimensions
takes it as one of these; every other op is called for each model, and the results are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[Any, Any]]


def _moved(tensor: Any, place: int | None, to: int) -> Any:
    return tensor if place is None else tensor.movedim(place, to)


def _with_places(results: Any, place: int) -> tuple[Any, Any]:
    """The results of an op, and the place of R in each; an empty tensor stands for no result and has none."""
    if isinstance(results, Tensor):
        return results, place
    results = tuple(results)
    return results, tuple(place if result.ndim > 1 else None for result in results)


def one_by_one(op: Callable[..., Any], wanted: int | None = None) -> Rule:
    """The rule that calls the op for each model.

    wanted: how many of the results are for the caller. The others are kept by the derivative of each call, and are
    empty; None: all are wanted.
    """

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
    """The rule of an op on batches of matrices: the places of R in its first arguments, all tensors, and its results.

    An argument without R is expanded.
    """

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
    """The tensor with R in place `at`."""
    if place is not None:
        return tensor.movedim(place, at)
    shape = list(tensor.shape)
    return tensor.unsqueeze(at).expand(*shape[:at], R, *shape[at:])


def _is_nested(factor: Tensor, place: int | None) -> bool:
    """Whether the map has R already: one vmap in another."""
    return factor.ndim - (place is not None) == 3


def scan_forward(op: Callable[..., Any], factors: int, time_first: tuple[int, ...]) -> Rule:
    """The rule of a scan's forward: one call for R models.

    Args:
        op: it.
        factors: how many tensors make up the map; they are the arguments behind x.
        time_first: the indices of the tensors [T, B, ...], in which R stands behind T.
    """
    each, of_map = one_by_one(op), range(1, 1 + factors)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if _is_nested(arguments[factors], in_dims[factors]):
            return each(info, in_dims, *arguments)
        given = list(arguments)
        for index, (tensor, place) in enumerate(zip(arguments, in_dims, strict=True)):
            if index in of_map:
                given[index] = _expanded(tensor, place, info.batch_size, 0)
            else:
                given[index] = _moved(tensor, place, 1 if index in time_first else 0)
        return _with_places(op(*given), 1)

    return rule


def scan_backward(op: Callable[..., Any], factors: int, time_first: tuple[int, ...], saved: int = 3) -> Rule:
    """The rule of a scan's backward. Its arguments begin with grad_hs, states, pre, x and the factors, or with four
    that the forward saved and the factors; saved: the first tensors [T, B, ...], which all models have."""
    each, of_map = one_by_one(op), range(4, 4 + factors)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if _is_nested(arguments[3 + factors], in_dims[3 + factors]):
            return each(info, in_dims, *arguments)
        given = list(arguments)
        for index, (tensor, place) in enumerate(zip(arguments, in_dims, strict=True)):
            if index in of_map:
                given[index] = _expanded(tensor, place, info.batch_size, 0)
            elif index < saved and tensor.ndim > 1:  # not a pre that was not kept
                given[index] = _expanded(tensor, place, info.batch_size, 1)
            else:
                given[index] = _moved(tensor, place, 1 if index in time_first else 0)
        results = tuple(op(*given))
        in_front = _with_places(results[1:], 0)[1]
        return results, (1 if results[0].ndim > 1 else None, *in_front)

    return rule
