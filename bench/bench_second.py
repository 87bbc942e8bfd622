"""The double backward of the scans against their first backward, and one tangent (forward mode) against a forward.

Both modules have D = N features. The double backward is what `loss.backward()` of a gradient penalty does: the
derivative of the first gradients, which one call with create_graph=True has made ready.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check, interleave, ratio, spread_ms
from torch import Tensor

from orthokern.nn import GRU, RNN, FactorizedRNN

SIZES = [{"N": 128, "T": 120, "B": 50}, {"N": 500, "T": 120, "B": 50}]
QUICK = [{"N": 24, "T": 5, "B": 3}]
BAR = 4.0
MEASURE = "time over that of one pass"  # ours over ours

# Relative RMS of float32 against the reference in float64. Measured: 2e-6 (factorized, N = 500).
TOLERANCE = 5e-5
MODULES = {
    "factorized": FactorizedRNN,
    "rnn": RNN,
    "gru, variant torch": lambda *sizes, **options: GRU(*sizes, variant="torch", **options),
    "gru, variant kanai": lambda *sizes, **options: GRU(*sizes, variant="kanai", **options),
}


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("kind", MODULES)
def test_double_backward(benchmark: Any, bench: Bench, size: Size, kind: str) -> None:
    """The double backward over the first backward without create_graph."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (torch.randn(T, B, N, generator=generator) for _ in range(2))

    def prepared(module: torch.nn.Module, create_graph: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves, and what has to be derived: the states, or the first gradients."""
        dtype = next(module.parameters()).dtype
        leaves = [x.to(dtype, copy=True).requires_grad_(), *module.parameters()]
        states = module(leaves[0])[0]
        if not create_graph:
            return leaves, [states]
        return leaves, list(torch.autograd.grad(states, leaves, cotangent.to(dtype), create_graph=True))

    def derive(leaves: list[Tensor], outputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(outputs, leaves, directions, retain_graph=True, materialize_grads=True))

    module = MODULES[kind](N, N)
    exact = MODULES[kind](N, N, dtype=torch.float64, backend="reference")
    exact.load_state_dict(module.state_dict())
    first, second = prepared(module, False), prepared(module, True)
    directions = [torch.randn(output.shape, generator=generator) for output in second[1]]
    wanted = derive(*prepared(exact, True), [direction.double() for direction in directions])
    error = check(kind, derive(*second, directions), wanted, TOLERANCE)

    benchmark.group = f"double backward, {kind}"
    calls = {"first": lambda: derive(*first, [cotangent]), "second": lambda: derive(*second, directions)}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(11))
    details = {"ms": spread_ms(seconds["second"]), "peer_ms": spread_ms(seconds["first"])}
    bench.record(
        "second", f"double backward over backward, {kind}", size, MEASURE,
        ratio(seconds["second"], seconds["first"]), bar=BAR, better="lower",
        details={**details, "error": error, "tolerance": TOLERANCE},
    )  # fmt: skip


@pytest.mark.sizes(SIZES, quick=QUICK)
@pytest.mark.parametrize("kind", MODULES)
def test_tangent(benchmark: Any, bench: Bench, size: Size, kind: str) -> None:
    """torch.func.jvp, which is a forward and a tangent, over the forward alone. No bar."""
    N, T, B = size["N"], size["T"], size["B"]
    module, x, direction = MODULES[kind](N, N), *(torch.randn(T, B, N) for _ in range(2))

    exact = MODULES[kind](N, N, dtype=torch.float64, backend="reference")
    exact.load_state_dict(module.state_dict())

    def forward(x: Tensor) -> Tensor:
        states: Tensor = module(x)[0]
        return states

    with torch.no_grad():
        wanted = torch.func.jvp(lambda x: exact(x)[0], (x.double(),), (direction.double(),))
        error = check(kind, torch.func.jvp(forward, (x,), (direction,)), wanted, TOLERANCE)
        benchmark.group = f"forward mode, {kind}"
        calls = {"forward": lambda: forward(x), "jvp": lambda: torch.func.jvp(forward, (x,), (direction,))}
        seconds = interleave(benchmark, calls, rounds=bench.rounds(11))
    details = {"ms": spread_ms(seconds["jvp"]), "peer_ms": spread_ms(seconds["forward"])}
    bench.record(
        "second", f"jvp over forward, {kind}", size, MEASURE, ratio(seconds["jvp"], seconds["forward"]),
        better="lower", details={**details, "error": error, "tolerance": TOLERANCE},
    )  # fmt: skip
