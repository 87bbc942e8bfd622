"""What `python -m orthokern.reproduce` makes where it is no table of training runs."""

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

__all__ = ["Study", "conditions"]


@dataclass(frozen=True)
class Study:
    """What `python -m orthokern.reproduce NAME` makes, where it is no Experiment.

    Attributes:
        name: as on the command line.
        title: one line.
        source: where the published numbers stand.
        options: those of the command line that it takes.
        produce: the options given, the folder to write to and where to say how it stands -> the files written, a
            Markdown file first.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...]
    produce: Callable[[Settings, Path, TextIO], list[Path]]

    def make(self, given: Settings, stream: TextIO) -> list[Path]:
        """Checks the options and produces.

        Raises:
            InputError: an option that says nothing here.
        """
        for option in given:
            if option not in ("experiment", "quick", "out", *self.options):
                raise InputError(f"--{option}: {self.name} does not take it")
        folder = given.get("out", Path("runs") / "reproduce") / ("quick" if given.get("quick") else "full")
        folder.mkdir(parents=True, exist_ok=True)
        return self.produce(given, folder, stream)


def conditions() -> str:
    """A line on versions, machine and date."""
    threads = torch.get_num_threads()
    machine = f"{platform.processor() or platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"
    return f"orthokern {__version__}, torch {torch.__version__}; {machine}; {time.strftime('%Y-%m-%d')}."
