"""Reading of data files, with every way in which that fails as one line: the file, what is wrong, what is expected."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orthokern._files import read_file, reason
from orthokern.errors import InputError


def data_folder(folder: str | Path) -> Path:
    """The folder, if it is one and may be read; InputError otherwise."""
    path = Path(folder)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # a parent that may not be searched
        raise InputError(f"cannot read the data folder {path}: {reason(error)}") from None
    except ValueError:  # a zero byte
        raise InputError(f"{str(path)!r} is no name of a data folder") from None
    if not exists:
        raise InputError(f"the data folder {path} does not exist (looked for at {path.absolute()})")
    if not is_folder:
        raise InputError(f"{path} is a file; expected: the folder that holds the data files")
    return path


def read_first(folder: Path, names: Sequence[str]) -> tuple[Path, bytes]:
    """Path and content of the first of several spellings of a file that a folder has.

    Args:
        folder: from `data_folder`.
        names: file names, the preferred one first.

    Raises:
        InputError: none is there, or the one that is cannot be read.
    """
    for name in names:
        try:
            return folder / name, read_file(folder / name)
        except FileNotFoundError:
            continue
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise InputError(f"missing data file {names[0]}{others}; looked for in {folder.absolute()}")


@dataclass(frozen=True)
class Standard:
    """What is known of a file of a standard data set.

    Attributes:
        size: bytes of its content.
        quarters: CRC-32 of the content's four quarters, all but the last of ceil(size / 4) bytes.
    """

    size: int
    quarters: tuple[int, int, int, int]

    def right(self, content: bytes) -> list[bool]:
        """Which of the quarters a content has."""
        quarter = -(-self.size // 4)
        parts = [content[start : start + quarter] for start in (0, quarter, 2 * quarter)] + [content[3 * quarter :]]
        return [zlib.crc32(part) == known for part, known in zip(parts, self.quarters, strict=True)]


def check_standard(path: Path, name: str, content: bytes, files: Mapping[str, Standard], owner: str) -> None:
    """Refuses a damaged copy of a standard file, and one that stands in the place of another.

    A content with all quarters right is the standard one, and one with some right a damaged copy of it. One with none
    is another data set of the same form, about which nothing is known.

    Args:
        path: of the file, for the error.
        name: which of `files` it should be.
        content: of the file, unpacked.
        files: the data set's, by name.
        owner: of the files, as in "MNIST's".

    Raises:
        InputError: see above.
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
