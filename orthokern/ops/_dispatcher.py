"""Whether a call may bypass torch's dispatcher, because only autograd and the op's kernel would handle it.

A call through the dispatcher converts all arguments twice, which takes longer than a scan of one step. The dispatcher
is needed for torch.compile and export, vmap and torch.func, modes (fake tensors, flop counters, a default device),
torch.jit.trace, autocast, the profiler, forward-mode derivatives, tensor subclasses, and tensors that are neither on a
CPU nor on a CUDA device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def one_cotangent_at_a_time(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A backward or jvp (ctx, *tensors) that is called for each cotangent, or tangent, of the older vmap.

    That of ``torch.autograd.grad(is_grads_batched=True)`` and ``torch.autograd.functional.hessian(vectorize=True)``
    knows few operations, and no functions of this package. Here it is a loop over the cotangents.
    """

    @functools.wraps(rule)
    def call(ctx: Any, *args: Any) -> Any:
        if not vmapped() or not any(map(_batched, args)):
            return rule(ctx, *args)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        size = max(len(torch._remove_batch_dim(t, level, 1, 0)) for t in args if _batched(t))
        of_all = [torch._remove_batch_dim(t, level, size, 0) if isinstance(t, Tensor) else [t] * size for t in args]
        torch._C._vmapmode_decrement_nesting()
        try:
            results = _stacked([call(ctx, *(tensors[i] for tensors in of_all)) for i in range(size)])
        finally:
            torch._C._vmapmode_increment_nesting()
        if isinstance(results, tuple):
            return tuple(None if t is None else torch._add_batch_dim(t, 0, level) for t in results)
        return torch._add_batch_dim(results, 0, level)

    return call


def _batched(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def _stacked(results: list[Any]) -> Any:
    """The results of all calls, joined along a new first dimension; None for a result that is None."""
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*results, strict=True))
