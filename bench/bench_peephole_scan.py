"""nn.PeepholeLSTM against torch.nn.LSTM, forward and backward, in the sizes of bench_gru_scan.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern.nn import PeepholeLSTM

SIZES = [{"N": 128, "T": 1000, "B": 50}, {"N": 500, "T": 120, "B": 50}, {"N": 1000, "T": 120, "B": 50}]
QUICK = [{"N": 24, "T": 5, "B": 3}]

# Relative RMS of float32 against float64, sums over up to 50 000 rows. Measured: 1e-6.
TOLERANCE = 2e-5


@pytest.mark.headline
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_peephole_lstm(benchmark: Any, bench: Bench, size: Size) -> None:
    """torch.nn.LSTM over ours, both with D = N features and biases. With peepholes of zero they compute the same."""
    N, T, B = size["N"], size["T"], size["B"]
    theirs, ours, exact = torch.nn.LSTM(N, N), PeepholeLSTM(N, N), torch.nn.LSTM(N, N, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    exact.load_state_dict(theirs.state_dict())
    x, grad = torch.randn(T, B, N, requires_grad=True), torch.randn(T, B, N)

    def step(module: torch.nn.Module, x: Tensor = x, grad: Tensor = grad) -> tuple[Tensor, ...]:
        output = module(x)[0]
        return output, *torch.autograd.grad(output, [x, *module.parameters()], grad)

    actual = step(ours)[:-1]  # without the peepholes' gradient
    error = check("lstm", actual, step(exact, x.detach().double().requires_grad_(), grad.double()), TOLERANCE)
    case = "torch.nn.LSTM over orthokern.nn.PeepholeLSTM"
    bench.compare(
        benchmark, "lstm", case, size, lambda: step(theirs), lambda: step(ours), rounds=7, target=1.0, error=error
    )
