"""One iteration of the copy task at T = 10000, as `python -m orthokern.tasks.copy` runs it: what takes how long, and
how much memory at the peak."""

from __future__ import annotations

import copy
import functools
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, child, median

from orthokern.cpu import factored_scan
from orthokern.tasks import copy as copy_task
from orthokern.training import train
from orthokern.training.loop import LoopSettings
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder

SIZES = [{"N": 128, "T": 10000}]
QUICK = [{"N": 32, "T": 20}]
ITERATIONS = 12  # timed; the first one, which warms up, and the last one, which evaluates, are not
PARTS = ("scan forward", "scan backward", "readout and loss", "optimizer", "data", "other")

# Relative error of the first loss, float32 against float64; measured: 9e-6. Most of its terms are small differences of
# large numbers: the blank's bias of 8 makes them log(1 + 8 exp(-8)).
TOLERANCE = 1e-4


@contextmanager
def clocked(owner: Any, name: str, add: Callable[[float], None]) -> Iterator[None]:
    """Tell `add` the seconds of every call of owner.name while the block runs."""
    original = getattr(owner, name)

    @functools.wraps(original)  # with its attributes: learning rate schedulers look for theirs
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            add(time.perf_counter() - start)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def experiment(T: int, N: int) -> copy_task.CopyExperiment:
    """The task with its defaults."""
    torch.manual_seed(0)
    settings = {**copy_task.DEFAULTS, "T": T, "hidden": N, "iterations": ITERATIONS + 2, "eval_every": 0}
    return copy_task.CopyExperiment(copy_task.complete(settings))


def first_loss_error(T: int, N: int) -> float:
    """Error of the loss of a few sequences before training, against the reference in float64."""
    ours = experiment(T, N)
    tokens, targets = (t[:, :5].contiguous() for t in ours.next_batch())
    exact = copy.deepcopy(ours.model).double()
    for module in exact.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    with torch.no_grad():
        actual, _ = ours.model(tokens, targets)
        expected, _ = exact(tokens, targets)
    return check("first loss", [actual], [expected], TOLERANCE)


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_parts_of_an_iteration(benchmark: Any, bench: Bench, size: Size, tmp_path: Path) -> None:
    """Shares of the scan and of everything else, the training loop's own work (norms, records, progress) included."""
    T, N = size["T"], size["N"]
    error = first_loss_error(T, N)
    task = experiment(T, N)
    run = RunFolder.create(tmp_path / "run", "copy", task.settings)
    begun: list[float] = []
    spent: dict[str, list[float]] = {part: [] for part in PARTS[:-1]}

    def into(part: str) -> Callable[[float], None]:
        def add(seconds: float) -> None:
            if spent[part]:
                spent[part][-1] += seconds

        return add

    next_batch = task.next_batch

    def new_iteration() -> Any:
        begun.append(time.perf_counter())
        for times in spent.values():
            times.append(0.0)
        batch = next_batch()
        into("data")(time.perf_counter() - begun[-1])
        return batch

    task.next_batch = new_iteration

    def training() -> None:
        settings = LoopSettings(iterations=ITERATIONS + 2, checkpoint_every=10**6, plots=False)
        train(task, run, settings, progress=Progress(settings.iterations, stream=io.StringIO()))

    clocks = [
        clocked(factored_scan, "factored_scan_fwd", into("scan forward")),
        clocked(factored_scan, "factored_scan_bwd", into("scan backward")),
        clocked(task.model.readout, "loss", into("readout and loss")),
        clocked(task.optimizer, "step", into("optimizer")),
    ]
    benchmark.group = f"copy task, {ITERATIONS + 2} iterations"
    with clocks[0], clocks[1], clocks[2], clocks[3]:
        benchmark.pedantic(training, rounds=1)

    timed = range(1, ITERATIONS + 1)
    total = [begun[i + 1] - begun[i] for i in timed]
    spent["other"] = [0.0] * len(begun)
    for i, whole in zip(timed, total, strict=True):
        spent["other"][i] = whole - sum(spent[part][i] for part in PARTS[:-1])
    sizes = {**size, "B": task.settings["batch"]}
    whole = median(total)
    details = {"iterations_timed": len(total), "error": error, "tolerance": TOLERANCE}
    bench.record("copy", "one iteration", sizes, "time", 1e3 * whole, unit="ms", better="lower", details=details)
    for part in PARTS:
        share = median([spent[part][i] / t for i, t in zip(timed, total, strict=True)])
        milliseconds = {"ms": round(1e3 * median([spent[part][i] for i in timed]), 3)}
        bench.record("copy", part, sizes, "share of an iteration", 100 * share, unit="%", details=milliseconds)
    rest = [1 - (spent["scan forward"][i] + spent["scan backward"][i]) / t for i, t in zip(timed, total, strict=True)]
    bench.record(
        "copy",
        "all but the scan",
        sizes,
        "share of an iteration",
        100 * median(rest),
        unit="%",
        bar=25.0,
        better="lower",
    )


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_peak_memory(benchmark: Any, bench: Bench, size: Size) -> None:
    """Resident memory of the whole process at its peak, over a few iterations and an evaluation."""
    benchmark.group = "processes of their own"
    found = benchmark.pedantic(child, args=("copy", "--T", str(size["T"]), "--N", str(size["N"])), rounds=1)
    bench.record(
        "copy",
        "peak memory of the process",
        {**size, "B": found.pop("B")},
        "resident memory",
        found.pop("peak_mb"),
        unit="MB",
        bar=1500.0,
        better="lower",
        details=found,
    )
