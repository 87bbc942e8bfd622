"""Memory of a scan's forward and backward over that of states plus adjoints, each in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
from child import child
from harness import BATCH, Bench, Size

SIZES = [{"N": 128, "T": 10020}]
QUICK = [{"N": 32, "T": 200}]
CASES = [(op, inputs, "tanh", 0) for op in ("factored_scan", "dense_scan") for inputs in ("tokens", "features")]
# These keep their pre-activations for the backward: half as much again, and more than the target. Not so with
# checkpoints.
CASES += [(op, "tokens", "prelu", 0) for op in ("factored_scan", "dense_scan")]
CASES += [("factored_scan", "tokens", "oplu", 0)]
CASES += [("factored_scan", "tokens", activation, 100) for activation in ("prelu", "oplu")]


@pytest.mark.parametrize(("op", "inputs", "activation", "every"), CASES)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_peak(benchmark: Any, bench: Bench, size: Size, op: str, inputs: str, activation: str, every: int) -> None:
    """Loss on all states (linear readout, cross-entropy), gradients of everything, the features' included."""
    if bench.quick and (op, inputs, activation, every) not in (CASES[0], CASES[4]):
        pytest.skip("two processes are enough for a quick run")
    benchmark.group = "processes of their own"
    arguments = ["memory", "--op", op, "--inputs", inputs, "--activation", activation]
    arguments += ["--checkpoint-every", str(every), "--T", str(size["T"]), "--N", str(size["N"])]
    result = benchmark.pedantic(child, args=tuple(arguments), rounds=1)
    case = f"{op}, {inputs}" + ("" if activation == "tanh" else f", {activation}")
    case += f", checkpoint_every={every}" if every else ""
    sizes = {**size, "B": BATCH}
    bench.record("memory", case, sizes, result.pop("ratio"), target=1.3, better="lower", **result)
