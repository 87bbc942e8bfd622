"""Errors, not times: float32 against float64 by T, ours beside eager torch.

The factored scan with N = 128, states and every gradient, without activation and with tanh. Cotangents at every step.
Errors are relative: RMS of the difference over RMS of the float64 result.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Bench, Size, WrongResult, factors, relative_error
from torch import Tensor

from orthokern import functional

SIZES = [{"N": 128, "T": T, "B": 10} for T in (10, 100, 1000, 10000)]
QUICK = [{"N": 32, "T": T, "B": 3} for T in (10, 50)]
RESULTS = ("states", "grad_x", "grad_u", "grad_s", "grad_v")

# Larger errors are bugs rather than rounding, which is at most a hundredth of this.
TOLERANCE = 1e-3


def eager(x: Tensor, u: Tensor, s: Tensor, v: Tensor, h0: Tensor, activation: str) -> Tensor:
    """The recurrence in torch's own operations."""
    h, states = h0, []
    for e in x.unbind(0):
        h = ((h @ v) * s) @ u.mT + e
        h = torch.tanh(h) if activation == "tanh" else h
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("activation", ("identity", "tanh"))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_error_by_T(benchmark: Any, bench: Bench, size: Size, activation: str) -> None:
    """Errors of ours and of eager torch against float64."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, s, v = factors(N, generator)
    s = 1 + (s - 1) / 50  # within 0.001 of 1: without an activation, 5 % would make states overflow or vanish
    x, cotangent = (torch.randn(T, B, N, generator=generator) for _ in range(2))
    h0 = torch.randn(B, N, generator=generator)
    x = 0.1 * x
    inputs = [x, u, s, v]

    def results(states: Tensor) -> list[Tensor]:
        return [states.detach(), *torch.autograd.grad(states, inputs, cotangent)]

    for tensor in inputs:
        tensor.requires_grad_()
    benchmark.group = "accuracy, forward and backward"
    ours = benchmark.pedantic(
        lambda: results(functional.factored_scan(x, u, s, v, h0, activation=activation)), rounds=1, warmup_rounds=1
    )
    theirs = results(eager(x, u, s, v, h0, activation))
    x64, u64, s64, v64, h64 = (t.detach().double() for t in (*inputs, h0))
    exact_inputs = [t.requires_grad_() for t in (x64, u64, s64, v64)]
    states = functional.factored_scan(*exact_inputs, h64, activation=activation, backend="reference")
    grads = torch.autograd.grad(states, exact_inputs, cotangent.double())
    for name, mine, other, exact in zip(RESULTS, ours, theirs, (states, *grads), strict=True):
        error, eager_error = relative_error(mine, exact), relative_error(other, exact)
        if not error < TOLERANCE:
            raise WrongResult(f"{name} is off by {error:.3g} (relative RMS), tolerated is {TOLERANCE:g}")
        bench.record("accuracy", f"{activation}: {name}", size, error, better="lower", peer_error=eager_error)


LOSS_SIZES = [{"N": 128, "T": T, "B": 10} for T in (100, 1000, 10000)]
LOSS_QUICK = [{"N": 32, "T": 50, "B": 3}]
LOSS_RESULTS = ("loss", "grad_u", "grad_s", "grad_v", "grad_readout", "grad_table")


@pytest.mark.parametrize("margin", (0.0, 0.001, 0.1))
@pytest.mark.sizes(LOSS_SIZES, quick=LOSS_QUICK)
def test_error_of_a_loss(benchmark: Any, bench: Bench, size: Size, margin: float) -> None:
    """Loss and gradients behind a readout, modal and step by step, and their distance from float64.

    Token ids. s is uniform in 1 +- margin, then scaled so that the largest eigenvalue of W has magnitude 1: otherwise
    the states leave the range of float32. The readout is scaled to the states.
    """
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, _, v = factors(N, generator)
    s = 1 + margin * (2 * torch.rand(N, generator=generator) - 1)
    s = s / torch.linalg.eigvals((u * s).double() @ v.double().mT).abs().max().float()
    table, readout = torch.randn(N, 10, generator=generator), torch.randn(9, N, generator=generator)
    ids = torch.randint(0, 10, (T, B), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 9, (T, B), generator=generator, dtype=torch.uint8)

    def results(inputs: list[Tensor], algorithm: str) -> list[Tensor]:
        for tensor in inputs:
            tensor.requires_grad_()
        u, s, v, readout, table = inputs
        loss = functional.scan_cross_entropy(
            ids, (u, s, v), readout, target, weight=table, activation="identity", algorithm=algorithm
        ).loss
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    states = functional.factored_scan(ids.long(), u, s, v, weight=table, activation="identity")
    inputs = [u, s, v, readout / states.square().mean().sqrt(), table]
    benchmark.group = "accuracy, loss and gradients"
    modal = benchmark.pedantic(lambda: results(inputs, "modal"), rounds=1, warmup_rounds=1)
    sequential = results(inputs, "sequential")
    exact = results([tensor.detach().double() for tensor in inputs], "sequential")
    for name, mine, other, right in zip(LOSS_RESULTS, modal, sequential, exact, strict=True):
        error, sequential_error = relative_error(mine, right), relative_error(other, right)
        if not error < TOLERANCE:
            raise WrongResult(f"modal {name} is off by {error:.3g} (relative RMS), tolerated is {TOLERANCE:g}")
        bench.record(
            "modal accuracy",
            f"margin {margin:g}: {name}",
            size,
            error,
            target=1e-6,
            better="lower",
            peer_error=sequential_error,
        )
