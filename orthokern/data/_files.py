"""Reading of data files, with every way in which that fails as one line: the file, what is wrong, what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orthokern.errors import InputError


def data_folder(folder: str | Path) -> Path:
    """The folder, if it is one and may be read; InputError otherwise."""
    path = Path(folder)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # a parent that may not be searched
        raise InputError(f"cannot read the data folder {path}: {_reason(error)}") from None
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
            return folder / name, read_bytes(folder / name)
        except FileNotFoundError:
            continue
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise InputError(f"missing data file {names[0]}{others}; looked for in {folder.absolute()}")


def read_bytes(path: Path) -> bytes:
    """Content of a file; FileNotFoundError if there is none, InputError for any other reason not to read it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {_reason(error)}; expected: a file that this user may read") from None


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
