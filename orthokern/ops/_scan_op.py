"""The torch ops of ``factored_scan`` and ``dense_scan``, made from one description of each.

The schema is flat. Below it, leaves take and return the types of ``orthokern/_scan_contract.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import LastGrad, Map, ScanInputs, ScanOptions, ScanStates
from orthokern.dispatch import Support
from orthokern.ops import _replicas, _route, _second, _second_native, _taps, _vmap
from orthokern.ops._common import (
    SCAN_FEATURES,
    check_lengths,
    check_tokens,
    contiguous,
    filled,
    given,
    no_second_derivative,
    scan_features,
)
from orthokern.ops._register import custom_op

_GPU: dict[str, Any] = {"devices": ("cuda",), "algorithms": ("sequential", "chunked"), "capability": (8, 0)}
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=SCAN_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=(*SCAN_FEATURES, "replicas")),
    "triton": Support(
        dtypes=(torch.float64, torch.float32), limits={"N": 512}, features=(*SCAN_FEATURES, "replicas"), **_GPU
    ),
    "cuda": Support(dtypes=(torch.float32,), features=(*SCAN_FEATURES, "replicas"), **_GPU),
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
    apply or is not needed is an empty tensor. Both take R models at once, see ``_replicas``.

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
        fwd.register_vmap(_vmap.scan(fwd, 1, self.count, behind_time=3))
        bwd.register_vmap(_vmap.scan(bwd, 4, self.count, saved=3))
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, backend: str | None, *arguments: Any) -> Tensor:
        """hs of the forward op's arguments, all of them; ``backend`` is one of them."""
        route = _route.route(backend)
        if route == "op" or (route == "function" and _route.first_reverse()):
            hs: Tensor = self.fwd(*arguments)[0]
            return hs
        if route == "function":
            factors, rest = arguments[1 : self.count + 1], arguments[self.count + 1 :]
            (*tensors, activation, _), (*choices, lengths, clip, resets, reset_state) = rest[:6], rest[6:]
            plan = self._plan(activation, choices, clip)
            rest = (*tensors, lengths, resets, reset_state, *factors)
            hs = _second.Scan.apply(self.fwd, plan, arguments[0], *rest)[0]
            return hs
        _, map_, inputs, options = self._read(*arguments)
        second = map_.second
        facts: dict[str, Any] = {"device": second.device, "dtype": second.dtype, "algorithm": options.algorithm}
        leaf = dispatch.resolve(self.name, "reference", **facts)
        check_lengths(options.lengths, arguments[0].shape[0])
        check_tokens(inputs.x, inputs.weight, options.lengths)
        options.checkpoint_every = 0  # changes nothing in plain torch code
        hs = getattr(leaf, f"{self.name}_fwd")(map_, inputs, options).hs
        _taps.record_states(self.name, hs)
        return hs

    def with_last(self, backend: str | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        """(hs, hs[-1]) of the arguments of a call; see ``CustomOp.with_last``."""
        if _route.route(backend) == "op":
            return self.fwd.with_last(*arguments)
        hs = self(backend, *arguments)
        return hs, hs[-1]

    def _plan(self, activation: str, choices: Sequence[Any], clip: float) -> _second.Plan:
        """The description of a call for ``_second``; choices: backend, precision and algorithm."""
        return _second.Plan(self.bwd, self.map_of, self.gradients, activation, tuple(choices), clip, True)

    def states(
        self,
        leaf: Any,
        x: Tensor,
        factors: tuple[Tensor, ...],
        h0: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act_param: Tensor | None,
        activation: str,
        precision: str,
    ) -> ScanStates:
        """The forward on checked CPU tensors by the leaf of the cpu backend, where no gradient is recorded and no tap
        is open. The arguments are those of the op."""
        if x.dtype is torch.int64:
            check_tokens(x, weight, None)
        inputs, options = ScanInputs(x, h0, weight, bias, act_param), ScanOptions(activation, precision=precision)
        found: ScanStates = getattr(leaf, self.name + "_fwd")(self.map_of(*factors), inputs, options)
        return found

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
        map_, inputs, options = _replicas.given_to_all(self.name, map_, inputs, options)
        check_lengths(options.lengths, T)
        check_tokens(inputs.x, inputs.weight, options.lengths)
        options.lengths, options.resets = contiguous(options.lengths), _replicas.for_leaf(options.resets, second)
        inputs = ScanInputs(_replicas.for_leaf(inputs.x, second), *(contiguous(t) for t in inputs[1:]))  # type: ignore[arg-type]
        return leaf, Map._make(contiguous(t) for t in map_), inputs, options

    def _function(
        self, leaf: Any, way: str, map_: Map, inputs: ScanInputs, options: ScanOptions, T: int
    ) -> Callable[..., Any]:
        call = (map_, options, T, inputs.h0.shape[-2])
        return _replicas.function_of(self.name, leaf, way, map_.second.ndim == 3, *call)

    def _forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        leaf, map_, inputs, options = self._leaf(x.shape[0], x, *rest)
        found = self._function(leaf, "fwd", map_, inputs, options, x.shape[0])(map_, inputs, options)
        _taps.record_states(self.name, found.hs)
        return filled(found, found.hs)

    def _backward(self, grad_hs: Tensor, states: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        arguments, need_x, need_params = self._without_needs(rest)
        leaf, map_, inputs, options = self._leaf(grad_hs.shape[0], *arguments)
        function = self._function(leaf, "bwd", map_, inputs, options, grad_hs.shape[0])
        saved = (grad_hs, states, pre if options.keeps_pre else None)
        given_ = (_replicas.for_leaf(tensor, map_.second) for tensor in saved)
        found = function(map_, inputs, options, *given_, need_x=need_x, need_params=need_params)
        if _taps.SINKS:
            _taps.record(self.name, found.norm)
        grad_x, m, *others = found
        grads = (None,) * self.count if m is None else self.gradients(m, map_)
        return filled((grad_x, *grads, *others), found.h0)

    def _without_needs(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
        """(the arguments that the forward has too, need_x, need_params)."""
        behind = self.count + 7  # x, the factors, _HEAD
        return (*rest[:behind], *rest[behind + 2 :]), rest[behind], rest[behind + 1]

    def _forward_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        _, map_, inputs, options = self._read(*arguments)
        (B, N), T, every = inputs.h0.shape[-2:], arguments[0].shape[0], options.checkpoint_every
        second, empty = map_.second, _replicas.empty
        rows = (*second.shape[:-2], B, N)  # R in front for replicas
        ckpt = empty(second, (T + every - 1) // every, *rows) if every else second.new_empty(0)
        pre = empty(second, T, *rows) if options.keeps_pre else second.new_empty(0)
        return empty(second, T, *rows), ckpt, pre

    def _backward_fake(self, grad_hs: Tensor, states: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (x, *tensors), need_x, need_params = self._without_needs(rest)
        resets, reset_state = tensors[-2:]
        factors, (h0, weight, bias, act_param) = tensors[: self.count], tensors[self.count : self.count + 4]
        new, dtype, replicas = h0.new_empty, h0.dtype, grad_hs.shape[1:-2]

        def like(tensor: Tensor | None, ndim: int, wanted: bool = need_params) -> Tensor:
            # new_empty, not empty_like: the gradients are contiguous whatever the strides of the input
            return new(*replicas, *tensor.shape[-ndim:]) if tensor is not None and wanted else new(0)

        features = grad_hs if weight is None else x if x is not None and x.is_floating_point() else None
        columns = features.shape[-1] if features is not None and need_x else 0
        grad_x = _replicas.empty(h0, *grad_hs.shape[:-1], columns) if columns else new(0)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        norm = new(*replicas, grad_hs.shape[0], dtype=wide)
        return (
            grad_x, *[like(factor, factor.ndim - len(replicas)) for factor in factors],
            like(h0, 2, True), like(weight, 2), like(bias, 1), like(act_param, 1),
            like(reset_state, 2, resets is not None), norm,
        )  # fmt: skip

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
        # replicas may share some of the tensors
        replicas = parameters[0].ndim == 3
        given_ = (x, *parameters, reset_state)
        ctx.dimensions = [0 if t is None else t.ndim for t in given_] if replicas else None
        # a precomputed input term is only needed to recompute states, and may be as large as all of them
        x_needed = parameters[-3] is not None or every > 0  # the weight
        ctx.save_for_backward(
            ckpt if every else hs, pre, x if x_needed else None, *parameters, lengths, resets, reset_state
        )

    def _derivative(
        self, ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | LastGrad | None, _: None, grad_pre: Tensor | None
    ) -> tuple[Any, ...]:
        if grad_hs is None and grad_pre is None:
            return ()
        *tensors, lengths, resets, reset_state = saved
        needs = ctx.needs_input_grad[: self.count + 5]
        wanted = resets is not None and reset_state is not None and ctx.needs_input_grad[self.count + 13]
        if not isinstance(grad_hs, LastGrad) and (grad_pre is not None or _route.recording(grad_hs, *saved)):
            *found, last = self._differentiable(ctx, saved, grad_hs, grad_pre, (*needs, wanted))
            return (*found, *(None,) * 8, last)
        h0 = self.count + 1
        run = self.bwd.kernel if isinstance(grad_hs, LastGrad) else self.bwd
        grads = run(
            grad_hs, *tensors, *ctx.head, needs[0], any(needs[1:h0]) or any(needs[h0 + 1 :]), *ctx.choices, lengths,
            ctx.message_clip, resets, reset_state,
        )  # fmt: skip
        found = [given(grad, needed) for grad, needed in zip(grads, needs, strict=False)]
        found.append(given(grads[-2], wanted))
        if ctx.dimensions is not None:
            found = _replicas.summed(found, ctx.dimensions)
        return (*found[:-1], *(None,) * 8, found[-1])  # None for the options; last, reset_state

    def _differentiable(
        self, ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, grad_pre: Tensor | None, needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """The same gradients, computed by differentiable operations."""
        hs, pre, x, *tensors, lengths, resets, reset_state = saved
        factors, (h0, weight, bias, act_param) = tensors[: self.count], tensors[self.count :]
        activation, every = ctx.head
        if every:  # hs holds the checkpoints: recompute the states as a differentiable function of the inputs
            with _taps.set_aside():
                options = activation, 0, *ctx.choices, lengths, ctx.message_clip, resets, reset_state
                hs, _, pre = self.fwd(x, *tensors, *options)
        taken = _second.Taken(hs, pre, x, h0, weight, bias, act_param, lengths, resets, reset_state, tuple(factors))
        plan = self._plan(activation, ctx.choices, ctx.message_clip)
        if ctx.dimensions is None:
            by = functools.partial(_second_native.products_by, self.name)
            return _second.gradients(plan, taken, grad_hs, grad_pre, needs, by)
        R, names = hs.shape[1], ("second",) if self.count == 1 else ("second", "scale", "first")
        models = [
            _second.gradients(
                plan, _replicas.taken(taken, names, r, R, self.name), _replicas.behind_time(grad_hs, r),
                _replicas.behind_time(grad_pre, r), needs,
            )
            for r in range(R)
        ]  # fmt: skip
        return tuple(_replicas.summed(_replicas.gradients_of_all(models), ctx.dimensions))
