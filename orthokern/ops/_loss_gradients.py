"""The derivative of an op that computes a loss together with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern.ops._common import given, no_second_derivative
from orthokern.ops._register import CustomOp, custom_op


def register_gradients(forward: CustomOp, first: int) -> None:
    """Enter the derivative of an op ``<name>_fwd``, and the op ``<name>_bwd``.

    The results of the forward from number ``first`` on are the gradients of its first float inputs, all of those ahead
    of the argument ``target``; those behind them, and those between the loss and them, have no derivative. The forward
    has an argument ``need_grad``: without it, it returns no gradients.
    """
    name = forward.name.removesuffix("_fwd")
    arguments = [(argument.name, str(argument.type)) for argument in forward.overload._schema.arguments]
    names = [argument for argument, _ in arguments]
    count, need_grad = names.index("target"), names.index("need_grad")
    inputs = [f"Tensor{'?' if 'Optional' in kind else ''} {argument}" for argument, kind in arguments[:count]]
    gradients = [f"Tensor grad_{argument}" for argument in names[:count]]
    results = ", ".join(["Tensor"] * count)

    def backward(grad_loss: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        # an op of the inputs, whose derivative raises: a second derivative would see the saved gradients as constants
        return tuple(grad * grad_loss for grad in saved[:count])

    op = custom_op(f"{name}_bwd", f"({', '.join(['Tensor grad_loss', *gradients, *inputs])}) -> ({results})")(backward)
    op.register_fake(lambda grad_loss, *saved: tuple(torch.empty_like(grad) for grad in saved[:count]))
    op.register_autograd(no_second_derivative(name))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.need_grad = inputs[need_grad]
        ctx.save_for_backward(*output[first : first + count], *inputs[:count])

    def derivative(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        if grad_loss is None:
            return ()
        if not ctx.need_grad:
            raise RuntimeError(f"{name}_fwd was called with need_grad=False: it kept no gradients")
        needs = ctx.needs_input_grad[:count]
        if torch.is_grad_enabled():  # create_graph=True
            return tuple(map(given, op.overload(grad_loss, *saved), needs))
        return tuple(_scaled(grad, grad_loss) if need else None for grad, need in zip(saved, needs, strict=False))

    forward.register_autograd(derivative, setup_context=setup_context)


def _scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """grad * grad_loss, or grad itself where that is the same and nobody can see it again.

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
