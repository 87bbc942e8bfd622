"""One iteration of the copy task at T = 10000, as `python -m orthokern.tasks.copy` runs it: the time of its parts, and
the peak memory."""

from __future__ import annotations

import copy
import functools
import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, child, median

from orthokern.cpu import factored_scan
from orthokern.ops.modal import choice, cpu, op
from orthokern.ops.modal import loss as scan_loss
from orthokern.tasks import copy as copy_task
from orthokern.training import train
from orthokern.training.loop import LoopSettings
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder

SIZES = [{"N": 128, "T": 10000}]
QUICK = [{"N": 32, "T": 20}]
ITERATIONS = 12  # timed iterations, without the first one (warm-up) and the last one (evaluation)
ALGORITHMS = ("modal", "sequential")
# Parts of an iteration that are timed; the rest is "other".
PARTS = {
    "modal": ("recurrence, readout and loss", "eigenbasis", "gradient of W", "optimizer", "data"),
    "sequential": ("scan forward", "scan backward", "readout and loss", "optimizer", "data"),
}
# Milliseconds of an iteration at T = 10000, N = 128 on the two-core machine of the results: bar and goal.
ITERATION = {"modal": (80.0, 45.0), "sequential": (None, None)}
# Peak memory in MB by algorithm and T: bar and goal.
MEMORY = {("modal", 10000): (450.0, 350.0), ("sequential", 10000): (1500.0, None), ("modal", 10**6): (1000.0, 700.0)}

# Relative error of the first loss, float32 against float64; measured: 9e-6. Most of its terms are small differences of
# large numbers: the blank's bias of 8 makes them log(1 + 8 exp(-8)).
TOLERANCE = 1e-4


@contextmanager
def clocked(owner: Any, name: str, add: Callable[[float], None]) -> Iterator[None]:
    """Pass the seconds of every call of owner.name to `add` while the block runs."""
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


def experiment(T: int, N: int, algorithm: str) -> copy_task.CopyExperiment:
    """The task with its defaults, except for the algorithm."""
    torch.manual_seed(0)
    settings = {
        **copy_task.DEFAULTS,
        "T": T,
        "hidden": N,
        "iterations": ITERATIONS + 2,
        "eval_every": 0,
        "algorithm": algorithm,
    }
    return copy_task.CopyExperiment(copy_task.complete(settings))


def first_loss_error(T: int, N: int, algorithm: str) -> float:
    """Error of the loss of a few sequences before training, against the reference in float64."""
    ours = experiment(T, N, algorithm)
    tokens, targets = (t[:, :5].contiguous() for t in ours.next_batch())
    exact = copy.deepcopy(ours.model).double()
    for module in exact.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    exact.algorithm = "sequential"
    with torch.no_grad():
        actual, _ = ours.model(tokens, targets)
        expected, _ = exact(tokens, targets)
    return check("first loss", [actual], [expected], TOLERANCE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_parts_of_an_iteration(benchmark: Any, bench: Bench, size: Size, algorithm: str, tmp_path: Path) -> None:
    """Fractions of time of the scan and of everything else, including the training loop (norms, records, progress).

    Only the first iteration computes gradients through time, which costs a second modal pass."""
    T, N = size["T"], size["N"]
    error = first_loss_error(T, N, algorithm)
    task = experiment(T, N, algorithm)
    parts = PARTS[algorithm]
    run = RunFolder.create(tmp_path / "run", "copy", asdict(task.settings))
    begun: list[float] = []
    spent: dict[str, list[float]] = {part: [] for part in parts}

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
        settings = LoopSettings(iterations=ITERATIONS + 2, checkpoint_every=10**6, diagnose_every=10**6, plots=False)
        train(task, run, settings, progress=Progress(settings.iterations, stream=io.StringIO()))

    clocks = [clocked(task.optimizer, "step", into("optimizer"))]
    if algorithm == "modal":
        clocks.append(clocked(cpu, "loss", into("recurrence, readout and loss")))
        clocks.append(clocked(choice, "diagonalise", into("eigenbasis")))
        clocks.append(clocked(op, "gradient_of_w", into("gradient of W")))
    else:
        clocks.append(clocked(factored_scan, "factored_scan_fwd", into("scan forward")))
        clocks.append(clocked(factored_scan, "factored_scan_bwd", into("scan backward")))
        clocks.append(clocked(scan_loss, "_readout", into("readout and loss")))
    benchmark.group = f"copy task, {ITERATIONS + 2} iterations"
    with ExitStack() as stack:
        for clock in clocks:
            stack.enter_context(clock)
        benchmark.pedantic(training, rounds=1)

    timed = range(1, ITERATIONS + 1)
    total = [begun[i + 1] - begun[i] for i in timed]
    spent["other"] = [0.0] * len(begun)
    for i, whole in zip(timed, total, strict=True):
        spent["other"][i] = whole - sum(spent[part][i] for part in parts)
    sizes = {**size, "B": task.settings.batch}
    whole = median(total)
    details = {"iterations_timed": len(total), "error": error, "tolerance": TOLERANCE}
    bar, goal = ITERATION[algorithm] if T == 10000 and N == 128 else (None, None)
    bench.record(
        "copy",
        f"one iteration, {algorithm}",
        sizes,
        "time",
        1e3 * whole,
        unit="ms",
        bar=bar,
        goal=goal,
        better="lower",
        details=details,
    )
    for part in (*parts, "other"):
        share = median([spent[part][i] / t for i, t in zip(timed, total, strict=True)])
        milliseconds = {"ms": round(1e3 * median([spent[part][i] for i in timed]), 3)}
        bench.record(
            "copy", f"{part}, {algorithm}", sizes, "share of an iteration", 100 * share, unit="%", details=milliseconds
        )
    if algorithm == "modal":
        return
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.sizes([*SIZES, {"N": 128, "T": 10**6}], quick=QUICK)
def test_peak_memory(benchmark: Any, bench: Bench, size: Size, algorithm: str) -> None:
    """Resident memory of the whole process at its peak, over a few iterations and an evaluation."""
    where = f" at T = {size['T']}" if size["T"] > SIZES[0]["T"] else ""
    if where and algorithm == "sequential":
        pytest.skip("a million steps one by one take minutes")
    benchmark.group = "processes of their own"
    arguments = ("copy", "--T", str(size["T"]), "--N", str(size["N"]), "--algorithm", algorithm)
    found = benchmark.pedantic(child, args=arguments, rounds=1)
    bar, goal = MEMORY.get((algorithm, size["T"]), (None, None))
    bench.record(
        "copy",
        f"peak memory of the process{where}, {algorithm}",
        {**size, "B": found.pop("B")},
        "resident memory",
        found.pop("peak_mb"),
        unit="MB",
        bar=bar,
        goal=goal,
        better="lower",
        details=found,
    )
