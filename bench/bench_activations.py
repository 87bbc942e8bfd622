"""Elementwise activations against the fastest implementation in eager torch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check
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
    x = torch.randn(size["T"], size["B"], size["N"])
    cotangent = torch.randn_like(x)
    parameter = {"prelu": torch.tensor([0.25]), "modrelu": torch.empty(size["N"]).uniform_(-0.1, 0.1)}.get(name)
    inputs = [t.requires_grad_() for t in (x, parameter) if t is not None]

    def step(function: Callable[..., Tensor], inputs: list[Tensor] = inputs, g: Tensor = cotangent) -> Any:
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, g)

    def ours(x: Tensor, parameter: Tensor | None = None) -> Tensor:
        return functional.activation(x, name, parameter)

    eager = EAGER[name]
    exact = step(eager, [t.detach().double().requires_grad_() for t in inputs], cotangent.double())
    error = check(name, step(ours), exact, TOLERANCE)
    del exact
    bench.compare(
        benchmark, "activations", name, size, lambda: step(eager), lambda: step(ours), rounds=15, warmup=2, error=error
    )
