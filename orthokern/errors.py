"""The exceptions for errors of the user, and their common format.

Command lines catch these and OSError, print ``error: <line>`` to stderr and exit with status 2. Everything else but an
interrupt is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeGuard

LARGEST_INT64 = (1 << 63) - 1


class InputError(ValueError):
    """Bad input. The message is one line with the argument, its value, and the accepted values."""

    def __init__(self, *args: object) -> None:  # the repr of a value may have several lines
        super().__init__(*(" ".join(arg.split()) if isinstance(arg, str) and "\n" in arg else arg for arg in args))


class OutOfRange(InputError):
    """A parameter is outside of the range for which its function can be computed. The tasks report it as divergence."""


class BackendUnavailable(RuntimeError):
    """The requested backend cannot run the call. The message is one line with the reason of every backend."""


class CheckpointError(InputError):
    """A checkpoint is truncated, has another format, or does not match the run to resume."""


def nearest(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to ``name`` (ignoring case), or None if no choice is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    result = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[result[0]] if result else None


def unknown_name(argument: str, name: object, choices: Iterable[str]) -> InputError:
    """Build (not raise) the error for a name that is not among ``choices``.

    Example: ``unknown nonlinearity 'tahn': did you mean 'tanh'? accepted: identity, tanh, relu``.
    """
    names = list(choices)
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}? " if guess is not None else ""
    return InputError(f"unknown {argument} {name!r}: {hint}accepted: {', '.join(names)}")


def one_of(argument: str, name: object, choices: Iterable[str]) -> str:
    """The name; InputError unless it is among ``choices``."""
    names = list(choices)
    if not isinstance(name, str) or name not in names:
        raise unknown_name(argument, name, names)
    return name


def require(fits: object, name: str, accepted: object, got: object) -> None:
    """Raise InputError("NAME must be ACCEPTED, got GOT") unless a check has succeeded."""
    if not fits:
        raise InputError(f"{name} must be {accepted}, got {got}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, also one of numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(
    name: str, value: Any, accepted: str = "a finite number", fits: Callable[[float], bool] = math.isfinite
) -> float:
    """The value as a float; InputError unless it is a finite number for which `fits` is true."""
    try:
        result = float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer
        result = math.inf
    require(math.isfinite(result) and fits(result), name, accepted, repr(value)[:80])
    return result


def integer(name: str, value: Any, minimum: int = 1, maximum: int = LARGEST_INT64) -> int:
    """The value as an int; InputError unless it is an integer, also one of numpy, in [minimum, maximum]."""
    try:
        result = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        result = None
    if result is None or not minimum <= result <= maximum:
        most = f" and at most {maximum}" if maximum < LARGEST_INT64 or (result or 0) > maximum else ""
        raise InputError(f"{name} must be an integer of at least {minimum}{most}, got {value!r}")
    return result


def cpu_generator(generator: Any) -> Any:
    """The generator; InputError unless it is a torch.Generator on the CPU, or None for torch's global one."""
    device = getattr(generator, "device", None)
    fits = generator is None or getattr(device, "type", None) == "cpu"
    require(fits, "generator", "a CPU torch.Generator or None", repr(generator))
    return generator
