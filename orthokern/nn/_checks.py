"""Checks of constructor arguments that the modules share. Each returns the value or raises a one-line InputError."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from orthokern.dispatch import BACKENDS
from orthokern.errors import InputError, OutOfRange, unknown_name

__all__ = [
    "check_backend",
    "check_device",
    "check_exponential",
    "check_ids",
    "check_input",
    "check_loaded_orthogonal",
    "finite",
    "flag",
    "number",
    "parameter_dtype",
    "positive_int",
    "share",
]

LOADED_TOLERANCE = 1e-3  # largest |B^T B - I| of a base that is loaded


def positive_int(name: str, value: Any, minimum: int = 1) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer, got {value!r}") from None
    if count < minimum:
        raise InputError(f"{name} must be at least {minimum}, got {count}")
    return count


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def number(name: str, value: Any, accepted: str) -> float:
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be {accepted}, got {value!r}") from None


def finite(name: str, value: Any, *, above_zero: bool) -> float:
    """A finite number, 0 or more; with `above_zero` more than 0."""
    accepted = "a finite number above 0" if above_zero else "a finite number, 0 or more"
    found = number(name, value, accepted)
    if not (math.isfinite(found) and (found > 0.0 if above_zero else found >= 0.0)):
        raise InputError(f"{name} must be {accepted}, got {value!r}")
    return found


def share(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    found = number(name, value, "a number in [0, 1]")
    if not 0.0 <= found <= 1.0:
        raise InputError(f"{name} must be a number in [0, 1], got {value!r}")
    return found


def parameter_dtype(value: torch.dtype | None, *, half: bool) -> torch.dtype:
    """The dtype of the parameters: float32, float64 and, with `half`, the 16-bit ones (only a dense recurrence may)."""
    dtype = torch.get_default_dtype() if value is None else value
    accepted = [torch.float32, torch.float64] + ([torch.bfloat16, torch.float16] if half else [])
    if dtype not in accepted:
        why = " (orthogonality is lost in 16 bits)" if dtype in (torch.bfloat16, torch.float16) else ""
        raise InputError(f"dtype {dtype} is not supported{why}; accepted: {', '.join(str(d) for d in accepted)}")
    return dtype


def check_backend(name: str | None) -> str | None:
    """A typing error in the name shows at construction; whether the backend can serve is known only in forward."""
    names = ("auto", *BACKENDS)
    if name is not None and name not in names:
        raise unknown_name("backend", name, names)
    return name


def check_device(value: Any) -> Any:
    """Where the parameters go: a device that torch can put tensors on here; None for torch's default."""
    if value is None:
        return None
    reason = ""
    try:
        device = torch.device(value)
        try:
            torch.empty(0, device=device)
            return device
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            reason = f" ({(str(error).splitlines() or [''])[0]})"
    except (RuntimeError, TypeError):
        pass
    raise InputError(
        f"device {str(value)!r} cannot be used here{reason}; accepted: a device that this torch and machine have, "
        "as cpu, cuda or cuda:0"
    )


def check_input(
    input: Any, weight: Tensor, input_size: int, *, batch_first: bool, packed: bool, small_ids: bool = False
) -> bool:
    """Check what a recurrence is given, but for its T and B.

    Args:
        input: [T,B,D], [T,D] or token ids without D ([B,T,..] if batch_first); the data of a PackedSequence if packed.
        weight: the input weight, whose dtype and device count.
        input_size: D, or the number of token ids.
        small_ids: token ids may also be uint8 or int16.

    Returns:
        Whether it is token ids.
    """
    if not isinstance(input, Tensor):
        raise InputError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
    if input.layout is not torch.strided or input.is_nested:
        kind = "nested" if input.is_nested else str(input.layout).removeprefix("torch.")
        raise InputError(f"input is a {kind} tensor; accepted: a strided (dense) one")
    if input.device != weight.device:
        raise InputError(f"input is on {input.device} and the parameters on {weight.device}; accepted: the same device")
    if weight.is_complex():
        raise InputError(f"parameters have dtype {weight.dtype}; accepted: real floating dtypes")
    ids = (torch.int64, torch.int32, *((torch.int16, torch.uint8) if small_ids else ()))
    tokens = input.dtype in ids
    if not tokens and input.dtype != weight.dtype:
        raise InputError(
            f"input has dtype {input.dtype}; accepted: {weight.dtype} like the parameters, "
            f"or token ids in {', '.join(map(str, ids[:-1]))} or {ids[-1]}"
        )
    kind = "token ids" if tokens else "floats"
    if packed:
        if input.dim() != (1 if tokens else 2):
            accepted = "one id per step" if tokens else f"{input_size} features per step"
            raise InputError(f"input packs {kind} of shape {tuple(input.shape)}; accepted: {accepted}")
    elif input.dim() not in ((1, 2) if tokens else (2, 3)):
        order, more = "B, T" if batch_first else "T, B", "" if tokens else ", D"
        raise InputError(
            f"input ({kind}) has shape {tuple(input.shape)}; accepted: [{order}{more}], or [T{more}] for one sequence"
        )
    if not tokens and input.shape[-1] != input_size:
        raise InputError(
            f"input has {input.shape[-1]} features (shape {tuple(input.shape)}); "
            f"accepted: input_size = {input_size} in the last dimension"
        )
    return tokens


def check_ids(ids: Tensor, size: int) -> None:
    """Refuses token ids outside of [0, size): at once on a CPU, where looking costs no wait, and as a part of the graph
    where torch.compile traces. On a GPU torch's look-up does."""
    if ids.is_cuda or ids.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(
            ((ids >= 0) & (ids < size)).all(), f"input has token ids outside of [0, input_size = {size})"
        )
        return
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= size:
        raise InputError(f"input has token ids from {low} to {high}; accepted: ids in [0, input_size = {size})")


def check_loaded_orthogonal(name: str, loaded: Any, held: Tensor) -> None:
    """Refuses a base B [N,N] from a state_dict, to be loaded into `held`, that is not orthogonal. What it is not made
    for, another shape say, is load_state_dict's to tell."""
    if not isinstance(loaded, Tensor) or loaded.shape != held.shape or loaded.is_meta:
        return
    b = loaded.double()
    off = float((b.mT @ b - torch.eye(len(b), dtype=b.dtype, device=b.device)).abs().max())
    if not off <= LOADED_TOLERANCE:
        raise InputError(f"{name} is not orthogonal: |B^T B - I| is {off:.3g}; accepted: up to {LOADED_TOLERANCE:g}")


def check_exponential(name: str, parameter: Tensor, p: Tensor) -> None:
    """Refuses a parameter [N,N] whose exponential P [N,N] is no number; on a CPU, where looking costs no wait."""
    if p.device.type != "cpu" or torch.compiler.is_compiling() or bool(p.detach().isfinite().all()):
        return
    bad = int((~parameter.detach().isfinite()).sum())
    if bad:
        raise OutOfRange(f"{name} holds {bad} NaN or infinite values of {parameter.numel()}; accepted: finite numbers")
    lower = parameter.detach().double().tril(-1)
    norm = float(torch.linalg.matrix_norm(lower - lower.mT, 2))
    raise OutOfRange(
        f"{name} is too large for an exponential: |A|_2 is {norm:.4g}; accepted: up to 768 in float32, 279 in float64"
    )
