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


@dataclass(frozen=True)
class Study:
    """A report of `python -m orthokern.reproduce NAME` that is not an Experiment.

    Attributes:
        name: as on the command line.
        title: one line.
        source: paper and table or figure of the published numbers.
        options: the command-line options that it accepts.
        produce: takes the options, this study and the stream for progress messages, and writes the report.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...]
    produce: Callable[[Mapping[str, Any], Study, TextIO], Outcome]

    def make(self, args: Mapping[str, Any], stream: TextIO) -> Outcome:
        """Checks the options and writes the report.

        Raises:
            InputError: an option that the study does not accept.
        """
        for option in args:
            if option not in ("experiment", "quick", "out", *self.options):
                raise InputError(f"--{option}: {self.name} does not accept it")
        output_folder(args).mkdir(parents=True, exist_ok=True)
        return self.produce(args, self, stream)


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
