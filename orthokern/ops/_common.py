"""Functions shared by the ops: checks of tensor values, and the error for second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from orthokern import _autocast, dispatch
from orthokern._scan_contract import running, without_padding
from orthokern.errors import InputError
from orthokern.ops._dispatcher import one_cotangent_at_a_time


def values(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func, whose values can be read: under vmap, those of all models."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.maybe_current_level() is not None


_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, without its import


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient. Under vmap only the unwrapped tensor has that flag; a derivative
    of torch.func may be with respect to any of them."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return _transformed() or any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if torch._C._are_functorch_transforms_active():
        levels = torch._C._functorch.get_interpreter_stack() or ()
        if any(level.key().name == "Grad" for level in levels):
            return True
    return any(tensor is not None and values(tensor).requires_grad for tensor in tensors)


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


def check_range(argument: str, ids: Tensor, size: int, what: str) -> None:
    """Raise InputError unless every one of ``ids`` (int64, any shape) is in [0, size).

    The CPU kernels index with these numbers without a check, so this runs before each of them, also in compiled graphs.
    """
    if not ids.numel():
        return
    low, high = values(ids).aminmax()
    least, most = int(low), int(high)
    if least < 0 or most >= size:
        worst = least if least < 0 else most
        hint = "; ignore_index is not supported: leave these rows out" if worst == -100 else ""
        raise InputError(f"{argument} holds {worst}: {what} must be in [0, {size}){hint}")


def check_lengths(lengths: Tensor | None, T: int) -> None:
    """Raise InputError unless all of a scan's lengths (int64 [B], or None) are in [1, T].

    Not checked on a GPU, where reading the values would synchronise with the host.
    """
    if lengths is None or lengths.is_cuda or lengths.is_meta:
        return
    low, high = values(lengths).aminmax()
    least, most = int(low), int(high)
    if least < 1 or most > T:
        raise InputError(f"lengths holds {least if least < 1 else most}: lengths must be in [1, T] = [1, {T}]")


def check_leak(leak: Tensor | None) -> None:
    """Raise InputError unless every value of a scan's leak is in (0, 1]. Not checked on a GPU, as in check_lengths."""
    if leak is None or leak.is_cuda or leak.is_meta:
        return
    low, high = values(leak).detach().aminmax()
    if not (float(low) > 0 and float(high) <= 1):
        raise InputError(f"leak holds values from {float(low):g} to {float(high):g}: accepted are values in (0, 1]")


def check_tokens(x: Tensor | None, weight: Tensor | None, lengths: Tensor | None) -> None:
    """check_range for a scan's x if it holds token ids [T, B] of the table weight [N, D]; padding is not checked.

    Not checked on a GPU, as in check_lengths; the kernels there turn a wrong id into NaN.
    """
    if x is not None and weight is not None and not x.is_floating_point() and not (x.is_cuda or x.is_meta):
        x = without_padding(x, running(x.shape[0], lengths))
        check_range("the input", x, weight.shape[-1], "token ids")


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """tensor.contiguous(), or None for None."""
    return None if tensor is None else tensor.contiguous()


def filled(results: tuple[Tensor | None, ...], args: tuple[Any, ...] = ()) -> tuple[Tensor, ...]:
    """The results with an empty tensor for each None, also if the op with the arguments ``args`` has none: a
    result of a torch op is a tensor."""
    like = next(tensor for tensor in (*results, *args) if isinstance(tensor, Tensor))
    # torch.empty: new_empty is many times slower below autograd
    return tuple([torch.empty(0, dtype=like.dtype, device=like.device) if t is None else t for t in results])


def refusal(op: str, way_out: str) -> RuntimeError:
    verb = "set" if way_out.startswith("ORTHOKERN_") else "pass"  # an environment variable, or an argument
    return RuntimeError(f"{op} has no second derivative through its kernels: {verb} {way_out}, which supports it")


def no_second_derivative(op: str, way_out: str = "backend='reference'") -> Callable[..., Any]:
    """A derivative for a backward op that raises."""

    def refuse(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> Any:
        raise refusal(op, way_out)

    return refuse


def differentiable_once(op: str, way_out: str = "backend='reference'") -> Callable[[Callable[..., Any]], Any]:
    """A decorator for the backward of an autograd Function without a second derivative: create_graph=True raises.

    torch's once_differentiable treats its gradients as constants if the incoming gradient does not require one, so that
    the second derivative of a sum with other terms would be wrong.
    """

    def decorate(backward: Callable[..., Any]) -> Any:
        @one_cotangent_at_a_time
        @functools.wraps(backward)
        def call(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise refusal(op, way_out)
            with torch.no_grad(), _autocast.off():
                return backward(ctx, *grads)

        return call

    return decorate
