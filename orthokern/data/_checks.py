"""Checks that readers and generators share."""

import os
from pathlib import Path
from typing import Any

from orthokern.errors import InputError


def as_path(name: str, value: str | Path) -> Path:
    """The value as a path; InputError for another type."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name} must be a path, got {value!r}")
    return Path(value)


def integer(name: str, value: int, minimum: int = 1, maximum: int | None = None) -> int:
    """The value, if it is an integer in [minimum, maximum]; InputError otherwise."""
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        most = "" if maximum is None else f" and at most {maximum}"
        raise InputError(f"{name} must be an integer of at least {minimum}{most}, got {value!r}")
    return value


def check_state(state: dict[str, Any], own: dict[str, Any], *names: str) -> None:
    """Rejects the saved state of an iterator over other data or with other options: entries `names` must be equal."""
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise InputError(f"the saved order of the data must have the entries {', '.join(own)}")
    for name in names:
        if state[name] != own[name]:
            raise InputError(f"the saved order of the data has {name} {state[name]}; expected: {own[name]}")
