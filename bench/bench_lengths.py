"""Packed batches of sequences of different lengths: orthokern.nn.RNN beside torch.nn.RNN; forward and backward to all
parameters, 10 features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, module_step
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from orthokern.nn import RNN

SIZES = [{"N": 128, "T": 500}, {"N": 500, "T": 120}]
QUICK = [{"N": 33, "T": 12}]
FEATURES = 10
TOLERANCE = 2e-5  # relative RMS of float32 against torch's in float64; measured: at most 1e-6


def lengths_of(distribution: str, T: int) -> Tensor:
    """int64 [BATCH] in [1, T], the longest T."""
    generator = torch.Generator().manual_seed(0)
    if distribution == "equal":
        lengths = torch.full((BATCH,), T)
    elif distribution == "uniform":
        lengths = torch.randint(1, T + 1, (BATCH,), generator=generator)
    elif distribution == "geometric":
        lengths = torch.empty(BATCH).geometric_(4 / T, generator=generator).clamp(1, T).long()
    else:
        lengths = torch.full((BATCH,), max(T // 20, 1))
    lengths[BATCH // 2] = T
    return lengths


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("distribution", ["equal", "uniform", "geometric", "one long"])
def test_packed(benchmark: Any, bench: Bench, size: Size, distribution: str, ordered: bool) -> None:
    N, T = size["N"], size["T"]
    lengths = lengths_of(distribution, T)
    if ordered:
        lengths = lengths.sort(descending=True).values
    theirs, ours, double = nn.RNN(FEATURES, N), RNN(FEATURES, N), nn.RNN(FEATURES, N, dtype=torch.float64)
    for module in (ours, double):
        module.load_state_dict(theirs.state_dict())
    x, cotangent = torch.randn(T, BATCH, FEATURES), torch.randn(int(lengths.sum()), N)
    packed, exact = (pack_padded_sequence(each, lengths, enforce_sorted=ordered) for each in (x, x.double()))
    expected = module_step(double, exact, cotangent.double())
    bench.compare(
        benchmark,
        "packed",
        f"RNN, lengths {distribution}" + ("" if ordered else ", enforce_sorted=False"),
        {**size, "B": BATCH, "D": FEATURES},
        lambda: module_step(theirs, packed, cotangent),
        lambda: module_step(ours, packed, cotangent),
        rounds=11,
        target=1.0,
        error=check(f"packed, {distribution}", module_step(ours, packed, cotangent), expected, TOLERANCE),
        share_of_steps=float(lengths.sum()) / (T * BATCH),
    )
