"""The leak of factored_scan and dense_scan: h_t = (1 - l) h_{t-1} + l phi(a_t)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checks import check_scan
from helpers import (
    SCANS,
    ScanProblem,
    assert_same_bits,
    call_functional,
    leaf_tensors,
    run_scan,
    scan_problem,
    some_lengths,
    with_resets,
)
from torch import Tensor

from orthokern.errors import InputError

B, N = 5, 10


def leaky(op: str, T: int, **options: Any) -> ScanProblem:
    return scan_problem(op, B=B, T=T, N=N, K=4, **{"leak": N, "inputs": "features", **options})


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("kind", ["dense", "features", "tokens"])
@pytest.mark.parametrize("activation", ["tanh", "modrelu", "oplu"])
@pytest.mark.parametrize(("T", "every"), [(1, 0), (7, 0), (7, 3)])
def test_the_kernel_agrees_with_the_reference(op: str, kind: str, activation: str, T: int, every: int) -> None:
    problem = leaky(op, T, activation=activation, leak=1 if every else N, inputs=kind)
    lengths = some_lengths(B, T, "any")
    check_scan(problem, torch.float64, "cpu", checkpoint_every=every, lengths=lengths)
    problem = with_resets(problem, 0.4)
    check_scan(problem, torch.float64, "cpu", checkpoint_every=every, lengths=lengths, message_clip=0.1)


@pytest.mark.parametrize("op", SCANS)
def test_float32_is_as_exact_as_plain_torch(op: str) -> None:
    check_scan(leaky(op, 200), torch.float32, "cpu")


@pytest.mark.parametrize("op", SCANS)
def test_a_leak_of_one_changes_no_bit_of_the_states(op: str) -> None:
    problem = leaky(op, 9)
    ones, none = (dataclasses.replace(problem, leak=leak) for leak in (torch.ones(1, dtype=torch.float64), None))
    result = run_scan(ones, "cpu")
    gradients = tuple(name for name in result if name.startswith("grad_") and name != "grad_leak")
    assert_same_bits(result, run_scan(none, "cpu"), skip=("grad_leak", "pre"), rounded=gradients)


def test_second_derivatives_vmap_and_compile() -> None:
    problem = leaky("factored_scan", 3, activation="modrelu", leak=1)
    inputs, leak = leaf_tensors(problem), problem.leak.clone().requires_grad_()
    s = inputs[2]

    def scan(leak: Tensor, s: Tensor) -> Tensor:
        return call_functional(problem, [*inputs[:2], s, *inputs[3:]], leak=leak)

    assert torch.autograd.gradcheck(scan, (leak, s)) and torch.autograd.gradgradcheck(scan, (leak, s), fast_mode=True)
    several = torch.stack([leak.detach(), leak.detach() / 2])
    expected = torch.stack([scan(row, s.detach()) for row in several])
    torch.testing.assert_close(torch.func.vmap(scan, (0, None))(several, s.detach()), expected)
    torch.testing.assert_close(torch.compile(scan, backend="aot_eager")(leak, s), scan(leak, s))


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (0.5, "leak must be a torch.Tensor, got 0.5"),
        (torch.ones(3).double(), r"leak has shape \[3\]: accepted is \[1\] or \[N\] = \[10\]"),
        (torch.ones(1), "leak has dtype float32"),
        (torch.zeros(1).double(), r"leak holds values from 0 to 0: accepted are values in \(0, 1\]"),
        (torch.full((1,), float("nan")).double(), "leak holds values from nan"),
    ],
)
def test_a_wrong_leak_is_refused(leak: Any, message: str) -> None:
    problem = leaky("dense_scan", 2)
    with pytest.raises(InputError, match=message):
        call_functional(problem, list(problem.inputs()), leak=leak)
