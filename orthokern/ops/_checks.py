"""Checks of arguments. Every failure is an InputError that names the argument, its value and what is accepted.

The checks read shapes, dtypes and devices only, so they cost microseconds and can be traced by torch.compile. Checks of
values (token ids, finiteness) are in the implementations of the ops.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from orthokern._activations import ACTIVATIONS
from orthokern.dispatch import dtype_name
from orthokern.errors import InputError, unknown_name
from orthokern.ops.activations import NAMES, PARAMETER

TOKEN_DTYPES = (torch.int64, torch.int32)
ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)  # of ops that read ids without a conversion
PRECISIONS = ("ieee", "3xtf32", "tf32", "bf16")
ALGORITHMS = ("auto", "sequential", "chunked", "modal")


def describe(value: object) -> str:
    """A short text for an error message: a tensor's shape, else the repr or the type of the value."""
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__


def is_tensor(argument: str, value: object) -> Tensor:
    """Return value if it is a tensor with strides."""
    if not isinstance(value, Tensor):
        raise InputError(f"{argument} must be a torch.Tensor, got {describe(value)}")
    strided(argument, value)
    return value


def strided(argument: str, tensor: Tensor) -> None:
    """tensor must have strides, which kernels need."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InputError(f"{argument} is a {kind} tensor; accepted: a strided (dense) one")


def whole(argument: str, tensor: Tensor) -> None:
    """tensor must not be distributed over processes, as fully_shard leaves parameters."""
    if hasattr(tensor, "placements"):
        raise InputError(
            f"{argument} is a DTensor, of which this process has a part; accepted: a whole tensor, as under "
            "DistributedDataParallel"
        )


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter of a module. Rejects a weight that is an attribute made of other parameters."""
    parameter = module._parameters.get(name)
    if parameter is None:
        raise InputError(
            f"{name} of {type(module).__name__} is computed from others; accepted: a parameter "
            "(remove the pruning or parametrization first)"
        )
    return parameter


def is_float(argument: str, tensor: Tensor) -> None:
    """tensor must have a floating dtype."""
    if not tensor.is_floating_point():
        raise InputError(
            f"{argument} has dtype {dtype_name(tensor.dtype)}: accepted are floating dtypes (float32, float64; "
            "float16 and bfloat16 on the reference backend)"
        )


