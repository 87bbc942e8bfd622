"""Input files: opening, size limits and decoding. Bad input is an error of one line that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from orthokern.errors import InputError

FILE_LIMIT = 2**30  # bytes of a data file, and of its decompressed content
RECORDS_LIMIT = 2**32  # of metrics.jsonl, which is read line by line
LARGEST_INTEGER = 2**53  # above any size or count; exact as float64, so that torch and JSON readers accept it
NUMBER_LIMIT = 1e100  # products and squares of such numbers stay finite


def reason(error: OSError) -> str:
    """The reason of a system error, without the name of the file."""
    return (error.strerror or type(error).__name__).lower()


def size_text(size: int) -> str:
    """A number of bytes as text, e.g. "16 MiB"."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def open_regular(path: Path, limit: int = FILE_LIMIT) -> tuple[BinaryIO, int]:
    """Opens a regular file of at most `limit` bytes for reading.

    Returns:
        The open file, and its size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is no regular file (opening a named pipe would wait for its writer), it is too large, or it may
            not be read.
    """
    try:
        size = os.stat(path).st_size
        if not path.is_file():
            raise InputError(f"{path} must be a regular file")
        if size > limit:
            raise InputError(f"{path} must have at most {size_text(limit)}, got {size_text(size)}")
        return open(path, "rb"), size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def read_file(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError, InputError: as `open_regular`.
    """
    file, _ = open_regular(path, limit)
    with file:
        return file.read()


def parse_json(content: bytes) -> Any:
    """Decodes a JSON text.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: as `open_regular`, or the file does not hold a JSON object.
    """
    try:
        value = parse_json(read_file(path))
    except InputError:
        raise
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: not a JSON object")
    return value


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file with their line ends, each with its JSON object, or None if it is not a JSON object.

    Raises:
        FileNotFoundError, InputError: as `open_regular`.
    """
    file, _ = open_regular(path, RECORDS_LIMIT)
    with file:
        for line in file:
            try:
                value = parse_json(line)
            except ValueError:
                value = None
            yield line, value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """A value of a record or a result as a number: finite and at most 1e100 in magnitude, so that computations with it
    stay finite; None for everything else (text, null, true, lists, NaN).

    Example:
        >>> number(3), number("3"), number(True)
        (3.0, None, None)
    """
    return float(value) if type(value) in (int, float) and abs(value) <= NUMBER_LIMIT else None


def count(value: Any, minimum: int = 0) -> int | None:
    """A value of a record or a result as an integer in [minimum, 2^53]; None for everything else."""
    return value if type(value) is int and minimum <= value <= LARGEST_INTEGER else None
