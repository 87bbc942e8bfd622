"""The common part of all benchmarks: interleaved timing, checks of results, and the results file.

Letters as everywhere: B batch, T time, N hidden, D input features or token ids. Times are in seconds unless a name says
ms or us.
"""

from __future__ import annotations

import datetime
import gc
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import orthokern
from orthokern import cpu, init
from orthokern._files import write_atomically
from orthokern.training.rundir import processor

ROOT = Path(__file__).resolve().parent.parent
BATCH = 50  # of every case that does not vary it: the paper's batch

Size = Mapping[str, int]
Row = dict[str, Any]


class Bench:
    """The interface of a case to the session: whether it is a quick run, and the list of rows; and to pytest-benchmark:
    the fixture `benchmark` of the case."""

    benchmark: Any

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rows: list[Row] = []

    def record(
        self,
        table: str,
        case: str,
        size: Size,
        value: float,
        *,
        unit: str = "",
        target: float | None = None,
        better: str = "higher",
        **details: Any,
    ) -> None:
        """Add a row. A quick run has other sizes and therefore no targets; details have units in their names."""
        row = {"table": table, "case": case, "size": dict(size), "value": _rounded(value), "unit": unit}
        row |= {"target": None if self.quick else target, "better": better}
        self.rows.append({**row, "details": {key: _rounded(detail) for key, detail in details.items()}})

    def compare(
        self,
        table: str,
        case: str,
        size: Size,
        theirs: Callable[[], Any],
        ours: Callable[[], Any],
        *,
        rounds: int,
        warmup: int = 1,
        better: str = "higher",
        **more: Any,
    ) -> None:
        """Time two calls in turns and record a row: theirs over ours, or ours over theirs where lower is better."""
        times = self.interleave(table, {"theirs": theirs, "ours": ours}, rounds=rounds, warmup=warmup)
        details = {"ms": spread_ms(times["ours"]), "peer_ms": spread_ms(times["theirs"]), **more}
        pair = ("theirs", "ours") if better == "higher" else ("ours", "theirs")
        self.record(table, case, size, ratio(*(times[name] for name in pair)), better=better, **details)

    def interleave(
        self, group: str, calls: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 1
    ) -> dict[str, list[float]]:
        """Time several calls in turns, one of each per round, so that a drift of the clock rate affects all of them
        equally.

        Args:
            group: heading of pytest-benchmark's own table. It times the last of `calls`, with the others as its untimed
                set-up: its tables show ours, which therefore comes last.
            calls: by name, in the order of a round.
            rounds: number of rounds; at most two in a quick run.
            warmup: number of earlier rounds, which are not counted: they map memory, fill caches and run compilers.

        Returns:
            For every name the seconds of each round. A call's result is freed before the next call, outside its time.
        """
        self.benchmark.group = group
        names, last = list(calls), list(calls)[-1]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        results: list[Any] = []

        def timed(name: str, call: Callable[[], Any]) -> None:
            start = time.perf_counter()
            results.append(call())
            seconds[name].append(time.perf_counter() - start)

        def before_last() -> None:
            for name in names[:-1]:
                timed(name, calls[name])
                results.clear()

        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            for _ in range(warmup):
                before_last()
                timed(last, calls[last])
                results.clear()
            for times in seconds.values():
                times.clear()
            self.benchmark.pedantic(
                lambda: timed(last, calls[last]),
                setup=before_last,
                teardown=results.clear,
                rounds=min(rounds, 2) if self.quick else rounds,
                warmup_rounds=0,
            )
        finally:
            if collecting:
                gc.enable()
        return seconds


# ---- timing ------------------------------------------------------------------------------------------------------


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times longer theirs takes: the median over rounds of the ratio of the two times in a round."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and extremes in ms."""
    ms = [1e3 * t for t in seconds]
    return {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}


def _rounded(value: Any) -> Any:
    """Six significant digits, in nested dictionaries too."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---- checks ------------------------------------------------------------------------------------------------------


class WrongResult(AssertionError):
    """The results of a case differ from the reference, so that its times must not be reported."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected values, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float(torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected).clamp_min(1e-300))


