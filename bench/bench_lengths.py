"""Packed batches of sequences of different lengths: orthokern.nn.RNN beside the same batch padded to a rectangle, and
beside torch.nn.RNN with the same packed batch; forward and backward to all parameters, 10 features.

The packed batch may not take longer than the rectangle, whatever the lengths; the share of the rectangle that holds
steps is in each row, and is what the time comes to where the lengths are sorted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from orthokern.nn import RNN

SIZES = [{"N": 128, "T": 500}, {"N": 500, "T": 120}]
QUICK = [{"N": 33, "T": 12}]
FEATURES = 10
# Relative RMS of float32 against torch's in float64. Measured: at most 1e-6.
TOLERANCE = 2e-5
DISTRIBUTIONS = ("equal", "uniform", "geometric", "one long")


def lengths_of(distribution: str, T: int) -> Tensor:
    """int64 [BATCH] in [1, T], the longest T."""
    generator = torch.Generator().manual_seed(0)
    if distribution == "equal":
        found = torch.full((BATCH,), T)
    elif distribution == "uniform":
        found = torch.randint(1, T + 1, (BATCH,), generator=generator)
    elif distribution == "geometric":
        found = torch.empty(BATCH).geometric_(4 / T, generator=generator).clamp(1, T).long()
    else:
        found = torch.full((BATCH,), max(T // 20, 1))
    found[BATCH // 2] = T
    return found


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packed(benchmark: Any, bench: Bench, size: Size, distribution: str, ordered: bool) -> None:
    """Ours of a packed batch over ours of the rectangle; torch's of the packed batch over ours."""
    N, T = size["N"], size["T"]
    lengths = lengths_of(distribution, T)
    if ordered:
        lengths = lengths.sort(descending=True).values
    theirs, ours = nn.RNN(FEATURES, N), RNN(FEATURES, N)
    ours.load_state_dict(theirs.state_dict())
    double = nn.RNN(FEATURES, N, dtype=torch.float64)
    double.load_state_dict(theirs.state_dict())
    x = torch.randn(T, BATCH, FEATURES)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=ordered)
    exact = pack_padded_sequence(x.double(), lengths, enforce_sorted=ordered)
    cotangent, for_packed = torch.randn(T, BATCH, N), torch.randn(int(lengths.sum()), N)

    def step(module: nn.Module, given: Tensor | PackedSequence, grad: Tensor) -> tuple[Tensor, ...]:
        output, _ = module(given)
        data = output.data if isinstance(output, PackedSequence) else output
        return data.detach(), *torch.autograd.grad(data, list(module.parameters()), grad)

    wanted = step(double, exact, for_packed.double())
    error = check(f"packed, {distribution}", step(ours, packed, for_packed), wanted, TOLERANCE)
    benchmark.group = "packed batches, forward and backward"
    calls = {
        "torch": lambda: step(theirs, packed, for_packed),
        "rectangle": lambda: step(ours, x, cotangent),
        "packed": lambda: step(ours, packed, for_packed),
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(11))
    case = f"RNN, lengths {distribution}" + ("" if ordered else ", enforce_sorted=False")
    share = float(lengths.sum()) / (T * BATCH)
    found = ratio(seconds["packed"], seconds["rectangle"])
    details = {
        "share_of_steps": round(share, 3),
        "over_share": round(found / share, 3),
        "ms": spread_ms(seconds["packed"]),
        "rectangle_ms": spread_ms(seconds["rectangle"]),
        "peer_ms": spread_ms(seconds["torch"]),
        "error": error,
        "tolerance": TOLERANCE,
    }
    where = {**size, "B": BATCH, "D": FEATURES}
    bench.record(
        "lengths", case, where, "time of the packed batch over that of the rectangle", found, bar=1.05, better="lower",
        details=details,
    )  # fmt: skip
    bench.record("lengths", f"torch.nn.RNN over orthokern's {case}", where, "times as long",
                 ratio(seconds["torch"], seconds["packed"]), bar=1.0, details=details)  # fmt: skip
