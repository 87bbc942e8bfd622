"""Packed batches of sequences of different lengths: orthokern.nn.RNN beside the same batch padded to a rectangle, and
beside torch.nn.RNN with the same packed batch; forward and backward to all parameters, 10 features.

The packed batch may not take longer than the rectangle, whatever the lengths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, interleave, module_step
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
    x = torch.randn(T, BATCH, FEATURES)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=ordered)
    exact = pack_padded_sequence(x.double(), lengths, enforce_sorted=ordered)
    cotangent, for_packed = torch.randn(T, BATCH, N), torch.randn(int(lengths.sum()), N)

    expected = module_step(double, exact, for_packed.double())
    error = check(f"packed, {distribution}", module_step(ours, packed, for_packed), expected, TOLERANCE)
    benchmark.group = "packed batches, forward and backward"
    calls = {
        "torch": lambda: module_step(theirs, packed, for_packed),
        "rectangle": lambda: module_step(ours, x, cotangent),
        "packed": lambda: module_step(ours, packed, for_packed),
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(11))
    case = f"RNN, lengths {distribution}" + ("" if ordered else ", enforce_sorted=False")
    sizes, share = {**size, "B": BATCH, "D": FEATURES}, float(lengths.sum()) / (T * BATCH)
    for table, peer, target, better in (("lengths", "rectangle", 1.05, "lower"), ("packed", "torch", 1.0, "higher")):
        bench.record_ratio(
            table,
            case,
            sizes,
            seconds[peer],
            seconds["packed"],
            target=target,
            better=better,
            error=error,
            share_of_steps=share,
        )
