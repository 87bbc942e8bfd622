"""Whether a call may go past torch's dispatcher: whether nothing but autograd and the op's kernel would see it.

A call through the dispatcher converts all arguments twice, which for a scan of one step takes longer than the scan.
It is needed wherever something else listens or acts on the call: torch.compile and export, vmap and torch.func, modes
(fake tensors, flop counters, a default device), torch.jit.trace, autocast, the profiler, forward-mode derivatives, and
tensors that are more than memory on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = {type(None), str, int, float, bool}
_NAMES = (
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_are_functorch_transforms_active",
    "_get_tracing_state",
)
# private functions of torch: one that a version lacks means that its calls go through the dispatcher
_KNOWN = all(hasattr(torch._C, name) for name in _NAMES) and hasattr(torch.autograd, "_profiler_enabled")
_KNOWN = _KNOWN and hasattr(forward_ad, "_current_level")


def quiet() -> bool:
    """Whether no tracing, transformation, mode or autocast is active for this thread."""
    return (
        not torch.compiler.is_compiling()
        and _KNOWN
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        and not torch.is_autocast_enabled("cpu")
    )


def alone(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of an op with these arguments may go to its kernel at once: `quiet`, and plain CPU tensors."""
    if not quiet():
        return False
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is nn.Parameter:
            if not argument.is_cpu or argument.is_neg():
                return False
        elif kind not in _PLAIN:
            return False
    return True
