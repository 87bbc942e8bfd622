"""The leak of factored_scan and dense_scan: h_t = (1 - l) h_{t-1} + l phi(a_t)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import (
    SCANS,
    ScanProblem,
    call_functional,
    check_scan,
    leaf_tensors,
    run_scan,
    scan_problem,
    some_lengths,
    with_resets,
)
from torch import Tensor

from orthokern import functional
from orthokern.errors import InputError
from orthokern.ops.activations import NAMES
from orthokern.reference._scan import input_term
from orthokern.reference.activations import activation_fwd

B, N, K = 5, 10, 4


def problem_of(op: str, T: int, **options: Any) -> ScanProblem:
    rank = {"K": K} if op == "factored_scan" else {}
    return scan_problem(op, B=B, T=T, N=N, **{"leak": N, "inputs": "features", **rank, **options})


def by_hand(problem: ScanProblem) -> dict[str, Tensor]:
    """hs [T, B, N] and the gradients of a loop in plain torch, by the names of ``run_scan``."""
    inputs, leak = leaf_tensors(problem), problem.leak.clone().requires_grad_()
    x, *matrices, h, weight, bias, act_param = inputs
    w = matrices[0]
    if len(matrices) == 3:
        w = w @ torch.diag(matrices[1]) @ matrices[2].mT
    states = []
    for e in input_term(x, weight, bias).unbind():
        phi = activation_fwd(h @ w.mT + e, act_param, activation=problem.activation)
        h = (1 - leak) * h + leak * phi
        states.append(h)
    hs = torch.stack(states)
    leaves = {name: t for name, t in zip(problem.input_names(), inputs, strict=True) if t is not None}
    leaves["leak"] = leak
    found = torch.autograd.grad(hs, list(leaves.values()), problem.grad_hs)
    return {"hs": hs.detach(), **{f"grad_{name}": grad for name, grad in zip(leaves, found, strict=True)}}


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("units", [1, N])
def test_the_values_and_gradients_are_those_of_a_loop(op: str, activation: str, units: int) -> None:
    problem = problem_of(op, 6, activation=activation, leak=units)
    expected = by_hand(problem)
    for backend in ("reference", "cpu"):
        found = run_scan(problem, backend)
        torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("kind", ["dense", "features", "tokens"])
@pytest.mark.parametrize("activation", ["tanh", "modrelu", "oplu"])
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("every", [0, 3])
def test_the_kernel_agrees_with_the_reference(op: str, kind: str, activation: str, T: int, every: int) -> None:
    problem = problem_of(op, T, activation=activation, leak=1 if every else N, inputs=kind)
    lengths = some_lengths(B, T, "any")
    check_scan(problem, torch.float64, "cpu", checkpoint_every=every, lengths=lengths)
    problem = with_resets(problem, 0.4)
    check_scan(problem, torch.float64, "cpu", checkpoint_every=every)
    check_scan(problem, torch.float64, "cpu", checkpoint_every=every, lengths=lengths, message_clip=0.1)


@pytest.mark.parametrize("op", SCANS)
def test_float32_is_as_exact_as_plain_torch(op: str) -> None:
    check_scan(problem_of(op, 200), torch.float32, "cpu")


@pytest.mark.parametrize("op", SCANS)
def test_a_leak_of_one_changes_no_bit_of_the_states(op: str) -> None:
    problem = problem_of(op, 9)
    with_one = run_scan(dataclasses.replace(problem, leak=torch.ones(1, dtype=torch.float64)), "cpu")
    without = run_scan(dataclasses.replace(problem, leak=None), "cpu")
    assert torch.equal(with_one["hs"], without["hs"])
    names = [name for name in problem.grad_names() if name != "grad_leak"]
    torch.testing.assert_close([with_one[n] for n in names], [without[n] for n in names], rtol=1e-12, atol=1e-13)


def test_second_derivatives_vmap_compile_and_opcheck() -> None:
    problem = problem_of("factored_scan", 3, activation="modrelu")
    inputs, leak = leaf_tensors(problem), problem.leak.clone().requires_grad_()
    s = inputs[2]

    def scan(leak: Tensor, s: Tensor) -> Tensor:
        return call_functional(problem, [*inputs[:2], s, *inputs[3:]], leak=leak)

    assert torch.autograd.gradgradcheck(scan, (leak, s))
    several = torch.stack([leak.detach(), leak.detach() / 2])
    expected = torch.stack([scan(row, s.detach()) for row in several])
    torch.testing.assert_close(torch.func.vmap(scan, (0, None))(several, s.detach()), expected)
    torch.testing.assert_close(torch.compile(scan, backend="aot_eager")(leak, s), scan(leak, s))
    leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in problem.args()]
    torch.library.opcheck(torch.ops.orthokern.factored_scan_fwd, tuple(leaves))


def test_the_loss_is_that_of_the_states() -> None:
    problem = problem_of("factored_scan", 8, inputs="tokens", activation="identity")
    readout, target = torch.randn(4, N, dtype=torch.float64), torch.randint(0, 4, (8, B))
    x, *matrices, h0, weight, bias, _ = leaf_tensors(problem)
    calls = {"weight": weight, "bias": bias, "activation": "identity", "leak": problem.leak.requires_grad_()}
    result = functional.scan_cross_entropy(x, matrices, readout, target, h0=h0, **calls)
    hs = functional.factored_scan(x, *matrices, h0=h0, **calls)
    expected = torch.nn.functional.cross_entropy((hs @ readout.mT).flatten(0, 1), target.flatten())
    torch.testing.assert_close(result.loss, expected)
    assert "leak" in result.refused
    leaves = [*matrices, h0, weight, bias, problem.leak]
    torch.testing.assert_close(torch.autograd.grad(result.loss, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (0.5, "leak must be a torch.Tensor, got 0.5"),
        (torch.ones(3).double(), r"leak has shape \[3\]: accepted is \[1\] or \[N\] = \[10\]"),
        (torch.ones(1), "leak has dtype float32"),
        (torch.zeros(1).double(), r"leak holds values from 0 to 0: accepted are values in \(0, 1\]"),
        (torch.full((N,), 1.5).double(), "leak holds values from 1.5"),
        (torch.full((1,), float("nan")).double(), "leak holds values from nan"),
    ],
)
def test_a_wrong_leak_is_refused(leak: Any, message: str) -> None:
    problem = problem_of("dense_scan", 2)
    with pytest.raises(InputError, match=message):
        call_functional(problem, list(problem.inputs()), leak=leak)
