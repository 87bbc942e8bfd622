"""linear_cross_entropy: a linear layer with cross-entropy, fused over chunks of rows; logits are never stored whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import Readout
from orthokern.dispatch import Support
from orthokern.ops._common import by_reference, check_range, contiguous, filled, needs_grad, recording
from orthokern.ops._register import custom_op

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(devices=("cuda",), dtypes=(torch.float32,), capability=(8, 0)),
    "cuda": Support(missing="no CUDA kernel in this release"),
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
    """Cross-entropy of a linear readout. Inputs are assumed to be checked, as by ``orthokern.functional``.

    Equation:
        z_r = W h_r + b,    loss = c sum_r (logsumexp(z_r) - z_r[target_r]),    c = 1/R for "mean", 1 for "sum".
        Gradients: Note [Linear cross-entropy backward] in ``orthokern/reference/linear_cross_entropy.py``.

    Args:
        As in ``orthokern.functional.linear_cross_entropy``, with hidden [R, N] and int64 target [R]. An explicit
        "reference" runs plain differentiable torch code. Class ids are checked on a CPU only, since a check on a GPU
        would synchronise; there a wrong id makes the loss and the gradients of its row and of the layer NaN.

    Returns:
        The loss, 0-dim, in nats.

    Saved:
        The gradients, computed in the forward: grad_hidden [R, N], grad_weight [C, N], grad_bias [C]; and references to
        the inputs, for second derivatives, which torch computes. Nothing if no input requires a gradient. For float16,
        all logits instead.

    Cost:
        2 R N C flops for the loss alone, 6 R N C with gradients. Memory beyond the inputs: grad_hidden, and one chunk
        of logits. A backward whose incoming gradient is 1 (loss.backward()) returns grad_hidden without a copy.

    Numerics:
        logsumexp subtracts the row's maximum. Sums over rows run in the dtype of hidden (float32 at least), by chunks
        in a fixed order. On the CPU, float32 sums over about 4096 rows are added up in float64.
    """
    # float16 gradients of a mean underflow, unless the factor of a loss scaling reaches them before they are rounded
    scaled = hidden.dtype is torch.float16 and backend in (None, "auto")
    if scaled or by_reference(backend, hidden, weight, bias, served=0):
        hidden, target = _checked(hidden, target, weight.shape[0], for_reference=True)
        reference = dispatch.leaf("linear_cross_entropy", "reference")
        readout = Readout(weight, bias, target, reduction)
        loss: Tensor = reference.linear_cross_entropy_fwd(hidden, readout, need_grad=False).loss
        return loss
    need_grad = needs_grad(hidden, weight, bias)
    loss = torch.ops.orthokern.linear_cross_entropy_fwd(hidden, weight, bias, target, reduction, need_grad, backend)[0]
    return loss


def _is_read(target: Tensor) -> bool:
    """Whether the class ids are checked."""
    return not target.is_cuda


def _checked(hidden: Tensor, target: Tensor, classes: int, *, for_reference: bool) -> tuple[Tensor, Tensor]:
    """(hidden [R, N], target [R]), for which every implementation gives a defined result.

    InputError for a wrong class id on a CPU. The kernels of a GPU turn such an id into NaN. Torch's functions, which
    the reference calls, would make the GPU unusable for the process: there the id becomes 0, and its row of hidden NaN.
    """
    if _is_read(target):
        check_range("target", target, classes, "class ids")
    elif for_reference:
        wrong = (target < 0) | (target >= classes)
        # added, so that the gradient of the row is NaN too
        nan_rows = torch.zeros_like(target, dtype=hidden.dtype).masked_fill(wrong, math.nan)
        hidden, target = hidden + nan_rows[:, None], target.masked_fill(wrong, 0)
    return hidden, target


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
    reduction: str,
    need_grad: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """(loss, grad_hidden, grad_weight, grad_bias); the gradients of the loss, empty unless need_grad."""
    leaf = dispatch.resolve(
        "linear_cross_entropy", backend, device=hidden.device, dtype=hidden.dtype, N=hidden.shape[1], C=weight.shape[0]
    )
    plain = dispatch.backend_of(leaf) == "reference"
    hidden, target = _checked(hidden, target, weight.shape[0], for_reference=plain)
    readout = Readout(weight.contiguous(), contiguous(bias), target.contiguous(), reduction)
    result = leaf.linear_cross_entropy_fwd(hidden.contiguous(), readout, need_grad=need_grad)
    return filled(tuple(result))


@_fwd.register_fake
def _fwd_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor, __: str, need_grad: bool, *___: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None) -> Tensor:
        return tensor.new_empty(tensor.shape) if tensor is not None and need_grad else hidden.new_empty(0)

    return hidden.new_empty(()), like(hidden), like(weight), like(bias)


def _differentiable(grad_loss: Tensor, needs: Sequence[bool], *inputs: Any) -> tuple[Tensor | None, ...]:
    # views, so that an input's gradient excludes its other paths to the loss, such as hidden states of the weight
    views: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs[:3]]
    (rows, weight, bias), (target, reduction) = views, inputs[3:]
    if not _is_read(target):  # on a CPU the forward has checked it
        rows, target = _checked(rows, target, weight.shape[0], for_reference=True)
    reference = dispatch.leaf("linear_cross_entropy", "reference")
    loss = reference.linear_cross_entropy_fwd(rows, Readout(weight, bias, target, reduction), need_grad=False).loss
    required = [tensor for tensor, need in zip(views, needs, strict=True) if need]
    grads = iter(torch.autograd.grad(loss, required, grad_loss, create_graph=True))
    return tuple(next(grads) if need else None for need in needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.reduction, ctx.need_grad = inputs[4:6]
    ctx.save_for_backward(*output[1:], *inputs[:4])


def _backward(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_loss is None:
        return ()
    if not ctx.need_grad:
        raise RuntimeError("linear_cross_entropy_fwd was called with need_grad=False: it kept no gradients")
    needs = ctx.needs_input_grad[:3]
    if recording():
        return _differentiable(grad_loss, needs, *saved[3:], ctx.reduction)
    return tuple(_scaled(grad, grad_loss) if need else None for grad, need in zip(saved, needs, strict=False))


def _scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """grad * grad_loss, or grad itself if grad_loss is 1 and nothing else uses grad, which may be as large as the
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


_fwd.register_autograd(_backward, setup_context=_setup_context)
