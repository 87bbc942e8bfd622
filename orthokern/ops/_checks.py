"""Checks of arguments. Every failure is an InputError that names the argument, its value and the accepted values.

The checks read shapes, dtypes and devices only, so they cost microseconds and can be traced by torch.compile. Checks of
values (token ids, finiteness) are in the implementations of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orthokern._activations import ACTIVATIONS
from orthokern._scan_contract import GRU_VARIANTS as VARIANTS
from orthokern._scan_contract import GruArgs, ScanArgs, ScanOptions, between_steps
from orthokern.dispatch import dtype_name
from orthokern.errors import InputError, one_of, unknown_name
from orthokern.ops.activations import NAMES, PARAMETER

TOKEN_DTYPES = (torch.int64, torch.int32)
ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)  # of ops that read ids without a conversion
PRECISIONS = ("ieee", "3xtf32", "tf32", "bf16")
ALGORITHMS = ("auto", "sequential", "chunked", "modal")


def describe(value: object) -> str:
    """A short text for an error message: a tensor's dtype and shape, else the repr or the type of the value."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
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
            "in most functions float16 and bfloat16 on the reference backend)"
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


def activation_parameter(
    activation: str, act_param: Tensor | None, N: int, like_name: str, like: Tensor, name: str = "act_param"
) -> None:
    """act_param must be [1] or [N] if the activation takes one, else None; activations of pairs need an even N."""
    if ACTIVATIONS[activation].pairs and N % 2:
        raise InputError(f"N is {N}: activation {activation!r} works on pairs and needs an even N")
    what = PARAMETER.get(activation)
    if what is None:
        if act_param is not None:
            raise InputError(
                f"{name} is {describe(act_param)}: activation {activation!r} takes none "
                f"(accepted with {', '.join(PARAMETER)})"
            )
        return
    if act_param is None:
        raise InputError(f"{name} is None: activation {activation!r} needs its {what}, a tensor [1] or [N] = [{N}]")
    _of_units(name, act_param, N, like_name, like, activation)


def factors(u: Tensor, s: Tensor, v: Tensor) -> None:
    """The checks of u [N, K], s [K], v [N, K]."""
    is_tensor("u", u)
    if u.ndim != 2 or u.shape[0] < 1 or u.shape[1] < 1:
        raise InputError(f"u has shape {list(u.shape)}: accepted is [N, K], both at least 1")
    N, K = u.shape
    if K > N:
        raise InputError(f"u has shape {list(u.shape)}: the rank K = {K} is above N = {N}, accepted is K up to N")
    is_float("u", u)
    fits("v", v, (N, K), "[N, K], the shape of u,", "u", u)
    fits("s", s, (K,), "[K]", "u", u)


def has_lengths(lengths: object, x: Tensor) -> None:
    """lengths must be int64 [B] on the device of x [T, B, ...], or None. The op checks their values."""
    if lengths is None:
        return
    tensor = is_tensor("lengths", lengths)
    if tensor.dtype != torch.int64:
        raise InputError(f"lengths has dtype {dtype_name(tensor.dtype)}: accepted is int64")
    has_shape("lengths", tensor, (x.shape[1],), "[B]")
    same_device("lengths", tensor, "x", x)


