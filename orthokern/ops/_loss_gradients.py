"""The derivative of an op that computes a loss together with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.ops import _route, _vmap
from orthokern.ops._common import needed, no_second_derivative
from orthokern.ops._register import CustomOp, custom_op


def register_gradients(forward: CustomOp, first: int, differentiable: Callable[..., Any] | None = None) -> None:
    """Register the derivative of an op ``<name>_fwd``.

    The inputs with a gradient are the arguments before ``target``. The results of the forward from number ``first`` on
    are their gradients; of the others, only the loss has a derivative. With ``need_grad=False`` the forward returns no
    gradients.

    ``differentiable`` computes the gradients for create_graph=True by differentiable functions, from grad_loss and the
    arguments before ``need_grad``. Without it, an op ``<name>_bwd`` is registered, whose derivative raises.
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
            return tuple(map(needed, differentiable(grad_loss, *saved[count:], *ctx.options), needs))
        if refusing is not None and torch.is_grad_enabled():  # create_graph=True
            return tuple(map(needed, refusing.overload(grad_loss, *saved), needs))
        return tuple(_scaled(grad, grad_loss) if need else None for grad, need in zip(saved, needs, strict=False))

    forward.register_autograd(derivative, setup_context=setup_context)
    forward.register_vmap(_vmap.one_by_one(forward, wanted=first))


def _refusing_op(forward: CustomOp, name: str, count: int) -> CustomOp:
    """The op ``<name>_bwd`` of grad_loss, the gradients and their inputs, whose derivative raises. Without it, a second
    derivative would treat the saved gradients as constants."""
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
    """grad * grad_loss, or grad itself where grad_loss is 1 and nothing else uses grad, which may be as large as the
    hidden states: the copy would be the largest of the whole backward.

    grad itself is returned only in an eager CPU backward that frees its graph: the saved tensors of a retained graph
    must not change if the caller accumulates into the result, and traced code cannot read values.
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
