"""Checks of arguments that readers and generators share."""

from orthokern.errors import InputError


def integer(name: str, value: int, minimum: int = 1) -> int:
    """The value, if it is an integer of at least `minimum`; InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return value
