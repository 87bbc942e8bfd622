"""Several models at once: torch.func.vmap over stacked modules, against a loop over the modules and over torch.nn.RNN.

8 models of 10 input features, the sequences their own, tanh, forward and backward to all parameters, cotangents at
every step. T = 200, so that a model is small and its fixed costs count.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_modules import FEATURES, TOLERANCE, build, expected, gradients
from harness import BATCH, Bench, Size, check, interleave, median, ratio, spread_ms
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

SIZES = [{"N": 64, "T": 200, "R": 8}, {"N": 128, "T": 200, "R": 8}]
QUICK = [{"N": 16, "T": 5, "R": 3}]

# Time of the loop over that of one call: the loop over the same modules, and over torch.nn.RNN.
BARS = {"one call for each model": 1 / 0.6, "torch.nn.RNN": 4.0}


@pytest.mark.parametrize("name", ["RNN", "FactorizedRNN"])
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_replicas(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """R models in one call: forward and backward of vmap over the stacked parameters."""
    N, T, R = size["N"], size["T"], size["R"]
    pairs = [build(name, N) for _ in range(R)]
    ours, theirs = zip(*pairs, strict=True)
    x, cotangent = torch.randn(R, T, BATCH, FEATURES), torch.randn(R, T, BATCH, N)
    parameters, buffers = stack_module_state(list(ours))

    def output(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(ours[0], (parameters, buffers), (x,))[0]
        return found

    def together() -> tuple[Tensor, ...]:
        return torch.autograd.grad(vmap(output)(parameters, buffers, x), list(parameters.values()), cotangent)

    def loop(modules: tuple[torch.nn.Module, ...]) -> list[tuple[Tensor, ...]]:
        return [
            torch.autograd.grad(module(one)[0], list(module.parameters()), g)
            for module, one, g in zip(modules, x, cotangent, strict=True)
        ]

    found, error = together(), 0.0
    for r, (module, peer) in enumerate(pairs):
        wanted = expected(module, peer, x[r], cotangent[r])
        actual = dict(zip(parameters, (grad[r] for grad in found), strict=True))
        error = max(error, check(name, actual.values(), [wanted[key] for key in actual], TOLERANCE))
    outputs = [gradients(module, x[r], cotangent[r])["output"] for r, module in enumerate(ours)]
    check(name, vmap(output)(parameters, buffers, x).detach(), outputs, TOLERANCE)

    benchmark.group = "replicas, forward and backward"
    calls = {
        "torch.nn.RNN": lambda: loop(theirs),
        "one call for each model": lambda: loop(ours),
        "ours": together,
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(21))
    for peer_name, bar in BARS.items():
        bench.record(
            "replicas",
            f"{peer_name} over vmap of orthokern.nn.{name}",
            {**size, "B": BATCH, "D": FEATURES},
            "times as long",
            ratio(seconds[peer_name], seconds["ours"]),
            bar=bar,
            details={
                "us_per_step_and_model": round(1e6 * median(seconds["ours"]) / T / R, 3),
                "ms": spread_ms(seconds["ours"]),
                "peer_ms": spread_ms(seconds[peer_name]),
                "error": error,
                "tolerance": TOLERANCE,
            },
        )
