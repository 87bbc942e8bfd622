"""bench/first_hour.py: a dry run executes every stage, a second call continues, and a missed bar is reported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cuda_host import build

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "first_hour.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a source tree with benchmarks")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("first_hour", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_goes_through_every_stage_and_continues(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert request.config.cache is not None
    objects = request.config.cache.mkdir("cuda_host")
    build.load(objects)
    out = tmp_path / "out"
    out.mkdir()
    (out / "build").symlink_to(objects)  # what other tests have compiled

    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[:3000] + done.stderr
        return done.stdout

    first = run()
    assert ", 0 did not, 0 have not run" in first and "A dry run on the CPU" in first
    names = {path.stem for path in out.glob("*.json")}
    assert {"probe-build", "probe", "versions", "sgemm", "tests-cuda", "parity-cayley", "parity-view"} <= names
    assert {"times-tanh-N1000", "times-identity-chunked-N128", "times-cudnn-N500"} <= names
    assert "| exchange | 16 blocks, 32 KiB, bulk copy |" in (out / "report.md").read_text()
    # a second call has nothing left to do; one that is cut short in between repeats nothing else
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert "ok  " not in run()
    assert run("--again", "parity-view").count("ok  ") == 1
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert {name for name in before if before[name] != after[name]} == {"parity-view.json"}


def test_a_job_that_hangs_is_ended_with_all_that_it_started(script: Any, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )
    start = time.monotonic()
    (record,) = script.run(script.Job("hang", (sys.executable, "-c", code), 60), 1.0, tmp_path)
    assert time.monotonic() - start < 20
    assert record["status"] == "failed" and record["error"] == "ran past 1 s"
    (record,) = script.run(script.Job("no", (sys.executable, "-c", "print('why'); exit(3)"), 60), 20, tmp_path)
    assert record["error"] == "exit status 3: why"
    (record,) = script.run(script.Job("gone", (), 60, missing="nvcc not found"), 20, tmp_path)
    assert record["status"] == "not available"


def test_a_case_that_fails_leaves_those_before_it(script: Any, tmp_path: Path) -> None:
    line = json.dumps({"case": "parity-N64", "result": {"value": 1.0}})
    job = script.Job("cases", (sys.executable, "-c", f"print({line!r}); import os; os.abort()"), 60, lines=True)
    done, failed = script.run(job, 20, tmp_path)
    assert (done["name"], done["status"]) == ("parity-N64", "ok")
    assert failed["status"] == "failed" and "exit status -6" in failed["error"]


def test_a_second_call_repeats_what_failed(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The build above all: until it has succeeded nothing else runs, also with --only."""
    works = tmp_path / "works"
    code = "import pathlib, sys; sys.exit(not pathlib.Path(sys.argv[1]).exists())"
    flaky = (sys.executable, "-c", code, str(works))
    steady = (sys.executable, "-c", "")
    plan = [
        script.Job("build", flaky, 60),
        script.Job("probe", (str(tmp_path / "not-compiled"),), 60),
        script.Job("flaky", flaky, 60),
        script.Job("steady", steady, 60),
        script.Job("tool", (), 60, missing="not found"),
    ]
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA X1, 9.0")
    monkeypatch.setattr(script, "jobs", lambda *_: plan)
    out, ran = tmp_path / "out", []
    true_run = script.run
    monkeypatch.setattr(script, "run", lambda job, *rest: ran.append(job.name) or true_run(job, *rest))

    def call(*arguments: str) -> tuple[int, list[str]]:
        ran.clear()
        return script.main(["--out", str(out), *arguments]), list(ran)

    assert call() == (1, ["build"]) and call("--only", "steady") == (1, ["build"])
    works.touch()
    assert call("--only", "steady") == (0, ["build", "steady"])
    works.unlink()
    assert call() == (1, ["probe", "flaky", "tool"])
    works.touch()
    plan[1] = script.Job("probe", steady, 60)
    assert call() == (0, ["probe", "flaky", "tool"]) and call() == (0, ["tool"])


