"""Rules of the ops for torch.func.vmap, see ``CustomOp.register_vmap``.

A rule gets the size of the vmapped dimension, its position in every argument (None for an argument without it) and the
arguments, as plain tensors. It returns the results and the position of the dimension in them. Every op is called for
each model, and the results are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

from orthokern.ops._common import filled

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
        found = [filled(results) for results in found]
        results = [torch.stack(of_all) for of_all in list(zip(*found, strict=True))[:wanted]]
        kept = [result.new_empty(0) for result in found[0][len(results) :]]
        return (*results, *kept), (0,) * len(results) + (None,) * len(kept)

    return rule
