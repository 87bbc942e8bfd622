"""Display of the progress of a run: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from orthokern.commandline import write


class Progress:
    """The display of the progress of a run of `total` iterations: a bar on a terminal, otherwise plain lines every
    `every` seconds."""

    REDRAW = 0.1  # seconds between updates of the bar: faster updates are unreadable and cost time

    def __init__(self, total: int, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.total = total
        self.stream: TextIO | None = stream if stream is not None else sys.stdout  # None if it is closed
        self.every = every
        self.bar = self.stream is not None and self.stream.isatty()
        self._next = 0.0
        self._drawn = False

    def update(self, iteration: int, text: str, *, force: bool = False) -> None:
        """Shows `text`, one line, for `iteration` if the last update was long enough ago, or with `force`."""
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + (self.REDRAW if self.bar else self.every)
        if self.bar:
            columns = shutil.get_terminal_size().columns
            filled = round(20 * iteration / max(self.total, 1))
            line = f"{iteration:>{len(str(self.total))}}/{self.total} |{'#' * filled}{' ' * (20 - filled)}| {text}"
            write("\r" + line[: columns - 1].ljust(columns - 1), self.stream)
            self._drawn = True
        else:
            write(f"iteration {iteration}/{self.total}: {text}\n", self.stream)

    def line(self, text: str) -> None:
        """Writes a message on a separate line above the bar."""
        if self._drawn:
            write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r", self.stream)
            self._drawn = False
        write(text + "\n", self.stream)

    def close(self) -> None:
        """Keeps the current bar and begins a new line."""
        if self._drawn:
            write("\n", self.stream)
            self._drawn = False
