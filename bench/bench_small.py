"""One sequence against torch.nn.RNN and torch.nn.GRU: `step` of a frozen module, and many steps at a large N.

A step is nearly all overhead: checks and allocation. Many steps at a large N are bound by the weights that every step
reads. Each row is our time over torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, module_step
from torch import Tensor, nn

from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, NonNormalRNN

FEATURES = 16
CALLS = 20  # of a step in one measurement
TOLERANCE = 2e-5  # relative RMS of float32 against float64; measured: 1e-6
MODULES: dict[str, Callable[..., Any]] = {
    "RNN": RNN,
    "FactorizedRNN": FactorizedRNN,
    "ExpRNN": ExpRNN,
    "NonNormalRNN": NonNormalRNN,
    "GRU": lambda *args, **options: GRU(*args, bias=True, variant="torch", **options),
}


def build(name: str, N: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Ours, the same in float64 on the reference backend, and torch's module of the same sizes."""
    ours = MODULES[name](FEATURES, N)
    exact = MODULES[name](FEATURES, N, dtype=torch.float64, backend="reference")
    exact.load_state_dict(ours.state_dict())
    return ours, exact, nn.GRU(FEATURES, N) if name == "GRU" else nn.RNN(FEATURES, N)


@torch.inference_mode()
@pytest.mark.sizes([{"N": 64, "T": 1, "B": 1}, {"N": 128, "T": 1, "B": 1}], quick=[{"N": 16, "T": 1, "B": 1}])
@pytest.mark.parametrize("name", MODULES)
def test_frozen_step(bench: Bench, size: Size, name: str) -> None:
    N = size["N"]
    ours, exact, theirs = build(name, N)
    x, h = torch.randn(1, 1, FEATURES), torch.randn(1, 1, N)
    frozen = ours.frozen()
    output, state = frozen.step(x[0], h)
    error = check(f"{name}, frozen step", [output.unsqueeze(0), state], exact(x.double(), h.double()), TOLERANCE)

    def repeated(call: Callable[[], Any]) -> None:
        for _ in range(CALLS):
            call()

    bench.compare(
        "frozen",
        name,
        {**size, "D": FEATURES},
        lambda: repeated(lambda: theirs(x, h)),
        lambda: repeated(lambda: frozen.step(x[0], h)),
        rounds=101,
        warmup=3,
        target=1.0,
        better="lower",
        calls=CALLS,
        error=error,
    )


@pytest.mark.sizes([{"N": N, "T": T, "B": 1} for T in (1, 200) for N in (500, 1000)], quick=[{"N": 40, "T": 8, "B": 1}])
@pytest.mark.parametrize("mode", ["inference", "gradients"])
@pytest.mark.parametrize("name", ["RNN", "FactorizedRNN", "GRU"])
def test_one_sequence(bench: Bench, size: Size, name: str, mode: str) -> None:
    N, T = size["N"], size["T"]
    ours, exact, theirs = build(name, N)
    x, cotangent = torch.randn(T, 1, FEATURES), torch.randn(T, 1, N)

    def run(module: nn.Module, x: Tensor = x, cotangent: Tensor = cotangent) -> tuple[Tensor, ...]:
        if mode == "gradients":
            return module_step(module, x, cotangent)
        with torch.inference_mode():
            return (module(x)[0],)

    bench.compare(
        "one sequence",
        f"{name}, {mode}",
        {**size, "D": FEATURES},
        lambda: run(theirs),
        lambda: run(ours),
        rounds=21,
        warmup=2,
        target=1.0,
        better="lower",
        error=check(f"{name}, one sequence", run(ours), run(exact, x.double(), cotangent.double()), TOLERANCE),
    )
