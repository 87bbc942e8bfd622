"""Input files: opening, size limits and decoding for all files that may come from elsewhere.

Every function rejects bad input with an error of one line that names the file. The type of a file is checked before it
is opened, so that a named pipe or a device is rejected instead of blocking, and its size is checked before it is read.
Decoders run inside `decoding`, which converts their errors to such a line. Sizes in a header are checked against a
limit before memory is allocated.

    FILE_LIMIT      1 GiB     a data file, and its decompressed content
    RECORDS_LIMIT   4 GiB     metrics.jsonl, which is read line by line
    JSON_LIMIT      16 MiB    config.json, result.json, a line of metrics.jsonl; nested at most JSON_DEPTH deep
    CHECKPOINT_LIMIT          1 TiB unless the caller gives a smaller limit
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from orthokern.errors import InputError

FILE_LIMIT = 2**30
RECORDS_LIMIT = 2**32
JSON_LIMIT = 2**24
CHECKPOINT_LIMIT = 2**40
JSON_DEPTH = 64
LARGEST_INTEGER = 2**53  # above any size or count; exact as float64, so that torch and JSON readers take it
NUMBER_LIMIT = 1e100  # products and squares of such numbers stay finite

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# ---- opening ---------------------------------------------------------------------------------------------------------


def reason(error: OSError) -> str:
    """The reason of a system error, without the name of the file."""
    return (error.strerror or type(error).__name__).lower()


def size_text(size: int) -> str:
    """A number of bytes as text, e.g. "16 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    raise AssertionError


