"""The spectral projection against a full SVD in every step (Kanai et al. 2017, Table 3), in a language model's training
iteration."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern.nn import GRU
from orthokern.optim import SpectralNormProjection

# Singular values of the change that an iteration of `word_lm` makes to W_hn after two epochs (Penn Treebank words,
# delta 0.2, seed 0; medians of 29 iterations, Frobenius norm 3.1), and those of W_hn itself, which decrease to 0.
STEP = (1.76, 1.2, 1.02, 0.83, 0.71, 0.62, 0.55, 0.48, 0.44, 0.39, 0.35, 0.31, 0.29, 0.27, 0.25, 0.24, 0.22, 0.2, 0.19)
SPECTRUM = (
    *(1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.79, 1.78, 1.77, 1.76, 1.75, 1.74, 1.73, 1.72, 1.71, 1.7),
    *(1.69, 1.69, 1.68, 1.67, 1.66, 1.65, 1.65, 1.64, 1.63, 1.63, 1.62, 1.61, 1.61, 1.6, 1.59, 1.59, 1.58, 1.58, 1.57),
)


def _training_steps(N: int, count: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """W [N, N] and `count` changes [N, N] of it with these singular values. Three quarters of a change's vectors lie in
    the span of W's 30 highest, as in training, so that about ten values rise above 1.8 in every step."""
    highest = torch.tensor(SPECTRUM[: N // 2])
    values = torch.cat([highest, torch.linspace(1.5, 0.0, N - len(highest))])
    u, v = (torch.linalg.qr(torch.randn(N, N, generator=generator))[0] for _ in range(2))
    step = torch.tensor(STEP[: N // 2])

    def near(vectors: Tensor) -> Tensor:
        mixed = vectors[:, :30] @ torch.randn(min(30, N), len(step), generator=generator)
        return torch.linalg.qr(mixed + 0.19 * torch.randn(N, len(step), generator=generator))[0]

    return (u * values) @ v.mT, [(near(u) * step) @ near(v).mT for _ in range(count)]


@pytest.mark.sizes([{"N": 650, "T": 35, "B": 20, "C": 10_000}], quick=[{"N": 24, "T": 5, "B": 3, "C": 50}])
def test_projection(bench: Bench, size: Size) -> None:
    """The projection's share of a language model's training iteration, and a full SVD's.

    Every call starts from the same spectrum and removes what a step as in `word_lm`, larger than the bound, adds above
    it. The cost is a mean over steps, because steps differ.
    """
    N, T, B, C = size["N"], size["T"], size["B"], size["C"]
    embedding, rnn, readout = torch.nn.Embedding(C, N), GRU(N, N, variant="kanai"), torch.nn.Linear(N, C)
    model = torch.nn.ModuleList([embedding, rnn, readout])
    tokens = torch.randint(0, C, (T + 1, B))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start, changes = _training_steps(N, 8, torch.Generator().manual_seed(0))

    def iteration() -> None:
        optimizer.zero_grad()
        logits = readout(rnn(0.01 * embedding(tokens[:-1]))[0])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten()).backward()
        optimizer.step()

    projection = SpectralNormProjection(rnn, delta=0.2)
    with torch.no_grad():
        rnn.recurrent_matrix().copy_(start)
    projection.step()
    ours, svds = rnn.recurrent_matrix().detach(), start.clone()  # the matrix of the SVD gets the same changes
    steps = {name: itertools.cycle(changes) for name in ("ours", "svd")}

    def disturb(name: str, w: Tensor) -> None:  # the optimizer's part
        w.copy_(start).add_(next(steps[name]))

    def clipped(w: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(w)
        return (u * s.clamp_max(1.8)) @ vh

    disturb("ours", ours)
    exact = clipped(ours.double())
    projection.step()
    error = check("projection", [ours], [exact], 1e-6)
    calls: dict[str, Callable[[], Any]] = {
        "iteration": iteration,
        "svd's change": lambda: disturb("svd", svds),
        "svd": lambda: svds.copy_(clipped(svds)),
        "change": lambda: disturb("ours", ours),
        "ours": projection.step,
    }
    seconds = bench.interleave("spectral projection", calls, rounds=17)
    iteration_seconds = statistics.median(seconds["iteration"])
    for case, times, target in (("projection", seconds["ours"], 12.0), ("full SVD", seconds["svd"], None)):
        bench.record(
            "projection",
            f"{case}, training steps",
            size,
            100 * statistics.fmean(times) / iteration_seconds,
            unit="%",
            target=target,
            better="lower",
            iteration_ms=1e3 * iteration_seconds,
            error=error,
        )
