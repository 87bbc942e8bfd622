"""Register an op with torch.library, with its fake and its derivative, at a low cost per call.

``custom_op`` replaces torch.library.custom_op and has the same interface. In torch's version, every call converts the
schema's arguments to find their defaults, and looks for results that share memory with arguments; this takes longer
than a scan of one step. Here the defaults are found once, and opcheck looks for shared memory in the tests. Both
register the op with torch.library.Library: torch.compile, FakeTensor and export see one node for an op, whose results
the fake describes, and Dynamo does not trace the kernel. Autocast is off inside a kernel: ``orthokern/_autocast.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import only_needed
from orthokern.errors import InputError
from orthokern.ops._common import filled
from orthokern.ops._dispatcher import can_bypass_dispatcher, one_cotangent_at_a_time, vmapped

NAMESPACE = "orthokern"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Function = Callable[..., Any]
_NUMBERS = ("lr", "grad_loss", "squarings")  # arguments that may be 0-dimensional


def untraced(function: Function) -> Function:
    """The function, excluded from tracing by Dynamo.

    torch.compiler.disable imports Dynamo at the first call, which takes one to two seconds. Here Dynamo is not
    imported: nothing is traced before other code has done that.
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


def _refuse_shapes(name: str, error: Exception) -> None:
    """Raise InputError for an error of shapes that cannot be unpacked: those of a tensor whose ``data`` was exchanged
    after the checks, or of a call of ``torch.ops``."""
    if not isinstance(error, InputError):
        raise InputError(f"{name}: the shapes of the tensors do not fit together: {error}") from error


class CustomOp:
    """An op whose kernel serves all devices. See ``custom_op``."""

    def __init__(self, name: str, schema: str, kernel: Function) -> None:
        self.name = name
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        # the dispatcher omits the last arguments of a call if they equal their defaults
        self.defaults = tuple(argument.default_value for argument in self.overload._schema.arguments)
        self.kernel = kernel
        self.guarded = self._guarded(keeps_dtype(kernel))
        self.apply: Any = None  # of the derivative, if there is one, for calls without transforms
        self.packet = getattr(getattr(torch.ops, NAMESPACE), name)
        _LIBRARY.impl(name, untraced(self.guarded), "CompositeExplicitAutograd")
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self._batched, lib=_LIBRARY)

    def __call__(self, *args: Any) -> Any:
        """Call the op, without torch's dispatcher if ``orthokern/ops/_dispatcher.py`` permits that."""
        if not can_bypass_dispatcher(args):
            return self.packet(*args)
        if torch.is_grad_enabled() and self.apply is not None:
            return self.apply(*args, *self.defaults[len(args) :], None)
        return self.kernel(*args)

    def _batched(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The rule of torch.func.vmap: one call per model, and the results stacked. in_dims: the position of the
        models' dimension in every argument, None for an argument without it."""
        # The derivative of unbind writes the gradient of all models once; that of R selects would write it R times.
        arguments = [
            (a,) * info.batch_size if place is None else a.unbind(place) for a, place in zip(args, in_dims, strict=True)
        ]
        results = [self(*of_one) for of_one in zip(*arguments, strict=True)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(of_all) for of_all in zip(*map(filled, results), strict=True))
        return stacked, (0,) * len(stacked)

    def _guarded(self, function: Function) -> Function:
        """A kernel or fake that raises InputError for tensors that are missing, 0-dimensional or not strided:
        ``torch.ops.orthokern`` can be called without the checks of ``orthokern.functional``, and takes None for every
        tensor."""
        arguments = self.overload._schema.arguments
        tensors = [(i, a.name) for i, a in enumerate(arguments) if "Tensor" in str(a.type) and a.name not in _NUMBERS]
        required = [(i, a.name) for i, a in enumerate(arguments) if str(a.type) == "Tensor"]

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            args = (*args, *self.defaults[len(args) :])
            for index, name in required:
                if args[index] is None:
                    raise InputError(f"{self.name}: {name} is None: accepted is a tensor")
            for index, name in tensors:
                tensor = args[index]
                if tensor is not None and (tensor.ndim == 0 or tensor.layout is not torch.strided):
                    kind = "0-dimensional" if tensor.ndim == 0 else str(tensor.layout).removeprefix("torch.")
                    raise InputError(
                        f"{self.name}: {name} is a {kind} tensor: accepted is a strided one of at least one dimension"
                    )
            try:
                results = function(*args)
            except (ValueError, IndexError) as error:
                _refuse_shapes(self.name, error)
                raise
            return filled(results, args) if isinstance(results, tuple) else results

        return call

    def register_fake(self, fake: Function) -> Function:
        """Register the function that returns empty results of the right shapes, dtypes and strides. A decorator."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._guarded(fake), lib=_LIBRARY)
        return fake

    def register_autograd(self, backward: Function, *, setup_context: Function | None = None) -> None:
        """Register the derivative, backward(ctx, saved tensors, *gradients of the results) -> gradients of the first
        arguments, None where there is none; the arguments after those have no gradient. A gradient that is not needed
        may be among them; autograd gets None for it.

        setup_context(ctx, inputs, output) is as that of torch.autograd.Function; inputs are all arguments.
        """
        op = self.overload

        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, keys = arguments  # keys: None from __call__
            if torch._C._are_functorch_transforms_active():
                # it was turned off until the end of this call, but transforms below this one have to record
                torch._C._set_grad_enabled(True)
            with torch._C._AutoDispatchBelowAutograd():
                output = self.kernel(*inputs) if keys is None else op.redispatch(keys, *inputs)
                if setup_context is not None:
                    setup_context(ctx, inputs, output)
            return output

        @one_cotangent_at_a_time
        @keeps_dtype
        def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            saved = ctx.saved_tensors  # outside of the guard: torch.utils.checkpoint records a forward to unpack them
            recorded = torch.is_grad_enabled() or vmapped() or torch.compiler.is_compiling()
            try:
                if recorded:
                    result = backward(ctx, saved, *grads)
                else:  # without create_graph nothing is recorded: call the kernels of the ops without autograd
                    with torch._C._AutoDispatchBelowAutograd():
                        result = backward(ctx, saved, *grads)
            except (ValueError, IndexError) as error:
                _refuse_shapes(f"backward of {self.name}", error)
                raise
            needs = ctx.needs_input_grad
            return (*only_needed(result, needs[: len(result)]), *(None,) * (len(needs) - len(result)))

        members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        # not of Function, whose `apply` would process all transforms of torch.func
        self.apply = apply = type(self.name, (_SingleLevelFunction,), members).apply  # type: ignore[attr-defined]

        def autograd_kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            inputs = (*args, *self.defaults[len(args) :])
            keys = keys & torch._C._after_autograd_keyset
            if torch.is_grad_enabled():
                # Of several transforms only the outermost one, torch.func.grad, is due here: the dispatcher calls this
                # kernel again for each transform below it.
                with enable_single_level_autograd_function():
                    return apply(*inputs, keys)
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys, *inputs)

        _LIBRARY.impl(self.name, untraced(autograd_kernel), "Autograd", with_keyset=True)


def custom_op(name: str, schema: str) -> Callable[[Function], CustomOp]:
    """A decorator that makes a function the kernel of the op ``torch.ops.orthokern.<name>``.

    schema: arguments and results in the syntax of torch.library, "(Tensor x, int k=0) -> Tensor". The op mutates no
    argument, and its results share no memory. ``register_fake`` and ``register_autograd`` complete it.
    """
    return lambda kernel: CustomOp(name, schema, kernel)
