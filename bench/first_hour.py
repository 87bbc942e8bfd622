"""The first hour on a GPU, in one command: build, probe, parity, times, tests, and a report with verdicts.

    python bench/first_hour.py             # on a machine with an NVIDIA GPU, nvcc and this source tree
    python bench/first_hour.py --dry-run   # every stage on the CPU, tiny sizes on the host harness; no number counts

Every measurement is a process of its own under a time limit, and so is the whole. Results go into
``bench/results/first-hour-<GPU>-<hash of the sources>``, a JSON file and a log for each measurement. A second call
continues with the measurements without a result, and repeats those that failed; ``--again NAME`` repeats those whose
names begin with NAME.
``report.md`` in this folder is rewritten after every measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "bench" / "first_hour_cases.py"
PROBE = ROOT / "bench" / "probe.cu"
SOURCES = (("csrc", "**/*"), ("orthokern", "**/*.py"), ("triton_kernels", "**/*.py"), ("bench", "probe.cu"))
ENDING = 30  # seconds that a killed process has to end


@dataclasses.dataclass(frozen=True)
class Bar:
    """The required (bar) and the desired (goal) value of a measurement, and the assumptions of the kernel planner."""

    bar: float | None
    goal: float | None
    better: str = "lower"


# Milliseconds of forward and backward with all gradients on an H200, B = 50, T = 10 000; ratios against cuDNN.
BARS = {
    "times-tanh-N128": Bar(12.0, 7.5),
    "times-composed-N128": Bar(12.0, 5.0),
    "times-identity-chunked-N128": Bar(3.0, 2.0),
    "times-tanh-N500": Bar(60.0, 40.0),
    "times-composed-N500": Bar(60.0, 22.0),
    "times-tanh-N1000": Bar(150.0, 60.0),
    "times-composed-N1000": Bar(150.0, 90.0),
    "times-cudnn-N128": Bar(2.0, 5.0, "higher"),
    "times-cudnn-N500": Bar(4.0, 8.0, "higher"),
    "times-cudnn-N1000": Bar(3.0, 6.0, "higher"),
}
# What the plans assume of the probe's numbers: (name, part of the size, comparison, value, why it matters).
ASSUMED = (
    ("resident clusters", "16 blocks", ">=", 7, "N = 1000 with 50 sequences runs in one wave of groups of 8"),
    ("exchange", "8 blocks, 8 KiB, st.async", "<=", 2000, "two exchanges a step at N = 500: 1 us each at most"),
    ("exchange", "16 blocks, 32 KiB, st.async", "<=", 2000, "two exchanges a step at N = 1000"),
    ("L2 stream", "32 KiB in flight", ">=", 25, "chunks of the map that are read in every step at N = 1000"),
    ("__syncthreads", "256 threads", "<=", 45, "one or two a step on the resident path"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement: a process, its time limit in seconds, and where its result comes from."""

    name: str
    command: tuple[str, ...]
    limit: int
    env: tuple[tuple[str, str], ...] = ()
    missing: str = ""  # why it cannot run on this machine
    lines: bool = False  # the output is JSON lines; else only the exit status counts
    passes: tuple[int, ...] = (0,)
    needs: str = ""  # the measurement without which this one has no meaning


# ---- what there is to do ---------------------------------------------------------------------------------------------


def gpu_name() -> str:
    """The name of the first GPU, by the driver's own tool; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def nvcc() -> str:
    """The compiler that setup.py would take: of CUDACXX, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda."""
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [os.environ.get("CUDACXX", ""), *(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    return next(filter(None, map(shutil.which, [*filter(None, candidates), "/usr/local/cuda/bin/nvcc"])), "")


def source_digest() -> str:
    digest = hashlib.sha256()
    for folder, pattern in SOURCES:
        for path in sorted((ROOT / folder).glob(pattern)):
            if path.is_file() and path.suffix in (".cu", ".cpp", ".h", ".py"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def case_names() -> list[str]:
    """The cases of first_hour_cases.py, which imports torch: asked for in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(CASES.parent)!r}); import first_hour_cases as c; print(*c.cases())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"first_hour: {CASES.name} does not load:\n{done.stderr.strip()}")
    return done.stdout.split()


