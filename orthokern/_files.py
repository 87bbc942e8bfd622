"""Files, and JSON files of run folders. Bad input is an error of one line that names the file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orthokern.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_INTEGER = 2**53  # above any size or count; exact as float64, so that torch and JSON readers accept it
NUMBER_LIMIT = 1e100  # products and squares of such numbers stay finite


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} without the file. InputError if the file holds something else."""
    try:
        value = parsed_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    if value is None:
        raise InputError(f"{path} is damaged: not a JSON object")
    return value


def parsed_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a text; None if it holds something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file of the package."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager: an OSError of the block, such as that of a full disk, has the name of the file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of the file `path` atomically.

    The temporary name is fixed (`<name>.tmp`), so that the temporary file of a killed process is overwritten by the
    next one.
    """
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def number(value: Any) -> float | None:
    """A value of a record or a result as a number: finite and at most 1e100 in magnitude, so that computations with it
    stay finite; None for everything else (text, null, true, lists, NaN).

    Example:
        >>> number(3), number("3"), number(True)
        (3.0, None, None)
    """
    return float(value) if type(value) in (int, float) and abs(value) <= NUMBER_LIMIT else None
