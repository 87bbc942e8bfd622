"""The derivative of an op that computes a loss together with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.ops import _route, _vmap
from orthokern.ops._common import given, no_second_derivative
from orthokern.ops._register import CustomOp, custom_op


def register_gradients(forward: CustomOp, first: int, differentiable: Callable[..., Any] | None = None) -> None:
    """Enter the derivative of an op ``<name>_fwd``.

    ``differentiable`` computes the gradients of its first float inputs for create_graph=True, from grad_loss and the
    arguments ahead of ``need_grad``, as functions that autograd can derive again. Without it, the derivative of an op
    ``<name>_bwd``, which is entered too, refuses.

    The results of the forward from number ``first`` on are the gradients of its first float inputs, all of those ahead
    of the argument ``target``; those behind them, and those between the loss and them, have no derivative. The forward
    has an argument ``need_grad``: without it, it returns no gradients.
    """
    name = forward.name.removesuffix("_fwd")
    names = [argument.name for argument in forward.overload._schema.arguments]
    count, need_grad = names.index("target"), names.index("need_grad")
    refusing = _refusing_op(forward, name, count) if differentiable is None else None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.need_grad, ctx.options = inputs[need_grad], inputs[count + 1 : need_grad]
        target = () if differentiable is None else inputs[count : count + 1]
        ctx.save_for_backward(*output[first : first + count], *inputs[:count], *target)

    def derivative(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        if grad_loss is None:
            return ()
        if not ctx.need_grad:
            raise RuntimeError(f"{name}_fwd was called with need_grad=False: it kept no gradients")
        needs = ctx.needs_input_grad[:count]
        if differentiable is not None and _route.recording():
            return tuple(map(given, differentiable(grad_loss, *saved[count:], *ctx.options), needs))
        if refusing is not None and torch.is_grad_enabled():  # create_graph=True
            return tuple(map(given, refusing.overload(grad_loss, *saved), needs))
        return tuple(_scaled(grad, grad_loss) if need else None for grad, need in zip(saved, needs, strict=False))

    forward.register_autograd(derivative, setup_context=setup_context)
    forward.register_vmap(_vmap.one_by_one(forward.overload, wanted=first))


def _refusing_op(forward: CustomOp, name: str, count: int) -> CustomOp:
    """The op ``<name>_bwd`` of grad_loss, the gradients and the inputs they belong to, whose derivative raises: without
    it, a second derivative would see the saved gradients as constants."""
    arguments = forward.overload._schema.arguments[:count]
    gradients = [f"Tensor grad_{argument.name}" for argument in arguments]
    inputs = [f"Tensor{'?' if 'Optional' in str(argument.type) else ''} {argument.name}" for argument in arguments]
    results = ", ".join(["Tensor"] * count)

    def backward(grad_loss: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * grad_loss for grad in saved[:count])

    op = custom_op(f"{name}_bwd", f"({', '.join(['Tensor grad_loss', *gradients, *inputs])}) -> ({results})")(backward)
    op.register_fake(lambda grad_loss, *saved: tuple(torch.empty_like(grad) for grad in saved[:count]))
    op.register_autograd(no_second_derivative(name))
    return op


def _scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """grad * grad_loss, or grad itself where that is the same and no other reference to it is left.

    A gradient may be as large as the hidden states, and the copy would be the largest of the whole backward. It is
    handed on only in a plain eager CPU backward that frees its graph: a retained graph must find its saved tensors as
    they were, even if someone accumulates into the gradient handed out, and a traced one must not look at values.
    """
    keep_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # no public equivalent
    if (
        type(grad_loss) is Tensor
        and grad_loss.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and keep_graph is not None
        and not keep_graph()
        and float(grad_loss) == 1.0
    ):
        return grad
    return grad * grad_loss
