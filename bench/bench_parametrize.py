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
from harness import Bench, Size, check
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.parametrize import register_parametrization

from orthokern import parametrize

SIZES = [{"N": 128, "K": 128}, {"N": 512, "K": 512}, {"N": 1024, "K": 32}]
QUICK = [{"N": 33, "K": 33}, {"N": 60, "K": 5}]
KINDS = {
    "matrix_exp": parametrize.Exponential,
    "cayley": parametrize.Cayley,
    "householder": parametrize.Householder,
}

# Relative RMS of weight and gradients against the same module in float64. Measured: at most 5e-7 (N = 512).
TOLERANCE = 2e-6
ORTHOGONAL = 1e-4  # largest |W^T W - I|, torch's too: a weight that is none is not worth a time


def layer(N: int, K: int, constrain: Callable[[nn.Module], object]) -> nn.Linear:
    """A layer with weight [N, K], constrained, moved away from where the constraint begins."""
    torch.manual_seed(N)
    linear = nn.Linear(K, N, bias=False)
    constrain(linear)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in linear.parameters():
            # torch's Householder map keeps its signs on the diagonal, as integers
            p.add_(torch.randn(p.shape, generator=generator).tril(-1), alpha=0.5 / N**0.5)
    return linear


def weight_and_gradients(module: nn.Linear, cotangent: Tensor) -> list[Tensor]:
    weight = module.weight
    return [weight, *torch.autograd.grad(weight, list(module.parameters()), cotangent)]


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("name", KINDS)
def test_weight(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """The matrix exponential and the Cayley map of square weights; K columns of a product of K reflections."""
    N, K = size["N"], size["K"]
    if (name == "householder") != (K < N):
        pytest.skip("reflections are for thin weights, the other maps for square ones")
    ours = layer(N, K, lambda m: register_parametrization(m, "weight", KINDS[name](m.weight)))  # type: ignore[arg-type]
    theirs = layer(N, K, lambda m: orthogonal(m, orthogonal_map=name))
    cotangent = torch.randn(N, K, generator=torch.Generator().manual_seed(2))
    exact = weight_and_gradients(copy.deepcopy(ours).double(), cotangent.double())
    error = check(name, weight_and_gradients(ours, cotangent), exact, TOLERANCE)
    for module in (ours, theirs):
        w = module.weight.detach()
        assert float((w.mT @ w - torch.eye(K)).abs().max()) < ORTHOGONAL
    bench.compare(
        benchmark,
        "parametrize",
        f"torch's {name}",
        size,
        lambda: weight_and_gradients(theirs, cotangent),
        lambda: weight_and_gradients(ours, cotangent),
        rounds=21 if N <= 128 else 7,
        warmup=2,
        error=error,
    )
