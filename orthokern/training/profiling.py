"""Profile of an iteration: wall time of its stages, and time of its operators by torch.profiler."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from orthokern.training.checkpoint import write_atomically

WARM_UP, OPERATOR_ITERATIONS, TOP = 3, 3, 12

STAGES = ("data", "forward", "backward", "clip and step", "diagnose", "evaluate", "record and checkpoint")


class Profiler:
    """Times the stages of some iterations, then runs torch.profiler for a few more. The results of training do not
    change: the stages are the same calls in the same order, with a synchronisation of the GPU between them.

    The first WARM_UP iterations of the process are not measured: they compile, allocate and fill caches.

    Args:
        iterations: number of iterations to time; None for no profile, which costs a comparison per stage.
        device: device of the model.
    """

    def __init__(self, iterations: int | None, device: torch.device) -> None:
        self.iterations = iterations
        self.device = device
        self.timing = False
        self.timed = 0
        self.first = 0  # number of the first timed iteration
        self.total = 0.0
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._seen = 0
        self._begun = 0.0
        self._operators: torch.profiler.profile | None = None
        self._operator_iterations = 0
        self.done = iterations is None

    def begin(self, iteration: int) -> None:
        """Called at the start of every iteration."""
        if self.done or self.iterations is None:
            return
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        if self.timed < self.iterations:
            self.first = self.first or iteration
            self.timing = True
            self._wait()
            self._begun = time.perf_counter()
        elif self._operators is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._operators = torch.profiler.profile(activities=activities)
            self._operators.start()

    def end(self) -> bool:
        """Called at the end of every iteration. Returns whether the profile is now complete."""
        if self.timing:
            self._wait()
            self.total += time.perf_counter() - self._begun
            self.timed += 1
            self.timing = False
        elif self._operators is not None and not self.done:
            self._operator_iterations += 1
            if self._operator_iterations == OPERATOR_ITERATIONS:
                self._stop()
                return True
        return False

    def close(self) -> bool:
        """Called when training ends. Returns whether there is an incomplete profile to show."""
        if self.done:
            return False
        self._stop()
        return self.timed > 0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the stage `name`. On a GPU it includes the kernels that the block launched."""
        if not self.timing:
            yield
            return
        begun = time.perf_counter()  # the GPU is idle: the previous block synchronised with it
        yield
        self._wait()
        self.seconds[name] += time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _stop(self) -> None:
        self.done = True
        if self._operators is not None:
            self._wait()
            self._operators.stop()

    def report(self) -> dict[str, Any]:
        """The numbers of profile.json. Times are in ms per iteration.

        Returns:
            "iterations" [first, last], "ms_per_iteration", "stages": {name: ms}, with "other" for the time between
            stages, "operators": [{"name", "calls", "self_cpu_ms", "self_cuda_ms"}, ...], slowest first, measured over
            "operator_iterations" iterations (0: training ended before).
        """
        count = max(self.timed, 1)
        stages = {name: 1e3 * seconds / count for name, seconds in self.seconds.items()}
        total = 1e3 * self.total / count
        stages["other"] = max(total - sum(stages.values()), 0.0)
        return {
            "iterations": [self.first, self.first + self.timed - 1],
            "device": str(self.device),
            "ms_per_iteration": total,
            "stages": stages,
            "operator_iterations": self._operator_iterations,
            "operators": self._top_operators(),
        }

    def _top_operators(self) -> list[dict[str, Any]]:
        if self._operators is None or not self._operator_iterations:
            return []
        per_iteration = 1e-3 / self._operator_iterations  # events are in µs
        rows = [
            {
                "name": event.key,
                "calls": event.count / self._operator_iterations,
                "self_cpu_ms": event.self_cpu_time_total * per_iteration,
                "self_cuda_ms": event.self_device_time_total * per_iteration,
            }
            for event in self._operators.key_averages()
        ]
        by = "self_cuda_ms" if self.device.type == "cuda" else "self_cpu_ms"
        return sorted(rows, key=lambda row: row[by], reverse=True)[:TOP]

    def write(self, path: Path) -> None:
        """Writes profile.json.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        write_atomically(path, json.dumps(self.report(), indent=2).encode() + b"\n")


def table(report: dict[str, Any]) -> str:
    """A report as lines to read."""
    first, last = report["iterations"]
    total = report["ms_per_iteration"]
    lines = [f"profile of iterations {first} to {last}: {total:.2f} ms per iteration on {report['device']}"]
    lines += [
        f"  {name:<24}{ms:>10.3f} ms{100 * ms / total if total else 0.0:>7.1f} %"
        for name, ms in report["stages"].items()
    ]
    if report["operators"]:
        on_gpu = report["device"].startswith("cuda")
        lines.append(
            f"operators by their own time{' on the GPU' if on_gpu else ''}, "
            f"per iteration of the {report['operator_iterations']} after these"
        )
        for row in report["operators"]:
            ms = row["self_cuda_ms" if on_gpu else "self_cpu_ms"]
            lines.append(f"  {row['name'][:48]:<48}{ms:>10.3f} ms{row['calls']:>8.0f} calls")
    return "\n".join(lines)
