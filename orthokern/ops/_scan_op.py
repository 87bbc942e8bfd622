"""The torch ops of ``factored_scan`` and ``dense_scan``, made from one description of each.

The schema is flat. Below it, leaves take and return the types of ``orthokern/_scan_contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import Map, ScanInputs, ScanOptions
from orthokern.dispatch import Support
from orthokern.ops import _taps
from orthokern.ops._common import (
    SCAN_FEATURES,
    check_lengths,
    check_tokens,
    contiguous,
    given,
    no_second_derivative,
    scan_features,
)
from orthokern.ops._register import custom_op

_GPU: dict[str, Any] = {
    "devices": ("cuda",), "algorithms": ("sequential", "chunked"), "features": SCAN_FEATURES, "capability": (8, 0)
}  # fmt: skip
SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), features=SCAN_FEATURES),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32), features=SCAN_FEATURES),
    "triton": Support(dtypes=(torch.float64, torch.float32), limits={"N": 512}, **_GPU),
    "cuda": Support(dtypes=(torch.float32,), **_GPU),
}

# Arguments of both schemas, behind x and the factors. The backward has need_x and need_params between the two parts.
_HEAD = "Tensor h0, Tensor? weight, Tensor? bias, Tensor? act_param, str activation, int checkpoint_every=0"
_TAIL = 'str? backend=None, str precision="ieee", str algorithm="auto", Tensor? lengths=None, float message_clip=0.0'


SCANS: dict[str, ScanOp] = {}  # by name


class ScanOp:
    """The ops ``torch.ops.orthokern.<name>_fwd`` and ``<name>_bwd``; calling the object runs the forward.

    The forward returns (hs, ckpt, pre). The backward takes (grad_hs, states, pre, x, ...), where states is hs, or ckpt
    with checkpoints, and x may be None where it is not read (no weight, no checkpoints). It returns (grad_x, a gradient
    for each factor, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm [T]). What does not apply or is not
    needed is an empty tensor.

    Args:
        name: the stem of the ops and of the leaves' modules.
        factors: names of the tensors that make up the recurrent map, in the order of the schema.
        map_of: the map that they make up.
        gradients: their gradients, from M = dL/dW and the map.
        facts: sizes that SUPPORT tables may limit, from the first factor.
    """

    # the function of the op's module, with the options by name; for calls outside autocast, whose backward keeps the
    # dtype by itself: it is one node, whose kernels do
    public: Callable[..., Tensor]

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
            f"bool need_params=True, {_TAIL}) -> ({', '.join(['Tensor'] * (len(factors) + 6))})",
        )
        fwd, bwd = forward(self._forward), backward(self._backward)
        fwd.register_fake(self._forward_fake)
        bwd.register_fake(self._backward_fake)
        fwd.register_autograd(self._derivative, setup_context=self._setup_context)
        bwd.register_autograd(no_second_derivative(name))
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, backend: str | None, *arguments: Any) -> Tensor:
        """hs of the forward op's arguments, all of them; ``backend`` is one of them."""
        if not dispatch.plain_reference(backend):
            hs: Tensor = self.fwd(*arguments)[0]
            return hs
        _, map_, inputs, options = self._read(*arguments)
        second = map_.second
        leaf = dispatch.resolve(
            self.name, "reference", device=second.device, dtype=second.dtype, algorithm=options.algorithm
        )
        check_lengths(options.lengths, arguments[0].shape[0])
        check_tokens(inputs.x, inputs.weight, options.lengths)
        options.checkpoint_every = 0  # changes nothing in plain torch code
        hs = getattr(leaf, f"{self.name}_fwd")(map_, inputs, options).hs
        _taps.record_states(self.name, hs)
        return hs

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
    ) -> Tensor:
        """hs of checked CPU tensors from the leaf of the cpu backend, where no gradient is recorded and no tap is open.
        The arguments are those of the op."""
        check_tokens(x, weight, None)
        run = getattr(leaf, self.name + "_fwd")
        hs: Tensor = run(self.map_of(*factors), ScanInputs(x, h0, weight, bias, act_param), ScanOptions(activation)).hs
        return hs

    def _read(self, x: Tensor | None, *rest: Any) -> tuple[str | None, Map, ScanInputs, ScanOptions]:
        """The backend, and the arguments of the leaf, from x, the factors and the arguments of _HEAD and _TAIL."""
        factors, (h0, weight, bias, act_param, activation, every, backend, precision, algorithm, lengths, clip) = (
            rest[: self.count], rest[self.count :]
        )  # fmt: skip
        options = ScanOptions(activation, every, precision, algorithm, lengths, clip)
        return backend, self.map_of(*factors), ScanInputs(x, h0, weight, bias, act_param), options

    def _leaf(self, T: int, *arguments: Any) -> tuple[Any, Map, ScanInputs, ScanOptions]:
        """The leaf's module that serves a call of T steps, and what to pass to it, after the checks of values."""
        backend, map_, inputs, options = self._read(*arguments)
        second, lengths = map_.second, options.lengths
        leaf = dispatch.resolve(
            self.name, backend, device=second.device, dtype=second.dtype, algorithm=options.algorithm,
            features=scan_features(lengths, options.message_clip), **dict(zip(self.facts, second.shape, strict=False)),
        )  # fmt: skip
        check_lengths(lengths, T)
        check_tokens(inputs.x, inputs.weight, lengths)
        options.lengths = contiguous(lengths)
        return leaf, Map._make(contiguous(t) for t in map_), ScanInputs._make(contiguous(t) for t in inputs), options

    def _forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        leaf, *arguments = self._leaf(x.shape[0], x, *rest)
        found = getattr(leaf, f"{self.name}_fwd")(*arguments)
        _taps.record_states(self.name, found.hs)
        return _filled(found, found.hs)

    def _backward(self, grad_hs: Tensor, states: Tensor, pre: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        arguments, need_x, need_params = self._without_needs(rest)
        leaf, map_, inputs, options = self._leaf(grad_hs.shape[0], *arguments)
        found = getattr(leaf, f"{self.name}_bwd")(
            map_, inputs, options, grad_hs.contiguous(), states.contiguous(),
            pre.contiguous() if options.keeps_pre else None, need_x=need_x, need_params=need_params,
        )  # fmt: skip
        if _taps.SINKS:
            _taps.record(self.name, found.norm)
        grad_x, m, *others = found
        grads = (None,) * self.count if m is None else self.gradients(m, map_)
        return _filled((grad_x, *grads, *others), found.h0)

    def _without_needs(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
        """The arguments from x on that the forward has too, and need_x and need_params."""
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
        factors, (h0, weight, bias, act_param) = tensors[: self.count], tensors[self.count : self.count + 4]
        new, dtype = h0.new_empty, h0.dtype

        def like(tensor: Tensor | None, wanted: bool = need_params) -> Tensor:
            # new_empty, not empty_like: the gradients are contiguous whatever the strides of the input
            return new(tensor.shape) if tensor is not None and wanted else new(0)

        features = x if x is not None and x.is_floating_point() else None
        norm = new(grad_hs.shape[0], dtype=torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
        return (
            like(grad_hs if weight is None else features, need_x), *[like(factor) for factor in factors],
            like(h0, True), like(weight), like(bias), like(act_param), norm,
        )  # fmt: skip

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        tensors = self.count + 5  # x, the factors, h0, weight, bias, act_param
        (x, *parameters), (activation, every, *choices, lengths, ctx.message_clip) = inputs[:tensors], inputs[tensors:]
        hs, ckpt, pre = output
        ctx.mark_non_differentiable(ckpt, pre)
        ctx.set_materialize_grads(False)
        ctx.head, ctx.choices = (activation, every), choices
        # a precomputed input term is only read again to recompute states, and may be as large as all of them
        x_needed = parameters[-3] is not None or every > 0  # the weight
        ctx.save_for_backward(ckpt if every else hs, pre, x if x_needed else None, *parameters, lengths)

    def _derivative(
        self, ctx: Any, saved: tuple[Any, ...], grad_hs: Tensor | None, *_: Tensor | None
    ) -> tuple[Any, ...]:
        if grad_hs is None:
            return ()
        *tensors, lengths = saved
        needs = ctx.needs_input_grad[: self.count + 5]
        h0 = self.count + 1
        grads = self.bwd(
            grad_hs, *tensors, *ctx.head, needs[0], any(needs[1:h0]) or any(needs[h0 + 1 :]), *ctx.choices, lengths,
            ctx.message_clip,
        )  # fmt: skip
        return tuple(given(grad, needed) for grad, needed in zip(grads, needs, strict=False))


def _filled(results: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """The results with an empty tensor in place of each None: a result of an op is a tensor."""
    # torch.empty, not new_empty, which below autograd costs many times as much
    dtype, device = like.dtype, like.device
    return tuple(torch.empty(0, dtype=dtype, device=device) if result is None else result for result in results)
