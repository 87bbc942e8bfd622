"""Select the implementation of a differentiable op by the kind of derivative that is being taken."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch
from orthokern.ops._alone import vmapped
from orthokern.ops._common import values


def route(backend: str | None) -> Literal["op", "function", "reference"]:
    """The implementation that a call runs: the op; an autograd Function around it, under forward mode and derivatives
    of torch.func, for which a torch.library op can have no rule; or the plain torch code of the reference, for an
    explicit "reference".

    Forward mode over forward mode also runs the reference, since torch silently loses the outer tangent in the jvp of
    any Function (pytorch/pytorch#197867).
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
    """Whether torch.func takes exactly one derivative, in reverse mode and inside any vmaps: the ops support that."""
    levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    return levels.count("Grad") == 1 and "Jvp" not in levels


def plain(backend: str | None) -> bool:
    """Whether a call of an op without such a Function runs the plain torch code of the reference."""
    return route(backend) != "op"


def recording(*tensors: Tensor | None) -> bool:
    """Whether a backward has to be differentiable: create_graph=True.

    Never under torch.compile, which has no second derivative. torch.func always sets create_graph; where it takes only
    one derivative, the graph is needed only if autograd outside of torch.func tracks one of the tensors.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if tensors and torch._C._are_functorch_transforms_active() and first_reverse():
        return any(tensor is not None and values(tensor).requires_grad for tensor in tensors)
    return True


def last() -> bool:
    """Whether a backward is neither differentiated again nor vmapped, so that it may work in place."""
    return not torch.is_grad_enabled() and not vmapped()