def parity_of(name: str, names: Sequence[str]) -> str:
    """The case that checks the results of the kernels that a case measures: of the same size; empty if there is none.

    Without it a time would be one of wrong results, or a kernel that waits for ever would take the hour, a time limit
    for each of its cases.
    """
    kinds = ["chunked"] if "chunked" in name else []
    parity = "-".join(["parity", *kinds, name.rpartition("-")[2]])
    return parity if name.startswith("times") and parity in names else ""


def case_jobs(names: Sequence[str], dry: bool, folder: Path) -> list[Job]:
    """A process for each case; in a dry run one for all, which would spend its time on importing torch."""
    base = (sys.executable, str(CASES))
    if dry:
        command = (*base, "--dry-run", "--build", str(folder / "build"), *names)
        return [Job("cases", command, 1200, lines=True)] if names else []
    limits = {name: 120 if name.startswith("parity") else 240 for name in names}
    return [Job(name, (*base, name), limits[name], lines=True, needs=parity_of(name, names)) for name in names]


def probe_jobs(dry: bool, folder: Path, capability: str) -> list[Job]:
    program = str(folder / "probe")
    flags = ["-std=c++17", f"-I{ROOT / 'csrc'}"]
    if dry:
        host = ROOT / "tests" / "cuda_host"
        more = ["-O1", "-U_FORTIFY_SOURCE", "-DORTHOKERN_CUDA_HOST", f"-I{host}", "-w", "-x", "c++"]
        files = [str(PROBE), str(host / "runtime.cpp")]
        command = (*(os.environ.get("CXX") or "g++").split(), *flags, *more, *files, "-o", program)
        missing = ""
    else:
        command = (nvcc(), *flags, "-O3", f"-arch=sm_{capability}", str(PROBE), "-o", program)
        missing = "" if nvcc() else "nvcc not found"
    return [
        Job("probe-build", command, 300, missing=missing),
        Job("probe", (program,), 120, lines=True, missing=missing),
    ]


