"""The first minutes on a GPU, in one command: correctness, times against cuDNN, and a report with verdicts.

    python bench/first_hour.py --bundle DIR             # on a machine with an NVIDIA GPU and this source tree
    python bench/first_hour.py --bundle DIR --prebuilt  # with an extension that is in the tree already
    python bench/first_hour.py --bundle DIR --dry-run   # every stage on the CPU, tiny sizes; no number counts

The stages that check correctness run at the same time. The stages that measure times run alone, after them. A stage of
cases is one process for all of its cases; a case that exceeds its time limit, or that ends its process, is recorded as
failed, and a new process continues with the next one. Cases that do not run in the available time are reported as not
run. DIR holds report.md, results.json, logs.txt.gz and the reports of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "bench" / "first_hour_cases.py"
START_SECONDS = 60.0  # of a process of cases before its first case
CASE_SECONDS = {"copy": 60.0, "parity": 20.0}  # by the first part of the name of a case
CHECKS = 2  # the group of the stages that check results
ENDING = 10.0  # seconds that a killed process has to end
TIMES = ("ms", "us", "s")  # units in which less is better
Record = dict[str, Any]

# The required and the desired value by the name of a case, or by its beginning up to a hyphen: a time must be below it,
# a ratio above it.
BARS = {
    **{f"rnn-N{N}-B{B}": (1.0, 2.0) for N in (64, 128, 256, 512, 768, 1024) for B in (1, 8, 50, 128)},
    "bf16-": (1.0, 2.0),
    "gru-": (1.0, 1.5),
    "lstm-": (1.0, 1.5),
    "short-RNN-T1000": (None, None),
    "short-RNN-": (0.7, 1.0),
    "graphed-RNN-": (1.5, 3.0),
    "long-factored-N128": (10.0, 7.5),
    "long-composed-N128": (7.0, 5.0),
    "long-factored-N500": (45.0, 35.0),
    "long-composed-N500": (25.0, 18.0),
    "long-composed-N1000": (85.0, 65.0),
    "rank8-N512": (0.4, 0.2),
    "rank8-N1024": (0.4, 0.2),
    "copy-T10000": (10.0, 6.0),
    "copy-T1000000": (60.0, 15.0),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, or cases of first_hour_cases.py. Stages with the same ``group`` run at the same time."""

    name: str
    group: int
    seconds: float
    command: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    missing: str = ""  # why it cannot run on this machine


# ---- the stages ------------------------------------------------------------------------------------------------------


