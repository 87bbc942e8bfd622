"""The cases of bench/first_hour.py: parity with float64 and times against cuDNN, with lines of JSON as the output.

    python bench/first_hour_cases.py parity-N128 rnn-N512-B50
    python bench/first_hour_cases.py --dry-run rnn-N512-B50      # tiny sizes, on the host harness

Sizes by letter: B batch, T time, N hidden, K rank. A result has a value with a unit, and details. Times of a device are
medians between CUDA events; ratios are those of whole modules, forward and backward with the gradients of all
parameters, on the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

BATCH, FEATURES = 50, 10
PARITY_SIZES = (8, 33, 64, 100, 128, 160, 192, 200, 256, 384, 500, 512, 768, 1000, 1024, 1100)
UNITS = (64, 128, 256, 512, 768, 1024)
SECONDS = 0.15  # of repetitions of one timing
Result = dict[str, Any]


class Machine:
    """Where the cases run: a GPU, or in a dry run the host harness, with sizes that it can take."""

    def __init__(self, dry: bool, folder: Path) -> None:
        import orthokern.nn  # noqa: F401  # registers the ops

        self.dry, self.device = dry, "cpu" if dry else "cuda"
        if dry:
            from cuda_host import build

            folder.mkdir(parents=True, exist_ok=True)
            torch.set_num_threads(1)
            build.use(build.load(folder), pytest.MonkeyPatch())

    def size(self, true: int, tiny: int) -> int:
        return tiny if self.dry else true

    def units(self, N: int) -> int:
        return self.size(N, max(4, N // 50))

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """The median time of a call after two rounds of warm-up, by events on the device; in a dry run of one call."""
        if self.dry:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        times: list[float] = []
        for turn in range(200):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 2:
                times.append(start.elapsed_time(end))
            if len(times) >= 5 and sum(times) > 1e3 * SECONDS:
                break
        return statistics.median(times)

    def host_microseconds(self, call: Callable[[], Any], calls: int = 50) -> float:
        """The mean time until a call returns, without waiting for the device."""
        calls = self.size(calls, 1)
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e6 * (time.perf_counter() - begin) / calls

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def kernels(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Milliseconds on the device and launches by kernel, the longest ones first; nothing in a dry run."""
        if self.dry:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self.wait()
        rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)[:6]
        return {row.key[:70]: [round(row.device_time_total / 1e3, 3), row.count] for row in rows}


@contextlib.contextmanager
def cudnn_tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


# ---- versions, parity ------------------------------------------------------------------------------------------------


def versions(machine: Machine) -> Result:
    import orthokern
    from orthokern import cuda

    details: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if not machine.dry:
        import triton

        properties = torch.cuda.get_device_properties(0)
        details |= {
            "triton": triton.__version__,
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
        }
    assert machine.dry or not cuda.REASON, cuda.REASON
    return {"value": orthokern.__version__, "unit": "", **details}


def parity(
    machine: Machine, N: int, T: int = 9, activation: str = "tanh", leak: bool = False, **options: Any
) -> Result:
    """Both scans of N units against float64: states and gradients are as accurate as plain torch. The batch is that of
    the times, so that the plan, and with it the kernels, are the same."""
    from comparison import assert_matches_reference
    from helpers import run_scan, scan_problem

    K = options.pop("K", None)
    errors = {}
    for op in ("factored_scan", "dense_scan")[: 1 if K else 2]:
        sizes = {"B": machine.size(BATCH, 2), "T": machine.size(T, 3), "N": machine.units(N)}
        sizes["leak"] = sizes["N"] if leak else 0
        problem = scan_problem(op, **sizes, K=K, activation=activation, inputs="tokens")
        if activation == "identity":  # an isometry: the state neither grows nor fades
            u, *others = problem.matrices
            problem.matrices = (u, torch.ones_like(others[0]), others[1]) if others else (torch.linalg.qr(u)[0],)
        problem = problem.to(torch.float32)
        exact = run_scan(problem.to(torch.float64), "reference")
        plain = run_scan(problem, "reference")
        there = problem.map(lambda t: t.to(machine.device))
        there.x = there.x.to(machine.device)
        result = run_scan(there, "cuda", **options)
        for name in ("hs", *problem.grad_names()):
            if result[name].numel():
                gradient = name.startswith("grad_")
                assert_matches_reference(result[name].cpu(), exact[name], plain[name], name=name, gradient=gradient)
        errors[op] = float((result["hs"].cpu().double() - exact["hs"]).norm() / exact["hs"].norm())
    return {"value": max(errors.values()), "unit": "relative error", **errors}


