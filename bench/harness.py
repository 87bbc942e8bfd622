"""The common part of all cases: description of the machine, interleaved timing, checks of results, and results files.

Letters as everywhere: B batch, T time, N hidden, D input features or token ids. Times are in seconds unless a name says
ms or us; rates in GFLOP/s (1e9 floating point operations per second).
"""

from __future__ import annotations

import dataclasses
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
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

import orthokern
from orthokern import cpu, init

ROOT = Path(__file__).resolve().parent.parent
BATCH = 50  # of every case that does not vary it: the paper's batch

Size = Mapping[str, int]

# ---- results -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One number of the results file.

    Attributes:
        table: the table it belongs to, e.g. "scan".
        case: what was measured, e.g. "factored_scan forward".
        size: the letters' values, e.g. {"N": 128, "T": 1000, "B": 50}.
        measure: what the number is, e.g. "share of SGEMM".
        value, unit: the number; unit "" for a ratio, "%" for a share in percent.
        bar, goal: the required and the desired value; None if there is none.
        better: "higher" or "lower".
        details: further values, with the unit in the name of the key.
        file: of the case that recorded it, e.g. "bench_modules.py".
    """

    table: str
    case: str
    size: dict[str, int]
    measure: str
    value: float
    unit: str = ""
    bar: float | None = None
    goal: float | None = None
    better: str = "higher"
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row as an object of the results file, with whether bar and goal are reached."""
        row = dataclasses.asdict(self)
        row["reached"] = reached(self.value, self.bar, self.goal, self.better)
        row["measured_at"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return row


def reached(value: float, bar: float | None, goal: float | None, better: str) -> str | None:
    """ "goal", "bar" or "no"; None for a number without a bar."""

    def holds(limit: float) -> bool:
        return value >= limit if better == "higher" else value <= limit

    if bar is None:
        return None
    if goal is not None and holds(goal):
        return "goal"
    return "bar" if holds(bar) else "no"


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two rows with the same key are the same measurement, made at two times."""
    return row["table"], row["case"], tuple(sorted(row["size"].items())), row["measure"]


class Bench:
    """The interface of a case to the session: whether it is a quick run, and the list of rows."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rows: list[dict[str, Any]] = []
        self.file = ""  # of the case that runs
        self._sgemm: Sgemm | None = None

    def record(self, table: str, case: str, size: Size, measure: str, value: float, **more: Any) -> None:
        """Add a row; `more` are the other attributes of Row. A quick run has other sizes and therefore no bars."""
        if self.quick:
            more = {key: None if key in ("bar", "goal") else given for key, given in more.items()}
        self.rows.append(Row(table, case, dict(size), measure, float(value), file=self.file, **more).as_json())

    def rounds(self, full: int) -> int:
        """The number of rounds."""
        return min(full, 2) if self.quick else full

    @property
    def sgemm(self) -> Sgemm:
        """torch's matrix product, to measure shares against."""
        if self._sgemm is None:
            self._sgemm = Sgemm(256 if self.quick else 2048)
        return self._sgemm


# ---- timing ------------------------------------------------------------------------------------------------------


class Benchmark(Protocol):
    """The part of the fixture of pytest-benchmark that is used here."""

    disabled: bool
    group: str | None
    extra_info: dict[str, Any]

    def pedantic(self, target: Callable[..., Any], **options: Any) -> Any: ...


class Sgemm:
    """torch's float32 matrix product of a size with the highest rate, with which a scan is compared."""

    def __init__(self, size: int) -> None:
        self.a, self.b = torch.randn(size, size), torch.randn(size, size)
        self.c = torch.empty(size, size)
        self.gflop = 2e-9 * size**3

    def __call__(self) -> None:
        torch.mm(self.a, self.b, out=self.c)


def gflop(op: str, direction: str, size: Size) -> float:
    """Floating point operations of one scan, in 1e9, counted as the README of this folder says.

    Args:
        op: "factored_scan" or "dense_scan", K = N.
        direction: "forward" or "backward".
        size: N, T, B, and D where the scan has the input projection in it.
    """
    N, T, B, D = size["N"], size["T"], size.get("B", BATCH), size.get("D", 0)
    factored = op == "factored_scan"
    products = 2 if factored else 1  # of N x N each step
    steps = 2e-9 * T * B * N
    if direction == "forward":
        return steps * (products * N + D)
    # the gradient M of W is one product over all steps; those of U and V are M V and M^T U
    return steps * ((products + 1) * N + D) + (4e-9 * N**3 if factored else 0.0)


def interleave(
    benchmark: Benchmark,
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    after: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Time several calls in turns, one of each per round, so that a drift of the clock rate affects all of them
    equally.

    Args:
        benchmark: pytest-benchmark's fixture. It times the last of `calls`, with the others as its untimed set-up: its
            own tables and --benchmark-json show ours, which therefore comes last.
        calls: by name, in the order of a round.
        rounds: number of rounds.
        warmup: number of earlier rounds, which are not counted: they map memory, fill caches and run compilers.
        after: further calls of a round, after the one that `benchmark` times.

    Returns:
        For every name the seconds of each round. A call's result is freed before the next call, outside its time.
    """
    names, last = list(calls), list(calls)[-1]
    after = after or {}
    seconds: dict[str, list[float]] = {name: [] for name in (*names, *after)}
    kept: list[Any] = []

    def timed(name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        kept.append(call())
        seconds[name].append(time.perf_counter() - start)

    def before_last() -> None:
        for name in names[:-1]:
            timed(name, calls[name])
            kept.clear()

    def after_last() -> None:
        kept.clear()
        for name, call in after.items():
            timed(name, call)
            kept.clear()

    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(warmup):
            before_last()
            timed(last, calls[last])
            after_last()
        for found in seconds.values():
            found.clear()
        benchmark.pedantic(
            lambda: timed(last, calls[last]),
            setup=before_last,
            teardown=after_last,
            rounds=rounds,
        )
        if benchmark.disabled:  # it ran the set-up and the call once, and no teardown
            after_last()
    finally:
        if collecting:
            gc.enable()
    return seconds


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times longer theirs takes: the median over rounds of the ratio of the two times in a round."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def median(seconds: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(seconds)


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread, in ms, for a row's details."""
    ms = [1e3 * t for t in seconds]
    return {
        "median": round(statistics.median(ms), 4),
        "min": round(min(ms), 4),
        "max": round(max(ms), 4),
        "rounds": len(ms),
    }


# ---- checks ------------------------------------------------------------------------------------------------------


class WrongResult(AssertionError):
    """The results of a case differ from the reference, so that its times must not be reported."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected, in float64."""
    difference = torch.linalg.vector_norm(actual.detach().double() - expected.detach().double())
    scale = torch.linalg.vector_norm(expected.detach().double())
    return float(difference / scale.clamp_min(1e-300))


def check(what: str, actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> float:
    """Compare results with those expected, tensor by tensor; returns the largest relative error (RMS).

    Raises:
        WrongResult: one that is above the tolerance or holds NaN.
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


# ---- inputs ------------------------------------------------------------------------------------------------------


def factors(N: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """u, s, v of a recurrence near an orthogonal one: Haar bases [N, N] and s [N] in 1 +- 0.05, float32."""
    u = init.haar_orthogonal_(torch.empty(N, N), generator)
    v = init.haar_orthogonal_(torch.empty(N, N), generator)
    return u, 1 + 0.1 * (torch.rand(N, generator=generator) - 0.5), v


# ---- another process ---------------------------------------------------------------------------------------------


def child(*arguments: str) -> dict[str, Any]:
    """Run bench/child.py in a process of its own (its peak of memory is its own), with the threads of this one.

    Returns:
        The JSON object that it prints.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "child.py"), *arguments, "--threads", str(torch.get_num_threads())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WrongResult(f"bench/child.py {' '.join(arguments)} failed: {done.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- conditions --------------------------------------------------------------------------------------------------


def cpu_model() -> str:
    """The name of the processor without trademark signs; the architecture if the name is unknown."""
    name, details = "", ""
    try:
        text = Path("/proc/cpuinfo").read_text()
        found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
        name = found.get("model name", "")
        if "cpu family" in found and "model" in found:  # a virtual machine's "model name" may be no more than a brand
            details = f" (family {found['cpu family']}, model {found['model']})"
    except OSError:
        if sys.platform == "darwin":
            run = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(run, capture_output=True, text=True, check=False).stdout
    name = re.sub(r"\((R|TM|C)\)|\bCPU\b|@.*$", "", name)
    name = " ".join(name.split()) or platform.processor() or platform.machine()
    return name + details


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.split("(")[0].lower()).strip("-")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def source_digest() -> str:
    """A hash of all sources that affect the speed of the library. Rows in one results file have the same hash."""
    digest = hashlib.sha256()
    for folder, pattern in (("csrc", "**/*"), ("orthokern", "**/*.py"), ("triton_kernels", "**/*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            if path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def conditions() -> dict[str, Any]:
    """The conditions of the measurement, without host names and paths, because the file is published."""
    native = cpu.build_info()
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return {
        "machine": {
            "cpu": cpu_model(),
            **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
            "architecture": platform.machine(),
            "cores": cores(),
            "system": platform.system(),
            "isa": native.get("isa"),
            "thread_pool": native.get("thread_pool"),
            "compiler": native.get("compiler"),
        },
        "versions": {
            "orthokern": orthokern.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": numpy.__version__,
        },
        "commit": _git("rev-parse", "HEAD"),
        "changed_since_commit": bool(changed) if changed is not None else None,
        "source": source_digest(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
    }


def same_conditions(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether rows measured under both conditions may be in one file. Commits may differ if these sources do not."""
    return all(one.get(key) == other.get(key) for key in ("machine", "versions", "source", "threads", "dtype"))


def write_results(folder: Path, rows: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]], name: str) -> Path:
    """Write rows to `folder`/<yyyy-mm-dd>-<machine>.json and return the path.

    If there is a file of the same day, machine, versions and sources, the rows are added to it, and replace earlier
    rows of the same measurements. A file with other conditions is not changed, and the name of the new one gets a
    number.

    Args:
        rows: of Bench.record.
        timings: pytest-benchmark's statistics, one object per case.
        name: the command that measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = conditions()
    stem = f"{datetime.date.today().isoformat()}-{slug(here['machine'].get('gpu', here['machine']['cpu']))}"
    path, copy = folder / f"{stem}.json", 1
    old: dict[str, Any] = {"rows": [], "timings": []}
    while path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if same_conditions(here, old["conditions"]):
            break
        old = {"rows": [], "timings": []}
        copy += 1
        path = folder / f"{stem}-{copy}.json"
    new_keys = {row_key(row) for row in rows}
    new_names = {timing["name"] for timing in timings}
    results = {
        "schema": 1,
        "command": name,
        "conditions": here,
        "rows": [row for row in old["rows"] if row_key(row) not in new_keys] + list(rows),
        "timings": [timing for timing in old["timings"] if timing["name"] not in new_names] + list(timings),
    }
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
