"""The copy task by `python -m orthokern.tasks.copy`, in a process of its own: an iteration's time, and peak memory."""

from __future__ import annotations

from typing import Any

import pytest
from child import child
from harness import Bench, Size

# Milliseconds of an iteration on the two-core machine of the results, and MB, by algorithm and T.
ITERATION = {("modal", 10_000): 80.0}
MEMORY = {("modal", 10_000): 450.0, ("sequential", 10_000): 1500.0, ("modal", 10**6): 1000.0}


@pytest.mark.parametrize("algorithm", ["modal", "sequential"])
@pytest.mark.sizes([{"N": 128, "T": 10_000}, {"N": 128, "T": 10**6}], quick=[{"N": 32, "T": 20}])
def test_copy(benchmark: Any, bench: Bench, size: Size, algorithm: str) -> None:
    N, T = size["N"], size["T"]
    if T == 10**6 and algorithm == "sequential":
        pytest.skip("a million steps one by one take minutes")
    benchmark.group = "processes of their own"
    arguments = ("copy", "--T", str(T), "--N", str(N), "--algorithm", algorithm)
    result = benchmark.pedantic(child, args=arguments, rounds=1)
    sizes = {**size, "B": result["B"]}
    for case, value, unit, targets in (
        ("one iteration", result["ms"]["median"], "ms", ITERATION),
        ("peak memory", result["peak_mb"], "MB", MEMORY),
    ):
        details = {"ms": result["ms"]} if unit == "ms" else {}
        target = targets.get((algorithm, T))
        bench.record("copy", f"{case}, {algorithm}", sizes, value, unit=unit, target=target, better="lower", **details)