def parity_cayley(machine: Machine) -> Result:
    """A thin basis whose block needs more than 48 KB of shared memory, static and dynamic together."""
    from orthokern import functional

    generator = torch.Generator().manual_seed(0)
    m = torch.linalg.qr(torch.randn(500, 10, generator=generator, dtype=torch.float64))[0]
    g = torch.randn(500, 10, generator=generator, dtype=torch.float64)
    exact = functional.cayley(m, g, 1e-2, backend="reference")
    there = [t.float().to(machine.device) for t in (m, g)]
    result = torch.ops.orthokern.cayley(*there, torch.tensor(1e-2, device=machine.device), "cuda")
    error = float((result.cpu().double() - exact).norm() / exact.norm())
    assert error < 1e-5, f"off by {error}"
    return {"value": error, "unit": "relative error"}


# ---- times against cuDNN ---------------------------------------------------------------------------------------------


def module_step(machine: Machine, module: torch.nn.Module, N: int, B: int, T: int) -> Callable[[], Any]:
    """Forward and backward of a module with the gradients of its parameters."""
    x = torch.randn(T, B, FEATURES, device=machine.device)
    cotangent = torch.randn(T, B, N, device=machine.device)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(module(x)[0], parameters, cotangent)


MODULES = {  # our module with the equations of torch's, its options, and torch's
    "RNN": ("RNN", {}, "RNN"),
    "FactorizedRNN": ("FactorizedRNN", {}, "RNN"),
    "GRU": ("GRU", {"variant": "torch", "bias": True}, "GRU"),
    "LSTM": ("LSTM", {}, "LSTM"),
}


