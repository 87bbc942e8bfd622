"""Linear recurrences: the modal form over the sequential scan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, factors
from torch import Tensor

from orthokern import functional, nn

SIZES = [{"N": 128, "T": T, "B": B} for T, B in ((1000, 50), (10020, 50), (10020, 1))]
QUICK = [{"N": 33, "T": 40, "B": 3}]
# Relative RMS of the modal results against the sequential scan, the less exact of the two.
TOLERANCE = 2e-4


@pytest.mark.parametrize("what", ("states", "loss"))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_modal(benchmark: Any, bench: Bench, size: Size, what: str) -> None:
    """A linear scan of token ids, forward and backward, with the eigenbasis computed in every call: its states; or the
    cross-entropy of a readout with nine classes, without storing the states."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, _, v = factors(N, generator)
    s = 1 + 0.001 * (2 * torch.rand(N, generator=generator) - 1)
    table, readout = torch.randn(N, 10, generator=generator), 0.01 * torch.randn(9, N, generator=generator)
    ids = torch.randint(0, 10, (T, B), generator=generator)
    target = torch.randint(0, 9, (T, B), generator=generator)
    cotangent = torch.randn(T, B, N, generator=generator) if what == "states" else None
    inputs = [u, s, v, table, *([readout] if what == "loss" else [])]
    for tensor in inputs:
        tensor.requires_grad_()

    def step(algorithm: str) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"weight": table, "activation": "identity", "algorithm": algorithm}
        if what == "states":
            output = functional.factored_scan(ids, u, s, v, **options)
        else:
            output = functional.scan_cross_entropy(ids, (u, s, v), readout, target, **options).loss
        return torch.autograd.grad(output, inputs, cotangent)

    bench.compare(
        benchmark,
        "modal",
        f"sequential over modal, {what}",
        size,
        functools.partial(step, "sequential"),
        functools.partial(step, "modal"),
        rounds=9 if T < 5000 else 5,
        target=1.6 if what == "states" and T > 5000 and B > 1 else None,
        error=check(f"modal {what}", step("modal"), step("sequential"), TOLERANCE),
    )


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
def test_rotation(benchmark: Any, bench: Bench, size: Size, features: int, peer: str) -> None:
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
    bench.compare(benchmark, "rotation", case, size, theirs, rotation, rounds=9, **more)