def gpu_name() -> str:
    """The name and the compute capability of the first GPU, by the driver's own tool; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    process = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    lines = process.stdout.splitlines()
    return lines[0].strip() if process.returncode == 0 and lines else ""


def case_names() -> tuple[str, ...]:
    """The cases of first_hour_cases.py, listed by a separate process, because that file imports torch."""
    code = f"import sys; sys.path.insert(0, {str(CASES.parent)!r}); import first_hour_cases as c; print(*c.cases())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"first_hour: {CASES.name} does not load:\n{process.stderr.strip()}")
    return tuple(process.stdout.split())


def stages(dry: bool, prebuilt: bool, folder: Path, capability: str) -> list[Stage]:
    """All stages, in the order that is most useful if the time is cut short."""
    names = case_names()
    checks = tuple(name for name in names if name.startswith("parity"))
    timed = tuple(name for name in names if name not in ("versions", *checks))
    # a test that breaks its CUDA context or hangs ends its worker (tests/gpu/conftest.py), and another one goes on
    pytest = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu", "--durations=15")
    cuda = (*pytest, "-n", "6", "--max-worker-restart", "50", f"--junit-xml={folder}/junit-cuda.xml")
    triton = (*pytest, "-n", "8", "--max-worker-restart", "50", f"--junit-xml={folder}/junit-triton.xml")
    sanitizer = shutil.which("compute-sanitizer") or ""
    some = ("parity-N33", "parity-N200", "parity-N500", "parity-N1100", "parity-rank8-N512")
    check = (sanitizer, "--error-exitcode", "3", sys.executable, str(CASES), *some)
    build = ("env", "ORTHOKERN_CUDA=1", f"ORTHOKERN_CUDA_ARCHS={capability}", sys.executable, "-m", "pip", "install")
    if dry:
        return [Stage("cases", 1, 1200, cases=names)]
    return [
        *([] if prebuilt else [Stage("build", 0, 600, (*build, "--no-build-isolation", "--no-deps", "-e", str(ROOT)))]),
        Stage("versions", 1, 60, cases=("versions",)),
        Stage("parity", CHECKS, 120, cases=checks),
        Stage("tests-cuda", CHECKS, 150, (*cuda, "-k", "not triton")),
        Stage("tests-triton", CHECKS, 150, (*triton, "-k", "triton")),
        Stage("memcheck", CHECKS, 180, check, missing="" if sanitizer else "compute-sanitizer not found"),
        Stage("times", 3, 600, cases=timed),
    ]


# ---- running ---------------------------------------------------------------------------------------------------------


class Runner:
    """Runs stages and gathers their records and logs."""

    def __init__(self, folder: Path, deadline: float, *, dry: bool = False, build: Path | None = None) -> None:
        self.folder, self.deadline = folder, deadline
        self.case_command = [sys.executable, str(CASES)]
        if dry:
            self.case_command += ["--dry-run", "--build", str(build or folder / "build")]
        self.records: list[Record] = []
        self.running: set[subprocess.Popen[bytes]] = set()

    def record(self, name: str, status: str, since: float, **more: Any) -> None:
        seconds = round(time.monotonic() - since, 1)
        self.records.append({"name": name, "status": status, "seconds": seconds, **more})
        print(f"{status:>13}  {name}  {seconds} s  {more.get('error', '')}".rstrip(), flush=True)

    def start(self, stage: Stage, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"{stage.name}.log"
        # one thread for each of the processes that run at the same time: threads that wait for a core spin
        env = {**os.environ, "OMP_NUM_THREADS": "1"} if stage.group == CHECKS else None
        with log.open("ab") as output:  # a process group of its own, so that the limit also ends what it has started
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.running.add(process)
        return process, log

    def end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait inside the driver
            process.wait(ENDING)
        self.running.discard(process)

    def run_command(self, stage: Stage) -> None:
        since = time.monotonic()
        if stage.missing:
            self.record(stage.name, "not available", since, error=stage.missing)
            return
        process, log = self.start(stage, stage.command)
        try:
            status = process.wait(max(0.1, min(since + stage.seconds, self.deadline) - since))
        except subprocess.TimeoutExpired:
            self.record(stage.name, "cut off", since, error=f"ran past {time.monotonic() - since:.0f} s")
            return
        finally:
            self.end(process)
        text = log.read_text(errors="replace")
        last = [line for line in text.splitlines() if line.strip()][-1:] or ["no output"]
        details: Record = {"said": last[0][:200]}
        if status:
            details["error"] = f"exit status {status}: {last[0][:200]}"
        self.record(stage.name, "failed" if status else "ok", since, **details)

    def run_cases(self, stage: Stage) -> None:
        left, end = list(stage.cases), min(time.monotonic() + stage.seconds, self.deadline)
        while left:
            since = time.monotonic()
            process, log = self.start(stage, [*self.case_command, *left])
            with log.open("rb") as lines:
                lines.seek(0, os.SEEK_END)
                try:
                    running = self._follow(process, lines, left, end)
                finally:
                    self.end(process)
            if time.monotonic() >= end:
                for name in left:
                    self.record(name, "cut off", end)
                return
            if left:
                error = "ran past its time" if running else f"exit status {process.returncode}"
                self.record(left.pop(0), "failed", since, error=error)

    def _follow(self, process: subprocess.Popen[bytes], lines: Any, left: list[str], end: float) -> bool:
        """Record the cases of a process, until it ends or exceeds a limit; returns whether it is still running."""
        since, limit, part = time.monotonic(), START_SECONDS, b""
        while True:
            running = process.poll() is None
            part += lines.read()
            *whole, part = part.split(b"\n")
            for line in whole:
                try:
                    event = json.loads(line) if line.startswith((b'{"begin"', b'{"case"')) else {}
                except ValueError:
                    continue
                if "begin" in event:
                    since, limit = time.monotonic(), CASE_SECONDS.get(event["begin"].split("-")[0], 30.0)
                elif "case" in event:
                    left.remove(event["case"])
                    more = {"error": event["error"]} if "error" in event else {"result": event["result"]}
                    self.record(event["case"], "failed" if "error" in event else "ok", since, **more)
                    since, limit = time.monotonic(), START_SECONDS
            if not running or time.monotonic() > min(since + limit, end):
                return running
            time.sleep(0.05)

    def run(self, plan: Sequence[Stage]) -> None:
        """All stages, group after group. A build that fails ends the run."""
        for group in sorted({stage.group for stage in plan}):
            threads = [
                threading.Thread(target=self.run_cases if stage.cases else self.run_command, args=(stage,), daemon=True)
                for stage in plan
                if stage.group == group
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if any(r["name"] == "build" and r["status"] != "ok" for r in self.records):
                return


# ---- the report ------------------------------------------------------------------------------------------------------


def bars_of(name: str) -> tuple[float | None, float | None]:
    """The bar and the goal of a case."""
    return next(
        (limits for start, limits in BARS.items() if f"{name}-".startswith(start.rstrip("-") + "-")), (None, None)
    )


def verdict(name: str, result: Record) -> tuple[str, str]:
    """The bar and the goal of a case, and whether its value reaches them."""
    bar, goal = bars_of(name)
    if bar is None or goal is None:
        return "", ""
    value, lower = result["value"], result["unit"] in TIMES

    def holds(limit: float) -> bool:
        return bool(value <= limit if lower else value >= limit)

    return f"{bar:g} / {goal:g}", "goal" if holds(goal) else "bar" if holds(bar) else "MISSED"


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(records: Sequence[Record], title: str, dry: bool) -> str:
    """One page: what failed first, then the results with their bars."""
    counts = {status: sum(r["status"] == status for r in records) for status in ("ok", "failed", "cut off")}
    lines = [f"# First hour on {title}", "", ", ".join(f"{n} {status}" for status, n in counts.items()), ""]
    if dry:
        lines += ["**A dry run on the CPU: no number on this page means anything.**", ""]
    failed = [r for r in records if r["status"] != "ok"]
    if failed:
        lines += ["## Failed or not run", ""]
        lines += [f"- {r['name']}: {r['status']}: {r.get('error', '')}" for r in failed] + [""]
    lines += ["## Results", "", "| case | value | bar / goal | verdict | details |", "| --- | ---: | --- | --- | --- |"]
    for r in records:
        if "result" in r:
            result = r["result"]
            details = ", ".join(f"{k} {shown(v)}" for k, v in result.items() if k not in ("value", "unit"))
            bars = ("", "dry run") if dry else verdict(r["name"], result)
            cells = (r["name"], f"{shown(result['value'])} {result['unit']}", *bars, details.replace("|", "/"))
            lines.append("| " + " | ".join(cells) + " |")
        elif "said" in r:
            lines.append(f"| {r['name']} | {r['seconds']} s | | {r['status']} | {r['said'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def write_bundle(bundle: Path, folder: Path, records: Sequence[Record], text: str) -> None:
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "report.md").write_text(text)
    (bundle / "results.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")
    with gzip.open(bundle / "logs.txt.gz", "wb") as logs:
        for log in sorted(folder.glob("*.log")):
            logs.write(f"==== {log.stem} ====\n".encode() + log.read_bytes() + b"\n")
    for junit in folder.glob("*.xml"):
        (bundle / f"{junit.name}.gz").write_bytes(gzip.compress(junit.read_bytes()))


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time the kernels on a GPU, and report.")
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="every stage on the CPU, tiny sizes on the host harness")
    parser.add_argument("--prebuilt", action="store_true", help="use the extension of the tree instead of building it")
    parser.add_argument("--minutes", type=float, default=15, help="limit on the whole (default 15)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="stages and cases that begin with a NAME")
    parser.add_argument("--build", type=Path, help="dry run: folder of the compiled harness")
    return parser.parse_args(arguments)


def chosen(plan: Sequence[Stage], only: Sequence[str]) -> list[Stage]:
    """The stages and cases whose names begin with one of ``only``; all without it. Exits for a name without a match."""
    if not only:
        return list(plan)
    names = [name for stage in plan for name in (stage.cases or (stage.name,))]
    for start in only:
        if not any(name.startswith(start) for name in names):
            raise SystemExit(f"first_hour: nothing begins with {start!r}; accepted: {', '.join(names)}")
    kept = tuple(only)
    selected = []
    for stage in plan:
        cases = tuple(name for name in stage.cases if name.startswith(kept))
        if cases or (not stage.cases and stage.name.startswith(kept)):
            selected.append(dataclasses.replace(stage, cases=cases))
    return selected


def stop(*_: Any) -> NoReturn:
    raise SystemExit("first_hour: terminated")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu = "" if options.dry_run else gpu_name()
    if not gpu and not options.dry_run:
        print("first_hour: nvidia-smi finds no GPU; --dry-run runs every stage without one", file=sys.stderr)
        return 2
    chip, _, capability = ("the host harness", "", "") if options.dry_run else gpu.rpartition(", ")
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = stages(options.dry_run, options.prebuilt, folder, capability.replace(".", ""))
        deadline = time.monotonic() + 60 * options.minutes
        runner = Runner(folder, deadline, dry=options.dry_run, build=options.build)
        try:
            runner.run(chosen(plan, options.only))
        finally:
            for process in tuple(runner.running):  # after a signal
                runner.end(process)
            text = report(runner.records, chip, options.dry_run)
            write_bundle(options.bundle, folder, runner.records, text)
    print(text[:10_000])
    return 0 if all(r["status"] in ("ok", "not available") for r in runner.records) else 1


if __name__ == "__main__":
    sys.exit(main())