def open_regular(path: Path, limit: int = FILE_LIMIT) -> tuple[BinaryIO, int]:
    """Opens a regular file for reading.

    Args:
        path: the file; a symbolic link is followed.
        limit: bytes that it may have at most.

    Returns:
        The open file, and its size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is a folder, a named pipe, a socket or a device, it is too large, or it may not be read.

    Example:
        file, size = open_regular(Path("metrics.jsonl"), RECORDS_LIMIT)
    """
    try:
        _check_kind(path, os.stat(path), limit)  # opening a named pipe would wait for its writer
        descriptor = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # the name may refer to another file by now
    except (FileNotFoundError, InputError):
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}; expected: a file that this user may read") from None
    except ValueError:  # a zero byte
        raise InputError(f"{str(path)!r} is no file name") from None
    try:
        found = os.fstat(descriptor)
        _check_kind(path, found, limit)
        return os.fdopen(descriptor, "rb"), found.st_size
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(path: Path, found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise InputError(f"{path} cannot be read: it is {kind}; expected: a regular file")
    if found.st_size > limit:
        raise InputError(f"{path} has {size_text(found.st_size)}; accepted: at most {size_text(limit)}")


def read_file(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError, InputError: as `open_regular`.
    """
    file, size = open_regular(path, limit)
    with file:
        try:
            content = file.read(size + 1)
            if len(content) > size:  # the file has grown, or its file system does not report sizes
                content += file.read(limit + 1 - len(content))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {reason(error)}") from None
    if len(content) > limit:
        raise InputError(f"{path} has more than {size_text(limit)}, which is the most that is accepted")
    return content


# ---- decoding --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def decoding(path: Path, what: str, size: int, error_type: type[InputError] = InputError) -> Iterator[None]:
    """Context manager: converts any error of a decoder to an error of one line.

    Args:
        path: path of the file.
        what: description of the problem, e.g. "damaged or no .npz file".
        size: bytes of the file, for the message.
        error_type: type of the new error.

    Raises:
        InputError: the decoder failed. An InputError from within the block stays as it is.
    """
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise error_type(f"{path} does not fit into memory ({size} bytes)") from None
    except Exception as error:  # zlib.error, zipfile's, struct.error, KeyError, ...: decoders share no base class
        text = re.sub(r"\x1b\[[0-9;]*m", "", (str(error).splitlines() or [""])[0])  # torch's are in colour
        told = " ".join(text.split())[:120] or type(error).__name__
        raise error_type(f"{path} is {what} ({size} bytes): {told}") from None


def inflate(content: bytes, limit: int, *, gzip: bool = False) -> bytes:
    """Decompresses at most `limit` bytes of a zlib or gzip stream, so that memory is bounded by the limit. A gzip
    stream may have several members. The checksum is verified only if the stream ends within the limit: request one byte
    more than expected.

    Args:
        content: the stream.
        limit: at least 1.
        gzip: whether it has gzip's header and not zlib's.

    Raises:
        EOFError: the stream is cut off.
        zlib.error: it is damaged.
    """
    parts: list[bytes] = []
    room, left = limit, memoryview(content)
    while True:
        unpacker = zlib.decompressobj(31 if gzip else 15)
        parts.append(unpacker.decompress(left, room))
        room -= len(parts[-1])
        if not unpacker.eof and room > 0:
            raise EOFError("the compressed stream ends early")
        left = memoryview(unpacker.unused_data.lstrip(b"\0"))  # gzip files may be padded with zeros
        if room == 0 or not gzip or not len(left):
            return b"".join(parts)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(content: bytes) -> Any:
    """Decodes a JSON text.

    Raises:
        ValueError: it is not JSON, has more than JSON_LIMIT bytes, or is nested deeper than JSON_DEPTH.
    """
    if len(content) > JSON_LIMIT:
        raise ValueError(f"more than {size_text(JSON_LIMIT)}")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested deeper than {JSON_DEPTH}") from None
    if content.count(b"[") + content.count(b"{") > JSON_DEPTH:
        layer, depth = [value], 0
        while layer := [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]:
            depth += 1
            if depth > JSON_DEPTH:
                raise ValueError(f"nested deeper than {JSON_DEPTH}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: as `open_regular`, or the file does not hold a JSON object.
    """
    content = read_file(path, JSON_LIMIT)
    try:
        value = parse_json(content)
    except ValueError:
        raise InputError(f"{path} is damaged: not JSON of at most {JSON_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: not a JSON object")
    return value


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file with their line ends, each with its JSON object, or None if it is not a JSON object.
    Iteration ends at the first line of more than JSON_LIMIT bytes, with (a part of) that line and None.

    Raises:
        FileNotFoundError, InputError: as `open_regular`.
    """
    file, _ = open_regular(path, RECORDS_LIMIT)
    with file:
        while True:
            try:
                line = file.readline(JSON_LIMIT + 1)
            except OSError as error:
                raise InputError(f"{path} cannot be read: {reason(error)}") from None
            if not line:
                return
            try:
                value = parse_json(line)
            except ValueError:
                value = None
            yield line, value if isinstance(value, dict) else None
            if len(line) > JSON_LIMIT:
                return


def number(value: Any) -> float | None:
    """A value of a record or a result as a number: finite and at most 1e100 in magnitude, so that computations with it
    stay finite; None for everything else (text, null, true, lists, NaN, integers of hundreds of digits).

    Example:
        >>> number(3), number("3"), number(10**400), number(True)
        (3.0, None, None, None)
    """
    if type(value) not in (int, float) or not abs(value) <= NUMBER_LIMIT:  # what JSON knows: bool is no number
        return None
    return float(value)


def count(value: Any, minimum: int = 0) -> int | None:
    """A value of a record or a result as an integer in [minimum, 2^53]; None for everything else."""
    return value if type(value) is int and minimum <= value <= LARGEST_INTEGER else None


# ---- folders ---------------------------------------------------------------------------------------------------------


def make_folder(path: Path) -> list[Path]:
    """Creates a folder and its parents.

    Returns:
        The folders that did not exist before, the innermost first, for `remove_folders`.

    Raises:
        OSError: it cannot be created; folders that were created before the error are removed.
    """
    made: list[Path] = []
    missing = [path, *path.parents]
    missing = missing[: next((i for i, each in enumerate(missing) if each.is_dir()), len(missing))]
    try:
        for each in reversed(missing):
            try:
                each.mkdir()
            except FileExistsError:
                if not each.is_dir():
                    raise
            else:
                made.insert(0, each)
    except OSError:
        remove_folders(made)
        raise
    return made


def remove_folders(folders: list[Path]) -> None:
    """Removes folders, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for each in folders:
            each.rmdir()
