"""Reading of data files. Every failure is a one-line error with the file, the problem, and the expected content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orthokern.errors import InputError


def read_first(folder: str | Path, names: Sequence[str]) -> tuple[Path, bytes]:
    """Path and content of a file that may have several names: the first file that exists is read."""
    folder = Path(folder)
    for path in (folder / name for name in names):
        if path.is_file():
            return path, path.read_bytes()
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    below = next((path.parent for name in names for path in folder.glob(f"*/{name}")), None)
    hint = "" if below is None else f"; {below} has it"
    raise InputError(f"missing data file {names[0]}{others}; looked for in {folder.absolute()}{hint}")


def text_of(path: Path, content: bytes) -> str:
    """The text of a file in UTF-8 with one sentence per line. A byte order mark is removed, and a Windows line end
    becomes a newline."""
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} line {line}: byte {content[error.start]:#04x} is not UTF-8; expected: text") from None
    if not text.strip():
        raise InputError(f"{path} is empty: {len(content)} bytes; expected: one sentence per line")
    if not text.rstrip(" ").endswith("\n"):
        raise InputError(f"{path} is incomplete: its last line has no line end; expected: one sentence per line")
    return text
