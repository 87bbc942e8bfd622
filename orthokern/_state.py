"""Checks of saved state: compares the content of a file with the state of the new objects that will load it.

A state consists of dicts, lists, tuples, numbers, strings, None and tensors. The template is the current state of the
new object, so that names, types, shapes and dtypes need not be listed separately:

    template            accepted
    tensor              a dense tensor on the CPU of its shape and dtype, without NaN if it has none
    dict                a dict of the same names
    list, tuple         one of the same length; of any length where the template is empty
    bool, str           bool; the same text
    int                 an integer of magnitude at most 2^53, not negative if the template is not
    float               a float, finite if the template is, not negative if the template is not
    None                None; with `unset` also numbers, tensors, and lists of them: the caller must check it

An InputError has the place of the first difference, the value found and what is expected.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern._files import LARGEST_INTEGER
from orthokern.errors import InputError

_DEEPEST = 32


def shown(value: Any) -> str:
    """A short text for any value."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(value).split())


def misfit(name: str, value: Any, expected: str) -> InputError:
    """Build (not raise) the error for a value that does not fit."""
    return InputError(f"{name} is {shown(value)}; expected: {expected}")


def check_integer(name: str, value: Any, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> int:
    """The value, if it is an integer in [minimum, maximum]; InputError otherwise."""
    if type(value) is not int or not minimum <= value <= maximum:
        most = "" if maximum == LARGEST_INTEGER else f" and at most {maximum}"
        raise misfit(name, value, f"an integer of at least {minimum}{most}")
    return value


def check_real(name: str, value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    """The value, if it is a finite float, or an integer, in [minimum, maximum]; InputError otherwise."""
    if type(value) not in (int, float) or not minimum <= value <= maximum or not abs(value) <= sys.float_info.max:
        least = "" if minimum == -math.inf else f" of at least {minimum:g}"
        most = "" if maximum == math.inf else f" {'and' if least else 'of'} at most {maximum:g}"
        raise misfit(name, value, f"a finite number{least}{most}")
    return float(value)


def check_tensor(name: str, value: Any, like: Tensor) -> Tensor:
    """The value, if it is a dense tensor in the CPU's memory of the shape and dtype of `like`, without NaN if that has
    none; InputError otherwise."""
    if (
        type(value) not in (Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
        or value.device.type != "cpu"
        or value.shape != like.shape
        or value.dtype != like.dtype
    ):
        raise misfit(name, value, shown(like))
    if value.is_floating_point() and bool(value.isnan().any()) and not bool(like.isnan().any()):
        raise InputError(f"{name} holds NaN; expected: numbers")
    return value


def check_like(name: str, value: Any, like: Any, *, unset: bool = False) -> None:
    """Checks a saved state against the state of a new object, see the table of this module.

    Args:
        name: of the place, for the error.
        value: what was saved.
        like: the template.
        unset: whether None, and empty lists, of the template may have become something else.

    Raises:
        InputError: they differ in structure.

    Example:
        check_like("task_state", payload["task_state"], task.state_dict(), unset=True)
    """
    if like is None:
        if value is not None and not (unset and _plain(value, _DEEPEST)):
            raise misfit(name, value, "numbers or tensors, or None" if unset else "None")
    elif isinstance(like, Tensor):
        check_tensor(name, value, like)
    elif isinstance(like, Mapping):
        if not isinstance(value, dict):
            raise misfit(name, value, "a dict")
        if value.keys() != like.keys():
            lacking = [str(key) for key in like if key not in value]
            foreign = [shown(key) for key in value if key not in like]
            what = f"lacks {', '.join(lacking[:3])}" if lacking else f"has {', '.join(foreign[:3])}, which is unknown"
            raise InputError(f"{name} {what}")
        for key, inner in like.items():
            check_like(f"{name}.{key}", value[key], inner, unset=unset)
    elif isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)):
            raise misfit(name, value, "a list")
        if not like and unset:
            check_like(name, value, None, unset=True)
        elif len(value) != len(like):
            raise InputError(f"{name} has {len(value)} entries; expected: {len(like)}")
        else:
            for index, (one, other) in enumerate(zip(value, like, strict=True)):
                check_like(f"{name}.{index}", one, other, unset=unset)
    else:
        _check_scalar(name, value, like)


def _check_scalar(name: str, value: Any, like: Any) -> None:
    if isinstance(like, bool):
        if type(value) is not bool:
            raise misfit(name, value, "True or False")
    elif isinstance(like, int):
        check_integer(name, value, 0 if like >= 0 else -LARGEST_INTEGER)
    elif isinstance(like, float):
        if math.isnan(like):
            if type(value) is not float:
                raise misfit(name, value, "a float")
        elif not math.isinf(like):
            check_real(name, value, 0.0 if like >= 0 else -math.inf)
        elif type(value) is not float or math.isnan(value) or (like > 0 and value < 0):
            raise misfit(name, value, "a float" + (" of at least 0" if like > 0 else ""))
    elif type(value) is not type(like) or value != like:
        raise misfit(name, value, shown(like))


def _plain(value: Any, depth: int) -> bool:
    """Whether a value consists of finite numbers, None and dense tensors without NaN."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_plain(inner, depth - 1) for inner in value)
    if isinstance(value, Tensor):
        fine = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
        # one number that stands for many in memory would become as many
        fine = fine and value.is_contiguous()
        return fine and not (value.is_floating_point() and bool(value.isnan().any()))
    return value is None or type(value) is float or (type(value) is int and abs(value) <= LARGEST_INTEGER)


# ---- what a constructor was given ------------------------------------------------------------------------------------


def constants(kind: type, state: Mapping[str, Any]) -> set[str]:
    """Names of a state that are parameters of the object's constructor: what it was made with, and keeps."""
    return set(inspect.signature(kind).parameters) & state.keys()


def check_constants(name: str, value: Mapping[str, Any], like: Mapping[str, Any], keys: set[str]) -> None:
    """Raises InputError for one of `keys` under which a saved state has another value than the new object."""
    for key in sorted(keys):
        check_like(f"{name}.{key}", value[key], like[key])
        ours, theirs = like[key], value[key]
        if not isinstance(ours, Tensor) and tuple_of(theirs) != tuple_of(ours):
            raise misfit(f"{name}.{key}", theirs, shown(ours))


def tuple_of(value: Any) -> Any:
    """Lists as tuples, so that both compare as equal."""
    return tuple(map(tuple_of, value)) if isinstance(value, (list, tuple)) else value
