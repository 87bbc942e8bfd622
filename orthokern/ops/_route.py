"""Whether a call of a differentiable op runs the op or the plain torch code of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import dispatch
from orthokern.ops._common import values


def by_reference(backend: str | None, *arguments: Any, served: int = 1) -> bool:
    """Whether a call runs the reference, which torch can differentiate in every way: for an explicit "reference", in
    forward mode, and under torch.func unless it takes at most ``served`` derivatives, in reverse mode.

    arguments: those of the op. A tensor that an autograd outside of torch.func tracks needs a second derivative.
    """
    if torch.compiler.is_compiling():
        return False
    if dispatch.plain_reference(backend):
        return True
    if not torch._C._are_functorch_transforms_active():
        return forward_ad._current_level >= 0
    levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    if "Jvp" in levels or levels.count("Grad") > served:
        return True
    return "Grad" in levels and any(isinstance(a, Tensor) and values(a).requires_grad for a in arguments)


def recording() -> bool:
    """Whether a backward has to be differentiable (create_graph=True). Never under torch.compile, which has no second
    derivative, and not under torch.func, where `by_reference` has decided."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()
