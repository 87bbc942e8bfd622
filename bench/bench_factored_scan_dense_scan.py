"""The scans: their rate as a share of the rate of torch's matrix product, and the same loop in eager torch.

tanh, K = N except for the rows of lower rank, inputs and cotangents at every step (so that adjoints do not become
denormal numbers, which would slow down the other implementation). W is nearly orthogonal, with s within 5 % of 1.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, checked_sequences, factors, only, spread_ms
from torch import Tensor

from orthokern import functional
from orthokern.cpu._call import has_bf16

SIZES = [{"N": 128, "T": 1000}, {"N": 128, "T": 10020}, {"N": 500, "T": 120}, {"N": 1000, "T": 120}]
QUICK = [{"N": 33, "T": 20}]
LOW_RANKS = (2, 8, 32, 128)
OPS = ("factored_scan", "dense_scan")

# Relative RMS of float32 results against float64; measured: at most 3e-6.
TOLERANCE = 2e-5
BF16_TOLERANCE = 3e-2  # of gradients with bfloat16 factors against exact ones; measured: at most 1.5e-2
EAGER = {128: 4.5, 500: 2.0, 1000: 1.6}  # time of the eager loop over ours, by N, for the factored loop


class Problem:
    """Inputs of one scan: x [T, B, N], matrices (u, s, v) or (w,), h0 [B, N], cotangent [T, B, N], all float32."""

    def __init__(self, op: str, N: int, T: int, activation: str = "tanh", rank: int | None = None) -> None:
        generator = torch.Generator().manual_seed(N + T)
        u, s, v = factors(N, generator, rank)
        self.op, self.activation, self.size = op, activation, {"N": N, "T": T, "B": BATCH}
        matrices = (u, s, v) if op == "factored_scan" else ((u * s) @ v.mT,)
        x = 0.1 * torch.randn(T, BATCH, N, generator=generator)
        self.h0 = torch.randn(BATCH, N, generator=generator)
        self.cotangent = torch.randn(T, BATCH, N, generator=generator)
        self.inputs = [t.requires_grad_() for t in (x, *matrices)]

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        """Ours, of (x, *matrices, h0), through the public function."""
        scan: Callable[..., Tensor] = getattr(functional, self.op)
        return scan(*(inputs or (*self.inputs, self.h0)), activation=self.activation, **options)

    def step(self, loop: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward of a function (x, *matrices, h0) -> states: the gradients of x and the matrices."""
        return torch.autograd.grad(loop(*self.inputs, self.h0), self.inputs, self.cotangent)

    @functools.cached_property
    def error(self) -> float:
        """The largest error of states and gradients against float64; WrongResult if it is above the tolerance."""
        some = checked_sequences(self.size)
        hs = self.forward()
        grads = torch.autograd.grad(hs, self.inputs, only(self.cotangent, some))
        x, *matrices, h0, cotangent = (t.detach().double() for t in (*self.inputs, self.h0, self.cotangent))
        exact = [t.requires_grad_() for t in (x[:, some], *matrices)]
        hs64 = self.forward(*exact, h0[some], backend="reference")
        grads64 = torch.autograd.grad(hs64, exact, cotangent[:, some])
        return check(self.op, [hs[:, some], grads[0][:, some], *grads[1:]], [hs64, *grads64], TOLERANCE)


def eager_factored(x: Tensor, u: Tensor, s: Tensor, v: Tensor, h: Tensor) -> Tensor:
    """The straightforward loop. It uses unbind instead of x[t], because indexing makes the backward quadratic in T."""
    states = []
    for e in x.unbind(0):
        h = torch.tanh(((h @ v) * s) @ u.mT + e)
        states.append(h)
    return torch.stack(states)


