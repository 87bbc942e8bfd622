"""Whether a call may bypass torch's dispatcher, because only autograd and the op's kernel would handle it.

A call through the dispatcher converts all arguments twice, which takes longer than a scan of one step. The dispatcher
is needed for torch.compile and export, vmap and torch.func, modes (fake tensors, flop counters, a default device),
torch.jit.trace, autocast, the profiler, forward-mode derivatives, tensor subclasses, and tensors that are neither on a
CPU nor on a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from orthokern._autocast import is_on_anywhere
from orthokern._scan_contract import PLAIN

_VMAP_MODE: Any = torch._C._dispatch_key_parse("VmapMode")
_INCLUDED: Any = torch._C._dispatch_tls_is_dispatch_key_included


def vmapped() -> bool:
    """Whether a vmap is active: that of torch.func, or the older one of torch.autograd.grad(is_grads_batched=True)."""
    return torch._C._are_functorch_transforms_active() or _INCLUDED(_VMAP_MODE)


def no_dispatch_modes() -> bool:
    """Whether no tracing, transformation, mode or autocast is active for this thread."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not _INCLUDED(_VMAP_MODE)
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        and not is_on_anywhere()
    )


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which the host cannot wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def can_bypass_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of an op may bypass the dispatcher: `no_dispatch_modes`, and all tensors are plain ones on a CPU
    or a CUDA device."""
    if not no_dispatch_modes():
        return False
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is nn.Parameter:
            if not (argument.is_cpu or argument.is_cuda) or argument.is_neg():
                return False
        elif kind not in PLAIN:
            return False
    return True
