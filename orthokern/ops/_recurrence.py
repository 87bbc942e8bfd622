"""The torch ops of a recurrence: the common part of the ops of the scans and of the GRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import join_tensors, only_needed, schema_of, split_needs
from orthokern.ops import _taps
from orthokern.ops._common import by_reference, check_lengths, no_second_derivative, recording
from orthokern.ops._dispatcher import can_bypass_dispatcher
from orthokern.ops._register import custom_op


class Recurrence:
    """The ops ``torch.ops.orthokern.<name>_fwd`` and ``<name>_bwd``; calling the object runs the forward.

    The forward takes the fields of ``arguments``, and returns the three states of the backend. The backward takes
    (grad_hs, saved states, needs, the arguments), where needs are the fields of ``gradients`` as bools, and returns the
    fields of ``gradients``. A result that does not apply or is not needed is an empty tensor, or None in a call that
    bypasses torch's dispatcher.

    A second derivative runs the hand-derived backward of the reference, which is differentiable torch code: there the
    states are functions of the inputs through the forward op.
    """

    arguments: Any  # named tuples of `_scan_contract`
    gradients: Any
    others: tuple[str, str]  # the states of a forward after hs
    saved: tuple[str, ...]  # the saved states in the schema of the backward

    def __init__(self, name: str, support: dispatch.SupportTable) -> None:
        self.name = name
        dispatch.register(name, support)
        fields, results = schema_of(self.arguments), ", ".join(["Tensor"] * len(self.gradients._fields))
        needs = (f"bool need_{name}" for name in self.gradients._fields)
        read = ", ".join(("Tensor grad_hs", *self.saved, *needs, fields))
        # the first optional argument is x, which only a backward may lack
        self.fwd = custom_op(f"{name}_fwd", f"({fields.replace('?', '', 1)}) -> (Tensor, Tensor, Tensor)")(
            self._forward
        )
        self.bwd = custom_op(f"{name}_bwd", f"({read}) -> ({results})")(self._backward)
        self.fwd.register_fake(self._forward_fake)
        self.bwd.register_fake(self._backward_fake)
        self.fwd.register_autograd(self._derivative, setup_context=self._setup_context)
        self.bwd.register_autograd(no_second_derivative(name))

    def __call__(self, args: Any) -> Tensor:
        """hs [T, B, N] of checked arguments."""
        if not by_reference(args.backend, *args):
            hs: Tensor = self.fwd(*args)[0]
            return hs
        return self._by_reference(args)

    @keeps_dtype
    def _by_reference(self, args: Any) -> Tensor:
        """hs by the plain torch code of the reference."""
        self._check_values(args, args.x.shape[0])
        hs: Tensor = self._function("fwd", args, "reference")(args).hs
        _taps.record_states(self.name, hs)
        return hs

    def _check_values(self, args: Any, T: int) -> None:
        """The checks of values, on a CPU, of a call of T steps."""
        if args.lengths is not None:
            check_lengths(args.lengths, T)

    def _function(self, direction: str, args: Any, backend: str | None, **features: Any) -> Any:
        """The function of a backend for a call, "fwd" or "bwd"."""
        h0 = args.h0
        module = dispatch.resolve(
            self.name, backend, device=h0.device, dtype=h0.dtype, algorithm=args.algorithm, **features
        )
        return getattr(module, f"{self.name}_{direction}")

    def _kernel(self, direction: str, args: Any, T: int) -> Any:
        """The function of the backend that serves a call of T steps. Checks values."""
        function = self._function(direction, args, args.backend, features=args.features, **args.sizes)
        self._check_values(args, T)
        return function

    def _forward(self, *fields: Any) -> tuple[Tensor | None, ...]:
        args = self.arguments(*fields)
        states = self._kernel("fwd", args, args.x.shape[0])(args)
        _taps.record_states(self.name, states.hs)
        return tuple(states)

    def _forward_fake(self, *fields: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _split(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Any]:
        """(saved states, needs, arguments) of a backward after grad_hs."""
        count = len(self.saved)
        needs, fields = split_needs(self.gradients, rest[count:])
        return rest[:count], needs, self.arguments(*fields)

    def _backward(self, grad_hs: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        saved, needs, args = self._split(rest)
        return only_needed(self._gradients(args, grad_hs, saved, needs), needs)

    def _of_backend(self, args: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
        """The saved states that the backward of a backend uses, which are checked."""
        raise NotImplementedError

    def _gradients(self, args: Any, grad_hs: Tensor, saved: tuple[Any, ...], needs: Any) -> Any:
        """The results of the backward of the backend that serves a call."""
        states = self._of_backend(args, saved)
        grads = self._kernel("bwd", args, grad_hs.shape[0])(args, grad_hs, *states, needs)
        if needs.norm:
            _taps.record(self.name, grads.norm)
        return grads

    def _by_op(self, args: Any, grad_hs: Any, saved: tuple[Any, ...], needs: Any) -> Any:
        """`_gradients`, by the backward op if torch has to see one."""
        if not torch.is_grad_enabled() and can_bypass_dispatcher((grad_hs, *saved, *args)):
            return self._gradients(args, grad_hs, saved, needs)
        return self.gradients(*only_needed(self.bwd(grad_hs, *saved, *needs, *args), needs))

    def _differentiable(
        self, args: Any, grad_hs: Tensor | None, saved: tuple[Any, ...], needs: Any, **of_states: Tensor | None
    ) -> Any:
        """The results of the backward op, computed by the reference as differentiable functions of all tensors.

        of_states: the gradients of the other states, if there are any.
        """
        grad_hs = torch.zeros_like(saved[0]) if grad_hs is None else grad_hs
        states = self._of_backend(args, saved)
        result = self._function("bwd", args, "reference")(args, grad_hs, *states, needs, **of_states)
        if result.norm is not None and not of_states:
            _taps.record(self.name, result.norm.detach())
        return result

    def _shape_of_x(self, args: Any, grad_hs: Tensor) -> Any:
        """The shape of x's gradient; None if it has none."""
        raise NotImplementedError

    def _backward_fake(self, grad_hs: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        _, needs, args = self._split(rest)
        T, dtype = grad_hs.shape[0], args.h0.dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        shapes = {"x": self._shape_of_x(args, grad_hs), "norm": (T,)}
        if args.resets is None:
            shapes["reset_state"] = None

        def result(name: str) -> Tensor | None:
            like = None if name in shapes else getattr(args, name)
            shape = shapes.get(name) if like is None else like.shape
            # new_empty, not empty_like: the gradients are contiguous whatever the strides of the input
            return None if shape is None else args.h0.new_empty(shape, dtype=wide if name == "norm" else dtype)

        return only_needed(map(result, self.gradients._fields), needs)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        raise NotImplementedError

    def _derivative(self, ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, *others: Any) -> tuple[Any, ...]:
        of_states = {f"grad_{name}": grad for name, grad in zip(self.others, others, strict=True) if grad is not None}
        if grad_hs is None and not of_states:
            return ()
        count, names = len(self.saved), self.arguments._fields
        states, args = saved[:count], join_tensors(ctx.options, saved[count:])
        of = self.arguments._make(ctx.needs_input_grad[: len(names)])
        needs = self.gradients._make([getattr(of, name, False) for name in self.gradients._fields])
        needs = needs._replace(reset_state=of.reset_state and args.resets is not None, norm=_taps.needed())
        if of_states or recording():
            results = self._differentiable(args, grad_hs, states, needs, **of_states)
        else:
            results = self._by_op(args, grad_hs, states, needs)
        return tuple([getattr(results, name, None) for name in names])
