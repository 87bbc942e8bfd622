"""The torch ops of ``factored_scan`` and ``dense_scan``, made from one description of each.

The schema is flat. Below it, leaves take and return the types of ``orthokern/_scan_contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import Map, ScanInputs, ScanOptions
from orthokern.dispatch import Support
from orthokern.ops import _route, _taps
from orthokern.ops._common import (
    SCAN_FEATURES,
    check_lengths,
    check_tokens,
    contiguous,
    filled,
    needed,
    no_second_derivative,
    scan_features,
)
from orthokern.ops._register import custom_op

_GPU: dict[str, Any] = {"devices": ("cuda",), "algorithms": ("sequential", "chunked"), "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=SCAN_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=SCAN_FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 512}, features=SCAN_FEATURES, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), features=SCAN_FEATURES, **_GPU),
}

# Arguments of both schemas, behind x and the factors. The backward has need_x and need_params between the two parts.
_HEAD = "Tensor h0, Tensor? weight, Tensor? bias, Tensor? act_param, str activation, int checkpoint_every=0"
_TAIL = (
    'str? backend=None, str precision="ieee", str algorithm="auto", Tensor? lengths=None, float message_clip=0.0, '
    "Tensor? resets=None, Tensor? reset_state=None"
)


SCANS: dict[str, ScanOp] = {}  # by name


class ScanOp:
    """The ops ``torch.ops.orthokern.<name>_fwd`` and ``<name>_bwd``; calling the object runs the forward.

    The forward returns (hs, ckpt, pre). The backward takes (grad_hs, states, pre, x, ...), where states is hs, or ckpt
    with checkpoints, and x may be None where it is not read (no weight, no checkpoints). It returns (grad_x, a gradient
    for each factor, grad_h0, grad_weight, grad_bias, grad_act_param, grad_reset_state, grad_norm [T]). What does not
    apply or is not needed is an empty tensor.

    A second derivative runs the hand-derived backward of the reference, which is differentiable torch code: there hs
    and pre are functions of the inputs through the forward op.

    Args:
        factors: names of the tensors that make up the recurrent map, in the order of the schema.
        gradients: of the factors, from M = dL/dW and the map.
        facts: sizes that SUPPORT tables may limit, from the first factor.
    """

    def __init__(
        self,
        name: str,
        factors: tuple[str, ...],
        map_of: Callable[..., Map],
        gradients: Callable[[Tensor, Map], tuple[Tensor, ...]],
        facts: tuple[str, ...],
    ) -> None:
        self.name, self.count, self.map_of, self.gradients, self.facts = name, len(factors), map_of, gradients, facts
        SCANS[name] = self
        dispatch.register(name, SUPPORT)
        tensors = ", ".join(f"Tensor {factor}" for factor in factors)
        forward = custom_op(f"{name}_fwd", f"(Tensor x, {tensors}, {_HEAD}, {_TAIL}) -> (Tensor, Tensor, Tensor)")
        backward = custom_op(
            f"{name}_bwd",
            f"(Tensor grad_hs, Tensor states, Tensor pre, Tensor? x, {tensors}, {_HEAD}, bool need_x=True, "
            f"bool need_params=True, {_TAIL}) -> ({', '.join(['Tensor'] * (len(factors) + 7))})",
        )
        fwd, bwd = forward(self._forward), backward(self._backward)
        fwd.register_fake(self._forward_fake)
        bwd.register_fake(self._backward_fake)
        fwd.register_autograd(self._derivative, setup_context=self._setup_context)
        bwd.register_autograd(no_second_derivative(name))
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, backend: str | None, *arguments: Any) -> Tensor:
        """hs of the forward op's arguments, all of them; ``backend`` is one of them."""
        if not _route.by_reference(backend, *arguments):
            hs: Tensor = self.fwd(*arguments)[0]
            return hs
        _, map_, inputs, options = self._read(*arguments)
        module = self._reference(map_, options)
        check_lengths(options.lengths, arguments[0].shape[0])
        check_tokens(inputs.x, inputs.weight, options.lengths)
        options.checkpoint_every = 0  # changes nothing in plain torch code
        hs = getattr(module, f"{self.name}_fwd")(map_, inputs, options).hs
        _taps.record_states(self.name, hs)
        return hs

    def _reference(self, map_: Map, options: ScanOptions) -> Any:
        """The module of the reference backend."""
        second = map_.second
        facts: dict[str, Any] = {"device": second.device, "dtype": second.dtype, "algorithm": options.algorithm}
        return dispatch.resolve(self.name, "reference", **facts)

    def _read(self, x: Tensor | None, *rest: Any) -> tuple[str | None, Map, ScanInputs, ScanOptions]:
        """The backend, and the arguments of the leaf, from x, the factors and the arguments of _HEAD and _TAIL."""
        factors, (
            h0, weight, bias, act_param, activation, every, backend, precision, algorithm, lengths, clip, resets, state
        ) = (rest[: self.count], rest[self.count :])  # fmt: skip
        options = ScanOptions(activation, every, precision, algorithm, lengths, clip, resets)
        inputs = ScanInputs(x, h0, weight, bias, act_param, None if resets is None else state)
        return backend, self.map_of(*factors), inputs, options

    def _leaf(self, T: int, *arguments: Any) -> tuple[Any, Map, ScanInputs, ScanOptions]:
        """The leaf that serves a call of T steps, and its arguments, whose values are checked."""
        backend, map_, inputs, options = self._read(*arguments)
        second, lengths = map_.second, options.lengths
        leaf = dispatch.resolve(
            self.name, backend, device=second.device, dtype=second.dtype, algorithm=options.algorithm,
            features=scan_features(lengths, options.message_clip, options.resets),
            **dict(zip(self.facts, second.shape[-2:], strict=False)),
        )  # fmt: skip
        check_lengths(options.lengths, T)
        check_tokens(inputs.x, inputs.weight, options.lengths)
        options.lengths, options.resets = contiguous(options.lengths), contiguous(options.resets)
        inputs = ScanInputs._make(map(contiguous, inputs))
        return leaf, Map._make(map(contiguous, map_)), inputs, options

    def _forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        leaf, map_, inputs, options = self._leaf(x.shape[0], x, *rest)
        result = getattr(leaf, f"{self.name}_fwd")(map_, inputs, options)
        _taps.record_states(self.name, result.hs)
        return filled(result, result.hs)

    def _backward(self, grad_hs: Tensor, states: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        arguments, need_x, need_params = self._without_needs(rest)
        leaf, map_, inputs, options = self._leaf(grad_hs.shape[0], *arguments)
        saved = map(contiguous, (grad_hs, states, pre if options.keeps_pre else None))
        backward = getattr(leaf, f"{self.name}_bwd")
        result = backward(map_, inputs, options, *saved, need_x=need_x, need_params=need_params)
        if _taps.SINKS:
            _taps.record(self.name, result.norm)
        grad_x, m, *others = result
        grads = (None,) * self.count if m is None else self.gradients(m, map_)
        return filled((grad_x, *grads, *others), result.h0)

    def _without_needs(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
        """(the arguments that the forward has too, need_x, need_params)."""
        behind = self.count + 7  # x, the factors, _HEAD
        return (*rest[:behind], *rest[behind + 2 :]), rest[behind], rest[behind + 1]

    def _forward_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        _, map_, inputs, options = self._read(*arguments)
        (B, N), T, every = inputs.h0.shape, arguments[0].shape[0], options.checkpoint_every
        new = map_.second.new_empty
        ckpt = new((T + every - 1) // every, B, N) if every else new(0)
        return new(T, B, N), ckpt, new(T, B, N) if options.keeps_pre else new(0)

    def _backward_fake(self, grad_hs: Tensor, states: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (x, *tensors), need_x, need_params = self._without_needs(rest)
        resets, reset_state = tensors[-2:]
        factors, (h0, weight, bias, act_param) = tensors[: self.count], tensors[self.count : self.count + 4]
        new, dtype = h0.new_empty, h0.dtype

        def like(tensor: Tensor | None, required: bool = need_params) -> Tensor:
            # new_empty, not empty_like: the gradients are contiguous whatever the strides of the input
            return new(tensor.shape) if tensor is not None and required else new(0)

        features = grad_hs if weight is None else x if x is not None and x.is_floating_point() else None
        columns = features.shape[-1] if features is not None and need_x else 0
        grad_x = new(*grad_hs.shape[:-1], columns) if columns else new(0)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return (
            grad_x,
            *map(like, factors),
            like(h0, True),
            *map(like, (weight, bias, act_param)),
            like(reset_state, resets is not None),
            new(grad_hs.shape[0], dtype=wide),
        )

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        tensors = self.count + 5  # x, the factors, h0, weight, bias, act_param
        x, *parameters = inputs[:tensors]
        activation, every, *choices, lengths, ctx.message_clip, resets, reset_state = inputs[tensors:]
        hs, ckpt, pre = output
        if ACTIVATIONS[activation].needs_input and not every:
            ctx.mark_non_differentiable(ckpt)  # pre has a gradient in a second derivative
        else:
            ctx.mark_non_differentiable(ckpt, pre)
        ctx.set_materialize_grads(False)
        ctx.head, ctx.choices = (activation, every), choices
        # a precomputed input term is only needed to recompute states, and may be as large as all of them
        x_needed = parameters[-3] is not None or every > 0  # the weight
        ctx.save_for_backward(
            ckpt if every else hs, pre, x if x_needed else None, *parameters, lengths, resets, reset_state
        )

    def _derivative(
        self, ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, _: None, grad_pre: Tensor | None
    ) -> tuple[Any, ...]:
        if grad_hs is None and grad_pre is None:
            return ()
        *tensors, lengths, resets, reset_state = saved
        needs = ctx.needs_input_grad[: self.count + 5]
        h0 = self.count + 1
        need_x, need_params = needs[0], any(needs[1:h0]) or any(needs[h0 + 1 :])
        if grad_pre is not None or _route.recording():
            grads = self._differentiable(ctx, saved, grad_hs, grad_pre, need_x, need_params)
        else:
            grads = self.bwd(
                grad_hs, *tensors, *ctx.head, need_x, need_params, *ctx.choices, lengths, ctx.message_clip, resets,
                reset_state,
            )  # fmt: skip
        result = [needed(grad, need) for grad, need in zip(grads, needs, strict=False)]
        need_reset_state = resets is not None and reset_state is not None and ctx.needs_input_grad[self.count + 13]
        # None for the options; last, reset_state
        return (*result, *(None,) * 8, needed(grads[-2], need_reset_state))

    def _differentiable(
        self,
        ctx: Any,
        saved: tuple[Any, ...],
        grad_hs: Tensor | None,
        grad_pre: Tensor | None,
        need_x: bool,
        need_params: bool,
    ) -> tuple[Tensor | None, ...]:
        """The results of the backward op, computed by the reference as differentiable functions of all tensors."""
        hs, pre, x, *tensors, lengths, resets, reset_state = saved
        activation, every = ctx.head
        options = activation, 0, *ctx.choices, lengths, ctx.message_clip, resets, reset_state
        if every:  # hs holds the checkpoints: recompute the states as a differentiable function of the inputs
            with _taps.set_aside():
                hs, _, pre = self.fwd(x, *tensors, *options)
        _, map_, inputs, scan_options = self._read(x, *tensors, *options)
        backward = getattr(self._reference(map_, scan_options), f"{self.name}_bwd")
        cotangent = torch.zeros_like(hs) if grad_hs is None else grad_hs
        result = backward(
            map_,
            inputs,
            scan_options,
            cotangent,
            hs,
            pre if scan_options.keeps_pre else None,
            need_x=need_x,
            need_params=need_params,
            grad_pre=grad_pre,
        )
        if _taps.SINKS and grad_pre is None:
            _taps.record(self.name, result.norm.detach())
        grad_x, m, *others = result
        grads = (None,) * self.count if m is None else self.gradients(m, map_)
        return (grad_x, *grads, *others)
