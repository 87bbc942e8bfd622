"""bench/first_hour.py: a dry run executes every case, and cases that fail, hang or end their process are recorded."""

from __future__ import annotations

import importlib
import json
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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("first_hour")


def test_a_dry_run_goes_through_every_case(request: pytest.FixtureRequest, script: Any, tmp_path: Path) -> None:
    assert request.config.cache is not None
    objects = request.config.cache.mkdir("cuda_host")
    build.load(objects)
    bundle = tmp_path / "bundle"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--bundle", str(bundle), "--build", str(objects)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout[:3000] + process.stderr
    records = json.loads((bundle / "results.json").read_text())
    assert [r["name"] for r in records] == list(script.case_names())
    assert {path.name for path in bundle.iterdir()} == {"report.md", "results.json", "logs.txt.gz"}
    text = (bundle / "report.md").read_text()
    assert ", 0 failed, 0 cut off" in text and "A dry run on the CPU" in text
    assert "| rnn-N64-B1 |" in text


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
    plan = [script.Stage("parity", 1, 60), script.Stage("times", 3, 60, cases=("rnn-N64", "gru-N64"))]
    assert [s.cases for s in script.chosen(plan, ["gru"])] == [("gru-N64",)]
    with pytest.raises(SystemExit, match="nothing begins with 'tims'; accepted: parity, rnn-N64, gru-N64"):
        script.chosen(plan, ["tims"])


def test_without_a_gpu_it_says_so(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "gpu_name", lambda: "")
    assert script.main(["--bundle", str(tmp_path)]) == 2
    assert "finds no GPU" in capsys.readouterr().err
    plan = script.stages(False, False, tmp_path, "90")
    assert plan[0].name == "build" and "ORTHOKERN_CUDA_ARCHS=90" in plan[0].command
