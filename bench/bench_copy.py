"""The copy task by `python -m orthokern.tasks.copy`, in its own process: time of an iteration, and peak memory."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from harness import BATCH, Bench, Size, peak_of

ITERATIONS = 12
# Milliseconds of an iteration on the two-core machine of the results, and MB, by algorithm and T.
TARGETS_MS = {("modal", 10_000): 80.0}
TARGETS_MB = {("modal", 10_000): 450.0, ("sequential", 10_000): 1500.0, ("modal", 10**6): 1000.0}


@pytest.mark.parametrize("algorithm", ["modal", "sequential"])
@pytest.mark.sizes([{"N": 128, "T": 10_000}, {"N": 128, "T": 10**6}], quick=[{"N": 32, "T": 20}])
def test_copy(bench: Bench, size: Size, algorithm: str, tmp_path: Path) -> None:
    """A few iterations, an evaluation and plots. The first iteration, a warm-up, and the last one are not timed."""
    N, T = size["N"], size["T"]
    if T == 10**6 and algorithm == "sequential":
        pytest.skip("a million steps one by one take minutes")
    options = {"T": T, "hidden": N, "batch": BATCH, "algorithm": algorithm, "iterations": ITERATIONS}
    options |= {"diagnose-every": 10**6, "threads": torch.get_num_threads(), "out": tmp_path / "run"}
    command = [sys.executable, "-m", "orthokern.tasks.copy", *(f"--{name}={it}" for name, it in options.items())]
    bench.benchmark.group = "processes of their own"
    peak = bench.benchmark.pedantic(peak_of, args=(command,), rounds=1)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    assert losses and math.isfinite(losses[-1])
    ms = sorted(record["ms_per_iteration"] for record in records[1:-1] if "ms_per_iteration" in record)
    sizes, key = {**size, "B": BATCH}, (algorithm, T)
    median, spread = ms[len(ms) // 2], {"min": ms[0], "max": ms[-1]}
    for case, value, unit, targets in (
        ("one iteration", median, "ms", TARGETS_MS),
        ("peak memory", peak / 1e6, "MB", TARGETS_MB),
    ):
        details = spread if unit == "ms" else {}
        target = targets.get(key)
        bench.record("copy", f"{case}, {algorithm}", sizes, value, unit=unit, target=target, better="lower", **details)
