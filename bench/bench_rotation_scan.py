"""RotationRNN over other linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern import nn

# Relative RMS of the gradients against those of the associative scan, which is float32 throughout.
TOLERANCE = 2e-4


def associative_scan(x: Tensor, eigenvalues: Tensor) -> Tensor:
    """The states [T, B, M] of a diagonal recurrence by log2(T) steps over all of x, each of twice the distance."""
    distance = 1
    while distance < len(x):
        x = torch.cat([x[:distance], x[distance:] + eigenvalues * x[:-distance]])
        eigenvalues, distance = eigenvalues * eigenvalues, 2 * distance
    return x


@pytest.mark.parametrize("peer", ("FactorizedRNN", "associative scan"))
@pytest.mark.parametrize("features", (1, 64))
@pytest.mark.sizes([{"N": 64, "T": 4096, "B": 8}], quick=[{"N": 8, "T": 20, "B": 2}])
def test_rotation(bench: Bench, size: Size, features: int, peer: str) -> None:
    """RotationRNN, forward and backward, over a linear FactorizedRNN, and over its own recurrence in torch."""
    N, T, B = size["N"], size["T"], size["B"]
    torch.manual_seed(0)
    x, cotangent = torch.randn(T, B, features), torch.randn(T, B, N)
    ours, other = nn.RotationRNN(features, N), nn.FactorizedRNN(features, N, nonlinearity="identity")
    own = list(ours.parameters())

    def rotation() -> tuple[Tensor, ...]:
        return torch.autograd.grad(ours(x)[0], own, cotangent)

    def factorized() -> tuple[Tensor, ...]:
        return torch.autograd.grad(other(x)[0], list(other.parameters()), cotangent)

    def associative() -> tuple[Tensor, ...]:
        weight, bias, re, im = ours._factors("l0")
        terms = torch.complex(*torch.nn.functional.linear(x, weight, bias).chunk(2, -1))
        states = associative_scan(terms, torch.complex(re, im).to(terms.dtype))
        return torch.autograd.grad(torch.cat([states.real, states.imag], -1), own, cotangent)

    error = check("associative scan", rotation(), associative(), TOLERANCE)
    theirs, target = (factorized, 3) if peer == "FactorizedRNN" else (associative, 5)
    case = f"{peer} over RotationRNN, {features} features"
    more: dict[str, Any] = {"target": target, "error": error}
    bench.compare("rotation", case, size, theirs, rotation, rounds=25, warmup=3, **more)
