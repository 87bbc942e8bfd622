"""What a call of a differentiable function runs, by the kind of derivative that is being taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch


def _levels() -> list[str]:
    """Names of the transforms of torch.func that are active: Grad, Jvp, Vmap, ..."""
    return [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]


def route(backend: str | None, *, grad_rule: bool = False) -> Literal["op", "function", "reference"]:
    """What a call runs: the op; an autograd Function around it under forward mode and derivatives of torch.func; or the
    reference's plain torch code, where that is asked for.

    grad_rule: whether the op itself serves one torch.func.grad, vjp or jacrev. It then keeps its batching rule for
    torch.func.vmap, which runs all models in one call.

    Forward mode over forward mode takes the reference, too: torch loses the outer tangent in the jvp of any Function,
    and says nothing (pytorch/pytorch#197867).
    """
    if torch.compiler.is_compiling():
        return "op"
    if dispatch.plain_reference(backend):
        return "reference"
    if torch._C._are_functorch_transforms_active():
        levels = _levels()
        if levels.count("Jvp") > 1:
            return "reference"
        most = 1 if grad_rule else 0
        return "function" if "Jvp" in levels or levels.count("Grad") > most else "op"
    return "function" if forward_ad._current_level >= 0 else "op"


def plain(backend: str | None) -> bool:
    """Whether a call of an op without a Function for the above runs the reference's plain torch code."""
    return route(backend) != "op"


def recording(saved: Iterable[Tensor | None] = ()) -> bool:
    """Whether a backward has to be one that autograd can derive again: create_graph=True.

    Not while torch.compile traces it, which has no second derivative. torch.func.grad always sets create_graph; where
    it is the only derivative, it needs no such backward unless one of the saved tensors has a gradient outside it.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if not torch._C._are_functorch_transforms_active():
        return True
    levels = _levels()
    if "Jvp" in levels or levels.count("Grad") != 1:
        return True
    return any(_innermost(tensor).requires_grad for tensor in saved if tensor is not None)


def _innermost(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def last() -> bool:
    """Whether nothing will derive a backward again, nor run it for many at once: it may work in place."""
    return not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
