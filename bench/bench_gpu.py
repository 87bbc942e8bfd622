"""The scans, the Cayley step and the copy task on a CUDA device: `pytest bench/bench_gpu.py --benchmark-only`.

Also a table of errors by precision, and a comparison with FlashRNN if it is installed.

Times are medians of CUDA events around whole calls of the public functions, after warm-up, with cached memory of the
previous call. Other implementations run in turns with ours, in float32 without TF32. Skipped without a device.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_table5 import CHECKED_ITERATIONS, CHECKED_RATES, TIMED_RATES, in_float64
from harness import BATCH, ROOT, Bench, Size, check, factors, relative_error
from torch import Tensor

import orthokern.nn
from orthokern import cuda, functional
from orthokern.data import CopyTask
from orthokern.optim import optimizer_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LONG = [{"N": 128, "T": 10000}, {"N": 500, "T": 10000}, {"N": 1000, "T": 10000}]
QUICK = [{"N": 32, "T": 50}]
ROUNDS = 9

# On an H200, milliseconds of forward and backward: bar and goal by N; and what a peer takes over ours.
FACTORED_MS = {128: (12.0, 5.0), 500: (60.0, 25.0), 1000: (150.0, 60.0)}
IDENTITY_MS = {128: (3.0, 1.0)}
CUDNN = {128: (2.0, 5.0), 500: (4.0, 8.0), 1000: (3.0, 6.0)}
EAGER = {128: (60.0, 200.0)}
SOLVE = {128: (4.0, 10.0), 500: (3.0, 6.0), 1000: (2.0, 4.0)}
TABLE5_SECONDS = {128: (1.5, 0.5), 500: (6.0, 2.0), 1000: (20.0, 6.0)}
GEODESIC_OVER_SGD = (2.0, 1.3)
COPY_SECONDS = (60.0, 10.0)

# Relative RMS of float32 results against float64, as on the CPU.
TOLERANCE = 2e-5


def tolerated(error_of_torch: float) -> float:
    """The tolerance of float32 results against float64, given the error of torch's float32 products.

    A linear recurrence keeps every rounding error: over 10 000 steps torch itself comes close to TOLERANCE.
    """
    return max(TOLERANCE, 2 * error_of_torch)


def milliseconds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CUDA events around each call, one of each per round after two rounds of warm-up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            del result
            if turn >= 2:
                found[name].append(start.elapsed_time(end))
    return found


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


class Problem:
    """A scan [T, B, N] on the device, tanh or linear, with a cotangent at every step."""

    def __init__(self, op: str, N: int, T: int, activation: str) -> None:
        generator = torch.Generator().manual_seed(N + T)
        u, s, v = factors(N, generator)
        self.op, self.activation, self.size = op, activation, {"N": N, "T": T, "B": BATCH}
        self.scan: Callable[..., Tensor] = getattr(functional, op)
        matrices = (u, s, v) if op == "factored_scan" else ((u * s) @ v.mT,)
        if activation == "identity":  # an isometry: a linear state neither grows nor fades over 10 000 steps
            matrices = (u, torch.ones_like(s), v) if op == "factored_scan" else (u @ v.mT,)
        x, cotangent = (torch.randn(T, BATCH, N, generator=generator) for _ in range(2))
        h0 = torch.randn(BATCH, N, generator=generator)
        self.inputs = [t.cuda().requires_grad_() for t in (0.1 * x, *matrices)]
        self.h0, self.cotangent = h0.cuda(), cotangent.cuda()

    def forward(self, **options: Any) -> Tensor:
        return self.scan(*self.inputs, self.h0, activation=self.activation, **options)

    def step(self, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(**options), self.inputs, self.cotangent)

    def error(self) -> float:
        """The largest error against float64 of a few sequences over all steps."""
        hs = self.forward()[:, :2].detach()

        def reference(dtype: torch.dtype) -> Tensor:
            x, *matrices = (t.detach().to(dtype) for t in self.inputs)
            h0 = self.h0[:2].to(dtype)
            return self.scan(x[:, :2], *matrices, h0, activation=self.activation, backend="reference").cpu()

        exact, torchs = reference(torch.float64), reference(torch.float32)
        limit = tolerated(relative_error(torchs, exact))
        return check(f"{self.op}, {self.activation}", [hs.cpu()], [exact], limit)


@pytest.mark.sizes([LONG[0], {"N": 160, "T": 10000}, *LONG[1:]], quick=QUICK)
@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_factored_scan(benchmark: Any, bench: Bench, size: Size, activation: str) -> None:
    """Forward and backward at T = 10000, milliseconds; both GPU backends."""
    problem = Problem("factored_scan", activation=activation, **size)
    error = problem.error()
    calls: dict[str, Callable[[], Any]] = {"step": problem.step, "forward": problem.forward}
    for backend in ("cuda", "triton"):
        try:
            problem.step(backend=backend)
        except orthokern.BackendUnavailable:
            continue
        calls[backend] = functools.partial(problem.step, backend=backend)
    times = milliseconds(calls, bench.rounds(ROUNDS))
    benchmark.pedantic(lambda: (problem.step(), torch.cuda.synchronize()), rounds=2)
    bars = (FACTORED_MS if activation == "tanh" else IDENTITY_MS).get(size["N"], (None, None))
    for name, found in times.items():
        bar, goal = bars if name == "step" else (None, None)
        measure = {"step": "forward and backward", "forward": "forward"}.get(name, f"forward and backward, {name}")
        bench.record(
            "gpu scan",
            f"factored, {activation}",
            problem.size,
            measure,
            statistics.median(found),
            unit="ms",
            bar=bar,
            goal=goal,
            better="lower",
            details={"error": error, "ms": spread(found)},
        )


@pytest.mark.sizes([{"N": 128, "T": 2000}, {"N": 1200, "T": 2000}], quick=[{"N": 32, "T": 140}])
def test_factored_scan_of_single_steps(
    benchmark: Any, bench: Bench, size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps path, forward and backward: in CUDA graphs, kernel by kernel, and on tensor cores."""
    problem = Problem("factored_scan", activation="tanh", **size)
    if not cuda.AVAILABLE:
        pytest.skip(cuda.REASON)

    def step(precision: str = "ieee", **overrides: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(cuda._call, "overrides", {"path": 2, **overrides})
        return problem.step(backend="cuda", precision=precision)

    for one, other in zip(step(), step(graph_steps=0), strict=True):
        assert torch.equal(one, other)
    calls: dict[str, Any] = {"in graphs": step, "kernel by kernel": functools.partial(step, graph_steps=0)}
    calls |= {f"in graphs, {name}": functools.partial(step, name) for name in ("3xtf32", "tf32", "bf16")}
    times = milliseconds(calls, bench.rounds(ROUNDS))
    benchmark.pedantic(lambda: (step(), torch.cuda.synchronize()), rounds=2)
    for name, found in times.items():
        bench.record(
            "gpu steps",
            f"factored, tanh, single steps {name}",
            problem.size,
            "forward and backward",
            statistics.median(found),
            unit="ms",
            better="lower",
            details={"ms": spread(found)},
        )


@pytest.mark.sizes(LONG, quick=QUICK)
def test_dense_scan_against_cudnn(benchmark: Any, bench: Bench, size: Size) -> None:
    """torch.nn.RNN over orthokern.nn.RNN: whole modules on the same weights, forward and backward."""
    torch.backends.cudnn.allow_tf32 = False
    theirs = torch.nn.RNN(10, size["N"]).cuda()
    ours = orthokern.nn.RNN(10, size["N"]).cuda()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(size["T"], BATCH, 10, device="cuda")
    cotangent = torch.randn(size["T"], BATCH, size["N"], device="cuda")

    def step(module: torch.nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x)[0], list(module.parameters()), cotangent)

    cudnn_float32 = theirs(x)[0].detach()
    error = check("RNN", [ours(x)[0].detach().cpu()], [cudnn_float32.double().cpu()], 20 * TOLERANCE)
    rounds = bench.rounds(5)
    times = milliseconds({"torch": lambda: step(theirs), "ours": lambda: step(ours)}, rounds)
    benchmark.pedantic(lambda: (step(ours), torch.cuda.synchronize()), rounds=2)
    bar, goal = CUDNN.get(size["N"], (None, None))
    ratio = statistics.median(times["torch"]) / statistics.median(times["ours"])
    bench.record(
        "gpu cudnn",
        "torch.nn.RNN over RNN, tanh",
        {**size, "B": BATCH},
        "time ratio",
        ratio,
        bar=bar,
        goal=goal,
        details={"error_between": error, **{f"ms_{name}": spread(found) for name, found in times.items()}},
    )