def same_kind(argument: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """tensor must share dtype and device with like."""
    if tensor.dtype != like.dtype:
        raise InputError(
            f"{argument} has dtype {dtype_name(tensor.dtype)}: accepted is the dtype of {like_name}, "
            f"{dtype_name(like.dtype)}"
        )
    same_device(argument, tensor, like_name, like)


def same_device(argument: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """tensor must be on the device of like."""
    if tensor.device != like.device:
        raise InputError(f"{argument} is on {tensor.device}: accepted is the device of {like_name}, {like.device}")


def has_shape(argument: str, tensor: Tensor, shape: tuple[int, ...], letters: str) -> None:
    """tensor must have exactly this shape; letters says which sizes these are, e.g. "[B, N]"."""
    if tensor.shape != shape:
        raise InputError(f"{argument} has shape {list(tensor.shape)}: accepted is {letters} = {list(shape)}")


def fits(argument: str, value: object, shape: tuple[int, ...], letters: str, like_name: str, like: Tensor) -> None:
    """value must be a tensor of exactly this shape, with the dtype and device of like."""
    tensor = is_tensor(argument, value)
    has_shape(argument, tensor, shape, letters)
    same_kind(argument, tensor, like_name, like)


def at_least_one(argument: str, tensor: Tensor, letters: str) -> None:
    """Every size of tensor must be 1 or more."""
    if 0 in tensor.shape:
        raise InputError(f"{argument} has shape {list(tensor.shape)}: every size of {letters} must be at least 1")


def as_int(value: Any) -> int | None:
    """An integer, also one of numpy, as an int; None for a bool and for everything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def positive(argument: str, value: object) -> int:
    """Return value as an int. It must be an integer, 1 or more."""
    count = as_int(value)
    if count is None or count < 1:
        raise InputError(f"{argument} is {describe(value)}: accepted is an integer, 1 or more")
    return count


def activation_name(name: object) -> str:
    """Return name if it is one of the activations."""
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("activation", name, NAMES)
    return name


def activation_parameter(activation: str, act_param: Tensor | None, N: int, like_name: str, like: Tensor) -> None:
    """act_param must be [1] or [N] if the activation takes one, else None; activations of pairs need an even N."""
    if ACTIVATIONS[activation].pairs and N % 2:
        raise InputError(f"N is {N}: activation {activation!r} works on pairs and needs an even N")
    what = PARAMETER.get(activation)
    if what is None:
        if act_param is not None:
            raise InputError(
                f"act_param is {describe(act_param)}: activation {activation!r} takes none "
                f"(accepted with {', '.join(PARAMETER)})"
            )
        return
    if act_param is None:
        raise InputError(f"act_param is None: activation {activation!r} needs its {what}, a tensor [1] or [N] = [{N}]")
    is_tensor("act_param", act_param)
    if act_param.ndim != 1 or act_param.shape[0] not in (1, N):
        raise InputError(
            f"act_param has shape {list(act_param.shape)}: accepted is the {what} of {activation!r}, [1] or [N] = [{N}]"
        )
    same_kind("act_param", act_param, like_name, like)


def scan_lengths(lengths: object, x: Tensor) -> None:
    """lengths must be int64 [B] on the device of x [T, B, ...], or None. The op checks their values."""
    if lengths is None:
        return
    tensor = is_tensor("lengths", lengths)
    if tensor.dtype != torch.int64:
        raise InputError(f"lengths has dtype {dtype_name(tensor.dtype)}: accepted is int64")
    has_shape("lengths", tensor, (x.shape[1],), "[B]")
    same_device("lengths", tensor, "x", x)


def scan_resets(
    resets: object, reset_state: object, x: Tensor, h0: Tensor | None, N: int, like_name: str, like: Tensor
) -> Tensor | None:
    """resets must be bool [T, B] on the device of x [T, B, ...], or None; reset_state [B, N] needs resets. Returns the
    state that a reset sets: reset_state, else h0, which may be None (zeros)."""
    if resets is None:
        if reset_state is not None:
            raise InputError(f"reset_state is {describe(reset_state)} without resets: accepted with resets only")
        return None
    tensor = is_tensor("resets", resets)
    if tensor.dtype != torch.bool:
        raise InputError(f"resets has dtype {dtype_name(tensor.dtype)}: accepted is bool")
    has_shape("resets", tensor, tuple(x.shape[:2]), "[T, B]")
    same_device("resets", tensor, "x", x)
    if reset_state is None:
        return h0
    state = is_tensor("reset_state", reset_state)
    has_shape("reset_state", state, (x.shape[1], N), "[B, N]")
    same_kind("reset_state", state, like_name, like)
    return state


def scan_clip(message_clip: object) -> None:
    """message_clip must be a finite number, 0 or more."""
    number = isinstance(message_clip, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(message_clip, bool)
    if not number or not 0 <= message_clip < float("inf"):  # type: ignore[operator]
        raise InputError(
            f"message_clip is {describe(message_clip)}: accepted is a finite number, 0 (no clipping) or more"
        )


def scan_choices(
    precision: object, algorithm: object, activation: str, message_clip: float, resets: object = None
) -> None:
    """precision and algorithm must be known names; "chunked" needs a linear recurrence in forward and backward."""
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if algorithm == "chunked" and activation != "identity":
        raise InputError(
            f"algorithm is 'chunked' with activation {activation!r}: chunks of time can only be joined for 'identity'"
        )
    if algorithm == "chunked" and message_clip > 0:
        raise InputError(
            f"algorithm is 'chunked' with message_clip {message_clip}: gradients of chunks of time can only be joined "
            "without clipping (accepted is 'sequential' or 'auto')"
        )
    if algorithm == "chunked" and resets is not None:
        raise InputError(
            "algorithm is 'chunked' with resets: chunks of time can only be joined without them (accepted is "
            "'sequential' or 'auto')"
        )


def scan_inputs(
    x: Tensor,
    N: int,
    h0: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    act_param: Tensor | None,
    checkpoint_every: int,
    like_name: str,
    like: Tensor,
    *,
    small_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a scan except its matrices, which are already checked (like is one of them).

    Args:
        small_ids: token ids may have any dtype of ID_DTYPES and are not converted.

    Returns:
        x (token ids as int64, unless small_ids) and h0 [B, N] (zeros for None).
    """
    is_tensor("x", x)
    if weight is not None:
        is_tensor("weight", weight)
        if weight.ndim != 2 or weight.shape[0] != N or weight.shape[1] < 1:
            raise InputError(f"weight has shape {list(weight.shape)}: accepted is [N, D] with N = {N}, D at least 1")
        same_kind("weight", weight, like_name, like)

    if x.is_floating_point():
        letters = "[T, B, N]" if weight is None else "[T, B, D]"
        size = N if weight is None else weight.shape[1]
        if x.ndim != 3 or x.shape[2] != size:
            raise InputError(
                f"x has shape {list(x.shape)}: accepted is {letters} with {letters[-2]} = {size}"
                + ("" if weight is None else ", or integer token ids [T, B]")
            )
        same_kind("x", x, like_name, like)
    elif x.dtype in (ID_DTYPES if small_ids else TOKEN_DTYPES):
        letters = "[T, B]"
        if weight is None:
            raise InputError(f"weight is None: token ids (x of dtype {dtype_name(x.dtype)}) need the table [N, D]")
        if x.ndim != 2:
            raise InputError(f"x has shape {list(x.shape)}: accepted for token ids is [T, B]")
        same_device("x", x, like_name, like)
        x = x if small_ids else x.to(torch.int64)
    else:
        raise InputError(
            f"x has dtype {dtype_name(x.dtype)}: accepted is {dtype_name(like.dtype)} (the dtype of {like_name}), "
            + ("or uint8, int16, int32 or int64 for token ids" if small_ids else "or int64 or int32 for token ids")
        )
    at_least_one("x", x, letters)

    if bias is not None:
        is_tensor("bias", bias)
        if weight is None:
            raise InputError("bias is given without weight: accepted with weight only (add it to x)")
        has_shape("bias", bias, (N,), "[N]")
        same_kind("bias", bias, like_name, like)
    B = x.shape[1]
    if h0 is None:
        h0 = like.new_zeros(B, N)
    else:
        fits("h0", h0, (B, N), "[B, N]", like_name, like)
    activation_parameter(activation_name(activation), act_param, N, like_name, like)
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, (int, torch.SymInt)):
        raise InputError(f"checkpoint_every is {describe(checkpoint_every)}: accepted is an integer, 0 or more")
    if checkpoint_every < 0:
        raise InputError(f"checkpoint_every is {checkpoint_every}: accepted is 0 (keep all states) or more")
    if isinstance(checkpoint_every, int) and checkpoint_every >= 1 << 63:
        raise InputError(f"checkpoint_every is {checkpoint_every}: accepted is a number of steps below 2^63")
    return x, h0
