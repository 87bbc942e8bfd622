"""Small calls: one step of one sequence, and one sequence of many steps, beside torch.nn.RNN and torch.nn.GRU.

The step is nearly all overhead: checks, the autograd graph, allocation. The parameters stay as they are, so that what
was made of them is kept between calls. In inference mode, with the module and with the
frozen module's `step`; and forward with backward to all parameters. One sequence at a large N is bound by the weights
that every step reads. Each row is our time over torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
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
BARS = {"inference": 1.2, "frozen step": 1.0, "gradients": 1.5}
STEPS = [{"N": 64, "T": 1, "B": 1}, {"N": 128, "T": 1, "B": 1}]
LONG = [{"N": N, "T": T, "B": 1} for T in (1, 200) for N in (500, 1000)]


def peer(name: str, N: int) -> nn.RNNBase:
    return nn.GRU(FEATURES, N) if name == "GRU" else nn.RNN(FEATURES, N)


@pytest.mark.sizes(STEPS, quick=[{"N": 16, "T": 1, "B": 1}])
@pytest.mark.parametrize("mode", BARS)
@pytest.mark.parametrize("name", MODULES)
def test_step(benchmark: Any, bench: Bench, size: Size, name: str, mode: str) -> None:
    N = size["N"]
    ours, theirs = MODULES[name](FEATURES, N), peer(name, N)
    exact = MODULES[name](FEATURES, N, dtype=torch.float64, backend="reference")
    exact.load_state_dict(ours.state_dict())
    x, h = torch.randn(1, 1, FEATURES), torch.randn(1, 1, N)
    frozen = ours.frozen()

    def gradients(module: nn.Module, x: Tensor = x, h: Tensor = h) -> tuple[Tensor, ...]:
        output, _ = module(x, h)
        return output.detach(), *torch.autograd.grad(output.sum(), list(module.parameters()))

    call: Callable[[nn.Module], Any] = gradients if mode == "gradients" else lambda module: module(x, h)
    own: Callable[[], Any] = (lambda: frozen.step(x[0], h)) if mode == "frozen step" else (lambda: call(ours))
    with torch.set_grad_enabled(mode == "gradients"):
        wanted = gradients(exact, x.double(), h.double()) if mode == "gradients" else exact(x.double(), h.double())
        found = own()
    if mode == "frozen step":
        found = found[0].unsqueeze(0), found[1]
    error = check(f"{name}, {mode}", found, wanted, TOLERANCE)

    def repeated(one: Callable[[], Any]) -> None:
        if mode == "gradients":
            for _ in range(CALLS):
                one()
            return
        with torch.inference_mode():
            for _ in range(CALLS):
                one()

    benchmark.group = f"one step, {mode}"
    calls = {"torch": lambda: repeated(lambda: call(theirs)), "ours": lambda: repeated(own)}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(101), warmup=3)
    bench.record(
        "small", f"{name}, {mode}", {**size, "D": FEATURES}, "time over that of torch's module",
        ratio(seconds["ours"], seconds["torch"]), bar=BARS[mode], better="lower",
        details={"calls": CALLS, "ms": spread_ms(seconds["ours"]), "peer_ms": spread_ms(seconds["torch"]),
                 "error": error, "tolerance": TOLERANCE},
    )  # fmt: skip


@pytest.mark.sizes(LONG, quick=[{"N": 40, "T": 8, "B": 1}])
@pytest.mark.parametrize("mode", ["inference", "gradients"])
@pytest.mark.parametrize("name", ["RNN", "FactorizedRNN", "GRU"])
def test_one_sequence(benchmark: Any, bench: Bench, size: Size, name: str, mode: str) -> None:
    N, T = size["N"], size["T"]
    ours, theirs = MODULES[name](FEATURES, N), peer(name, N)
    exact = MODULES[name](FEATURES, N, dtype=torch.float64)
    exact.load_state_dict(ours.state_dict())
    x, cotangent = torch.randn(T, 1, FEATURES), torch.randn(T, 1, N)

    def run(module: nn.Module, x: Tensor = x, cotangent: Tensor = cotangent) -> tuple[Tensor, ...]:
        if mode == "inference":
            with torch.inference_mode():
                return (module(x)[0],)
        output, _ = module(x)
        return output.detach(), *torch.autograd.grad(output, list(module.parameters()), cotangent)

    error = check(f"{name}, one sequence", run(ours), run(exact, x.double(), cotangent.double()), TOLERANCE)
    benchmark.group = f"one sequence, {mode}"
    calls = {"torch": lambda: run(theirs), "ours": lambda: run(ours)}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(21), warmup=2)
    bench.record(
        "small", f"{name}, one sequence, {mode}", {**size, "D": FEATURES}, "time over that of torch's module",
        ratio(seconds["ours"], seconds["torch"]), bar=1.0, better="lower",
        details={"ms": spread_ms(seconds["ours"]), "peer_ms": spread_ms(seconds["torch"]), "error": error,
                 "tolerance": TOLERANCE},
    )  # fmt: skip
