"""Reading of data files. Every failure is an error of one line: the file, what is wrong, and what is expected."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orthokern._files import read_file, reason
from orthokern.errors import InputError


def data_folder(folder: str | Path) -> Path:
    """The path, if it is a readable folder; InputError otherwise."""
    path = Path(folder)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # no permission for a parent folder
        raise InputError(f"cannot read the data folder {path}: {reason(error)}") from None
    except ValueError:  # a zero byte
        raise InputError(f"{str(path)!r} is no name of a data folder") from None
    if not exists:
        raise InputError(f"the data folder {path} does not exist (looked for at {path.absolute()})")
    if not is_folder:
        raise InputError(f"{path} is a file; expected: the folder that holds the data files")
    return path


def read_first(folder: Path, names: Sequence[str]) -> tuple[Path, bytes]:
    """Path and content of a file that may have several names: the first one that exists is read.

    Args:
        folder: from `data_folder`.
        names: file names, the preferred one first.

    Raises:
        InputError: none exists, or the file cannot be read.
    """
    for name in names:
        try:
            return folder / name, read_file(folder / name)
        except FileNotFoundError:
            continue
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise InputError(f"missing data file {names[0]}{others}; looked for in {folder.absolute()}")


def text_of(path: Path, content: bytes, expected: str) -> str:
    """The text of a file in UTF-8 with one sentence per line, without the byte order mark that some editors write.

    Raises:
        InputError: it is empty, or not text; `expected` says what the text consists of.
    """
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise InputError(f"{path} is empty: {len(content)} bytes; expected: one sentence a line")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} line {line}: byte {content[error.start]:#04x} is no text in UTF-8; expected: {expected}"
        ) from None


@dataclass(frozen=True)
class Standard:
    """Size and checksums of a file of a standard data set."""

    size: int  # bytes of its content
    quarters: tuple[int, int, int, int]  # CRC-32 of the four quarters; all but the last have ceil(size / 4) bytes

    def right(self, content: bytes) -> list[bool]:
        """For each quarter, whether the content has its checksum."""
        quarter = -(-self.size // 4)
        parts = [content[start : start + quarter] for start in (0, quarter, 2 * quarter)] + [content[3 * quarter :]]
        return [zlib.crc32(part) == known for part, known in zip(parts, self.quarters, strict=True)]


def check_standard(path: Path, name: str, content: bytes, files: Mapping[str, Standard], owner: str) -> None:
    """Rejects a damaged copy of a standard file, and a standard file with the name of another one.

    If all quarters of the content match, it is the standard file; if some match, it is a damaged copy. If none matches,
    it belongs to another data set of the same format, and is accepted.

    Args:
        path: path of the file, for the error message.
        name: the expected file, a key of `files`.
        content: content of the file, uncompressed.
        files: the files of the data set, by name.
        owner: name of the data set in the genitive, e.g. "MNIST's".

    Raises:
        InputError: the content is that of another standard file, or damaged.
    """
    for known, standard in files.items():
        right = standard.right(content)
        if not any(right):
            continue
        if all(right):
            if known != name:
                raise InputError(f"{path} holds {owner} {known}; expected: its {name}")
            continue
        size, quarter = len(content), -(-standard.size // 4)
        if size < standard.size and all(right[: size // quarter]):
            raise InputError(f"{path} is cut off: {size} bytes; expected: {owner} {known}, {standard.size} bytes")
        first = right.index(False) * quarter
        last = min(first + quarter, standard.size) - 1
        raise InputError(f"{path} is damaged: wrong checksum in bytes {first} to {last}; expected: {owner} {known}")
