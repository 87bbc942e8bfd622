"""What torch's autograd engine may hand to a backward besides plain tensors of the right dtype.

Hooks of saved tensors may unpack a tensor in another dtype, to compress it. The vmap of
``torch.autograd.grad(is_grads_batched=True)`` and ``torch.autograd.functional.hessian(vectorize=True)`` is an older one
than that of torch.func: it knows few operations, and no functions of this package. Here it is a loop over the
cotangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.ops._dispatcher import vmapped


def save_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward``, and a note of the dtypes, to which `saved_tensors` converts the tensors back."""
    ctx.save_for_backward(*tensors)
    ctx.dtypes = _dtypes(tensors)


def note_dtypes(ctx: Any) -> None:
    """Note the dtypes of what is saved for the backward."""
    ctx.dtypes = _dtypes(ctx.to_save or ())


def saved_tensors(ctx: Any) -> Any:
    """``ctx.saved_tensors`` in the dtypes in which they were saved."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    if _dtypes(saved) != ctx.dtypes:
        with torch.enable_grad():  # a tensor that requires a gradient still does
            return tuple(None if t is None else t.to(kind) for t, kind in zip(saved, ctx.dtypes, strict=True))
    return saved


def _dtypes(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """The dtype of each tensor; True for None. This runs in every call, and is as short as it can be."""
    return [tensor is None or tensor.dtype for tensor in tensors]


def one_cotangent_at_a_time(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A backward or jvp (ctx, *tensors) that is called for each cotangent, or tangent, of the older vmap."""

    @functools.wraps(rule)
    def call(ctx: Any, *given: Any) -> Any:
        if not vmapped() or not any(map(_batched, given)):
            return rule(ctx, *given)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        size = max(len(torch._remove_batch_dim(t, level, 1, 0)) for t in given if _batched(t))
        of_all = [torch._remove_batch_dim(t, level, size, 0) if isinstance(t, Tensor) else [t] * size for t in given]
        torch._C._vmapmode_decrement_nesting()
        try:
            found = [call(ctx, *(tensors[i] for tensors in of_all)) for i in range(size)]
            results = _stacked(found)
        finally:
            torch._C._vmapmode_increment_nesting()
        if isinstance(results, tuple):
            return tuple(None if t is None else torch._add_batch_dim(t, 0, level) for t in results)
        return torch._add_batch_dim(results, 0, level)

    return call


def _batched(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def _stacked(found: list[Any]) -> Any:
    """The results of all calls along a new first dimension; None for a result that is None."""
    if isinstance(found[0], Tensor):
        return torch.stack(found)
    return tuple(None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*found, strict=True))
