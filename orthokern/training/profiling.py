"""Profile of an iteration: wall time of its stages, and time of its operators by torch.profiler."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from orthokern.training.checkpoint import write_atomically

WARM_UP, OPERATOR_ITERATIONS, TOP = 3, 3, 12

STAGES = ("data", "forward", "backward", "clip and step", "diagnose", "evaluate", "record and checkpoint")


class Profiler:
    """Times the stages of some iterations, then runs torch.profiler for a few more, prints a table and writes
    profile.json. The results of training do not change: the stages are the same calls in the same order, with a
    synchronisation of the GPU between them.

    The first WARM_UP iterations of the process are not measured: they compile, allocate and fill caches.

    Args:
        iterations: number of iterations to time; None for no profile, which costs a comparison per stage.
        device: device of the model.
        say: prints lines.
        path: profile.json.
    """

    def __init__(
        self, iterations: int | None, device: torch.device, say: Callable[[str], None] = print, path: Path | None = None
    ) -> None:
        self.iterations, self.device, self.say, self.path = iterations or 0, device, say, path
        self.done = iterations is None
        self.timing = False
        self.seen = self.timed = self.profiled = 0  # iterations of the process, and those measured in either way
        self.first = 0  # number of the first timed iteration
        self.total = self.begun = 0.0
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.operators: torch.profiler.profile | None = None

    def begin(self, iteration: int) -> None:
        """Called at the start of every iteration."""
        self.seen += 1
        if self.done or self.seen <= WARM_UP:
            return
        if self.timed < self.iterations:
            self.first = self.first or iteration
            self.timing = True
            self.begun = self._now()
        elif self.operators is None:
            self.operators = torch.profiler.profile()
            self.operators.start()

    def end(self) -> None:
        """Called at the end of every iteration."""
        if self.timing:
            self.total += self._now() - self.begun
            self.timed += 1
            self.timing = False
        elif self.operators is not None and not self.done:
            self.profiled += 1
            if self.profiled == OPERATOR_ITERATIONS:
                self.close()

    def close(self) -> None:
        """Shows and writes the profile, complete or not. Called when it is complete, and when training ends."""
        if self.done:
            return
        self.done = True
        if self.operators is not None:
            self._now()
            self.operators.stop()
        if not self.timed:
            self.say(f"no profile: training ended within the {WARM_UP} warm-up iterations")
            return
        report = self.report()
        self.say(table(report))
        try:
            if self.path is not None:
                write_atomically(self.path, json.dumps(report, indent=2).encode() + b"\n")
        except OSError as error:
            self.say(f"warning: {self.path} not written: {error.strerror or error}")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the stage `name`. On a GPU it includes the kernels that the block launched."""
        begun = time.perf_counter()  # the GPU is idle: the previous block synchronised with it
        yield
        if self.timing:
            self.seconds[name] += self._now() - begun

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def report(self) -> dict[str, Any]:
        """The numbers of profile.json. Times are in ms per iteration; "other" is the time between stages. Operators,
        slowest first, are measured over "operator_iterations" iterations (0: training ended before)."""
        stages = {name: 1e3 * seconds / self.timed for name, seconds in self.seconds.items()}
        total = 1e3 * self.total / self.timed
        stages["other"] = max(total - sum(stages.values()), 0.0)
        count = self.profiled
        events = self.operators.key_averages() if self.operators is not None and count else []
        operators = [
            {
                "name": event.key,
                "calls": event.count / count,
                "self_cpu_ms": event.self_cpu_time_total * 1e-3 / count,  # events are in µs
                "self_cuda_ms": event.self_device_time_total * 1e-3 / count,
            }
            for event in events
        ]
        return {
            "iterations": [self.first, self.first + self.timed - 1],
            "device": str(self.device),
            "ms_per_iteration": total,
            "stages": stages,
            "operator_iterations": count,
            "operators": sorted(operators, key=lambda row: row[f"self_{self.device.type}_ms"], reverse=True)[:TOP],
        }


def table(report: dict[str, Any]) -> str:
    """A report as lines to read."""
    first, last = report["iterations"]
    total = report["ms_per_iteration"]
    lines = [f"profile of iterations {first} to {last}: {total:.2f} ms per iteration on {report['device']}"]
    lines += [f"  {name:<24}{ms:>10.3f} ms{100 * ms / total:>7.1f} %" for name, ms in report["stages"].items()]
    if report["operators"]:
        kind = "cuda" if report["device"].startswith("cuda") else "cpu"
        after = f"per iteration of the {report['operator_iterations']} after these"
        lines.append(f"operators by their own time{' on the GPU' if kind == 'cuda' else ''}, {after}")
        for row in report["operators"]:
            lines.append(f"  {row['name'][:48]:<48}{row[f'self_{kind}_ms']:>10.3f} ms{row['calls']:>8.0f} calls")
    return "\n".join(lines)
