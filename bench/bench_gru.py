"""nn.GRU against torch.nn.GRU, forward and backward, and the spectral projection against a full SVD in every step
(Kanai et al. 2017, Table 3), in the sizes of the paper's tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor

from orthokern.nn import GRU
from orthokern.optim import SpectralNormProjection

SIZES = [{"N": 200, "T": 35, "B": 20}, {"N": 650, "T": 35, "B": 20}, {"N": 128, "T": 1000, "B": 50}]
QUICK = [{"N": 24, "T": 5, "B": 3}]
LANGUAGE_MODEL = [{"N": 650, "T": 35, "B": 20, "C": 10_000}]
LANGUAGE_MODEL_QUICK = [{"N": 24, "T": 5, "B": 3, "C": 50}]

# Relative RMS of float32 against float64, sums over up to 50 000 rows. Measured: 1e-6.
TOLERANCE = 2e-5


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("variant", ["torch", "kanai"])
def test_gru(benchmark: Any, bench: Bench, size: Size, variant: str) -> None:
    """torch.nn.GRU over ours, both with D = N features and biases."""
    N, T, B = size["N"], size["T"], size["B"]
    theirs, ours = torch.nn.GRU(N, N), GRU(N, N, bias=True, variant=variant)
    ours.load_state_dict(theirs.state_dict())
    x, grad = torch.randn(T, B, N, requires_grad=True), torch.randn(T, B, N)

    def step(module: torch.nn.Module, x: Tensor = x, grad: Tensor = grad) -> tuple[Tensor, ...]:
        output = module(x)[0]
        return output, *torch.autograd.grad(output, [x, *module.parameters()], grad)

    exact = GRU(N, N, bias=True, variant=variant, dtype=torch.float64, backend="reference")
    exact.load_state_dict(ours.state_dict())
    error = check("gru", step(ours), step(exact, x.detach().double().requires_grad_(), grad.double()), TOLERANCE)
    benchmark.group = "GRU, forward and backward"
    seconds = interleave(
        benchmark, {"torch": lambda: step(theirs), "ours": lambda: step(ours)}, rounds=bench.rounds(11)
    )
    bench.record(
        "gru",
        f"torch.nn.GRU over orthokern.nn.GRU, variant {variant}",
        size,
        "times as long",
        ratio(seconds["torch"], seconds["ours"]),
        bar=1.0,
        details={
            "ms": spread_ms(seconds["ours"]),
            "peer_ms": spread_ms(seconds["torch"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )


@pytest.mark.sizes(LANGUAGE_MODEL, quick=LANGUAGE_MODEL_QUICK)
def test_projection(benchmark: Any, bench: Bench, size: Size) -> None:
    """The projection's share of a language model's training iteration, and a full SVD's, in a training whose W_hn
    stays at the bound: what rises above it in every step has to be found and taken out."""
    N, T, B, C = size["N"], size["T"], size["B"], size["C"]
    embedding, rnn, readout = torch.nn.Embedding(C, N), GRU(N, N), torch.nn.Linear(N, C)
    model = torch.nn.ModuleList([embedding, rnn, readout])
    tokens = torch.randint(0, C, (T + 1, B))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(0)

    def iteration() -> None:
        optimizer.zero_grad()
        logits = readout(rnn(0.01 * embedding(tokens[:-1]))[0])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten()).backward()
        optimizer.step()

    with torch.no_grad():
        rnn.recurrent_matrix().mul_(torch.linspace(1.8, 0.2, N))  # orthogonal columns: these are its singular values
    start = rnn.recurrent_matrix().detach().clone()
    projection = SpectralNormProjection(rnn, delta=0.2)
    projection.step()
    noise = torch.randn(N, N, generator=generator)
    noise *= 0.02 / noise.norm()
    top = torch.outer(torch.linalg.svd(start)[0][:, 0], torch.linalg.svd(start)[2][0])

    def disturbed(project: Callable[[], Any]) -> None:
        with torch.no_grad():
            rnn.recurrent_matrix().add_(noise).add_(top, alpha=0.01)
        project()

    def by_svd() -> None:
        with torch.no_grad():
            w = rnn.recurrent_matrix()
            u, s, vh = torch.linalg.svd(w)
            w.copy_((u * s.clamp_max(1.8)) @ vh)

    disturbed(lambda: None)
    expected = rnn.recurrent_matrix().detach().double().clone()
    u, s, vh = torch.linalg.svd(expected)
    projection.step()
    error = check("projection", [rnn.recurrent_matrix().detach()], [(u * s.clamp_max(1.8)) @ vh], 1e-6)
    benchmark.group = "spectral projection"
    calls = {
        "iteration": iteration,
        "svd": lambda: disturbed(by_svd),
        "ours": lambda: disturbed(projection.step),
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(9))
    details = {
        "ms": spread_ms(seconds["ours"]),
        "svd_ms": spread_ms(seconds["svd"]),
        "iteration_ms": spread_ms(seconds["iteration"]),
        "error": error,
        "counts": dict(projection.counts),
    }
    share = 100 * ratio(seconds["ours"], seconds["iteration"])
    bench.record(
        "gru", "projection", size, "share of an iteration", share, unit="%", bar=5.0, better="lower", details=details
    )
    bench.record("gru", "full SVD over projection", size, "times as long", ratio(seconds["svd"], seconds["ours"]))
