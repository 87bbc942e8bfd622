"""Reports of `python -m orthokern.reproduce` that are not tables of training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from orthokern.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """What a command line has done.

    Attributes:
        files: the files written, a Markdown file first.
        failed: name -> last line of output, for the runs that failed.
        spent: whether the budget ended before all runs were done.
    """

    files: list[Path]
    failed: Mapping[str, str] = field(default_factory=dict)
    spent: bool = False


Produce = Callable[[Mapping[str, Any], Mapping[str, Any], TextIO], Outcome]
"""Writes the report of a study. Its arguments are the options of the command line, the `[[study]]` table of
specs/*.toml, and the stream for progress messages."""


def output_folder(args: Mapping[str, Any]) -> Path:
    """Where a command line writes runs and reports."""
    out: Path = args.get("out", Path("runs") / "reproduce")
    return out / ("quick" if args.get("quick") else "full")


def data_folder(args: Mapping[str, Any], name: str, *, read: bool = True) -> Path:
    """The folder `name` in that of --data, or else that of --data itself.

    Raises:
        InputError: there is no such folder, and `read` is set.
    """
    root: Path = args.get("data", Path("data"))
    folder = root / name if (root / name).is_dir() else root
    if read and not folder.is_dir():
        raise InputError(f"--data {root}: no such folder; it must hold {name}/ (see docs/experiments.md, Data)")
    return folder
