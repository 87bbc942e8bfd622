"""A check that readers, generators and diagnostics share."""

from orthokern.errors import InputError


def integer(name: str, value: int, minimum: int = 1, maximum: int | None = None) -> int:
    """The value, if it is an integer in [minimum, maximum]; InputError otherwise."""
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        most = "" if maximum is None else f" and at most {maximum}"
        raise InputError(f"{name} must be an integer of at least {minimum}{most}, got {value!r}")
    return value
