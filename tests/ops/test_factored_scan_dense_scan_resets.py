"""Lengths, clips and resets of factored_scan and dense_scan: every sequence on its own, cut where a step starts from
reset_state in place of the state before."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from checks import check_scan
from helpers import (
    SCANS,
    GruProblem,
    ScanProblem,
    assert_same_bits,
    call_functional,
    each,
    leaf_tensors,
    run_scan,
    scan_args,
    scan_problem,
    some_lengths,
    with_resets,
)
from torch import Tensor

from orthokern import cpu, functional
from orthokern.errors import InputError
from orthokern.nn import GRU
from orthokern.ops.activations import NAMES
from orthokern.reference.activations import activation_fwd

BACKENDS = ("reference", "cpu") if cpu.AVAILABLE else ("reference",)


def cut_by_hand(
    problem: ScanProblem,
    inputs: list[Tensor | None],
    state: Tensor | None,
    resets: Tensor | None,
    lengths: Tensor,
    clip: float,
) -> tuple[Tensor, list[list[Tensor]]]:
    """hs [T, B, N] in plain torch: every sequence on its own, cut at its resets into scans of their own; and the states
    [1, N] of each sequence."""
    x, *matrices, h0, weight, bias, act_param = inputs
    assert x is not None and h0 is not None
    w = matrices[0] if problem.op == "dense_scan" else matrices[0] @ torch.diag(matrices[1]) @ matrices[2].mT
    sequences = []
    for b, length in enumerate(lengths.tolist()):
        h, states = h0[b : b + 1], []
        for t in range(length):
            if resets is not None and resets[t, b]:
                assert state is not None
                h = state[b : b + 1]
            e = x[t, b] if weight is None else weight @ x[t, b] if x.is_floating_point() else weight[:, x[t, b]]
            a = h @ w.mT + (e if bias is None else e + bias)
            if clip:
                a.register_hook(lambda g: g.clamp(-clip, clip))
            h = activation_fwd(a.clone(), act_param, activation=problem.activation)  # the identity returns its argument
            states.append(h)
        sequences.append(states)
    rows = [torch.cat([*states, h0.new_zeros(len(x) - len(states), h0.shape[1])]) for states in sequences]
    return torch.stack(rows, 1), sequences


def check_against_cuts(problem: ScanProblem, lengths: Tensor, clip: float, everys: tuple[int, ...]) -> None:
    """States, every gradient and grad_norm of a float64 problem, with its resets, against ``cut_by_hand``: of the op of
    every backend, with its own backward, and with backend="reference" of plain torch code too."""
    inputs, state = leaf_tensors(problem), problem.reset_state
    state = None if state is None else state.clone().requires_grad_()
    hs, sequences = cut_by_hand(problem, inputs, state, problem.resets, lengths, clip)
    wanted = [t for t in (*inputs, state) if t is not None and t.requires_grad]
    steps = [h for states in sequences for h in states]
    expected = torch.autograd.grad(hs, [*wanted, *steps], problem.grad_hs, allow_unused=True)
    squares, norms = iter(expected[len(wanted) :]), torch.zeros(len(problem.x), dtype=torch.float64)
    for states in sequences:
        norms[: len(states)] += torch.stack([next(squares).square().sum() for _ in states])
    poisoned = problem.with_poisoned_padding(lengths)
    options: dict[str, Any] = {"lengths": lengths, "message_clip": clip, "resets": problem.resets}

    def op(inputs: list[Tensor | None], **more: Any) -> Tensor:
        args = scan_args(problem.op, inputs, problem.activation, **options, **more)
        hs: Tensor = getattr(torch.ops.orthokern, f"{problem.op}_fwd")(*args)[0]
        return hs

    def plain(inputs: list[Tensor | None], **more: Any) -> Tensor:
        return call_functional(poisoned, inputs, **options, **more)

    for backend, every in itertools.product(BACKENDS, everys):
        more = {"backend": backend, "checkpoint_every": every}
        for run in (op, plain) if backend == "reference" else (op,):
            again, own = leaf_tensors(poisoned), None if state is None else state.detach().clone().requires_grad_()
            ours = run(again, reset_state=own, **more)
            torch.testing.assert_close(ours, hs, rtol=1e-12, atol=1e-13)
            leaves = [t for t in (*again, own) if t is not None and t.requires_grad]
            gradients = torch.autograd.grad(ours, leaves, poisoned.grad_hs, allow_unused=True)
            for leaf, grad, want in zip(leaves, gradients, expected, strict=False):
                want = torch.zeros_like(leaf) if want is None else want
                torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)
        grad_norm = run_scan(poisoned, **options, **more)["grad_norm"]
        torch.testing.assert_close(grad_norm, norms.sqrt(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", NAMES)
def test_lengths_and_resets_are_cuts(op: str, activation: str) -> None:
    T, B = 9, 5
    for kind, order in (("dense", "any"), ("features", "falling"), ("tokens", "rising")):
        whole = scan_problem(op, B=B, T=T, N=6, D=4, K=4, activation=activation, inputs=kind, gap=1e-3)
        lengths = some_lengths(B, T, order)
        cut = with_resets(whole, gap=0.0)
        assert cut.resets is not None
        cut.resets[0, 1], cut.resets[:, 2], cut.resets[:, 3] = True, True, False
        for problem in (whole, cut):
            check_against_cuts(problem, lengths, 0.0, (0, 1))
            check_against_cuts(problem, lengths, 0.3, (4, 20))


@pytest.mark.parametrize("op", [*SCANS, "gru_scan"])
def test_reset_state_defaults_to_h0_and_then_to_zeros(op: str) -> None:
    gru = GruProblem.random("kanai", 6, 3, 5, bias=False).with_resets()
    problem = gru if op == "gru_scan" else with_resets(scan_problem(op, B=3, T=6, N=5))
    x, *matrices = gru.inputs()[:2] if op == "gru_scan" else (problem.x, *problem.matrices)

    def run(h0: Tensor | None, **options: Any) -> Tensor:
        return getattr(functional, op)(x, *matrices, h0, resets=problem.resets, **options)

    h0, apart, both = (problem.h0.clone().requires_grad_() for _ in range(3))
    run(h0).backward(problem.grad_hs)
    run(both, reset_state=apart).backward(problem.grad_hs)
    assert h0.grad is not None and apart.grad is not None and both.grad is not None and apart.grad.abs().max() > 0
    torch.testing.assert_close(h0.grad, apart.grad + both.grad)
    zeros = torch.zeros_like(problem.h0)
    assert torch.equal(run(None), run(zeros, reset_state=zeros))


@each(*SCANS)
def test_parity_with_resets(op: str, backend: str) -> None:
    """Odd sizes, states that are streamed (they take more than 8 MiB, N of whole vectors), lengths, checkpoints; and
    these sizes without resets."""
    sizes = [(5, 9, 33, 0), (130, 7, 20, 3), (64, 260, 128, 0), (64, 260, 128, 17), (1, 40, 1, 8)]
    for i, (B, T, N, every) in enumerate(sizes):
        activation, inputs, dtype = (("tanh", "dense", torch.float32), ("prelu", "features", torch.float64))[i % 2]
        problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=inputs, gap=-1.0)
        lengths = some_lengths(B, T, ("falling", "any")[i % 2])
        check_scan(problem, dtype, backend, checkpoint_every=every, lengths=lengths, message_clip=0.5)
        problem = with_resets(problem, 0.1, state=i % 2 == 0, gap=-1.0)
        ragged = {"lengths": lengths} if i % 3 == 1 else {}
        check_scan(problem, torch.float64, backend, checkpoint_every=every, **ragged)


@pytest.mark.parametrize("op", SCANS)
def test_bad_resets_are_one_line(op: str) -> None:
    problem = scan_problem(op, B=3, T=4, N=5)
    inputs = leaf_tensors(problem)
    good = torch.zeros(4, 3, dtype=torch.bool)
    cases = [
        ({"resets": good.int()}, "resets has dtype int32: accepted is bool"),
        ({"resets": good.mT}, r"resets has shape \[3, 4\]: accepted is \[T, B\] = \[4, 3\]"),
        ({"resets": [True]}, "resets must be a torch.Tensor, got list"),
        ({"reset_state": problem.h0}, "reset_state is float64 .* without resets: accepted with resets only"),
        ({"resets": good, "reset_state": problem.h0[:1]}, r"reset_state has shape \[1, 5\]: accepted is \[B, N\]"),
        ({"resets": good, "reset_state": problem.h0.float()}, "reset_state has dtype float32: accepted is the dtype"),
        ({"resets": good, "algorithm": "chunked"}, "algorithm is 'chunked' with resets"),
        ({"resets": good, "algorithm": "modal"}, "algorithm is 'modal': with resets the recurrence runs step by step"),
    ]
    problem.activation = "identity"
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            call_functional(problem, inputs, **options)


@pytest.mark.parametrize("op", SCANS)
def test_any_byte_but_zero_is_a_reset(op: str) -> None:
    """A bool tensor that is a view of bytes may have other values than 0 and 1."""
    problem = scan_problem(op, B=8, T=6, N=5, K=3, D=2, activation="tanh", inputs="features")
    flags = torch.zeros(6, 8, dtype=torch.uint8)
    flags[3], flags[4, 2] = 255, 2
    state = torch.randn_like(problem.h0)
    viewed, plain = (
        run_scan(dataclasses.replace(problem, resets=resets, reset_state=state), "cpu")
        for resets in (flags.view(torch.bool), flags > 0)
    )
    assert_same_bits(viewed, plain)


@pytest.mark.parametrize("N", [9, 260])
@pytest.mark.parametrize("leak", [False, True])
@pytest.mark.parametrize("op", SCANS)
def test_a_dropped_state_may_be_infinite(op: str, leak: bool, N: int) -> None:
    """It reaches no gradient if its own cotangent is zero: NaN in h0, and with relu a state before a reset."""
    T, B, K = 4, 2, 3
    u, s = torch.eye(N, K), torch.ones(K)
    leaves = [t.requires_grad_() for t in ((torch.eye(N) / 2,) if op == "dense_scan" else (u, s, u.clone()))]
    x, h0, resets = torch.randn(T, B, N), torch.full((B, N), torch.nan), torch.zeros(T, B, dtype=torch.bool)
    x[1, 1], resets[0], resets[2, 1] = torch.inf, True, True
    options: dict[str, Any] = {"activation": "tanh" if leak else "relu", "resets": resets, "reset_state": x[0]}
    if leak:
        options["leak"] = torch.full((N,), 0.5, requires_grad=True)
        leaves += [options["leak"]]
    hs = getattr(functional, op)(x, *leaves[: len(leaves) - leak], h0, **options)
    kept = torch.ones(T, B, 1, dtype=torch.bool)
    kept[1, 1] = False
    for gradient in torch.autograd.grad(torch.where(kept, hs, 0.0).square().sum(), leaves):
        assert bool(gradient.isfinite().all())


def test_a_reset_state_that_no_reset_uses_may_be_nan() -> None:
    """Of a low rank with N from 256 on, whose gradients are products with reset_state; a reset in padding is none."""
    T, B, N = 5, 2, 260
    u, v = (torch.linalg.qr(torch.randn(N, 3))[0].requires_grad_() for _ in range(2))
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[0, 0], resets[3, 1] = True, True
    state = torch.randn(B, N)
    state[1] = torch.nan
    options: dict[str, Any] = {"resets": resets, "reset_state": state, "lengths": torch.tensor([5, 2])}
    hs = functional.factored_scan(torch.randn(T, B, N), u, torch.ones(3), v, activation="tanh", **options)
    for gradient in torch.autograd.grad(hs.sum(), (u, v)):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("op", ["factored_scan", "gru"])
def test_func_transforms_of_many_rows(op: str) -> None:
    """At least 256 rows, for which gradients of weights are sums of products."""
    if op == "gru":
        gru, x = GRU(16, 8), torch.randn(90, 3, 16)
        leaves, y = tuple(gru.parameters()), gru(x)[0][-1, 0, :2]
        batched = torch.vmap(lambda c: torch.autograd.grad(y, leaves, c, retain_graph=True))(torch.eye(2))
    else:
        x, (u, v) = torch.randn(90, 3, 256), (torch.linalg.qr(torch.randn(256, 4))[0] for _ in range(2))

        def values(u: Tensor, v: Tensor) -> Tensor:
            return functional.factored_scan(x, u, torch.ones(4), v, activation="tanh")[-1, 0, :2]

        batched = torch.func.jacrev(values, (0, 1))(u, v)
        leaves = u.requires_grad_(), v.requires_grad_()
        y = values(*leaves)
    again = torch.autograd.grad(y, leaves, torch.eye(2), is_grads_batched=True, retain_graph=True)  # by another vmap
    one_by_one = [torch.autograd.grad(value, leaves, retain_graph=True) for value in y]
    for several, actual, *single in zip(batched, again, *one_by_one, strict=True):
        torch.testing.assert_close(several, torch.stack(single), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(actual, several, rtol=1e-4, atol=1e-6)