def resets_and_state(
    resets: object, reset_state: Tensor | None, x: Tensor, h0: Tensor | None, N: int, like_name: str, like: Tensor
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
    fits("reset_state", reset_state, (x.shape[1], N), "[B, N]", like_name, like)
    return reset_state


def _of_units(argument: str, value: object, N: int, like_name: str, like: Tensor, activation: str = "") -> None:
    """value must be [1] or [N], with the dtype and device of like; activation: whose parameter it is."""
    tensor = is_tensor(argument, value)
    if tensor.ndim != 1 or tensor.shape[0] not in (1, N):
        what = f"the {PARAMETER[activation]} of {activation!r}, " if activation else ""
        raise InputError(f"{argument} has shape {list(tensor.shape)}: accepted is {what}[1] or [N] = [{N}]")
    same_kind(argument, tensor, like_name, like)


def in_chunks(activation: str, features: tuple[str, ...]) -> None:
    """Algorithm "chunked" needs a linear recurrence in forward and backward."""
    if activation != "identity":
        raise InputError(
            f"algorithm is 'chunked' with activation {activation!r}: chunks of time can only be joined for 'identity'"
        )
    if names := between_steps(features):
        raise InputError(
            f"algorithm is 'chunked' with {' and '.join(names)}: chunks of time can only be joined without (accepted "
            "is 'sequential' or 'auto')"
        )


def _options(args: ScanArgs) -> None:
    """message_clip, precision, algorithm and checkpoint_every."""
    clip, every = args.message_clip, args.checkpoint_every
    number = isinstance(clip, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(clip, bool)
    if not number or not 0 <= clip <= 1e308:
        raise InputError(f"message_clip is {describe(clip)}: accepted is a finite number, 0 (no clipping) or more")
    one_of("precision", args.precision, PRECISIONS)
    one_of("algorithm", args.algorithm, ALGORITHMS)
    if args.algorithm == "chunked":
        in_chunks(args.activation, args.features)
    if isinstance(every, bool) or not isinstance(every, (int, torch.SymInt)):
        raise InputError(f"checkpoint_every is {describe(every)}: accepted is an integer, 0 or more")
    if every < 0:
        raise InputError(f"checkpoint_every is {every}: accepted is 0 (keep all states) or more")
    if isinstance(every, int) and every >= 1 << 63:
        raise InputError(f"checkpoint_every is {every}: accepted is a number of steps below 2^63")


def _input(args: ScanArgs, like_name: str, small_ids: bool) -> Tensor:
    """x, with token ids as int64 unless small_ids."""
    like, x, weight = args.second, is_tensor("x", args.x), args.weight
    N = like.shape[0]
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
    return x


def scan_args(
    like_name: str, matrix: Sequence[Tensor], x: Tensor, h0: Tensor | None, options: Any, *, small_ids: bool = False
) -> ScanArgs:
    """The arguments of a scan. They are checked except for the matrix, which already is.

    Args:
        like_name: the name of the first factor, with whose dtype and device the others have to agree.
        matrix: (w,), or (u, s, v).
        options: a ScanOptions.
        small_ids: token ids may have any dtype of ID_DTYPES and are not converted.

    Returns:
        The arguments with token ids as int64 (unless small_ids), h0 zeros for None, and reset_state h0 for None.
    """
    like, s, v = matrix if len(matrix) == 3 else (matrix[0], None, None)
    try:
        args = ScanArgs(x, v, s, like, h0, **options)  # type: ignore[arg-type]  # h0 may still be None
    except TypeError:
        accepted = ScanOptions.__annotations__
        raise unknown_name("argument", next(name for name in options if name not in accepted), accepted) from None
    bias = args.bias
    N, x = like.shape[0], _input(args, like_name, small_ids)
    if bias is not None:
        if args.weight is None:
            raise InputError("bias is given without weight: accepted with weight only (add it to x)")
        fits("bias", bias, (N,), "[N]", like_name, like)
    if h0 is not None:
        fits("h0", h0, (x.shape[1], N), "[B, N]", like_name, like)
    activation_parameter(one_of("activation", args.activation, NAMES), args.act_param, N, like_name, like)
    has_lengths(args.lengths, x)
    reset_state = resets_and_state(args.resets, args.reset_state, x, h0, N, like_name, like)
    if args.leak is not None:  # the op checks its values
        _of_units("leak", args.leak, N, like_name, like)
    _options(args)
    h0 = like.new_zeros(x.shape[1], N) if h0 is None else h0
    # not args._replace, here and in gru_args: the Dynamo of torch 2.6 does not trace it
    return ScanArgs(x, v, s, like, h0, **{**options, "reset_state": reset_state})


def gru_args(args: GruArgs) -> GruArgs:
    """Check the arguments of ``gru_scan``. Returns them with h0 zeros for None, and reset_state h0 for None."""
    w, h0, bias = is_tensor("w", args.w), args.h0, args.bias
    if w.ndim != 2 or w.shape[0] != 3 * w.shape[1] or w.shape[1] < 1:
        raise InputError(f"w has shape {list(w.shape)}: accepted is [3N, N], N at least 1")
    is_float("w", w)
    N, x = w.shape[1], is_tensor("x", args.x)
    if x.ndim != 3 or x.shape[2] != 3 * N:
        raise InputError(f"x has shape {list(x.shape)}: accepted is [T, B, 3N] with 3N = {3 * N}")
    same_kind("x", x, "w", w)
    at_least_one("x", x, "[T, B, 3N]")
    if h0 is not None:
        fits("h0", h0, (x.shape[1], N), "[B, N]", "w", w)
    if bias is not None:
        fits("bias", bias, (3 * N,), "[3N]", "w", w)
    one_of("variant", args.variant, VARIANTS)
    has_lengths(args.lengths, x)
    reset_state = resets_and_state(args.resets, args.reset_state, x, h0, N, "w", w)
    h0 = w.new_zeros(x.shape[1], N) if h0 is None else h0
    return GruArgs(x, w, h0, bias, args.variant, args.backend, args.lengths, args.resets, reset_state)
