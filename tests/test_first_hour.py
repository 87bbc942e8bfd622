"""bench/first_hour.py: a dry run executes every case, and cases that fail, hang or end their process are recorded."""

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


def test_a_dry_run_goes_through_every_case(request: pytest.FixtureRequest, script: Any, tmp_path: Path) -> None:
    assert request.config.cache is not None
    objects = request.config.cache.mkdir("cuda_host")
    build.load(objects)
    bundle = tmp_path / "bundle"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--bundle", str(bundle), "--build", str(objects)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout[:3000] + process.stderr
    records = json.loads((bundle / "results.json").read_text())
    assert [r["name"] for r in records] == ["probe", *script.case_names()]
    assert {path.name for path in bundle.iterdir()} == {"report.md", "results.json", "logs.txt.gz"}
    text = (bundle / "report.md").read_text()
    assert ", 0 failed, 0 cut off" in text and "A dry run on the CPU" in text
    assert "| exchange | 16 blocks, 32 KiB |" in text


CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    if name == "hangs": time.sleep(60)
    if name == "aborts": os.abort()
    more = {"error": "no"} if name == "fails" else {"result": {"value": 1.0, "unit": "ms"}}
    print(json.dumps({"case": name, **more}), flush=True)
"""


def test_cases_that_fail_hang_or_abort_leave_the_others(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.CASE_SECONDS, "hangs", 0.5)
    runner = script.Runner(tmp_path, time.monotonic() + 60)
    runner.case_command = [sys.executable, "-c", CHILD]
    runner.run([script.Stage("cases", 0, 60, cases=("a", "fails", "hangs", "b", "aborts", "c"))])
    assert {r["name"]: r["status"] for r in runner.records} == {
        **dict.fromkeys("abc", "ok"),
        **dict.fromkeys(("fails", "hangs", "aborts"), "failed"),
    }
    errors = {r["name"]: r.get("error") for r in runner.records}
    assert (errors["fails"], errors["hangs"], errors["aborts"]) == ("no", "ran past its time", "exit status -6")


def test_what_the_end_of_the_time_cuts_off(script: Any, tmp_path: Path) -> None:
    """A command with all that it has started, and cases."""
    sleep = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    runner = script.Runner(tmp_path, time.monotonic() + 1)
    runner.case_command = [sys.executable, "-c", CHILD]
    command = script.Stage("sleep", 0, 60, (sys.executable, "-c", sleep))
    runner.run([command, script.Stage("cases", 0, 60, cases=("a", "hangs", "b"))])
    assert time.monotonic() < runner.deadline + 10
    assert {r["name"]: r["status"] for r in runner.records} == {
        "a": "ok",
        **dict.fromkeys(("sleep", "hangs", "b"), "cut off"),
    }


def test_commands(script: Any, tmp_path: Path) -> None:
    row = {"name": "grid barrier", "size": "", "value": 1.0, "unit": "clocks"}
    runner = script.Runner(tmp_path, time.monotonic() + 60)
    runner.run(
        [
            script.Stage("probe", 0, 60, (sys.executable, "-c", f"print('''{json.dumps(row)}''')")),
            script.Stage("exits", 0, 60, (sys.executable, "-c", "print('why'); exit(3)")),
            script.Stage("tool", 0, 60, missing="not there"),
        ]
    )
    records = {r["name"]: r for r in runner.records}
    assert records["exits"]["error"] == "exit status 3: why" and records["tool"]["status"] == "not available"
    text = script.report(runner.records, "X1", dry=False)
    assert "| grid barrier |  | 1 clocks |" in text and "- exits: failed: exit status 3: why" in text


def test_after_a_build_that_fails_nothing_else_runs(script: Any, tmp_path: Path) -> None:
    runner = script.Runner(tmp_path, time.monotonic() + 60)
    build = script.Stage("build", 0, 60, (sys.executable, "-c", "exit(1)"))
    runner.run([build, script.Stage("next", 1, 60, (sys.executable, "-c", ""))])
    assert [r["name"] for r in runner.records] == ["build"]


def test_verdicts(script: Any) -> None:
    def of(name: str, value: float, unit: str) -> str:
        return str(script.verdict(name, {"value": value, "unit": unit})[1])

    assert [of("long-factored-N128", v, "ms") for v in (7.0, 9.0, 10.1)] == ["goal", "bar", "MISSED"]
    assert [of("rnn-N64-B50", v, "times as fast") for v in (2.5, 1.0, 0.9, float("nan"))] == [
        *("goal", "bar", "MISSED", "MISSED")
    ]
    names = script.case_names()
    assert all(any(name.startswith(start) for name in names) for start in script.BARS)


def test_a_name_that_nothing_begins_with(script: Any) -> None:
    plan = [script.Stage("probe", 1, 60), script.Stage("times", 3, 60, cases=("rnn-N64", "gru-N64"))]
    assert [s.cases for s in script.chosen(plan, ["gru"])] == [("gru-N64",)]
    with pytest.raises(SystemExit, match="nothing begins with 'tims'; accepted: probe, rnn-N64, gru-N64"):
        script.chosen(plan, ["tims"])


def test_without_a_gpu_it_says_so(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "gpu_name", lambda: "")
    assert script.main(["--bundle", str(tmp_path)]) == 2
    assert "finds no GPU" in capsys.readouterr().err
    plan = script.stages(False, False, tmp_path, "90")
    assert plan[0].name == "build" and "ORTHOKERN_CUDA_ARCHS=90" in plan[0].command


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
