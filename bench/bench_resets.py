"""The scans and the GRU with a share of the steps reset, over the same calls without `resets`; forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, factors, interleave
from torch import Tensor

from orthokern import functional

SIZES = [{"N": 128, "T": 1000}, {"N": 512, "T": 120}]
QUICK = [{"N": 24, "T": 12}]
SHARES = {"0 %": 0.0, "1 %": 0.01, "10 %": 0.1}

# Relative RMS of float32 against float64, on sums over up to 50 000 rows; measured: 2e-6.
TOLERANCE = 2e-5


@pytest.mark.parametrize("op", ["factored_scan", "dense_scan", "gru_scan"])
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_resets(benchmark: Any, bench: Bench, size: Size, op: str) -> None:
    """Forward and backward, resets to h0, spread at random over the batch."""
    N, T = size["N"], size["T"]
    generator = torch.Generator().manual_seed(N)
    u, s, v = factors(N, generator)
    w = (u * s) @ v.mT
    matrices = {"factored_scan": [u, s, v], "dense_scan": [w], "gru_scan": [torch.cat([w, w.mT, w @ w])]}[op]
    x, h0 = 0.1 * torch.randn(T, BATCH, matrices[0].shape[0], generator=generator), torch.randn(BATCH, N)
    inputs = [t.requires_grad_() for t in (x, *matrices, h0)]
    cotangent = torch.randn(T, BATCH, N, generator=generator)
    options = {"variant": "torch"} if op == "gru_scan" else {"activation": "tanh"}
    scan: Callable[..., Tensor] = functools.partial(getattr(functional, op), **options)
    drawn = torch.rand(T, BATCH, generator=torch.Generator().manual_seed(0))
    resets: dict[str, Tensor | None] = {name: drawn < share for name, share in SHARES.items()}

    def step(resets: Tensor | None, inputs: list[Tensor] = inputs, **options: Any) -> tuple[Tensor, ...]:
        hs = scan(*inputs, resets=resets, **options)
        return hs.detach(), *torch.autograd.grad(hs, inputs, cotangent.to(hs.dtype))

    check(f"{op} with no true reset", step(resets["0 %"]), step(None), 0.0)
    double = [t.detach().double().requires_grad_() for t in inputs]
    exact = step(resets["10 %"], double, backend="reference")
    error = check(f"{op} with resets", step(resets["10 %"]), exact, TOLERANCE)
    benchmark.group = f"{op} with resets, forward and backward"
    calls = {name: functools.partial(step, each) for name, each in {"without": None, **resets}.items()}
    seconds = interleave(benchmark, calls, rounds=bench.rounds(15))
    for name in SHARES:
        label = f"{op}, {name} of the steps"
        bench.record_ratio(
            "resets", label, size, seconds["without"], seconds[name], target=1.05, better="lower", error=error
        )
