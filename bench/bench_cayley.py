"""The Cayley step of two N x N bases against torch.linalg.solve.

Two step sizes are timed, because the kernel has different algorithms for them (csrc/cpu/cayley.cpp, Note [Which
series]): a step as small as in training, where one product after X is enough, and a step that rotates the bases by some
degrees, where I + X is factored. torch takes the same time for both: the reference's formula in float32, with baddbmm
and one batched solve.
"""

from __future__ import annotations

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern import functional, init
from orthokern.reference.cayley import cayley as reference

SIZES = [{"N": N, "B": 2} for N in (64, 128, 256, 512, 1000)]
QUICK = [{"N": 33, "B": 2}]

# |lr G| in the Frobenius norm, as a multiple of sqrt(N): 1e-6 corresponds to a clipped gradient at the rate of the copy
# task; 0.05 rotates the bases by at most 8 degrees.
STEPS = {"training's step": 1e-6, "large step": 0.05}

# Relative RMS of float32 against float64. Measured: 3e-8, half a unit in the last place; the large step, 5e-8.
TOLERANCE = 5e-7


def by_solve(m: Tensor, g: Tensor, lr: float) -> Tensor:
    """The step in torch's own operations: m, g [B, N, N]."""
    a = torch.baddbmm(torch.bmm(m, g.mT), g, m.mT, beta=-1)
    correction = torch.bmm(a, m)
    a.mul_(lr / 2).diagonal(dim1=-2, dim2=-1).add_(1)
    return m - lr * torch.linalg.solve(a, correction)


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_step(bench: Bench, size: Size, step: str) -> None:
    """Time of torch divided by that of functional.cayley, including its checks for NaN."""
    N, B = size["N"], size["B"]
    generator = torch.Generator().manual_seed(N)
    m = torch.stack([init.haar_orthogonal_(torch.empty(N, N), generator) for _ in range(B)])
    g = torch.randn(B, N, N, generator=generator) / N**0.5  # |G|_F = sqrt(N)
    lr = STEPS[step]

    exact = reference(m.double(), g.double(), lr)
    error = check("cayley", [functional.cayley(m, g, lr)], [exact], TOLERANCE)
    check("torch.linalg.solve", [by_solve(m, g, lr)], [exact], TOLERANCE)
    bench.compare(
        "cayley",
        f"torch.linalg.solve, {step}",
        size,
        lambda: by_solve(m, g, lr),
        lambda: functional.cayley(m, g, lr),
        rounds=101 if N <= 128 else 31 if N <= 256 else 9,
        warmup=3,
        target=1.0,
        error=error,
    )
