"""Cost as T, B and N grow: orthokern.nn.RNN and FactorizedRNN beside torch.nn.RNN, forward and backward.

One letter varies, the others stay at T = 100, B = 50, N = 128 (T = 30 where N varies). tanh, 10 input features. All
three modules hold the same recurrence and must agree before they are timed. The session plots the curves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_modules import FEATURES, copy_weights
from harness import Bench, Size, check, interleave, median, ratio, spread_ms
from torch import Tensor, nn

import orthokern.nn

SIZES = [
    *({"N": 128, "T": T, "B": 50} for T in (1, 3, 10, 30, 100, 300, 1000, 3000)),
    *({"N": 128, "T": 100, "B": B} for B in (1, 2, 3, 5, 10, 25, 64, 100, 128, 256, 333, 512)),
    *({"N": N, "T": 30, "B": 50} for N in (16, 31, 64, 100, 200, 256, 333, 512, 777, 1024)),  # 128: above
]
QUICK = [
    *({"N": 128, "T": T, "B": 50} for T in (1, 3)),
    *({"N": 128, "T": 100, "B": B} for B in (1, 2)),
    *({"N": N, "T": 30, "B": 50} for N in (16, 31)),
]

# Relative RMS between float32 results of ours and of torch's: rounding of both, and of the composed matrix.
TOLERANCE = 5e-5


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_scaling(benchmark: Any, bench: Bench, size: Size) -> None:
    """One point of the three curves."""
    N, T, B = size["N"], size["T"], size["B"]
    factorized = orthokern.nn.FactorizedRNN(FEATURES, N)
    theirs, dense = nn.RNN(FEATURES, N), orthokern.nn.RNN(FEATURES, N)
    copy_weights(factorized, theirs)
    dense.load_state_dict(theirs.state_dict())
    x, cotangent = torch.randn(T, B, FEATURES), torch.randn(T, B, N)

    def step(module: nn.Module) -> tuple[Tensor, ...]:
        output, _ = module(x)
        return output, *torch.autograd.grad(output, list(module.parameters()), cotangent)

    wanted = step(theirs)  # output, then weight_ih first in all three
    check("orthokern.nn.RNN", step(dense), wanted, TOLERANCE)
    check("orthokern.nn.FactorizedRNN", step(factorized)[:2], wanted[:2], TOLERANCE)
    del wanted

    benchmark.group = "scaling, forward and backward"
    calls = {
        "torch.nn.RNN": lambda: step(theirs),
        "RNN": lambda: step(dense),
        "FactorizedRNN": lambda: step(factorized),
    }
    # Short calls are repeated more often: their medians are the ones that a single interruption would move.
    rounds = 30 if T * B * N < 10**6 else 7 if T * B * N < 10**7 else 3
    seconds = interleave(benchmark, calls, rounds=bench.rounds(rounds))
    for name in calls:
        bench.record(
            "scaling",
            name,
            size,
            "us per step",
            1e6 * median(seconds[name]) / T,
            unit="us",
            better="lower",
            details={
                "us_per_sequence": round(1e6 * median(seconds[name]) / B, 3),
                "torch_over_ours": round(ratio(seconds["torch.nn.RNN"], seconds[name]), 3),
                "ms": spread_ms(seconds[name]),
                "tolerance": TOLERANCE,
            },
        )
