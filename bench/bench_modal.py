"""Linear recurrences: the modal form over the sequential scan, and one long sequence beside torch.nn.RNN."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import Bench, Size, check, factors
from torch import Tensor

from orthokern import functional

SIZES = [{"N": 128, "T": T, "B": B} for T, B in ((1000, 50), (10020, 50), (10020, 1))]
QUICK = [{"N": 33, "T": 40, "B": 3}]
# Relative RMS of the modal results against the sequential scan, which is the less exact of the two: bench_accuracy.py.
TOLERANCE = 2e-4


@pytest.mark.parametrize("what", ("states", "loss"))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_modal(benchmark: Any, bench: Bench, size: Size, what: str) -> None:
    """A linear scan of token ids, forward and backward, with the eigenbasis computed in every call: its states; or the
    cross-entropy of a readout with nine classes, without storing the states."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, _, v = factors(N, generator)
    s = 1 + 0.001 * (2 * torch.rand(N, generator=generator) - 1)
    table, readout = torch.randn(N, 10, generator=generator), 0.01 * torch.randn(9, N, generator=generator)
    ids = torch.randint(0, 10, (T, B), generator=generator)
    target = torch.randint(0, 9, (T, B), generator=generator)
    cotangent = torch.randn(T, B, N, generator=generator) if what == "states" else None
    inputs = [u, s, v, table, *([readout] if what == "loss" else [])]
    for tensor in inputs:
        tensor.requires_grad_()

    def step(algorithm: str) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"weight": table, "activation": "identity", "algorithm": algorithm}
        if what == "states":
            output = functional.factored_scan(ids, u, s, v, **options)
        else:
            output = functional.scan_cross_entropy(ids, (u, s, v), readout, target, **options).loss
        return torch.autograd.grad(output, inputs, cotangent)

    bench.compare(
        benchmark,
        "modal",
        f"sequential over modal, {what}",
        size,
        functools.partial(step, "sequential"),
        functools.partial(step, "modal"),
        rounds=9 if T < 5000 else 5,
        target=1.6 if what == "states" and T > 5000 and B > 1 else None,
        error=check(f"modal {what}", step("modal"), step("sequential"), TOLERANCE),
    )


@torch.no_grad()
@pytest.mark.parametrize("what", ("loss", "states"))
@pytest.mark.sizes([{"N": 128, "T": 10_000, "B": 1}], quick=[{"N": 33, "T": 40, "B": 1}])
def test_forward_of_one_sequence(benchmark: Any, bench: Bench, size: Size, what: str) -> None:
    """torch.nn.RNN (tanh, ten features) over a linear recurrence of the same sizes. The loss includes its readout and
    its cross-entropy, which torch's side has not, and the eigenbasis of an earlier call, as in training; the states
    have neither."""
    N, T, B = size["N"], size["T"], size["B"]
    generator = torch.Generator().manual_seed(T)
    u, s, v = factors(N, generator)
    w = (u * (1 + (s - 1) / 50)) @ v.mT
    weight, readout = torch.randn(N, 10, generator=generator), 0.01 * torch.randn(9, N, generator=generator)
    x, target = torch.randn(T, B, 10, generator=generator), torch.randint(0, 9, (T, B), generator=generator)
    theirs = torch.nn.RNN(10, N)
    options: dict[str, Any] = {"weight": weight, "activation": "identity"}
    basis = functional.scan_cross_entropy(x, w, readout, target, algorithm="modal", **options).basis

    def ours(algorithm: str, basis: Tensor | None = None) -> Tensor:
        if what == "states":
            return functional.dense_scan(x, w, algorithm=algorithm, **options)
        return functional.scan_cross_entropy(x, w, readout, target, algorithm=algorithm, basis=basis, **options).loss

    bench.compare(
        benchmark,
        "modal_forward",
        "loss, with the basis of an earlier call" if what == "loss" else "states",
        size,
        lambda: theirs(x),
        lambda: ours("modal", basis),
        rounds=9,
        target=8.0 if what == "loss" else None,
        error=check(f"modal {what}", [ours("modal", basis)], [ours("sequential")], TOLERANCE),
    )
