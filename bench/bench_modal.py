"""Linear recurrences: the modal form over the sequential scan."""

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
# Relative RMS of the modal results against the sequential scan, the less exact of the two.
TOLERANCE = 2e-4


@pytest.mark.parametrize("what", ("states", "loss"))
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_modal(bench: Bench, size: Size, what: str) -> None:
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
        "modal",
        f"sequential over modal, {what}",
        size,
        functools.partial(step, "sequential"),
        functools.partial(step, "modal"),
        rounds=9 if T < 5000 else 5,
        target=1.6 if what == "states" and T > 5000 and B > 1 else None,
        error=check(f"modal {what}", step("modal"), step("sequential"), TOLERANCE),
    )
