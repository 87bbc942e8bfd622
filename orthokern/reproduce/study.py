"""Reports of `python -m orthokern.reproduce` that are not tables of training runs."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from orthokern._version import __version__
from orthokern.commandline import Settings
from orthokern.errors import InputError


@dataclass(frozen=True)
class Study:
    """A report of `python -m orthokern.reproduce NAME` that is not an Experiment.

    Attributes:
        name: as on the command line.
        title: one line.
        source: paper and table or figure of the published numbers.
        options: the command-line options that it accepts.
        produce: takes the given options, the output folder and the stream for progress messages; returns the files
            written, a Markdown file first.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...]
    produce: Callable[[Settings, Path, TextIO], list[Path]]

    def make(self, given: Settings, stream: TextIO) -> list[Path]:
        """Checks the options and writes the report.

        Raises:
            InputError: an option that the study does not accept.
        """
        for option in given:
            if option not in ("experiment", "quick", "out", *self.options):
                raise InputError(f"--{option}: {self.name} does not accept it")
        folder = output_folder(given)
        folder.mkdir(parents=True, exist_ok=True)
        return self.produce(given, folder, stream)


def output_folder(given: Settings) -> Path:
    """Where a command line writes runs and reports."""
    out: Path = given.get("out", Path("runs") / "reproduce")
    return out / ("quick" if given.get("quick") else "full")


def data_folder(given: Settings, name: str, *, read: bool = True) -> Path:
    """The folder `name` in that of --data, or else that of --data itself.

    Raises:
        InputError: there is no such folder, and `read` is set.
    """
    root: Path = given.get("data", Path("data"))
    found = root / name if (root / name).is_dir() else root
    if read and not found.is_dir():
        raise InputError(f"--data {root}: no such folder; it must hold {name}/ (see docs/experiments.md, Data)")
    return found


def conditions() -> str:
    """One line with versions, machine and date."""
    threads = torch.get_num_threads()
    machine = f"{platform.processor() or platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"
    return f"orthokern {__version__}, torch {torch.__version__}; {machine}; {time.strftime('%Y-%m-%d')}."