def modules(machine: Machine, kind: str, N: int, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our module and torch's, with the same parameters except for FactorizedRNN."""
    import orthokern.nn

    name, own, rival = MODULES[kind]
    theirs = getattr(torch.nn, rival)(FEATURES, N).to(machine.device)
    ours = getattr(orthokern.nn, name)(FEATURES, N, **own, **options).to(machine.device)
    if kind != "FactorizedRNN":
        ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def against_cudnn(machine: Machine, kind: str, N: int, B: int, T: int, **options: Any) -> Result:
    """torch's module, with its default of TF32, over ours in IEEE float32 or as set by ``options``."""
    N, B, T = machine.units(N), machine.size(B, 2), machine.size(T, 3)
    ours, theirs = modules(machine, kind, N, **options)
    x = torch.randn(T, B, FEATURES, device=machine.device)
    with cudnn_tf32(False):
        error = float((ours(x)[0] - theirs(x)[0]).detach().abs().max())
    assert error < (0.3 if options else 2e-4), f"differs from torch.nn.{kind} by {error}"
    ms = {"ours": machine.milliseconds(module_step(machine, ours, N, B, T))}
    for name, allowed in (("cudnn_tf32", True), ("cudnn_ieee", False)):
        with cudnn_tf32(allowed):
            ms[name] = machine.milliseconds(module_step(machine, theirs, N, B, T))
    return {"value": ms["cudnn_tf32"] / ms["ours"], "unit": "times as fast", **ms}


def short(machine: Machine, kind: str, T: int, graphed: bool = False) -> Result:
    """Short sequences at N = 128, where the host is the bottleneck: eager, or forward and backward as CUDA graphs."""
    N, B = machine.units(128), machine.size(BATCH, 2)
    ours, theirs = modules(machine, kind, N)
    if graphed and not machine.dry:
        ours = torch.cuda.make_graphed_callables(ours, (torch.randn(T, B, FEATURES, device=machine.device),))
    result = {}
    for name, module in (("ours", ours), ("torch", theirs)):
        step = module_step(machine, module, N, B, machine.size(T, 3))
        result |= {name: machine.milliseconds(step), f"{name}_host_us": machine.host_microseconds(step)}
    return {"value": result["torch"] / result["ours"], "unit": "times as fast", **result}


# ---- times of the scans ----------------------------------------------------------------------------------------------


def scan_call(machine: Machine, N: int, form: str, T: int, activation: str, **options: Any) -> Callable[[], Any]:
    """Forward and backward of one scan with all gradients, through the public function."""
    from orthokern import functional

    N, T, B = machine.units(N), machine.size(T, 3), machine.size(BATCH, 2)
    K = min(options.pop("K", N), N)
    generator = torch.Generator(machine.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=machine.device)

    u, v = (torch.linalg.qr(normal(N, K))[0] for _ in range(2))
    s = torch.ones(K, device=machine.device)
    matrices = ((u * s) @ v.mT,) if form == "dense" else (u, s, v)
    parameters = [t.requires_grad_() for t in matrices]
    x, h0, cotangent = (0.1 * normal(T, B, N)).requires_grad_(), normal(B, N), normal(T, B, N)
    more = {"activation": activation, "backend": "cuda", **options}

    def step() -> tuple[Tensor, ...]:
        if form == "factored":
            hs = functional.factored_scan(x, *parameters, h0, **more)
        else:
            w = parameters[0] if form == "dense" else (parameters[0] * parameters[1]) @ parameters[2].mT
            hs = functional.dense_scan(x, w, h0, **more)
        return torch.autograd.grad(hs, [x, *parameters], cotangent)

    return step


def times(machine: Machine, N: int, form: str, T: int = 10_000, activation: str = "tanh", **options: Any) -> Result:
    step = scan_call(machine, N, form, T, activation, **options)
    return {"value": machine.milliseconds(step), "unit": "ms", **machine.kernels(step)}


def low_rank(machine: Machine, N: int, K: int, T: int = 1000, leak: bool = False) -> Result:
    """Microseconds per step and direction of the whole call, with the gradients of U, s and V."""
    more = {"leak": torch.full((1,), 0.1, device=machine.device)} if leak else {}
    step = scan_call(machine, N, "factored", T, "tanh", K=K, **more)
    ms = machine.milliseconds(step)
    return {"value": 1e3 * ms / (2 * T), "unit": "us", **machine.kernels(step)}


def against_triton(machine: Machine, op: str, N: int) -> Result:
    """The time of the Triton kernels over that of the CUDA kernels, T = 400; CUDA's twice in a dry run."""
    N, T, B = machine.units(N), machine.size(400, 3), machine.size(BATCH, 2)
    ms = {}
    for backend in ("cuda", "cuda" if machine.dry else "triton"):
        module, _ = modules(machine, op, N, backend=backend)
        ms[backend] = machine.milliseconds(module_step(machine, module, N, B, T))
    return {"value": ms.get("triton", ms["cuda"]) / ms["cuda"], "unit": "times CUDA's time", **ms}


def linear_cross_entropy(machine: Machine) -> Result:
    """The fused readout and loss against torch's two functions, forward and backward."""
    from orthokern import functional

    rows, N, classes = machine.size(20_000, 6), machine.units(512), machine.size(10_000, 11)
    h, w = (torch.randn(n, N, device=machine.device, requires_grad=True) for n in (rows, classes))
    target = torch.randint(0, classes, (rows,), device=machine.device)

    def step(loss: Callable[[], Tensor]) -> Any:
        return torch.autograd.grad(loss(), [h, w])

    ms = {
        "torch": machine.milliseconds(
            lambda: step(lambda: torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, w), target))
        ),
        "ours": machine.milliseconds(lambda: step(lambda: functional.linear_cross_entropy(h, w, target))),
    }
    return {"value": ms["torch"] / ms["ours"], "unit": "times as fast", **ms}


def cayley(machine: Machine, N: int) -> Result:
    """Two matrices: torch.linalg.solve's form of the step over ours."""
    from orthokern import functional

    N, lr = machine.units(N), 1e-3
    m = torch.linalg.qr(torch.randn(2, N, N, device=machine.device))[0]
    g, eye = torch.randn(2, N, N, device=machine.device), torch.eye(N, device=machine.device)

    def solve() -> Tensor:
        a = g @ m.mT
        a = a - a.mT
        return torch.linalg.solve(eye + lr / 2 * a, m - lr / 2 * (a @ m))

    ms = {"solve": machine.milliseconds(solve), "ours": machine.milliseconds(lambda: functional.cayley(m, g, lr))}
    return {"value": ms["solve"] / ms["ours"], "unit": "times as fast", **ms}


# ---- whole processes -------------------------------------------------------------------------------------------------