@pytest.mark.sizes([{"N": N, "T": 1000} for N in (128, 512, 1024)], quick=[{"N": 32, "T": 20}])
@pytest.mark.parametrize("backend", ["cuda_fused", "cuda"])
def test_dense_scan_against_flashrnn(benchmark: Any, bench: Bench, size: Size, backend: str) -> None:
    """FlashRNN's Elman network (Poeppel et al. 2024) over dense_scan, tanh, float32; only where it is installed.

    Its kernels are compiled at the first call, for one batch size and N; it may round products to TF32, which the error
    in the row tells.
    """
    flashrnn = pytest.importorskip("flashrnn", reason="FlashRNN is not installed").flashrnn
    problem = Problem("dense_scan", activation="tanh", **size)
    x, w = problem.inputs
    N = size["N"]
    wide = problem.h0.new_zeros(1, BATCH, 1, 1, N)
    wide[0, :, 0, 0] = problem.h0
    bias = torch.zeros(1, 1, N, device="cuda")

    def theirs() -> Tensor:
        term = x.transpose(0, 1).reshape(BATCH, size["T"], 1, 1, N)
        hs = flashrnn(term, w.view(1, 1, N, N), bias, states=wide, function="elman", backend=backend, dtype="float32")[
            0
        ]
        return hs[0, :, :, 0].transpose(0, 1)  # of [states, B, T, heads, N]

    try:
        hs = theirs().detach()
    except (RuntimeError, OSError) as error:  # no compiler for its kernels, or a size that does not fit the device
        pytest.skip(f"FlashRNN, {backend}: {(str(error) or type(error).__name__).splitlines()[0]}")
    error = problem.error()
    error_of_theirs = check("FlashRNN", [hs.cpu()], [problem.forward().detach().double().cpu()], 1e-2)
    calls = {
        "theirs": lambda: torch.autograd.grad(theirs(), problem.inputs, problem.cotangent),
        "ours": problem.step,
    }
    times = milliseconds(calls, bench.rounds(5))
    benchmark.pedantic(lambda: (problem.step(), torch.cuda.synchronize()), rounds=2)
    ratio = statistics.median(times["theirs"]) / statistics.median(times["ours"])
    bench.record(
        "gpu flashrnn",
        f"FlashRNN {backend} over dense_scan, tanh",
        problem.size,
        "time ratio",
        ratio,
        details={
            "error": error,
            "error_between": error_of_theirs,
            **{f"ms_{name}": spread(found) for name, found in times.items()},
        },
    )


