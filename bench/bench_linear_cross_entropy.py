"""The fused readout and cross-entropy against torch's linear and cross_entropy, forward and backward: the copy task's
output layer, 9 classes at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check
from torch import Tensor
from torch.nn import functional as F

from orthokern import functional

SIZES = [{"N": 128, "T": 1000}, {"N": 128, "T": 10020}, {"N": 1000, "T": 120}]
QUICK = [{"N": 32, "T": 20}]
CLASSES = 9

# Relative RMS of float32 against float64; the loss and the gradients are sums over all rows. Measured: 1e-6.
TOLERANCE = 2e-5


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_readout(bench: Bench, size: Size) -> None:
    N, T = size["N"], size["T"]
    hidden, weight, bias = torch.randn(T, BATCH, N), torch.randn(CLASSES, N) / N**0.5, torch.randn(CLASSES)
    target = torch.randint(0, CLASSES, (T, BATCH))
    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]

    def eager(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), target.flatten())

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear_cross_entropy(hidden, weight, target, linear_bias=bias)

    def step(function: Any, inputs: list[Tensor] = inputs) -> tuple[Tensor, ...]:
        loss = function(*inputs)
        return loss, *torch.autograd.grad(loss, inputs)

    exact = step(eager, [t.detach().double().requires_grad_() for t in inputs])
    error = check("linear_cross_entropy", step(ours), exact, TOLERANCE)
    del exact
    sizes, case = {**size, "B": BATCH, "C": CLASSES}, "linear and cross_entropy over linear_cross_entropy"
    bench.compare("readout", case, sizes, lambda: step(eager), lambda: step(ours), rounds=11, error=error)