def copy_task(machine: Machine, T: int, arguments: tuple[str, ...]) -> Result:
    """The copy task from the command line: wall time of the process, and seconds in training."""
    tiny = ["--iterations", "2", "--batch", "2", "--hidden", "8"] if machine.dry else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "orthokern.tasks.copy", "--T", str(machine.size(T, 5)), *arguments, *tiny]
        begin = time.perf_counter()
        process = subprocess.run(
            [*command, "--device", machine.device, "--no-plots", "--out", str(run)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        wall = time.perf_counter() - begin
        lines = (process.stdout + process.stderr).strip().splitlines() or [""]
        assert process.returncode == 0, lines[-1]
        results = json.loads((run / "result.json").read_text())
    details = {key: results[key] for key in ("iteration", "seconds", "reached") if key in results}
    return {"value": wall, "unit": "s", **details, "said": " | ".join(lines[-3:])[-300:]}


# ---- the table -------------------------------------------------------------------------------------------------------

Case = Callable[[Machine], Result]


def correctness() -> dict[str, Case]:
    of = functools.partial
    table: dict[str, Case] = {f"parity-N{N}": of(parity, N=N) for N in PARITY_SIZES}
    table |= {f"parity-rank{K}-N{N}": of(parity, N=N, K=K) for K, N in ((1, 512), (8, 512), (8, 1024), (30, 2048))}
    table |= {f"parity-leak-N{N}": of(parity, N=N, leak=True) for N in (128, 500, 1100)}
    table["parity-leak-rank8-N512"] = of(parity, N=512, K=8, leak=True)
    table["parity-chunked-N128"] = of(parity, N=128, T=400, activation="identity", algorithm="chunked")
    return table | {"parity-cayley": parity_cayley}


def measurements() -> dict[str, Case]:
    of = functools.partial
    table: dict[str, Case] = {}
    for N in UNITS:
        for B in (1, 8, 50, 128, 512, 2048):
            table[f"rnn-N{N}-B{B}"] = of(against_cudnn, kind="RNN", N=N, B=B, T=400)
        for B in (50, 512):
            table[f"gru-N{N}-B{B}"] = of(against_cudnn, kind="GRU", N=N, B=B, T=200)
        for B in (512, 2048) if N >= 256 else ():
            table[f"bf16-N{N}-B{B}"] = of(against_cudnn, kind="RNN", N=N, B=B, T=400, precision="bf16")
    for N in (128, 512):
        table[f"lstm-N{N}-B50"] = of(against_cudnn, kind="LSTM", N=N, B=50, T=100)
    for kind in ("RNN", "FactorizedRNN", "GRU"):
        for T in (28, 100, 1000):
            table[f"short-{kind}-T{T}"] = of(short, kind=kind, T=T)
        table[f"graphed-{kind}-T28"] = of(short, kind=kind, T=28, graphed=True)
    for N in (128, 500, 1000):
        for form in ("factored", "composed", "dense"):
            table[f"long-{form}-N{N}"] = of(times, N=N, form=form)
    table["long-linear-N128"] = of(times, N=128, form="factored", activation="identity")
    for N in (512, 1024, 2048):
        table[f"rank8-N{N}"] = of(low_rank, N=N, K=8)
        table[f"leak-rank8-N{N}"] = of(low_rank, N=N, K=8, leak=True)
    for N in (128, 500):
        table[f"leak-N{N}"] = of(low_rank, N=N, K=N, leak=True)
    for op, N in (("RNN", 64), ("RNN", 128), ("FactorizedRNN", 128), ("GRU", 64), ("GRU", 128)):
        table[f"triton-{op}-N{N}"] = of(against_triton, op=op, N=N)
    table["linear-cross-entropy"] = linear_cross_entropy
    return table | {f"cayley-N{N}": of(cayley, N=N) for N in (32, 128, 256, 500, 1000)}


def cases() -> dict[str, Case]:
    of = functools.partial
    tanh = ("--iterations", "200", "--nonlinearity", "tanh")
    return {
        "versions": versions,
        **correctness(),
        "copy-T10000": of(copy_task, T=10_000, arguments=()),
        "copy-tanh-T1000": of(copy_task, T=1000, arguments=tanh),
        **measurements(),
        "copy-T100000": of(copy_task, T=100_000, arguments=()),
        "copy-T1000000": of(copy_task, T=1_000_000, arguments=("--iterations", "200")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Cases of bench/first_hour.py; each prints one line of JSON.")
    parser.add_argument("names", nargs="+", choices=list(cases()), metavar="CASE")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the host harness")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "first_hour", help="where the harness is built")
    options = parser.parse_args()
    table = cases()
    machine = Machine(options.dry_run, options.build)
    for name in options.names:
        print(json.dumps({"begin": name}), flush=True)
        try:
            line: Result = {"case": name, "result": table[name](machine)}
        except Exception as error:  # any error of a case is its result
            traceback.print_exc()
            text = str(error).strip().splitlines()
            line = {"case": name, "error": text[0] if text else type(error).__name__}
        print(json.dumps(line), flush=True)
        if "CUDA error" in line.get("error", ""):  # every later call of this process would fail as well
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
