"""The problems, comparisons and calls that the tests on a device share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import checks
import pytest
import torch
from checks import assert_scan_parity
from helpers import GruProblem, ScanProblem, run_scan, scan_problem
from peephole_problem import PeepholeProblem
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import RotationArgs

OPS = ("factored_scan", "dense_scan")
DTYPES = (torch.float32, torch.float64)
KINDS = ("dense", "features", "tokens")


def serves(op: str, backend: str, dtype: torch.dtype = torch.float32, **facts: Any) -> list[str]:
    """Why this backend does not serve a call by its SUPPORT table; empty if it does."""
    return dispatch.reasons(op, backend, dispatch.Call(torch.device("cuda", 0), dtype, facts))


def need(op: str, backend: str, dtype: torch.dtype = torch.float32, **facts: Any) -> None:
    """Skip what the SUPPORT table says this backend does not serve."""
    if why := serves(op, backend, dtype, **facts):
        pytest.skip(f"{backend}: {' and '.join(why)}")


def on(problem: ScanProblem, device: str = "cuda") -> ScanProblem:
    """The problem on a device, token ids and resets too."""
    moved = problem.map(lambda t: t.to(device))
    moved.x = moved.x.to(device)
    return moved


def float_problem(op: str, device: str = "cuda", **options: Any) -> ScanProblem:
    """A float32 problem on the device."""
    return on(scan_problem(op, **options).to(torch.float32), device)


def few(B: int, T: int, N: int, activation: str) -> int:
    """A batch of at most B: among more units some would sit on a kink."""
    return B if activation in ("identity", "tanh") else min(B, max(1, 20000 // (T * N)))


def orthogonal(problem: ScanProblem) -> ScanProblem:
    """With an orthogonal W, in place."""
    if problem.op == "dense_scan":
        problem.matrices = (torch.linalg.qr(problem.matrices[0])[0],)
    else:
        problem.matrices = (problem.matrices[0], torch.ones_like(problem.matrices[1]), problem.matrices[2])
    return problem


def check(
    problem: ScanProblem, dtype: torch.dtype, backend: str, *, skip: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem, with the reference on the CPU; returns it."""
    inexact = problem.to(dtype)
    there = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in options.items()}
    actual = run_scan(on(inexact), backend, **there)
    actual = {name: tensor.cpu() for name, tensor in actual.items()}
    compared = {name: tensor for name, tensor in actual.items() if name not in skip}
    assert_scan_parity(inexact, compared, lambda p, **same: run_scan(p, "reference", **same), options)
    return actual


def check_gru(problem: GruProblem, dtype: torch.dtype, backend: str, lengths: Tensor | None = None) -> None:
    """Parity of everything that comes out of one problem, with the reference on the CPU."""

    def run(problem: GruProblem, lengths: Tensor | None) -> dict[str, Tensor]:
        result = problem.map(Tensor.cuda).run(backend, lengths=None if lengths is None else lengths.cuda())
        return {name: tensor.cpu() for name, tensor in result.items()}

    checks.check_gru(problem, dtype, run, lengths)


def replayed(call: Callable[[], Any], change: Callable[[], Any]) -> Any:
    """The results of a captured call after ``change`` and a replay. The first call, not captured, compiles."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return captured


class Call(NamedTuple):
    """A call of an op: its tensors, the number of the one that another value may replace, and the function."""

    inputs: list[Tensor]
    changed: int
    function: Callable[..., tuple[Tensor, ...]]

    def __call__(self) -> tuple[Tensor, ...]:
        return self.function(*self.inputs)


CALLS = (
    "sequential scans",
    "chunked scans",
    "scans of 300 units",
    "gru_scan",
    "peephole_scan",
    "rotation_scan",
    "cayley",
    "thin cayley",
)
CALLS += ("activation_fwd", "activation_bwd", "few classes", "many classes")


def call_of(name: str, backend: str, device: str = "cuda") -> Call:
    """A call by its name in CALLS; skips what the backend does not serve."""
    ops, parts = torch.ops.orthokern, name.split()
    if "scans" in parts:
        N = 300 if "300" in parts else 66
        need("dense_scan", backend, N=N, K=N)
        activation, T = ("identity", 300) if "chunked" in parts else ("modrelu", 40)
        problems = [float_problem(op, device, B=20, T=T, N=N, activation=activation, gap=-1.0) for op in OPS]
        problems = [orthogonal(problem) for problem in problems]

        def scans(x: Tensor) -> tuple[Tensor, ...]:
            results = [run_scan(dataclasses.replace(problem, x=x), backend) for problem in problems]
            return tuple(tensor for result in results for tensor in result.values())

        return Call([problems[0].x.clone()], 0, scans)
    if name == "gru_scan":
        need("gru_scan", backend, N=64)
        gru = GruProblem.random("torch", 9, 20, 64).map(lambda t: t.float().to(device))
        return Call([gru.x], 0, lambda x: tuple(dataclasses.replace(gru, x=x).run(backend).values()))
    if name == "peephole_scan":
        need("peephole_scan", backend)
        lstm = PeepholeProblem.random(9, 20, 64).map(lambda t: t.float().to(device))
        return Call([lstm.x], 0, lambda x: tuple(dataclasses.replace(lstm, x=x).run(backend).values()))
    if name == "rotation_scan":
        need("rotation_scan", backend)
        T, B, M, D = 300, 20, 33, 10
        leaf, angles = dispatch.leaf("rotation_scan", backend), torch.rand(M, device=device, dtype=torch.float64)
        x, h0, weight, bias, grad = (
            torch.randn(*size, device=device) for size in ((T, B, D), (B, 2 * M), (2 * M, D), (2 * M,), (T, B, 2 * M))
        )
        resets = torch.rand(T, B, device=device) < 0.01

        def rotation(x: Tensor) -> tuple[Tensor, ...]:
            args = RotationArgs(x, angles.cos(), angles.sin(), h0, weight, bias, resets)
            hs = leaf.rotation_scan_fwd(args)
            return hs, *leaf.rotation_scan_bwd(args, grad, hs, need_x=True)

        return Call([x], 0, rotation)
    if "classes" in parts:
        need("linear_cross_entropy", backend)
        C = 10 if name == "few classes" else 200
        inputs = [torch.randn(*size, device=device) for size in ((501, 66), (C, 66), (C,))]
        target = torch.randint(0, C, (501,), device=device)
        return Call([*inputs, target], 0, lambda *args: ops.linear_cross_entropy_fwd(*args, "mean", True, backend))
    if "cayley" in parts:
        need("cayley", backend, N=130, K=130)
        m, g = torch.linalg.qr(torch.randn(2, 130, 130, device=device))[0], torch.randn(2, 130, 130, device=device)
        if name == "thin cayley":
            m, g = m[:, :, :7].contiguous(), g[:, :, :7].contiguous()
        rate = torch.tensor([1e-4, 0.3], device=device, dtype=torch.float64)
        return Call([m, g, rate], 1, lambda *args: (ops.cayley(*args, backend),))
    need("activations", backend)
    x, grad_y, slope = (torch.randn(*size, device=device) for size in ((501, 66), (501, 66), (66,)))
    if name == "activation_fwd":
        return Call([x, slope], 0, lambda *args: (ops.activation_fwd(*args, "modrelu", backend),))
    return Call([grad_y, x, slope], 1, lambda *args: ops.activation_bwd(*args, "prelu", backend))


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))
