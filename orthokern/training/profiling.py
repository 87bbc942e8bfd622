"""A profile of training iterations by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP, ROWS = 3, 24


def stage(name: str) -> AbstractContextManager[object]:
    """Context manager: the block is one row of a profile, "stage: NAME"."""
    return record_function(f"stage: {name}")


class Profiler:
    """Records `iterations` iterations after WARM_UP ones, which compile, allocate and fill caches. It then prints a
    table of the stages and operators that take most time, and writes a trace for chrome://tracing or Perfetto. The
    results of training do not change.

    Args:
        iterations: number of iterations to record; None for no profile.
        device: device of the model.
        say: prints lines.
        path: file of the trace.
    """

    def __init__(self, iterations: int | None, device: torch.device, say: Callable[[str], None], path: Path) -> None:
        self.iterations, self.device, self.say, self.path = iterations or 0, device, say, path
        self.seen = 0
        self.profile: profile | None = None

    def begin(self) -> None:
        """Called at the start of every iteration."""
        if self.iterations and self.seen == WARM_UP:
            cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profile = profile(activities=[ProfilerActivity.CPU, *cuda])
            self.profile.start()
        self.seen += 1

    def end(self, last: bool = False) -> None:
        """Called at the end of every iteration, and with `last` at the end of training."""
        if self.profile is None or (self.seen < WARM_UP + self.iterations and not last):
            return
        self.profile.stop()
        by = "device_time_total" if self.device.type == "cuda" else "cpu_time_total"
        table = self.profile.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=44)
        self.say(f"profile of {self.seen - WARM_UP} iterations, trace in {self.path}\n{table}")
        self.profile.export_chrome_trace(str(self.path))
        self.profile = None