@pytest.mark.parametrize("option", ["--only", "--again"])
def test_a_name_that_nothing_begins_with(
    script: Any, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA X1, 9.0")
    plan = [script.Job("times-N8", (sys.executable, "-c", ""), 60), script.Job("probe", (), 60, missing="no")]
    monkeypatch.setattr(script, "jobs", lambda *_: plan)
    out = tmp_path / "out"
    assert script.main(["--out", str(out), option, "times", "tims"]) == 2
    told = capsys.readouterr()
    assert told.err == "first_hour: no measurement begins with 'tims'; accepted: times-N8, probe\n"
    assert not told.out and not out.exists()


def test_a_truncated_record(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA X1, 9.0")
    monkeypatch.setattr(script, "jobs", lambda *_: [])
    (tmp_path / "probe.json").write_text('{"name": "probe", "sta')
    with pytest.raises(SystemExit, match=r"^first_hour: \S+/probe.json is damaged \(.*\); remove it to measure again$"):
        script.main(["--out", str(tmp_path)])


def test_what_the_end_of_the_hour_cuts_off_has_no_result(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    sleep = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA X1, 9.0")
    plan = [script.Job("whole", sleep, 60)]
    monkeypatch.setattr(script, "jobs", lambda *_: plan)
    assert script.main(["--out", str(tmp_path), "--minutes", "0.1"]) == 0
    told = capsys.readouterr().out
    assert "cut off  whole  ran past" in told and "## Not run\n\nwhole\n" in told
    assert not script.load(tmp_path)
    plan[0] = script.Job("own", sleep, 1)
    assert script.main(["--out", str(tmp_path), "--minutes", "0.5"]) == 1
    assert script.load(tmp_path)["own"]["status"] == "failed"


def test_cases_that_failed_run_again(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those alone; and a process that died is forgotten where the cases that it left have run."""
    code = (
        "import json, os, pathlib, sys\n"
        "works = pathlib.Path(sys.argv[1]).exists()\n"
        "for name in sys.argv[2:]:\n"
        "    if name == 'c' and not works: os.abort()\n"
        "    failed = {'error': 'no'} if name == 'b' and not works else {'result': {}}\n"
        "    print(json.dumps({'case': name, **failed}), flush=True)\n"
    )
    works, names = tmp_path / "works", ["a", "b", "c", "d"]
    job = script.Job("cases", (sys.executable, "-c", code, str(works), *names), 60, lines=True)
    monkeypatch.setattr(script, "jobs", lambda *_: [job])
    monkeypatch.setattr(script, "case_names", lambda: names)
    out = tmp_path / "out"
    call = ["--dry-run", "--out", str(out)]
    assert script.main(call) == 1
    statuses = {name: record["status"] for name, record in script.load(out).items()}
    assert statuses == {"a": "ok", "b": "failed", "cases": "failed"}
    before = (out / "a.json").stat().st_mtime_ns
    works.touch()
    assert script.main(call) == 0
    assert set(script.load(out)) == set(names) and (out / "a.json").stat().st_mtime_ns == before


def test_verdicts_and_report(script: Any, tmp_path: Path) -> None:
    bar = script.BARS["times-tanh-N128"]
    assert [script.verdict(v, bar) for v in (bar.goal, bar.bar, bar.bar * 1.01)] == ["goal", "bar", "MISSED"]
    ratio = script.BARS["times-cudnn-N128"]
    assert [script.verdict(v, ratio) for v in (9.0, 2.0, 1.9, float("nan"))] == ["goal", "bar", "MISSED", "MISSED"]
    assert set(script.BARS) <= set(script.case_names())
    script.store(tmp_path, {"name": "times-tanh-N128", "status": "ok", "result": {"value": 14.5, "unit": "ms"}})
    script.store(tmp_path, {"name": "probe-build", "status": "failed", "error": "exit status 1: no"})
    slow = {"name": "exchange", "size": "8 blocks, 8 KiB, st.async", "value": 3000.0, "unit": "clocks"}
    script.store(tmp_path, {"name": "probe", "status": "ok", "result": [slow]})
    text = script.report(tmp_path, "NVIDIA X1", False, ["times-tanh-N128", "sgemm"])
    assert "| tanh-N128 | 14.5 ms | 12 | 7.5 | MISSED |" in text
    assert "- probe-build: failed: exit status 1: no" in text and "NOT SO: two exchanges" in text
    assert "## Not run\n\nsgemm\n" in text


def test_without_a_gpu_it_says_so(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(script, "gpu_name", lambda: "")
    assert script.main([]) == 2
    assert "finds no GPU" in capsys.readouterr().err
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA H200, 9.0")
    plan = script.jobs(False, Path("/nowhere"), "90")
    assert [job.name for job in plan[:3]] == ["build", "probe-build", "probe"]
    assert dict(plan[0].env)["ORTHOKERN_CUDA_ARCHS"] == "90" and all(job.limit <= 1200 for job in plan)


def test_the_tolerance_of_the_benchmarks_is_that_of_torch() -> None:
    """Linear states after 10 000 steps are off by 1.9e-5 in plain torch: 2e-5 is no bar for them."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); import bench_gpu as b; print(b.tolerated(1.9e-5), b.tolerated(0.0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3.8e-05", "2e-05"]


TORCH = """
class cuda:
    is_available = is_initialized = lambda: True
    broken = False
    def synchronize():
        if cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
TESTS = """
import time, torch
def test_first(): pass
def test_breaks():
    torch.cuda.broken = True
    assert False
def test_next(): assert not torch.cuda.broken
def test_fails(): assert False
def test_hangs(): time.sleep(60)
def test_last(): pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_test_that_breaks_its_context_or_hangs_leaves_the_others(workers: int, tmp_path: Path) -> None:
    """tests/gpu/conftest.py, on a torch that only pretends to have a device."""
    pytest.importorskip("xdist")
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    conftest = (ROOT / "tests" / "gpu" / "conftest.py").read_text()
    assert "LIMIT = 300 " in conftest
    (folder / "conftest.py").write_text(conftest.replace("LIMIT = 300 ", "LIMIT = 2 "))
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    options = ("-v", "-p", "no:cacheprovider", "-n", str(workers), "--max-worker-restart", "50", "tests/gpu")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not workers:
        assert done.returncode == 1 and "test_breaks has broken the CUDA context (CUDA error: an illegal" in done.stdout
        return
    said = [line for line in done.stdout.splitlines() if "[gw" in line or " crashed while running " in line]
    for name in ("first", "next", "last"):
        assert any("PASSED" in line and f"test_{name}" in line for line in said), done.stdout
    assert any("FAILED" in line and "test_fails" in line for line in said), done.stdout
    for name in ("breaks", "hangs"):
        assert any("crashed while running" in line and f"test_{name}" in line for line in said), done.stdout
    assert "Timeout (0:00:02)!" in done.stderr and "in test_hangs" in done.stderr


def test_what_has_not_been_checked_is_not_measured(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    names = ["parity-N128", "parity-chunked-N128", "times-tanh-N128", "times-identity-chunked-N128", "times-dense-N64"]
    needs = [script.parity_of(name, names) for name in names]
    assert needs == ["", "", "parity-N128", "parity-chunked-N128", ""]
    works, line = tmp_path / "works", json.dumps({"case": "parity-N128", "result": {"value": 0.0, "errors": {}}})
    code = f"import pathlib; assert pathlib.Path({str(works)!r}).exists(); print({line!r})"
    plan = [
        script.Job("parity-N128", (sys.executable, "-c", code), 60, lines=True),
        script.Job("times-N128", (sys.executable, "-c", ""), 60, needs="parity-N128"),
        script.Job("profile-N128", (sys.executable, "-c", ""), 60, needs="times-N128"),
    ]
    monkeypatch.setattr(script, "gpu_name", lambda: "NVIDIA X1, 9.0")
    monkeypatch.setattr(script, "jobs", lambda *_: plan)
    assert script.main(["--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    assert "- times-N128: skipped: parity-N128 has not succeeded" in told
    assert "- profile-N128: skipped: times-N128 has not succeeded" in told
    works.touch()
    assert script.main(["--out", str(tmp_path / "out")]) == 0
    assert {record["status"] for record in script.load(tmp_path / "out").values()} == {"ok"}


def test_every_time_of_a_size_has_a_case_that_checks_its_results(script: Any) -> None:
    names = script.case_names()
    for name in names:
        assert bool(script.parity_of(name, names)) == name.startswith("times"), name


def test_what_a_probe_found_before_it_failed(script: Any, tmp_path: Path) -> None:
    found = {"name": "grid barrier", "size": "", "value": 1.0, "unit": "clocks"}
    code = f"print('{{no JSON'); print({json.dumps(found)!r}); print('[1]'); exit(1)"
    (record,) = script.run(script.Job("probe", (sys.executable, "-c", code), 60, lines=True), 20, tmp_path)
    assert record["status"] == "failed" and record["result"] == [found]
    assert "| grid barrier |  | 1 clocks |" in "\n".join(script.probe_rows({"probe": record}, False))


def test_a_process_that_cannot_be_ended(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that waits inside the driver."""
    monkeypatch.setattr(script, "ENDING", 0.1)
    monkeypatch.setattr(script.os, "killpg", lambda *_: None)
    sleep = (sys.executable, "-c", "import time; time.sleep(5)")
    (record,) = script.run(script.Job("stuck", sleep, 60), 0.5, tmp_path)
    assert record["error"] == "ran past 0 s and does not end: the GPU may need a reset"
