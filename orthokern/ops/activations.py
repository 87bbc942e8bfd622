"""activations: the elementwise functions of the scans, as an op of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._activations import ACTIVATIONS
from orthokern._autocast import keeps_dtype
from orthokern.dispatch import Support
from orthokern.ops._common import by_reference, contiguous, no_second_derivative, recording
from orthokern.ops._register import custom_op

SUPPORT = {
    "reference": Support(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "cpu": Support(devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    "triton": Support(
        devices=("cuda",), dtypes=(torch.float64, torch.float32), limits={"N": 1 << 23}, capability=(8, 0)
    ),
    "cuda": Support(missing="no CUDA kernel: those of Triton serve GPUs"),
}
dispatch.register("activations", SUPPORT)

NAMES = tuple(ACTIVATIONS)
# the meaning of act_param, for the activations that take one
PARAMETER = {name: row.parameter.name for name, row in ACTIVATIONS.items() if row.parameter is not None}


@keeps_dtype
def activation(x: Tensor, act_param: Tensor | None, *, activation: str, backend: str | None = None) -> Tensor:
    """Apply one activation. Inputs are assumed to be checked, as by ``orthokern.functional``.

    Equation:
        identity    y = x
        tanh        y = tanh(x)
        relu        y = max(x, 0)
        leaky_relu  y = max(x, 0) + slope min(x, 0)
        prelu       the same with a learned slope
        modrelu     y = sign(x) max(|x| + bias, 0), sign(0) = 0
        oplu        adjacent pairs (x_2i, x_2i+1) -> (max, min); a tie is not swapped
        softsign    y = x / (1 + |x|)
        Derivatives: Note [Activation derivatives] in ``orthokern/reference/activations.py``.

    Args:
        As in ``orthokern.functional.activation``.

    Returns:
        [..., N]; for identity, x itself.

    Saved:
        x and act_param.

    Cost:
        O(1) flops per element; reads and writes each element once, backward reads two and writes one.

    Numerics:
        Elementwise, in the dtype of x. The gradient of act_param sums over rows in that dtype, in a fixed order. At a
        kink the derivative is one-sided: 0 for relu at 0, slope for prelu at 0, 0 for modrelu at 0.
    """
    if activation == "identity":
        return x
    if by_reference(backend, x, act_param):
        y: Tensor = dispatch.leaf("activations", "reference").activation_fwd(x, act_param, activation=activation)
        return y
    y = torch.ops.orthokern.activation_fwd(x, act_param, activation, backend)
    return y


@custom_op("activation_fwd", "(Tensor x, Tensor? act_param, str activation, str? backend=None) -> Tensor")
def _fwd(x: Tensor, act_param: Tensor | None, activation: str, backend: str | None = None) -> Tensor:
    """y [..., N], never x itself."""
    if activation == "identity":
        return x.clone(memory_format=torch.contiguous_format)
    leaf = dispatch.resolve("activations", backend, device=x.device, dtype=x.dtype, N=x.shape[-1])
    y: Tensor = leaf.activation_fwd(contiguous(x), contiguous(act_param), activation=activation)
    return y


@_fwd.register_fake
def _fwd_fake(x: Tensor, act_param: Tensor | None, activation: str, backend: str | None = None) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    "activation_bwd",
    "(Tensor grad_y, Tensor x, Tensor? act_param, str activation, str? backend=None) -> (Tensor, Tensor)",
)
def _bwd(
    grad_y: Tensor, x: Tensor, act_param: Tensor | None, activation: str, backend: str | None = None
) -> tuple[Tensor, ...]:
    """(grad_x [..., N], grad_act_param of act_param's shape or empty)."""
    leaf = dispatch.resolve("activations", backend, device=x.device, dtype=x.dtype, N=x.shape[-1])
    grads: tuple[Tensor, ...] = leaf.activation_bwd(
        contiguous(grad_y), contiguous(x), contiguous(act_param), activation=activation
    )
    return grads


@_bwd.register_fake
def _bwd_fake(
    grad_y: Tensor, x: Tensor, act_param: Tensor | None, activation: str, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if act_param is None else act_param.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, act_param, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(x, act_param)


def _backward(ctx: Any, saved: tuple[Any, ...], grad_y: Tensor) -> Any:
    x, act_param = saved
    if recording():
        reference = dispatch.leaf("activations", "reference")
        return reference.activation_bwd(grad_y, x, act_param, activation=ctx.activation)
    return torch.ops.orthokern.activation_bwd(grad_y, x, act_param, ctx.activation, ctx.backend)


_fwd.register_autograd(_backward, setup_context=_setup_context)
_bwd.register_autograd(no_second_derivative("activation"))
