"""The errors a user can meet, and the one wording they share.

Command lines catch exactly these, print ``error: <line>`` to stderr and exit with status 2. Everything else is a bug
and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A user's mistake. One line that names the argument, the value given, and what is accepted."""


class OutOfRange(InputError):
    """A parameter has left the range of what is computed from it. In training that is a divergence."""


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot serve. One line that lists every backend with its reason."""


class CheckpointError(InputError):
    """A checkpoint that is truncated, foreign, or does not match the run that wants to resume from it."""


def nearest(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice most like ``name`` (case ignored), or None when nothing comes near."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown_name(argument: str, name: object, choices: Iterable[str]) -> InputError:
    """Build (not raise) the error for a name that is not among ``choices``.

    Example: ``unknown nonlinearity 'tahn': did you mean 'tanh'? accepted: identity, tanh, relu``.
    """
    names = list(choices)
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}? " if guess is not None else ""
    return InputError(f"unknown {argument} {name!r}: {hint}accepted: {', '.join(names)}")
