"""Elementwise activations against the fastest implementation in eager torch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor
from torch.nn import functional as F

from orthokern import functional

SIZES = [{"T": 1000, "B": 50, "N": 128}]
QUICK = [{"T": 10, "B": 5, "N": 32}]

# Relative RMS of float32 against torch in float64; a slope's or bias's gradient is a sum over all rows. Measured: 2e-7.
TOLERANCE = 1e-5


def modrelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.sign(x) * torch.relu(x.abs() + bias)


def oplu(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([torch.maximum(a, b), torch.minimum(a, b)], -1).flatten(-2)


EAGER: dict[str, Callable[..., Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "prelu": F.prelu,
    "modrelu": modrelu,
    "oplu": oplu,
}


@pytest.mark.parametrize("name", list(EAGER))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_activation(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """Eager torch over ours."""
    x = torch.randn(size["T"], size["B"], size["N"])
    cotangent = torch.randn_like(x)
    parameter = {"prelu": torch.tensor([0.25]), "modrelu": torch.empty(size["N"]).uniform_(-0.1, 0.1)}.get(name)
    inputs = [t.requires_grad_() for t in (x, parameter) if t is not None]

    def step(function: Callable[..., Tensor], given: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
        y = function(*given)
        return y, *torch.autograd.grad(y, given, g)

    def ours(x: Tensor, parameter: Tensor | None = None) -> Tensor:
        return functional.activation(x, name, parameter)

    exact = step(EAGER[name], [t.detach().double().requires_grad_() for t in inputs], cotangent.double())
    error = check(name, step(ours, inputs, cotangent), exact, TOLERANCE)
    del exact
    benchmark.group = "activations, forward and backward"
    calls = {
        "eager": lambda: step(EAGER[name], inputs, cotangent),
        "ours": lambda: step(ours, inputs, cotangent),
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(15), warmup=2)
    bench.record(
        "activations",
        name,
        size,
        "times as long",
        ratio(seconds["eager"], seconds["ours"]),
        details={
            "ms": spread_ms(seconds["ours"]),
            "peer_ms": spread_ms(seconds["eager"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )
