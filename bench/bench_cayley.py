"""The Cayley step of two N x N bases against torch.linalg.solve, and against an optimizer step of geoopt and geotorch.

Two step sizes, because the kernel has different algorithms for them (csrc/cpu/cayley.cpp, Note [Which series]): a step
as small as in training, where one product after X is enough, and a step that rotates the bases by some degrees, where I
+ X is factored. The other implementations take the same time for both. Their steps are:

* torch: the reference's formula in float32, with baddbmm and one batched solve.
* geoopt: one RiemannianSGD step on two ManifoldParameters of the canonical Stiefel manifold.
* geotorch: one SGD step on two orthogonal-parametrised weights: the map from parameter to weight, its backward, the
  update. Its default map (the matrix exponential), and its Cayley map.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench, Size, check
from torch import Tensor

from orthokern import functional, init
from orthokern.reference.cayley import cayley as reference

SIZES = [{"N": N, "B": 2} for N in (64, 128, 256, 512, 1000)]
QUICK = [{"N": 33, "B": 2}]

# |lr G| in the Frobenius norm, as a multiple of sqrt(N): 1e-6 is that of a clipped gradient at the rate of the copy
# task; 0.05 rotates the bases by at most 8 degrees.
STEPS = {"training's step": 1e-6, "large step": 0.05}

# Relative RMS of float32 against float64. Measured: 3e-8, half a unit in the last place; the large step, 5e-8.
TOLERANCE = 5e-7
# Relative RMS of W^T W against I for the other implementations. Their steps are different, so only orthogonality is
# checked.
ORTHOGONAL = 1e-3


def by_solve(m: Tensor, g: Tensor, lr: float) -> Tensor:
    """The step in torch's own operations: m, g [B, N, N]."""
    a = torch.baddbmm(torch.bmm(m, g.mT), g, m.mT, beta=-1)
    correction = torch.bmm(a, m)
    a.mul_(lr / 2).diagonal(dim1=-2, dim2=-1).add_(1)
    return m - lr * torch.linalg.solve(a, correction)


def geoopt_step(m: Tensor, g: Tensor, lr: float) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """A step, and the bases as they are."""
    geoopt = importlib.import_module("geoopt")
    bases = [geoopt.ManifoldParameter(one.clone(), manifold=geoopt.Stiefel(canonical=True)) for one in m]
    optimizer = geoopt.optim.RiemannianSGD(bases, lr=lr)
    for basis, gradient in zip(bases, g, strict=True):
        basis.grad = gradient.clone()
    return optimizer.step, lambda: [basis.detach() for basis in bases]


def geotorch_step(m: Tensor, g: Tensor, lr: float, map_: str) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """A step, and the bases as they are."""
    geotorch = importlib.import_module("geotorch")
    N = m.shape[-1]
    layers = [torch.nn.Linear(N, N, bias=False) for _ in m]
    for layer in layers:  # starts at a random orthogonal weight of its own
        geotorch.orthogonal(layer, "weight", triv=map_)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        for layer, gradient in zip(layers, g, strict=True):
            layer.weight.backward(gradient)
        optimizer.step()

    return step, lambda: [layer.weight.detach() for layer in layers]


PEERS: dict[str, tuple[str | None, Callable[[Tensor, Tensor, float], Any]]] = {
    "torch.linalg.solve": (None, lambda m, g, lr: (lambda: by_solve(m, g, lr), None)),
    "geoopt": ("geoopt", geoopt_step),
    "geotorch, matrix exponential": ("geotorch", lambda m, g, lr: geotorch_step(m, g, lr, "expm")),
    "geotorch, Cayley map": ("geotorch", lambda m, g, lr: geotorch_step(m, g, lr, "cayley")),
}


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("peer", list(PEERS))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_step(benchmark: Any, bench: Bench, size: Size, peer: str, step: str) -> None:
    """Time of the other implementation divided by that of functional.cayley, including its checks for NaN."""
    N, B = size["N"], size["B"]
    package, build = PEERS[peer]
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[bench]'")
    generator = torch.Generator().manual_seed(N)
    m = torch.stack([init.haar_orthogonal_(torch.empty(N, N), generator) for _ in range(B)])
    g = torch.randn(B, N, N, generator=generator) / N**0.5  # |G|_F = sqrt(N)
    lr = STEPS[step]

    exact = reference(m.double(), g.double(), lr)
    error = check("cayley", [functional.cayley(m, g, lr)], [exact], TOLERANCE)
    call, bases = build(m, g, lr)
    if bases is None:
        check(peer, [call()], [exact], TOLERANCE)
    else:
        call()
        for w in bases():
            check(peer, [w.mT @ w], [torch.eye(N)], ORTHOGONAL)

    bench.compare(
        benchmark,
        "cayley",
        f"{peer}, {step}",
        size,
        call,
        lambda: functional.cayley(m, g, lr),
        rounds=101 if N <= 128 else 31 if N <= 256 else 9,
        warmup=3,
        target=1.0,
        error=error,
    )
