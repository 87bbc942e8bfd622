"""Learned orthogonality of a batch of matrices in one call against a Python loop over them: the same descent by torch's
own operations, which stops for every matrix where it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor

from orthokern.init import learned_orthogonal_

# N: side of the matrices; B: how many
SIZES = [{"N": 16, "B": 400}, {"N": 32, "B": 200}, {"N": 100, "B": 100}]
QUICK = [{"N": 8, "B": 6}]

LR, TOL = 0.1, 1e-6
# Relative RMS of float32 matrices against the loop in float64. Measured: 1.4e-6; a matrix that stops a step apart, its
# error being at the tolerance, is off by up to sqrt(TOL / N).
TOLERANCE = 1e-4


def loop(given: Tensor) -> Tensor:
    """The plain rule, matrix by matrix, on [B, N, N]."""
    results = []
    for w in given:
        eye = torch.eye(len(w), dtype=w.dtype)
        while True:
            distance = w @ w.mT - eye
            if distance.square().sum() < TOL:
                break
            w = w - 4.0 * LR * distance @ w
        results.append(w)
    return torch.stack(results)


def together(given: Tensor) -> Tensor:
    w = given.clone()
    result = learned_orthogonal_(w, LR, TOL)
    assert result.converged.all()
    return w


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_learned_orthogonality(benchmark: Any, bench: Bench, size: Size) -> None:
    """The loop's time over ours, with the guard."""
    N, B = size["N"], size["B"]
    given = torch.randn(B, N, N) / N**0.5
    error = check("learned_orthogonal_", [together(given)], [loop(given.double())], TOLERANCE)
    benchmark.group = "learned orthogonality"
    calls = {"loop": lambda: loop(given), "ours": lambda: together(given)}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(7))
    bench.record(
        "oinit",
        "a Python loop over learned_orthogonal_ of the batch",
        size,
        "times as long",
        ratio(seconds["loop"], seconds["ours"]),
        details={
            "ms": spread_ms(seconds["ours"]),
            "peer_ms": spread_ms(seconds["loop"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )
