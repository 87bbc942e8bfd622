"""Memory of a scan's forward and backward over that of states plus adjoints, each in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
from harness import BATCH, Bench, Size, child

SIZES = [{"N": 128, "T": 10020}]
QUICK = [{"N": 32, "T": 200}]
BAR = 1.3


@pytest.mark.parametrize("inputs", ("tokens", "features"))
@pytest.mark.parametrize("op", ("factored_scan", "dense_scan"))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_peak(benchmark: Any, bench: Bench, size: Size, op: str, inputs: str) -> None:
    """Loss on all states (linear readout, cross-entropy), gradients of everything, the features' included."""
    if bench.quick and (op, inputs) != ("factored_scan", "tokens"):
        pytest.skip("one process is enough for a quick run")
    benchmark.group = "processes of their own"
    arguments = ["memory", "--op", op, "--inputs", inputs, "--T", str(size["T"]), "--N", str(size["N"])]
    found = benchmark.pedantic(child, args=tuple(arguments), rounds=1)
    bench.record(
        "memory",
        f"{op}, {inputs}",
        {**size, "B": BATCH},
        "peak over states and adjoints",
        found.pop("ratio"),
        bar=BAR,
        better="lower",
        details=found,
    )
