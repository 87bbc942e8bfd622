"""Constrained weights of torch layers, orthokern.parametrize, against torch.nn.utils.parametrizations.orthogonal.

One weight, float32: its matrix from the parameters, and their gradients, as a layer takes them every iteration. A is
dense, as it is after some training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.parametrize import register_parametrization

from orthokern import parametrize

SIZES = [{"N": 128, "K": 128}, {"N": 512, "K": 512}]
THIN = [{"N": 1024, "K": 32}]
QUICK = [{"N": 33, "K": 33}]
QUICK_THIN = [{"N": 60, "K": 5}]

# Relative RMS of weight and gradients against the same module in float64. Measured: at most 5e-7 (N = 512).
TOLERANCE = 2e-6
ORTHOGONAL = 1e-4  # largest |W^T W - I|, torch's too: a weight that is none is not worth a time


def layer(N: int, K: int, constrain: Callable[[nn.Module], object]) -> nn.Linear:
    """A layer with weight [N, K], constrained, moved away from where the constraint begins."""
    torch.manual_seed(N)
    made = nn.Linear(K, N, bias=False)
    constrain(made)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            # torch's Householder map keeps its signs on the diagonal, as integers
            p.add_(torch.randn(p.shape, generator=generator).tril(-1), alpha=0.5 / N**0.5)
    return made


def weight_and_gradients(module: nn.Linear, cotangent: Tensor) -> list[Tensor]:
    weight = module.weight
    return [weight, *torch.autograd.grad(weight, list(module.parameters()), cotangent)]


def compare(
    benchmark: Any, bench: Bench, size: Size, name: str, ours: nn.Linear, theirs: nn.Linear, rounds: int
) -> None:
    """torch's time over ours; both checked to be what they promise."""
    N, K = size["N"], size["K"]
    cotangent = torch.randn(N, K, generator=torch.Generator().manual_seed(2))
    exact = weight_and_gradients(copy.deepcopy(ours).double(), cotangent.double())
    error = check(name, weight_and_gradients(ours, cotangent), exact, TOLERANCE)
    for module in (ours, theirs):
        w = module.weight.detach()
        assert float((w.mT @ w - torch.eye(K)).abs().max()) < ORTHOGONAL
    benchmark.group = f"constrained weight and its gradient, {N} x {K}"
    calls = {
        "torch": lambda: weight_and_gradients(theirs, cotangent),
        "ours": lambda: weight_and_gradients(ours, cotangent),
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(rounds), warmup=2)
    bench.record(
        "parametrize",
        f"torch's {name}",
        size,
        "times as long",
        ratio(seconds["torch"], seconds["ours"]),
        details={
            "ms": spread_ms(seconds["ours"]),
            "torch_ms": spread_ms(seconds["torch"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("name", ["matrix_exp", "cayley"])
def test_square(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """W = B exp(A) and the Cayley map."""
    N, K = size["N"], size["K"]
    kinds = {"matrix_exp": parametrize.Exponential, "cayley": parametrize.Cayley}
    ours = layer(N, K, lambda m: register_parametrization(m, "weight", kinds[name](m.weight)))  # type: ignore[arg-type]
    theirs = layer(N, K, lambda m: orthogonal(m, orthogonal_map=name))
    compare(benchmark, bench, size, name, ours, theirs, 21 if N <= 128 else 7)


@pytest.mark.sizes(THIN, quick=QUICK_THIN)
def test_thin(benchmark: Any, bench: Bench, size: Size) -> None:
    """K columns of a product of K reflections."""
    N, K = size["N"], size["K"]

    def constrain(module: nn.Module) -> None:
        assert isinstance(module.weight, Tensor)
        register_parametrization(module, "weight", parametrize.Householder(module.weight))

    theirs = layer(N, K, lambda m: orthogonal(m, orthogonal_map="householder"))
    compare(benchmark, bench, size, "householder", layer(N, K, constrain), theirs, 11)
