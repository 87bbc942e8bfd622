"""nn.GRU against torch.nn.GRU, forward and backward, in the sizes of the tasks of Kanai et al. 2017."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern.nn import GRU

# the sizes of torch.nn.RNN in bench_modules.py
HEADLINE = [{"N": 128, "T": 1000, "B": 50}, {"N": 500, "T": 120, "B": 50}, {"N": 1000, "T": 120, "B": 50}]
SIZES = [{"N": 200, "T": 35, "B": 20}, {"N": 650, "T": 35, "B": 20}, *HEADLINE]
QUICK = [{"N": 24, "T": 5, "B": 3}]

# Relative RMS of float32 against float64, sums over up to 50 000 rows. Measured: 1e-6.
TOLERANCE = 2e-5


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("variant", [pytest.param("torch", marks=pytest.mark.headline), "kanai"])
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
    case = f"torch.nn.GRU over orthokern.nn.GRU, variant {variant}"
    bench.compare(
        benchmark, "gru", case, size, lambda: step(theirs), lambda: step(ours), rounds=11, target=1.0, error=error
    )