def jobs(dry: bool, folder: Path, capability: str) -> list[Job]:
    """Everything, in the order in which an hour that is cut short is of most use."""
    names = case_names()
    pytest = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider")  # a line for each test, also of a part
    build = (*(sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e"), str(ROOT))
    build_env = (("ORTHOKERN_CUDA", "1"), ("ORTHOKERN_CUDA_ARCHS", capability))
    # a test that breaks its CUDA context or hangs ends its worker (tests/gpu/conftest.py), and another one goes on
    restarts = ("--max-worker-restart", "50")
    tests = [
        Job("tests-cuda", (*pytest, "-n", "1", *restarts, "tests/gpu", "-k", "not triton"), 1200, passes=(0, 5)),
        Job("tests-triton", (*pytest, "-n", "12", *restarts, "tests/gpu", "-k", "triton"), 1200, passes=(0, 5)),
    ]
    if dry:
        tests = [dataclasses.replace(tests[0], command=(*pytest, "-n", "0", "tests/gpu", "--collect-only"))]
    return [
        *([] if dry else [Job("build", build, 1200, env=build_env)]),
        *probe_jobs(dry, folder, capability),
        *case_jobs(names, dry, folder),
        *tests,
    ]


# ---- running ---------------------------------------------------------------------------------------------------------


def records_in(text: str) -> list[dict[str, Any]]:
    """The lines of a log that are JSON objects. Libraries write into it too, and the last line may be cut off."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line) if line.startswith("{") else None
            if isinstance(record, dict):
                found.append(record)
    return found


def run(job: Job, limit: float, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a job and give a record for each result. The log has all that it printed."""
    if job.missing:
        yield {"name": job.name, "status": "not available", "error": job.missing}
        return
    start = time.monotonic()
    env = {**os.environ, **dict(job.env)}
    log = folder / f"{job.name}.log"
    with log.open("w") as output:
        # a group of its own, so that the limit also ends what it has started
        try:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:  # as the probe that could not be compiled
            yield {"name": job.name, "status": "failed", "error": str(error)}
            return
        stuck = ""
        try:
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:  # it waits inside the driver, which signals do not reach
                stuck = " and does not end: the GPU may need a reset"
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
    seconds = round(time.monotonic() - start, 1)
    text = log.read_text(errors="replace")
    records = records_in(text) if job.lines else []
    cases = [record for record in records if "case" in record]
    for record in cases:
        status_of = "failed" if "error" in record else "ok"
        name = record.pop("case")
        yield {"name": name, "status": status_of, "seconds": seconds, **record}
    timed_out = status is None
    if timed_out:
        error = f"ran past {limit:.0f} s{stuck}"
    elif status not in job.passes:
        last = [line for line in text.splitlines() if line.strip()]
        error = f"exit status {status}: {last[-1] if last else 'no output'}"
    elif cases:
        return
    else:
        done: dict[str, Any] = {"name": job.name, "status": "ok", "seconds": seconds}
        yield {**done, "result": records} if job.lines else done
        return
    failed: dict[str, Any] = {"name": job.name, "status": "failed", "seconds": seconds, "error": error}
    if records and not cases:  # what it found before
        failed["result"] = records
    yield {**failed, "timed_out": True} if timed_out else failed


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder, by name. Raises SystemExit for a damaged file."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_bytes())
        except ValueError as error:
            raise SystemExit(f"first_hour: {path} is damaged ({error}); remove it to measure again") from None
    return found


def store(folder: Path, record: dict[str, Any]) -> None:
    partial = folder / f"{record['name']}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(folder / f"{record['name']}.json")


# ---- the report ------------------------------------------------------------------------------------------------------


def verdict(value: float, bar: Bar) -> str:
    def holds(limit: float | None) -> bool:
        return limit is not None and (value <= limit if bar.better == "lower" else value >= limit)

    return "goal" if holds(bar.goal) else "bar" if holds(bar.bar) else "MISSED"


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def time_rows(records: dict[str, dict[str, Any]], dry: bool) -> list[str]:
    rows = ["| case | measured | bar | goal | verdict |", "| --- | ---: | ---: | ---: | --- |"]
    for name, record in records.items():
        result = record.get("result")
        if not name.startswith("times") or not isinstance(result, dict):
            continue
        bar = BARS.get(name)
        value = result["value"]
        limits = [shown(bar.bar), shown(bar.goal), "dry run" if dry else verdict(value, bar)] if bar else ["", "", ""]
        cells = [name[6:], f"{shown(value)} {result['unit']}", *limits]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def probe_rows(records: dict[str, dict[str, Any]], dry: bool) -> list[str]:
    rows = ["| probe | size | measured | assumed | verdict |", "| --- | --- | ---: | ---: | --- |"]
    for found in records.get("probe", {}).get("result", []):
        fits = [a for a in ASSUMED if a[0] == found["name"] and a[1] in found["size"]]
        assumed, said = "", ""
        if fits:
            _, _, comparison, limit, why = fits[0]
            holds = found["value"] >= limit if comparison == ">=" else found["value"] <= limit
            assumed, said = f"{comparison} {limit}", "dry run" if dry else "holds" if holds else f"NOT SO: {why}"
        measured = f"{shown(found['value'])} {found['unit']}"
        rows.append(f"| {found['name']} | {found['size']} | {measured} | {assumed} | {said} |")
    return rows


def report(folder: Path, chip: str, dry: bool, planned: Sequence[str]) -> str:
    """One page: what failed first, then the times against their bars, errors, and the probe."""
    records = load(folder)
    failed = [f"- {r['name']}: {r['status']}: {r.get('error', '')}" for r in records.values() if r["status"] != "ok"]
    waiting = [name for name in planned if name not in records]
    errors = [
        f"| {name[7:]} | {record['result']['value']:.1e} | "
        + ", ".join(f"{key} {value:.1e}" for key, value in record["result"].get("errors", {}).items())
        + " |"
        for name, record in records.items()
        if name.startswith("parity") and isinstance(record.get("result"), dict)
    ]
    versions = records.get("versions", {}).get("result") or {}
    lines = [
        f"# First hour on {chip}",
        "",
        f"Sources {source_digest()}; " + ", ".join(f"{key} {value}" for key, value in versions.items()),
        "",
        f"{sum(r['status'] == 'ok' for r in records.values())} measurements succeeded, {len(failed)} did not, "
        f"{len(waiting)} have not run.",
        "",
        *(["**A dry run on the CPU: no number on this page means anything.**", ""] if dry else []),
        *(["## Failed", "", *failed, ""] if failed else []),
        *(["## Not run", "", ", ".join(waiting), ""] if waiting else []),
        "## Times",
        "",
        "Forward and backward with all gradients, B = 50, T = 10 000, medians.",
        "",
        *time_rows(records, dry),
        "",
        "## Parity with float64",
        "",
        "| case | largest | by kind |",
        "| --- | ---: | --- |",
        *errors,
        "",
        "## Probe",
        "",
        *probe_rows(records, dry),
        "",
    ]
    text = "\n".join(lines)
    (folder / "report.md").write_text(text)
    return text


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, probe, check and time the CUDA kernels, and report.")
    parser.add_argument("--dry-run", action="store_true", help="every stage on the CPU, tiny sizes on the host harness")
    parser.add_argument("--minutes", type=float, default=60, help="limit on the whole (default 60)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: see above; a dry run: build/)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measurements that begin with a NAME")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat what begins with a NAME")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    dry = options.dry_run
    gpu = "" if dry else gpu_name()
    if not gpu and not dry:
        print("first_hour: nvidia-smi finds no GPU; --dry-run goes through every stage without one", file=sys.stderr)
        return 2
    chip, _, capability = ("host harness", "", "") if dry else gpu.rpartition(", ")[::1]
    slug = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    parent = ROOT / ("build" if dry else "bench/results")
    folder = (options.out or parent / f"first-hour-{slug}-{source_digest()}").resolve()
    deadline = time.monotonic() + 60 * options.minutes
    plan = jobs(dry, folder, capability.replace(".", ""))
    planned = [name for job in plan for name in (case_names() if job.name == "cases" else [job.name])]
    for names, known in ((options.only, planned), (options.again, [*planned, *load(folder)])):
        for name in names:
            if not any(each.startswith(name) for each in known):
                accepted = ", ".join(planned)
                print(f"first_hour: no measurement begins with {name!r}; accepted: {accepted}", file=sys.stderr)
                return 2
    folder.mkdir(parents=True, exist_ok=True)
    for record in load(folder).values():
        if any(record["name"].startswith(name) for name in options.again):
            (folder / f"{record['name']}.json").unlink()
    for job in plan:
        wanted = job.name == "cases" or not options.only or any(job.name.startswith(name) for name in options.only)
        records = load(folder)
        done = {name for name, record in records.items() if record["status"] == "ok"}
        if job.name == "build":  # nothing else counts after one that failed
            wanted = wanted or ("build" in records and "build" not in done)
        if job.name == "cases":  # of many cases in one process: those that are missing
            left = [n for n in planned if n in job.command and n not in done]
            if options.only:
                left = [n for n in left if any(n.startswith(name) for name in options.only)]
            fixed = [part for part in job.command if part not in planned]
            job = dataclasses.replace(job, command=(*fixed, *left))
            wanted = bool(left)
        if not wanted or job.name in done:
            continue
        left_seconds = deadline - time.monotonic()
        if left_seconds < 5:
            break
        if records.get(job.needs, {}).get("status", "ok") != "ok":
            store(folder, {"name": job.name, "status": "skipped", "error": f"{job.needs} has not succeeded"})
            print(f"{'skipped':>13}  {job.name}  {job.needs} has not succeeded", flush=True)
            continue
        names = set()
        for record in run(job, min(job.limit, left_seconds), folder):
            names.add(record["name"])
            if record.get("timed_out") and left_seconds < job.limit:  # the whole had no more time: no result
                record["status"] = "cut off"
            else:
                store(folder, record)
            print(f"{record['status']:>13}  {record['name']}  {record.get('error', '')}".rstrip(), flush=True)
        if job.name not in names:  # all cases ran to their end, maybe after a call in which the process died
            (folder / f"{job.name}.json").unlink(missing_ok=True)
        report(folder, chip, dry, planned)
        if job.name == "build" and load(folder).get("build", {}).get("status") != "ok":
            break
    print(report(folder, chip, dry, planned))
    print(f"results: {folder}")
    return 0 if all(r["status"] in ("ok", "not available") for r in load(folder).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