# What a result of each precision may be off by at most: beyond that it is of something else. Of the lower ones, which
# keep 11 and 8 bits of a factor at every step, any finite error is a row of the table.
PRECISION_LIMITS = {"ieee": 1e-3, "3xtf32": 1e-3, "tf32": math.inf, "bf16": math.inf}


@pytest.mark.sizes([{"N": 128, "T": T} for T in (10, 100, 1000, 10000)], quick=[{"N": 32, "T": 20}])
@pytest.mark.parametrize("activation", ["tanh", "identity"])
@pytest.mark.parametrize("op", ["factored_scan", "dense_scan"])
def test_error_by_precision(benchmark: Any, bench: Bench, size: Size, op: str, activation: str) -> None:
    """No times: relative RMS errors against float64, of states and of gradients together, by precision and backend.

    Beside them the same recurrence in torch's own float32 (the reference). Five sequences; a call whose size has no
    product of the precision asked for is IEEE, and its row then says as much by its number.
    """
    problem = Problem(op, activation=activation, **size)
    few = [problem.inputs[0][:, :5].detach(), *problem.inputs[1:]]
    h0, cotangent = problem.h0[:5], problem.cotangent[:, :5]

    def results(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        inputs = [t.detach().to(dtype).requires_grad_() for t in few]
        hs = problem.scan(*inputs, h0.to(dtype), activation=activation, **options)
        grads = torch.autograd.grad(hs, inputs, cotangent.to(dtype))
        return [t.detach().double().cpu() for t in (hs, *grads)]

    exact = results(torch.float64, backend="reference")
    cases: dict[str, dict[str, Any]] = {"torch float32": {"backend": "reference"}}
    for backend in ("cuda", "triton"):
        for precision in PRECISION_LIMITS:
            cases[f"{backend} {precision}"] = {"backend": backend, "precision": precision}
    for name, options in cases.items():
        try:
            found = results(torch.float32, **options)
        except orthokern.BackendUnavailable:
            continue
        limit = PRECISION_LIMITS[options.get("precision", "ieee")]
        errors = [check(f"{op}, {name}", [one], [other], limit) for one, other in zip(found, exact, strict=True)]
        bench.record(
            "gpu accuracy",
            f"{op}, {activation}, {name}",
            {**size, "B": 5},
            "relative RMS error of the states",
            errors[0],
            better="lower",
            details={"largest_of_gradients": max(errors[1:])},
        )
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.sizes([{"N": 128, "T": 1000}], quick=[{"N": 32, "T": 20}])
def test_eager_loop(benchmark: Any, bench: Bench, size: Size) -> None:
    """Time of the straightforward loop in torch divided by ours."""
    problem = Problem("factored_scan", activation="tanh", **size)

    def eager() -> tuple[Tensor, ...]:
        x, u, s, v = problem.inputs
        h, states = problem.h0, []
        for e in x.unbind(0):
            h = torch.tanh(((h @ v) * s) @ u.mT + e)
            states.append(h)
        return torch.autograd.grad(torch.stack(states), problem.inputs, problem.cotangent)

    error = problem.error()
    times = milliseconds({"eager": eager, "ours": problem.step}, bench.rounds(5))
    benchmark.pedantic(lambda: (problem.step(), torch.cuda.synchronize()), rounds=2)
    bar, goal = EAGER.get(size["N"], (None, None))
    ratio = statistics.median(times["eager"]) / statistics.median(times["ours"])
    bench.record(
        "gpu eager",
        "eager factored loop over ours",
        problem.size,
        "time ratio",
        ratio,
        bar=bar,
        goal=goal,
        details={"error": error, **{f"ms_{name}": spread(found) for name, found in times.items()}},
    )


@pytest.mark.sizes([{"N": 32}, {"N": 64}, {"N": 128}, {"N": 256}, {"N": 500}, {"N": 1000}], quick=[{"N": 16}])
def test_cayley(benchmark: Any, bench: Bench, size: Size) -> None:
    """Two matrices: torch.linalg.solve's form of the step over ours."""
    N = size["N"]
    m = torch.linalg.qr(torch.randn(2, N, N, device="cuda"))[0]
    g = torch.randn(2, N, N, device="cuda")
    eye, lr = torch.eye(N, device="cuda"), 1e-3

    def solve() -> Tensor:
        a = g @ m.mT
        a = a - a.mT
        return torch.linalg.solve(eye + lr / 2 * a, m - lr / 2 * (a @ m))

    exact = functional.cayley(m.double(), g.double(), lr, backend="reference")
    error = check("cayley", [functional.cayley(m, g, lr).cpu()], [exact.cpu()], TOLERANCE)
    times = milliseconds({"solve": solve, "ours": lambda: functional.cayley(m, g, lr)}, bench.rounds(41))
    benchmark.pedantic(lambda: (functional.cayley(m, g, lr), torch.cuda.synchronize()), rounds=5)
    bar, goal = SOLVE.get(N, (None, None))
    ratio = statistics.median(times["solve"]) / statistics.median(times["ours"])
    bench.record(
        "gpu cayley",
        "torch.linalg.solve over cayley",
        {"N": N, "count": 2},
        "time ratio",
        ratio,
        bar=bar,
        goal=goal,
        details={"error": error, **{f"ms_{name}": spread(found) for name, found in times.items()}},
    )


@pytest.mark.sizes([{"N": n, "T": 100} for n in (128, 500, 1000)], quick=[{"N": 32, "T": 5}])
def test_table5(benchmark: Any, bench: Bench, size: Size) -> None:
    """1000 iterations of the copy task, T = 100: with geodesic steps, and the same kernels with SGD on a dense W."""
    N, task, count = size["N"], CopyTask(size["T"]), 5 if bench.quick else 100
    batches = [task.buffers(BATCH) for _ in range(8)]
    generator = torch.Generator().manual_seed(0)
    for tokens, targets in batches:
        task.fill(tokens, targets, generator)
    there = [(tokens.cuda(), targets.cuda()) for tokens, targets in batches]

    def trainer(
        model: torch.nn.Module, rates: tuple[float, float], iterations: int, backend: str | None = None
    ) -> Callable[[], Tensor]:
        """Iterations of a model on the device; the call returns their last loss."""
        rnn, readout = model.children()
        lr, geodesic_lr = rates
        optimizer = optimizer_for(
            model,
            lr=lr,
            geodesic_lr=geodesic_lr,
            euclidean=torch.optim.SGD,
            geodesic_options={"backend": backend},
        )

        def iterate() -> Tensor:
            for index in range(iterations):
                tokens, targets = there[index % len(there)]
                loss: Tensor = readout.loss(rnn(tokens)[0], targets)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            return loss.detach()

        return iterate

    rnns = {
        "geodesic": orthokern.nn.FactorizedRNN(task.num_ids, N, nonlinearity="identity"),
        "SGD": orthokern.nn.RNN(task.num_ids, N, nonlinearity="identity", init="orthogonal"),
    }
    calls, errors = {}, {}
    for name, rnn in rnns.items():
        model = torch.nn.ModuleList([rnn, orthokern.nn.LinearCrossEntropy(N, task.num_classes)]).cuda()
        # a few iterations at rates with which a wrong step shows, as on the CPU
        copied, exact = copy.deepcopy(model), in_float64(model)
        found = [trainer(copied, CHECKED_RATES, CHECKED_ITERATIONS)(), *copied.parameters()]
        expected = [trainer(exact, CHECKED_RATES, CHECKED_ITERATIONS, "reference")(), *exact.parameters()]
        errors[name] = check(f"Table 5, {name}", found, expected, TOLERANCE)
        calls[name] = trainer(model, TIMED_RATES, count)
    times = milliseconds(calls, bench.rounds(3))
    benchmark.pedantic(calls["geodesic"], rounds=1)
    seconds = {name: statistics.median(found) / count for name, found in times.items()}  # of 1000 iterations
    bar, goal = TABLE5_SECONDS.get(N, (None, None))
    sizes = {**size, "B": BATCH}
    for name, value in seconds.items():
        limits = {"bar": bar, "goal": goal} if name == "geodesic" else {}
        details = {"error": errors[name], "tolerance": TOLERANCE}
        bench.record(
            "gpu table5", name, sizes, "seconds per 1000 iterations", value, unit="s", better="lower",
            details=details, **limits,
        )  # fmt: skip
    bar, goal = GEODESIC_OVER_SGD
    ratio = seconds["geodesic"] / seconds["SGD"]
    bench.record("gpu table5", "geodesic over SGD", sizes, "time ratio", ratio, bar=bar, goal=goal, better="lower")


def test_copy(benchmark: Any, bench: Bench) -> None:
    """The copy task from the command line until it is solved, wall time."""
    T = 50 if bench.quick else 10000
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "orthokern.tasks.copy", "--T", str(T), "--device", "cuda", "--out", str(out)]
        command += ["--iterations", "3"] if bench.quick else []
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        assert done.returncode == 0, done.stderr[-2000:]
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    solved = "solved" in done.stdout and "not solved" not in done.stdout
    assert solved or bench.quick, done.stdout[-500:]
    benchmark.pedantic(lambda: None, rounds=1)  # the run above is timed as a whole, its start included
    bar, goal = COPY_SECONDS
    bench.record(
        "gpu copy",
        "solved, wall time",
        {"N": 128, "T": T, "B": BATCH},
        "seconds",
        seconds,
        unit="s",
        bar=bar,
        goal=goal,
        better="lower",
        details={"records": len(metrics), "last": done.stdout.splitlines()[-1]},
    )
