"""The exponential of a skew matrix and its gradient against torch.matrix_exp with autograd.

Forward and backward together, float32, as a recurrence with the matrix exp(A) takes them every iteration. A is dense,
as it is after some training, with angles up to pi.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern import functional

SIZES = [{"N": N} for N in (64, 128, 256, 512)]
QUICK = [{"N": 33}]

# Relative RMS against torch.matrix_exp in float64. Measured: ours at most 7e-7, torch in float32 2.3e-4 (N = 512).
TOLERANCE = 2e-6
TORCH_TOLERANCE = 1e-3
ORTHOGONAL = 1e-6  # largest |P^T P - I| of ours


def skew(N: int) -> Tensor:
    """[N, N] float32 with angles up to pi."""
    x = torch.randn(N, N, generator=torch.Generator().manual_seed(N))
    a = x - x.mT
    return a * (torch.pi / torch.linalg.matrix_norm(a, 2))


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_forward_and_backward(benchmark: Any, bench: Bench, size: Size) -> None:
    N = size["N"]
    a, cotangent = skew(N), torch.randn(N, N, generator=torch.Generator().manual_seed(1))

    def run(function: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        x = a.to(dtype, copy=True).requires_grad_()
        p = function(x)
        (grad,) = torch.autograd.grad(p, x, cotangent.to(dtype))
        return [p.detach(), (grad - grad.mT) / 2]

    exact = run(torch.matrix_exp, torch.float64)
    ours = run(functional.skew_exp)
    error = check("skew_exp", ours, exact, TOLERANCE)
    check("torch.matrix_exp", run(torch.matrix_exp), exact, TORCH_TOLERANCE)
    assert float((ours[0].mT @ ours[0] - torch.eye(N)).abs().max()) < ORTHOGONAL
    bench.compare(
        benchmark,
        "skew_exp",
        "torch.matrix_exp and autograd",
        size,
        lambda: run(torch.matrix_exp),
        lambda: run(functional.skew_exp),
        rounds=41 if N <= 128 else 9,
        warmup=2,
        target=1.0,
        error=error,
    )