def eager_dense(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """h_t = tanh(W h_{t-1} + e_t), the addition within the product."""
    states, wt = [], w.mT
    for e in x.unbind(0):
        h = torch.tanh(torch.addmm(e, h, wt))
        states.append(h)
    return torch.stack(states)


@functools.cache
def problem(op: str, N: int, T: int) -> Problem:
    return Problem(op, N, T)


@pytest.fixture(autouse=True)
def _one_problem_at_a_time() -> Iterator[None]:
    """Free the inputs after the case: those of T = 10020 take a gigabyte."""
    yield
    problem.cache_clear()


def gflop(op: str, direction: str, N: int, rows: int) -> float:
    """Operations of one scan over `rows` = T B steps, in 1e9, counted as in the README of this folder."""
    products = 2 if op == "factored_scan" else 1  # of N x N each step
    if direction == "forward":
        return 2e-9 * rows * N * N * products
    # the gradient M of W is one product over all steps; those of U and V are M V and M^T U
    return 2e-9 * rows * N * N * (products + 1) + (4e-9 * N**3 if op == "factored_scan" else 0.0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_share_of_sgemm(bench: Bench, size: Size, op: str) -> None:
    """Forward and backward separately, with the buffers of the previous round cached, alternating with torch's
    product, whose median within the round is 100 %."""
    p, N, T = problem(op, **size), size["N"], size["T"]
    error, states = p.error, []
    product_size = 256 if bench.quick else 2048
    a, b, c = (torch.randn(product_size, product_size) for _ in range(3))

    def forward() -> None:
        states.append(p.forward())

    def backward() -> tuple[Tensor, ...]:
        # pop frees the states before the next round allocates memory of this size
        return torch.autograd.grad(states.pop(), p.inputs, p.cotangent)

    def product() -> None:
        torch.mm(a, b, out=c)

    calls: dict[str, Callable[[], Any]] = {"product 1": product, "product 2": product, "forward": forward}
    calls |= {"product 3": product, "product 4": product, "backward": backward}
    seconds = bench.interleave(f"{op}, backward", calls, rounds=15 if T < 5000 else 9)
    # the median of the products: the scan runs once per round, with whatever load other processes cause
    products = list(map(statistics.median, zip(*(seconds[f"product {i}"] for i in (1, 2, 3, 4)), strict=True)))
    sgemm = [2e-9 * product_size**3 / t for t in products]
    for direction in ("forward", "backward"):
        work, times = gflop(op, direction, N, T * BATCH), seconds[direction]
        bench.record(
            "scan",
            f"{op} {direction}",
            p.size,
            statistics.median(work / t / rate for t, rate in zip(times, sgemm, strict=True)),
            target=0.65 if op == "dense_scan" and N == 128 else 0.8,
            us_per_step=1e6 * statistics.median(times) / T,
            gflops=work / statistics.median(times),
            sgemm_gflops=statistics.median(sgemm),
            ms=spread_ms(times),
            error=error,
        )


def compare_loop(
    bench: Bench, p: Problem, name: str, loop: Callable[..., Tensor], table: str = "loops", **more: Any
) -> None:
    """Check that a loop agrees with ours, and record the time of its forward and backward over ours."""
    error = p.error
    check(name, p.step(loop), p.step(p.forward), 2 * TOLERANCE)
    bench.compare(
        table,
        name,
        p.size,
        lambda: p.step(loop),
        lambda: p.step(p.forward),
        rounds=9 if p.size["T"] < 5000 else 3,
        error=error,
        **more,
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_eager_loop(bench: Bench, size: Size, op: str) -> None:
    loop, target = (eager_factored, EAGER.get(size["N"])) if op == "factored_scan" else (eager_dense, None)
    compare_loop(bench, problem(op, **size), f"eager loop over {op}", loop, target=target)


@pytest.mark.parametrize("rank", LOW_RANKS)
@pytest.mark.sizes([{"N": N, "T": 60} for N in (512, 1024, 2048)], quick=QUICK)
def test_low_rank(bench: Bench, size: Size, rank: int) -> None:
    p = Problem("factored_scan", **size, rank=min(rank, size["N"]))
    compare_loop(bench, p, f"rank {rank}", eager_factored, "low rank", target=3.0 if rank <= 8 else None)


@pytest.mark.skipif(not has_bf16(), reason="no products of bfloat16 on this CPU")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.sizes([SIZES[0], *SIZES[2:]], quick=QUICK)
def test_bfloat16_factors(bench: Bench, size: Size, op: str) -> None:
    """Forward and backward with exact products over those with bfloat16 factors."""
    p = problem(op, **size)
    loops = (functools.partial(p.forward, precision=precision) for precision in ("ieee", "bf16"))
    exact, rounded = (functools.partial(p.step, loop) for loop in loops)
    error = check(f"{op} with bfloat16 factors", rounded(), exact(), BF16_TOLERANCE)
    bench.compare("precision", op, p.size, exact, rounded, rounds=15, target=1.4, error=error)
