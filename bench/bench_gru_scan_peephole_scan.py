"""nn.GRU against torch.nn.GRU and nn.LSTM against torch.nn.LSTM, forward and backward, D = N features, biases.

The GRU is also timed in the sizes of the tasks of Kanai et al. 2017.
"""

from __future__ import annotations

import pytest
import torch
from harness import Bench, Size, check, module_step

from orthokern.nn import GRU, LSTM

# the sizes of torch.nn.RNN in bench_modules.py
HEADLINE = [{"N": 128, "T": 1000, "B": 50}, {"N": 500, "T": 120, "B": 50}, {"N": 1000, "T": 120, "B": 50}]
SIZES = [{"N": 200, "T": 35, "B": 20}, {"N": 650, "T": 35, "B": 20}, *HEADLINE]
QUICK = [{"N": 24, "T": 5, "B": 3}]

# Relative RMS of float32 against float64, sums over up to 50 000 rows. Measured: 1e-6.
TOLERANCE = 2e-5


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("variant", [pytest.param("torch", marks=pytest.mark.headline), "kanai"])
def test_gru(bench: Bench, size: Size, variant: str) -> None:
    N = size["N"]
    theirs, ours = torch.nn.GRU(N, N), GRU(N, N, bias=True, variant=variant)
    exact = GRU(N, N, bias=True, variant=variant, dtype=torch.float64, backend="reference")
    case = f"torch.nn.GRU over orthokern.nn.GRU, variant {variant}"
    compare(bench, size, "gru", case, theirs, ours, exact, rounds=11)


@pytest.mark.headline
@pytest.mark.sizes(HEADLINE, quick=QUICK)
def test_lstm(bench: Bench, size: Size) -> None:
    N = size["N"]
    theirs, ours, exact = torch.nn.LSTM(N, N), LSTM(N, N), torch.nn.LSTM(N, N, dtype=torch.float64)
    case = "torch.nn.LSTM over orthokern.nn.LSTM"
    compare(bench, size, "lstm", case, theirs, ours, exact, rounds=7)


def compare(
    bench: Bench,
    size: Size,
    table: str,
    case: str,
    theirs: torch.nn.Module,
    ours: torch.nn.Module,
    exact: torch.nn.Module,
    rounds: int,
) -> None:
    for module in (ours, exact):
        module.load_state_dict(theirs.state_dict())
    N, T, B = size["N"], size["T"], size["B"]
    x, grad = torch.randn(T, B, N, requires_grad=True), torch.randn(T, B, N)
    expected = module_step(exact, x.detach().double().requires_grad_(), grad.double())
    error = check(table, module_step(ours, x, grad)[: len(expected)], expected, TOLERANCE)  # without the peepholes'
    bench.compare(
        table,
        case,
        size,
        lambda: module_step(theirs, x, grad),
        lambda: module_step(ours, x, grad),
        rounds=rounds,
        target=1.0,
        error=error,
    )