def check(what: str, actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> float:
    """Compare results with those expected, tensor by tensor; returns the largest relative error (RMS).

    Raises:
        WrongResult: an error is above the tolerance, or a result holds NaN.
    """
    worst = 0.0
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = relative_error(a, e)
        if not error <= tolerance:  # so that NaN fails too
            raise WrongResult(
                f"{what}: result {index} is off by {error:.3g} (relative RMS), tolerated is {tolerance:g}"
            )
        worst = max(worst, error)
    return worst


# Linux counts the largest resident size of the process that starts a command as that of the command. This one is small.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_of(command: Sequence[str]) -> int:
    """Run a command that imports this source tree; returns its largest resident size in bytes, or raises WrongResult if
    it fails."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.run([sys.executable, "-c", PEAK, *command], env=environment, capture_output=True, text=True)
    if process.returncode:
        raise WrongResult(f"{' '.join(command)} failed: {process.stderr.strip()[-800:]}")
    return int(process.stdout) * (1 if sys.platform == "darwin" else 1024)


def module_step(module: nn.Module, x: Tensor | PackedSequence, cotangent: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward of a recurrent module: the output, the gradient of x if it requires one, and those of all
    parameters. For a packed x, the data of the output."""
    output = module(x)[0]
    output = output.data if isinstance(output, PackedSequence) else output
    variables = [*([x] if isinstance(x, Tensor) and x.requires_grad else []), *module.parameters()]
    return output.detach(), *torch.autograd.grad(output, variables, cotangent)


def checked_sequences(size: Size) -> Tensor:
    """Indices [b] of the sequences of a batch that are checked: all, or five of them if float64 takes too long.

    Sequences are independent, so that with a cotangent of zero for the others, the gradients are those of these five.
    """
    B = size.get("B", BATCH)
    if size["T"] * B * size["N"] <= 8_000_000 or B <= 5:
        return torch.arange(B)
    return torch.linspace(0, B - 1, 5).round().long()


def only(cotangent: Tensor, sequences: Tensor) -> Tensor:
    """The cotangent [T, B, N] with zeros for all other sequences."""
    masked = torch.zeros_like(cotangent)
    masked[:, sequences] = cotangent[:, sequences]
    return masked


def factors(N: int, generator: torch.Generator, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """u, s, v of a recurrence near an orthogonal one, of rank K, or N: Haar bases [N, K] and s [K] in 1 +- 0.05,
    float32."""
    K = N if rank is None else rank
    u = init.haar_orthogonal_(torch.empty(N, K), generator)
    v = init.haar_orthogonal_(torch.empty(N, K), generator)
    return u, 1 + 0.1 * (torch.rand(K, generator=generator) - 0.5), v


# ---- results -----------------------------------------------------------------------------------------------------


def _git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def source_digest() -> str:
    """A hash of all sources that affect the speed of the library. Rows in one results file have the same hash."""
    digest = hashlib.sha256()
    for folder, pattern in (("csrc", "**/*"), ("orthokern", "**/*.py"), ("triton_kernels", "**/*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            if path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def conditions() -> dict[str, Any]:
    """The conditions of the measurement, without host names and paths, because the file is published."""
    native = cpu.build_info()
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = {"orthokern": orthokern.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "machine": {"cpu": processor(), **gpu, "cores": cores, "isa": native.get("isa")},
        "compiler": native.get("compiler"),
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "changed_since_commit": bool(changed) if changed is not None else None,
        "source": source_digest(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
    }


def write_results(folder: Path, rows: Sequence[Row]) -> Path:
    """Write rows to `folder`/<yyyy-mm-dd>-<machine>.json, one per line, and return the path.

    The rows are added to a file of the same day and conditions (the commit may differ), and replace earlier rows of the
    same measurements. A file with other conditions is not changed, and the name of the new one gets a number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here, today = conditions(), datetime.date.today().isoformat()
    machine = here["machine"].get("gpu", here["machine"]["cpu"]).split("(")[0]
    stem = f"{today}-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}"
    path, copy = folder / f"{stem}.json", 1
    earlier: list[Row] = []
    while path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if all(here[key] == old["conditions"].get(key) for key in ("machine", "versions", "source", "threads")):
            earlier = old["rows"]
            break
        copy += 1
        path = folder / f"{stem}-{copy}.json"

    def key(row: Row) -> tuple[Any, ...]:
        return row["table"], row["case"], tuple(sorted(row["size"].items()))

    measured = {key(row) for row in rows}
    dump_results(path, today, here, [*(row for row in earlier if key(row) not in measured), *rows])
    return path


def dump_results(path: Path, date: str, here: Mapping[str, Any], rows: Sequence[Row]) -> None:
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps({"schema": 2, "date": date, "conditions": here}, ensure_ascii=False)
    write_atomically(path, f'{head[:-1]},\n "rows": [\n  {lines}\n]}}\n'.encode())
