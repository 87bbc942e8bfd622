"""The measurements of bench/first_hour.py, each to be run in a process of its own: one line of JSON per case.

    python bench/first_hour_cases.py parity-N128 times-tanh-N128
    python bench/first_hour_cases.py --dry-run times-tanh-N128      # tiny sizes, on the host harness

Sizes by letter: B batch, T time, N hidden, D features or token ids. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

BATCH, STEPS, FEATURES, TOKENS = 50, 10_000, 10, 10
PARITY_SIZES = (64, 128, 160, 250, 500, 1000, 1100)


class Machine:
    """Where the cases run: a GPU, or in a dry run the host harness, with sizes that it can take."""

    def __init__(self, dry: bool, folder: Path) -> None:
        import orthokern.functional  # noqa: F401  # registers the ops

        self.dry, self.folder = dry, folder
        self.device = "cpu" if dry else "cuda"
        if dry:
            from cuda_host import build

            folder.mkdir(parents=True, exist_ok=True)
            torch.set_num_threads(1)
            build.use(build.load(folder), pytest.MonkeyPatch())

    def units(self, N: int) -> int:
        return max(4, N // 50) if self.dry else N

    def steps(self, T: int) -> int:
        return 3 if self.dry else T

    @property
    def batch(self) -> int:
        return 2 if self.dry else BATCH

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], Any], rounds: int = 7) -> list[float]:
        """Times of a call after two rounds of warm-up: of CUDA events around it, of the clock in a dry run."""
        found = []
        for turn in range(3 if self.dry else rounds + 2):
            if self.dry:
                begin = time.perf_counter()
                call()
                took = 1e3 * (time.perf_counter() - begin)
            else:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end)
            if turn >= 2:
                found.append(took)
        return found

    def kernels(self, call: Callable[[], Any]) -> dict[str, dict[str, float]]:
        """Time on the device by kernel, the longest ones first; nothing in a dry run."""
        if self.dry:
            call()
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self.wait()
        rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)[:8]
        return {row.key[:100]: {"ms": row.device_time_total / 1e3, "count": row.count} for row in rows}


# ---- versions, parity ------------------------------------------------------------------------------------------------


def versions(machine: Machine) -> dict[str, Any]:
    import orthokern
    from orthokern import cuda

    found: dict[str, Any] = {
        "orthokern": orthokern.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cuda_kernels": cuda.REASON or "available",
    }
    if not machine.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
        }
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().cpu().double() - exact).norm() / exact.norm())


def parity(machine: Machine, N: int, T: int = 9, activation: str = "tanh", algorithm: str = "auto") -> dict[str, Any]:
    """Both scans of N units against float64: states and gradients as near as plain torch is. The batch is that of the
    times, so that the plan, and with it the kernels, are the same."""
    from helpers import assert_matches_reference, run_scan, scan_problem

    errors = {}
    for op in ("factored_scan", "dense_scan"):
        sizes = {"B": machine.batch, "T": machine.steps(T), "N": machine.units(N)}
        problem = scan_problem(op, **sizes, activation=activation, inputs="tokens")
        if activation == "identity":  # an isometry: the state neither grows nor fades
            u, *others = problem.matrices
            problem.matrices = (u, torch.ones_like(others[0]), others[1]) if others else (torch.linalg.qr(u)[0],)
        problem = problem.to(torch.float32)
        exact = run_scan(problem.to(torch.float64), "reference")
        plain = run_scan(problem, "reference")
        there = problem.map(lambda t: t.to(machine.device))
        there.x = there.x.to(machine.device)
        found = run_scan(there, "cuda", algorithm=algorithm)
        for name in ("hs", *problem.grad_names()):
            if found[name].numel():
                gradient = name.startswith("grad_")
                assert_matches_reference(found[name].cpu(), exact[name], plain[name], name=name, gradient=gradient)
        errors[op] = relative(found["hs"], exact["hs"])
    return {"value": max(errors.values()), "unit": "relative error of the states", "errors": errors}


def parity_cayley(machine: Machine) -> dict[str, Any]:
    """A thin basis whose block needs more than 48 KB of shared memory, static and dynamic together."""
    from orthokern import functional

    generator = torch.Generator().manual_seed(0)
    m = torch.linalg.qr(torch.randn(500, 10, generator=generator, dtype=torch.float64))[0]
    g = torch.randn(500, 10, generator=generator, dtype=torch.float64)
    exact = functional.cayley(m, g, 1e-2, backend="reference")
    there = [t.float().to(machine.device) for t in (m, g)]
    found = torch.ops.orthokern.cayley(*there, torch.tensor(1e-2, device=machine.device), "cuda")
    error = relative(found, exact)
    assert error < 1e-5, f"off by {error}"
    return {"value": error, "unit": "relative error"}


def parity_view(machine: Machine) -> dict[str, Any]:
    """An activation of pairs on a contiguous view that begins in the middle of a vector access."""
    x = torch.randn(8 * 6 + 1, device=machine.device)[1:].view(8, 6)
    found = torch.ops.orthokern.activation_fwd(x, None, "oplu", "cuda")
    machine.wait()
    assert torch.equal(found.cpu(), torch.ops.orthokern.activation_fwd(x.cpu().clone(), None, "oplu", "reference"))
    return {"value": 0.0, "unit": "relative error"}


# ---- times -----------------------------------------------------------------------------------------------------------


def scan_call(machine: Machine, op: str, N: int, activation: str, inputs: str, **options: Any) -> Callable[[], Any]:
    """Forward and backward of one scan with all gradients, through the public function."""
    from orthokern import functional

    N, T, B = machine.units(N), machine.steps(STEPS), machine.batch
    generator = torch.Generator(machine.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=machine.device)

    u, v = (torch.linalg.qr(normal(N, N))[0] for _ in range(2))
    s = torch.ones(N, device=machine.device)
    if activation != "identity":
        s.uniform_(0.95, 1.05, generator=generator)
    matrices = {"factored_scan": (u, s, v), "dense_scan": ((u * s) @ v.mT,), "composed": (u, s, v)}[op]
    parameters = [t.requires_grad_() for t in matrices]
    h0, cotangent = normal(B, N), normal(T, B, N)
    more: dict[str, Any] = {"activation": activation, "backend": "cuda", **options}
    if inputs == "dense":
        x = (0.1 * normal(T, B, N)).requires_grad_()
        wanted = [x, *parameters]
    else:
        D = TOKENS if inputs == "tokens" else FEATURES
        x = normal(T, B, D)
        if inputs == "tokens":
            x = torch.randint(0, D, (T, B), generator=generator, device=machine.device)
        weight = (0.1 * normal(N, D)).requires_grad_()
        more["weight"] = weight
        wanted = [weight, *parameters]

    def step() -> tuple[Tensor, ...]:
        if op == "factored_scan":
            hs = functional.factored_scan(x, *parameters, h0, **more)
        else:
            w = parameters[0] if op == "dense_scan" else (parameters[0] * parameters[1]) @ parameters[2].mT
            hs = functional.dense_scan(x, w, h0, **more)
        return torch.autograd.grad(hs, wanted, cotangent)

    return step


def spread(ms: list[float]) -> dict[str, float]:
    return {"min": min(ms), "max": max(ms)}


def times(machine: Machine, op: str, N: int, activation: str, inputs: str, **options: Any) -> dict[str, Any]:
    step = scan_call(machine, op, N, activation, inputs, **options)
    found = machine.milliseconds(step)
    kernels = machine.kernels(step)
    return {"value": statistics.median(found), "unit": "ms", "spread": spread(found), "kernels": kernels}


def times_cudnn(machine: Machine, N: int) -> dict[str, Any]:
    """torch.nn.RNN over orthokern.nn.RNN, whole modules on the same weights."""
    import orthokern.nn

    torch.backends.cudnn.allow_tf32 = False
    N, T, B = machine.units(N), machine.steps(STEPS), machine.batch
    theirs = torch.nn.RNN(FEATURES, N).to(machine.device)
    ours = orthokern.nn.RNN(FEATURES, N).to(machine.device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, FEATURES, device=machine.device)
    cotangent = torch.randn(T, B, N, device=machine.device)

    def step(module: torch.nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x)[0], list(module.parameters()), cotangent)

    ms = {"cudnn": machine.milliseconds(lambda: step(theirs)), "ours": machine.milliseconds(lambda: step(ours))}
    ratio = statistics.median(ms["cudnn"]) / statistics.median(ms["ours"])
    return {"value": ratio, "unit": "times as fast", "spread": {name: spread(found) for name, found in ms.items()}}


def times_sgemm(machine: Machine) -> dict[str, Any]:
    """The product of the gradients at N = 128: [128, 64800] by [64800, 128], TFLOP/s; whole and in partial sums."""
    from orthokern.cuda import _sums

    rows, N = (60, 4) if machine.dry else (64800, 128)
    left, right = (torch.randn(rows, N, device=machine.device) for _ in range(2))
    total = torch.zeros(N, N, device=machine.device)
    ms = {
        "whole": machine.milliseconds(lambda: torch.mm(left.mT, right)),
        "partial sums": machine.milliseconds(lambda: _sums.add_product(total, left, right)),
    }
    rate = {name: 2e-9 * rows * N * N / max(statistics.median(found), 1e-9) for name, found in ms.items()}
    return {
        "value": rate["partial sums"],
        "unit": "TFLOP/s",
        "rates": rate,
        "spread": {name: spread(found) for name, found in ms.items()},
    }


# ---- the table -------------------------------------------------------------------------------------------------------

Case = Callable[[Machine], dict[str, Any]]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {"versions": versions, "sgemm": times_sgemm}
    for N in PARITY_SIZES:
        found[f"parity-N{N}"] = functools.partial(parity, N=N)
    found |= {"parity-cayley": parity_cayley, "parity-view": parity_view}
    linear = {"N": 128, "T": 400, "activation": "identity", "algorithm": "chunked"}
    found["parity-chunked-N128"] = functools.partial(parity, **linear)

    def time_of(name: str, op: str, N: int, activation: str = "tanh", inputs: str = "dense", **options: Any) -> None:
        found[f"times-{name}-N{N}"] = functools.partial(
            times, op=op, N=N, activation=activation, inputs=inputs, **options
        )

    for N in (128, 160, 500, 1000):
        time_of("tanh", "factored_scan", N)
    for algorithm in ("chunked", "sequential"):
        time_of(f"identity-{algorithm}", "factored_scan", 128, "identity", algorithm=algorithm)
    for inputs in ("tokens", "features"):
        time_of(f"tanh-{inputs}", "factored_scan", 128, inputs=inputs)
    for N in (128, 500, 1000):
        time_of("dense", "dense_scan", N)
        time_of("composed", "composed", N)
        found[f"times-cudnn-N{N}"] = functools.partial(times_cudnn, N=N)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Cases of bench/first_hour.py; each prints one line of JSON.")
    parser.add_argument("names", nargs="+", choices=list(cases()), metavar="CASE")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the host harness")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "first_hour", help="where the harness is built")
    options = parser.parse_args()
    table = cases()
    machine = Machine(options.dry_run, options.build)
    for name in options.names:
        try:
            line: dict[str, Any] = {"case": name, "result": table[name](machine)}
        except Exception as error:  # whatever a case meets is its result
            traceback.print_exc()
            text = str(error).strip().splitlines()
            line = {"case": name, "error": text[0] if text else type(error).__name__}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
