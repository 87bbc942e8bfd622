"""factored_scan and dense_scan in torch: opcheck, torch.compile, autograd, saved tensors, taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import (
    SCANS,
    call_functional,
    compiled,
    gradients,
    leaf_tensors,
    scan_needs,
    scan_problem,
    some_lengths,
    with_resets,
)
from torch import Tensor

from orthokern import functional

NAMESPACE = torch.ops.orthokern


# -------------------------------------------------------------------------------------------------------------- opcheck

SCAN_CHECKS = [
    ("tanh", "dense", 0, "auto"),
    ("prelu", "tokens", 2, "auto"),
    ("prelu", "tokens", 2, "reference"),
    ("oplu", "features", 0, "auto"),
    ("modrelu", "dense", 3, "auto"),
]


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize(("activation", "inputs", "checkpoint_every", "backend"), SCAN_CHECKS)
def test_opcheck_scans(op: str, activation: str, inputs: str, checkpoint_every: int, backend: str) -> None:
    """With lengths and a clip beside a weight, with a leak and resets for modrelu."""
    leak = int(activation == "modrelu")
    problem = scan_problem(op, B=3, T=5, N=4, D=6, activation=activation, inputs=inputs, leak=leak, gap=1e-4)
    problem = with_resets(problem) if leak else problem
    fwd, bwd = getattr(NAMESPACE, f"{op}_fwd").default, getattr(NAMESPACE, f"{op}_bwd").default
    options: dict[str, Any] = {"checkpoint_every": checkpoint_every, "backend": backend}
    if inputs != "dense":
        options |= {"lengths": some_lengths(3, 5, "any"), "message_clip": 0.5}
    leaves = problem.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
    torch.library.opcheck(fwd, tuple(leaves.args(**options)))
    args = problem.args(**options)
    hs, ckpt, pre = fwd(*args)
    args = args._replace(x=args.x if problem.weight is not None or checkpoint_every else None)
    states = ckpt if checkpoint_every else hs
    for needs in ((True, True), (False, True), (True, False)):
        arguments = (problem.grad_hs, states, pre, *scan_needs(*needs), *args)
        torch.library.opcheck(bwd, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(bwd, arguments)


# -------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize(("activation", "inputs"), [("tanh", "dense"), ("prelu", "tokens"), ("modrelu", "features")])
def test_compiled_scans(op: str, activation: str, inputs: str) -> None:
    problem = with_resets(scan_problem(op, B=3, T=5, N=4, activation=activation, inputs=inputs))
    assert problem.reset_state is not None
    state = problem.reset_state.requires_grad_()
    every = {"checkpoint_every": 2, "lengths": some_lengths(3, 5, "any"), "message_clip": 0.5}
    for options in ({}, {"resets": problem.resets, "reset_state": state, **every}):
        expected = gradients(problem, call_functional, **options)
        actual = gradients(problem, compiled(call_functional), **options)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_compiled_with_any_length() -> None:
    """One graph for all lengths and batches."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = compiled(call_functional, backend=counter, dynamic=True)
    for B, T in ((3, 5), (4, 7), (6, 9)):  # equal sizes would count as one symbol: none is N or D
        problem = scan_problem("factored_scan", B=B, T=T, N=8, D=11, activation="prelu", inputs="tokens")
        expected, actual = gradients(problem, call_functional), gradients(problem, run)
        torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch finds a compiled backward by the graph of the forward, also one of an earlier schema of the backward op
    monkeypatch.setattr("torch._functorch.config.enable_autograd_cache", False)
    problem = scan_problem("factored_scan", B=3, T=5, N=4, activation="prelu", inputs="features")
    expected, actual = (
        gradients(problem, run) for run in (call_functional, compiled(call_functional, backend="inductor"))
    )
    torch.testing.assert_close(actual, expected)


# ------------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("every", [0, 4])
def test_what_is_saved(op: str, every: int) -> None:
    """The docstring's Saved part, by shape: a training run's memory is made of it."""
    saved: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t

    T, B, N, D = 10, 5, 4, 7
    for activation, inputs in (("tanh", "dense"), ("prelu", "dense"), ("modrelu", "features"), ("tanh", "tokens")):
        problem = scan_problem(op, B=B, T=T, N=N, D=D, activation=activation, inputs=inputs)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call_functional(problem, leaf_tensors(problem), checkpoint_every=every)
        large = sorted(shape for shape in saved if shape and shape[0] in (T, -(-T // 4)) and len(shape) > 1)
        states = [(-(-T // 4), B, N)] if every else [(T, B, N)] * (2 if activation == "prelu" else 1)
        x = {"features": [(T, B, D)], "tokens": [(T, B)], "dense": [(T, B, N)] if every else []}[inputs]
        assert large == sorted(states + x)


@pytest.mark.parametrize("inputs", ["features", "tokens"])
def test_gradients_summed_over_many_rows(inputs: str) -> None:
    """The bias gradient of 200 000 rows in float32; parts of the sum are added up in float64."""
    T, B, N = 20000, 10, 4
    x = torch.rand(T, B, 3) if inputs == "features" else torch.randint(0, 3, (T, B))
    table, results = torch.rand(N, 3), []
    for dtype in (torch.float32, torch.float64):
        weight, bias = table.to(dtype), torch.zeros(N, dtype=dtype, requires_grad=True)
        values = x.to(dtype) if inputs == "features" else x
        w = 0.3 * torch.eye(N, dtype=dtype)
        functional.dense_scan(values, w, weight=weight, bias=bias, activation="tanh").mean().backward()
        assert bias.grad is not None
        results.append(bias.grad.double())
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 2e-7


# ----------------------------------------------------------------------------------------------------------------- taps


@pytest.mark.parametrize(
    ("dtype", "message_clip"), [(torch.float16, 1e5), (torch.bfloat16, 1e39), (torch.float32, 1e39)]
)
def test_a_message_clip_beyond_the_range_of_the_dtype_has_no_effect(dtype: torch.dtype, message_clip: float) -> None:
    w = torch.linspace(-0.5, 0.5, 16).view(4, 4).to(dtype)
    results = []
    for options in ({}, {"message_clip": message_clip}):
        x = torch.linspace(-1, 1, 24).view(3, 2, 4).to(dtype).requires_grad_()
        loss = functional.dense_scan(x, w, backend="reference", **options).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        results.append((grad, *torch.autograd.grad(grad.square().sum(), x)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
