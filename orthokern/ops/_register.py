"""Entering an op into torch.library, with its fake and its derivative, so that a call costs little.

``custom_op`` stands in for torch.library.custom_op and has its names. That one asks more of every call than a scan of
one step takes: it converts the schema's arguments anew to find their defaults, and looks for results that share memory
with arguments. Here the defaults are found once, and opcheck looks for shared memory in the tests. Below it is the same
interface, torch.library.Library; and in the same way as there

- torch.compile, FakeTensor and export see one node for an op (the tag says that it is fit for that), whose results the
  fake describes; Dynamo does not look into the Python of a kernel;
- modes of torch's dispatcher that no op has a kernel for pass by.

Inside a kernel autocast is off: ``orthokern/_autocast.py``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from orthokern._autocast import keeps_dtype
from orthokern.errors import InputError
from orthokern.ops import _vmap
from orthokern.ops._alone import alone

NAMESPACE = "orthokern"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Function = Callable[..., Any]
_NUMBERS = ("lr", "grad_loss", "squarings")  # arguments that may be 0-dimensional


def untraced(function: Function) -> Function:
    """The function, which Dynamo does not trace.

    torch's own decorator imports Dynamo at the first call, which takes a second or two. Nothing is traced before
    something else has imported it.
    """
    disabled: list[Function] = []

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **options)
            disabled.append(torch._dynamo.disable(function))
        return disabled[0](*arguments, **options)

    return call


class CustomOp:
    """An op whose kernel serves all devices. See ``custom_op``."""

    def __init__(self, name: str, schema: str, kernel: Function) -> None:
        self.name = name
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        # a call from Python arrives without its last arguments where they have their defaults
        self.defaults = tuple(argument.default_value for argument in self.overload._schema.arguments)
        self.kernel = self._guarded(keeps_dtype(kernel))
        self.derivative: Any = None  # the autograd.Function, where there is one
        self.packet = getattr(getattr(torch.ops, NAMESPACE), name)
        _LIBRARY.impl(name, untraced(self.kernel), "CompositeExplicitAutograd")
        self._vmap_rule = _vmap.one_by_one(self.overload)

        def batched(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
            defaults = self.defaults[len(given) :]
            return self._vmap_rule(info, (*in_dims, *(None,) * len(defaults)), *given, *defaults)

        torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=_LIBRARY)

    def __call__(self, *given: Any) -> Any:
        """The op, past torch's dispatcher where nothing listens there (``orthokern/ops/_alone.py``)."""
        if not alone(given):
            return self.packet(*given)
        if torch.is_grad_enabled() and self.derivative is not None:
            return self.derivative.apply(*given, *self.defaults[len(given) :], None)
        return self.kernel(*given)

    def _guarded(self, function: Function) -> Function:
        """A kernel or fake that refuses in one line what no tensor argument may be, and sizes beyond the memory: the
        functions of ``orthokern.functional`` check their arguments, ``torch.ops.orthokern`` is open to any."""
        arguments = self.overload._schema.arguments
        tensors = [(i, a.name) for i, a in enumerate(arguments) if "Tensor" in str(a.type) and a.name not in _NUMBERS]

        @functools.wraps(function)
        def call(*given: Any) -> Any:
            given = (*given, *self.defaults[len(given) :])
            for index, name in tensors:
                tensor = given[index]
                if tensor is not None and (tensor.ndim == 0 or tensor.layout is not torch.strided):
                    kind = "0-dimensional" if tensor.ndim == 0 else str(tensor.layout).removeprefix("torch.")
                    raise InputError(
                        f"{self.name}: {name} is a {kind} tensor: accepted is a strided one of at least one dimension"
                    )
            try:
                return function(*given)
            except RuntimeError as error:
                if "can't allocate memory" not in str(error):
                    raise
                shapes = ", ".join(f"{n} {list(given[i].shape)}" for i, n in tensors if given[i] is not None)
                raise InputError(
                    f"{self.name}: there is no memory for the results of {shapes}: accepted are smaller sizes"
                ) from None

        return call

    def indices(self, *names: str) -> tuple[int, ...]:
        """The places of arguments in the schema; those that it does not have are left out."""
        return tuple(i for i, argument in enumerate(self.overload._schema.arguments) if argument.name in names)

    def register_vmap(self, rule: Function) -> None:
        """Enter what torch.func.vmap does with the op, in place of one call per model: see ``orthokern.ops._vmap``."""
        self._vmap_rule = rule

    def register_fake(self, fake: Function) -> Function:
        """Enter the function that gives empty results of the right shapes, dtypes and strides. A decorator."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._guarded(fake), lib=_LIBRARY)
        return fake

    def register_autograd(self, backward: Function, *, setup_context: Function | None = None) -> None:
        """Enter the derivative.

        Args:
            backward: (ctx, what setup_context saved for it, *gradients of the results) -> gradients of the first
                arguments, None where there is none; arguments behind those have no gradient.
            setup_context: (ctx, inputs, output) -> None, keeps what backward needs; inputs are all arguments, defaults
                filled in. As that of torch.autograd.Function.
        """
        op = self.overload

        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, keys = arguments  # no keys: from __call__
            # a Function turns grad mode off: transforms of torch.func below this one, and autograd, record by their own
            below = torch._C._are_functorch_transforms_active()
            grad_mode = torch.enable_grad() if below else contextlib.nullcontext()
            with grad_mode, torch._C._AutoDispatchBelowAutograd():
                output = self.kernel(*inputs) if keys is None else op.redispatch(keys, *inputs)
                if setup_context is not None:
                    setup_context(ctx, inputs, output)
            return output

        def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            saved = ctx.saved_tensors  # out here: to unpack them, torch.utils.checkpoint runs and records a forward
            transforms = torch._C._are_functorch_transforms_active()
            if torch.is_grad_enabled() or transforms or torch.compiler.is_compiling():
                found = backward(ctx, saved, *grads)
            else:  # without create_graph nothing is recorded: straight to the kernels of the ops in there
                with torch._C._AutoDispatchBelowAutograd():
                    found = backward(ctx, saved, *grads)
            return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))

        members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        derivative: Any = type(self.name, (torch.autograd.Function,), members)
        self.derivative = derivative
        apply_at_one_level = super(torch.autograd.Function, derivative).apply  # type: ignore[misc]

        def autograd_kernel(keys: torch._C.DispatchKeySet, *given: Any) -> Any:
            inputs = (*given, *self.defaults[len(given) :])
            keys = keys & torch._C._after_autograd_keyset
            if torch.is_grad_enabled():
                if torch._C._are_functorch_transforms_active():
                    # Function.apply would go through all transforms at once. Here torch.func.grad is the outermost one
                    # that is left: the dispatcher calls this kernel again for each transform below it.
                    with enable_single_level_autograd_function():
                        return apply_at_one_level(*inputs, keys)
                return derivative.apply(*inputs, keys)
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys, *inputs)

        _LIBRARY.impl(self.name, untraced(autograd_kernel), "Autograd", with_keyset=True)


def custom_op(name: str, schema: str) -> Callable[[Function], CustomOp]:
    """A decorator that makes a function the kernel of the op ``torch.ops.orthokern.<name>``.

    Args:
        name: the op's name in the namespace.
        schema: its arguments and results as torch.library writes them, "(Tensor x, int k=0) -> Tensor". It mutates
            nothing, and returns nothing that is, or shares memory with, an argument or another result.

    Returns:
        The op. ``register_fake`` and ``register_autograd`` complete it.
    """
    return lambda kernel: CustomOp(name, schema, kernel)
