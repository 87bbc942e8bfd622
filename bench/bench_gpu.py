"""The scans, the Cayley step and the copy task on a CUDA device: `pytest bench/bench_gpu.py --benchmark-only`.

Times are those of CUDA events around whole calls of the public functions, after warm-up, with cached memory of the
previous call. Other implementations run in turns with ours, in float32 without TF32. Skipped without a device.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_factored_scan_dense_scan import Problem, eager_factored
from harness import BATCH, ROOT, Bench, Size, check, relative_error, spread_ms
from torch import Tensor

import orthokern.nn
from orthokern import functional

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LONG = [{"N": 128, "T": 10000}, {"N": 500, "T": 10000}, {"N": 1000, "T": 10000}]
QUICK = [{"N": 32, "T": 50}]

# On an H200: milliseconds of forward and backward by N; and the time of a peer over ours.
SCAN_MS = {"tanh": {128: 12.0, 500: 60.0, 1000: 150.0}, "identity": {128: 3.0}}
CUDNN = {128: 2.0, 500: 4.0, 1000: 3.0}
SOLVE = {128: 4.0, 500: 3.0, 1000: 2.0}

TOLERANCE = 2e-5  # relative RMS of float32 results against float64, as on the CPU


def tolerated(error_of_torch: float) -> float:
    """The tolerance of float32 results against float64, from the error of torch's float32 products.

    A linear recurrence keeps every rounding error: over 10 000 steps torch itself comes close to TOLERANCE.
    """
    return max(TOLERANCE, 2 * error_of_torch)


def device_seconds(benchmark: Any, calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CUDA events around each call, one of each per round after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            del result
            if turn >= 2:
                seconds[name].append(1e-3 * start.elapsed_time(end))
    benchmark.pedantic(lambda: (list(calls.values())[-1](), torch.cuda.synchronize()), rounds=2)
    return seconds


class GpuProblem(Problem):
    """The problem of the CPU on the device, tanh or linear; a linear one is an isometry, so that no state fades."""

    def __init__(self, op: str, N: int, T: int, activation: str) -> None:
        super().__init__(op, N, T, activation)
        with torch.no_grad():
            if activation == "identity":
                self.inputs[2].fill_(1.0)
        self.inputs = [t.detach().cuda().requires_grad_() for t in self.inputs]
        self.h0, self.cotangent = self.h0.cuda(), self.cotangent.cuda()

    @functools.cached_property
    def error(self) -> float:
        """The largest error against float64 of two sequences over all steps."""
        hs = self.forward()[:, :2].detach()

        def reference(dtype: torch.dtype) -> Tensor:
            x, *matrices, h0 = (t.detach().to(dtype) for t in (*self.inputs, self.h0))
            return self.forward(x[:, :2], *matrices, h0[:2], backend="reference")

        exact = reference(torch.float64)
        limit = tolerated(relative_error(reference(torch.float32), exact))
        return check(f"{self.op}, {self.activation}", [hs], [exact], limit)


@pytest.mark.sizes([LONG[0], {"N": 160, "T": 10000}, *LONG[1:]], quick=QUICK)
@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_factored_scan(benchmark: Any, bench: Bench, size: Size, activation: str) -> None:
    """Forward and backward at T = 10000, milliseconds, by backend; beside them the eager loop at the smallest N."""
    p = GpuProblem("factored_scan", activation=activation, **size)
    error = p.error
    calls: dict[str, Callable[[], Any]] = {}
    for backend in ("triton", "cuda", "auto"):
        step = functools.partial(p.step, functools.partial(p.forward, backend=backend))
        try:
            step()
        except orthokern.BackendUnavailable:
            continue
        calls[backend] = step
    if activation == "tanh" and size["N"] == 128:
        calls = {"eager loop": lambda: p.step(eager_factored), **calls}
    for name, times in device_seconds(benchmark, calls, bench.rounds(9)).items():
        ms = spread_ms(times)
        target = SCAN_MS[activation].get(size["N"]) if name == "auto" else None
        case = f"factored, {activation}, {name}"
        bench.record("gpu scan", case, p.size, ms["median"], unit="ms", target=target, better="lower", error=error)


@pytest.mark.sizes(LONG, quick=QUICK)
def test_dense_scan_against_cudnn(benchmark: Any, bench: Bench, size: Size) -> None:
    """torch.nn.RNN over orthokern.nn.RNN: whole modules on the same weights, forward and backward."""
    torch.backends.cudnn.allow_tf32 = False
    theirs, ours = torch.nn.RNN(10, size["N"]).cuda(), orthokern.nn.RNN(10, size["N"]).cuda()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(size["T"], BATCH, 10, device="cuda")
    cotangent = torch.randn(size["T"], BATCH, size["N"], device="cuda")

    def step(module: torch.nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x)[0], list(module.parameters()), cotangent)

    error = check("RNN", [ours(x)[0]], [theirs(x)[0]], 20 * TOLERANCE)
    seconds = device_seconds(benchmark, {"torch": lambda: step(theirs), "ours": lambda: step(ours)}, bench.rounds(5))
    sizes, target = {**size, "B": BATCH}, CUDNN.get(size["N"])
    bench.record_ratio("gpu cudnn", "RNN, tanh", sizes, seconds["torch"], seconds["ours"], target=target, error=error)


@pytest.mark.sizes([{"N": N} for N in (32, 64, 128, 256, 500, 1000)], quick=[{"N": 16}])
def test_cayley(benchmark: Any, bench: Bench, size: Size) -> None:
    """Two matrices: torch.linalg.solve's form of the step over ours."""
    N, lr = size["N"], 1e-3
    m, g = torch.linalg.qr(torch.randn(2, N, N, device="cuda"))[0], torch.randn(2, N, N, device="cuda")
    eye = torch.eye(N, device="cuda")

    def solve() -> Tensor:
        a = g @ m.mT
        a = a - a.mT
        return torch.linalg.solve(eye + lr / 2 * a, m - lr / 2 * (a @ m))

    def ours() -> Tensor:
        return functional.cayley(m, g, lr)

    exact = functional.cayley(m.double(), g.double(), lr, backend="reference")
    error = check("cayley", [ours()], [exact], TOLERANCE)
    seconds = device_seconds(benchmark, {"solve": solve, "ours": ours}, bench.rounds(41))
    target = SOLVE.get(N)
    bench.record_ratio(
        "gpu cayley", "two matrices", size, seconds["solve"], seconds["ours"], target=target, error=error
    )


def test_copy(benchmark: Any, bench: Bench) -> None:
    """The copy task from the command line until it is solved, wall time of the whole process."""
    T = 50 if bench.quick else 10000
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "orthokern.tasks.copy", "--T", str(T), "--device", "cuda"]
        command += ["--out", str(Path(folder) / "run"), *(["--iterations", "3"] if bench.quick else [])]
        start = time.perf_counter()
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
    assert process.returncode == 0, process.stderr[-2000:]
    assert bench.quick or ("solved" in process.stdout and "not solved" not in process.stdout), process.stdout[-500:]
    benchmark.pedantic(lambda: None, rounds=1)  # the run above is timed as a whole
    sizes = {"N": 128, "T": T, "B": BATCH}
    bench.record("gpu copy", "solved, wall time", sizes, seconds, unit="s", target=60.0, better="lower")
