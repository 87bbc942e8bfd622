"""linear_cross_entropy: a linear layer with cross-entropy, fused over chunks of rows; logits are never stored whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern.dispatch import Support
from orthokern.ops import _route
from orthokern.ops._common import NO_CUDA, apart, check_range, contiguous, given
from orthokern.ops._register import custom_op

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(devices=("cuda",), dtypes=(torch.float32,), capability=(8, 0)),
    "cuda": NO_CUDA,
}
dispatch.register("linear_cross_entropy", SUPPORT)

REDUCTIONS = ("mean", "sum")


@keeps_dtype
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of a linear readout. Inputs are taken as checked (``orthokern.functional`` does).

    Equation:
        z_r = W h_r + b,    loss = c sum_r (logsumexp(z_r) - z_r[target_r]),    c = 1/R for "mean", 1 for "sum".
        Gradients: Note [Linear cross-entropy backward] in ``orthokern/reference/linear_cross_entropy.py``.

    Args:
        hidden: [R, N], float; weight: [C, N]; bias: [C] or None; one dtype and device.
        target: int64 [R], class ids in [0, C).
        reduction: "mean" or "sum", over the R rows.
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code.

    Returns:
        The loss, 0-dim, in nats.

    Saved:
        The gradients, computed in the forward: grad_hidden [R, N], grad_weight [C, N], grad_bias [C]; and references to
        the inputs, for second derivatives, which torch computes. Nothing of that if no input requires a gradient.

    Cost:
        2 R N C flops for the loss alone, 6 R N C with gradients. Memory beyond the inputs: grad_hidden, and one chunk
        of logits. A backward whose incoming gradient is 1 (loss.backward()) hands grad_hidden on without a copy.

    Numerics:
        logsumexp subtracts the row's maximum. Sums over rows run in the dtype of hidden (float32 at least), by chunks
        in a fixed order.
    """
    if _route.plain(backend):
        check_range("target", target, weight.shape[0], "class ids")
        reference = dispatch.leaf("linear_cross_entropy", "reference")
        loss: Tensor = reference.linear_cross_entropy_fwd(
            hidden, weight, bias, target, reduction=reduction, need_grad=False
        )[0]
        return loss
    need_grad = torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    loss = torch.ops.orthokern.linear_cross_entropy_fwd(hidden, weight, bias, target, reduction, need_grad, backend)[0]
    return loss


@custom_op(
    "linear_cross_entropy_fwd",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, str reduction='mean', bool need_grad=True, "
    "str? backend=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str = "mean",
    need_grad: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """(loss, grad_hidden, grad_weight, grad_bias); the gradients of the loss, empty unless need_grad."""
    leaf = dispatch.resolve(
        "linear_cross_entropy", backend, device=hidden.device, dtype=hidden.dtype, N=hidden.shape[1], C=weight.shape[0]
    )
    check_range("target", target, weight.shape[0], "class ids")
    outputs = leaf.linear_cross_entropy_fwd(
        *map(contiguous, (hidden, weight, bias, target)),
        reduction=reduction,
        need_grad=need_grad,
    )
    return apart(outputs)


@_fwd.register_fake
def _fwd_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str = "mean",
    need_grad: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None) -> Tensor:
        return tensor.new_empty(tensor.shape) if tensor is not None and need_grad else hidden.new_empty(0)

    return hidden.new_empty(()), like(hidden), like(weight), like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    hidden, weight, bias, target, ctx.reduction, ctx.need_grad, _ = inputs
    _, *grads = output
    ctx.mark_non_differentiable(*grads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*grads, hidden, weight, bias, target)


def _scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """grad * grad_loss, or grad itself where that is the same and nobody can see it again.

    grad is as large as the hidden states, so the copy would be the largest of the whole backward. It is handed on only
    in a plain eager CPU backward that frees its graph: a retained graph must find its saved tensors as they were, even
    if someone accumulates into the gradient handed out, and a traced one must not look at values.
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


def _backward(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_loss is None:
        return ()
    if not ctx.need_grad:
        raise RuntimeError("linear_cross_entropy_fwd was called with need_grad=False: it kept no gradients")
    grad_hidden, grad_weight, grad_bias, *inputs = saved
    needs = ctx.needs_input_grad
    if _route.recording():
        reference = dispatch.leaf("linear_cross_entropy", "reference")
        grads = reference.linear_cross_entropy_gradients(grad_loss, *inputs, reduction=ctx.reduction)
    else:
        grads = (
            _scaled(grad_hidden, grad_loss) if needs[0] else None,
            grad_weight * grad_loss,
            grad_bias * grad_loss,
        )
    return tuple(map(given, grads, needs[:3]))


_fwd.register_autograd(_backward, setup_context=_setup_context)
