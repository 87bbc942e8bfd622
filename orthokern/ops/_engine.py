"""The batched cotangents that torch's autograd engine may hand to a backward.

The vmap of ``torch.autograd.grad(is_grads_batched=True)`` and ``torch.autograd.functional.hessian(vectorize=True)`` is
an older one than that of torch.func: it knows few operations, and no functions of this package. Here it is a loop over
the cotangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.ops._dispatcher import vmapped


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
