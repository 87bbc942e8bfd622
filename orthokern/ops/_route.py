"""What a call of a differentiable function runs, by the kind of derivative that is being taken."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch
from orthokern.ops._common import values


def route(backend: str | None) -> Literal["op", "function", "reference"]:
    """What a call runs: the op; an autograd Function around it under forward mode and derivatives of torch.func, for
    which a torch.library op can have no rule; or the reference's plain torch code, where that is asked for.

    Forward mode over forward mode takes the reference, too: torch loses the outer tangent in the jvp of any Function,
    and says nothing (pytorch/pytorch#197867).
    """
    if torch.compiler.is_compiling():
        return "op"
    if dispatch.plain_reference(backend):
        return "reference"
    if torch._C._are_functorch_transforms_active():
        levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
        if levels.count("Jvp") > 1:
            return "reference"
        return "function" if "Jvp" in levels or "Grad" in levels else "op"
    return "function" if forward_ad._current_level >= 0 else "op"


def first_reverse() -> bool:
    """Whether torch.func takes one reverse derivative and no other, in whatever vmaps: the ops can serve that."""
    levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    return levels.count("Grad") == 1 and "Jvp" not in levels


def plain(backend: str | None) -> bool:
    """Whether a call of an op without a Function for the above runs the reference's plain torch code."""
    return route(backend) != "op"


def recording(*tensors: Tensor | None) -> bool:
    """Whether a backward has to be one that autograd can derive again: create_graph=True.

    Not while torch.compile traces it, which has no second derivative. torch.func always asks for such a graph; where
    it takes one derivative alone, autograd outside of it needs the graph only if it follows one of the tensors.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if tensors and torch._C._are_functorch_transforms_active() and first_reverse():
        return any(tensor is not None and values(tensor).requires_grad for tensor in tensors)
    return True


def last() -> bool:
    """Whether nothing will derive a backward again, nor run it for many at once: it may work in place."""
    return not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
