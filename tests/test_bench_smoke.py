"""The benchmarks run: every case once at a tiny size, with its check; and tables agree with their file."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orthokern import cpu

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "bench" / "tables.py"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
UTF_8 = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")  # no file in the encoding of the locale

pytestmark = pytest.mark.skipif(not TABLES.exists(), reason="not a source tree with benchmarks")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: on a machine that is busy with other tests, two that wait for each other take many times as long.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Nothing of the pytest around it: in a worker of pytest-xdist benchmarks are switched off.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**ours, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of bench/."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of a quick run of everything."""
    if not cpu.AVAILABLE:
        pytest.skip(cpu.REASON)
    pytest.importorskip("pytest_benchmark")
    folder = tmp_path_factory.mktemp("results")
    command = ["-m", "pytest", "bench", "--benchmark-only", "--quick", "-p", "no:cacheprovider", "-q"]
    process = run(*command, "--bench-results", str(folder))
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert "Table 5" in process.stdout
    (path,) = folder.glob("*.json")
    return path


def test_a_quick_run_reports_every_table(results: Path, module: Any) -> None:
    tables, text = module("tables"), results.read_text()
    run = json.loads(text)
    expected = {*tables.TITLES, *tables.ACCURACY, "table5"}
    optional = {name for name in expected if name.startswith("gpu")} | {"precision"}  # not on every CPU
    assert expected - optional <= {row["table"] for row in run["rows"]} <= expected
    assert all(row["target"] is None for row in run["rows"]), "tiny sizes have no targets"
    assert set(run["conditions"]) >= {"machine", "versions", "commit", "threads", "source"}
    assert str(ROOT) not in text and f'"{platform.node()}"' not in text, "the file is published"


def test_tables_fill_a_page_and_notice_a_changed_one(results: Path, tmp_path: Path) -> None:
    shutil.copy(results, tmp_path / "numbers.json")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    sections = ("speed-summary", "error-summary", "speed", "table5", "accuracy")
    page.write_text("before\n" + "".join(f"<!-- bench:{s} -->\n<!-- /bench:{s} -->\nbetween\n" for s in sections))
    assert run(str(TABLES), "--page", str(page), "--check").returncode == 1, "it names no file yet"
    assert run(str(TABLES), str(tmp_path / "numbers.json"), "--page", str(page)).returncode == 0
    filled = page.read_text()
    assert filled.startswith("before\n") and filled.count("between\n") == len(sections)
    assert_columns_differ(filled)
    assert "](../numbers.json)" in filled and "| factored_scan forward |" in filled and "geodesic" in filled
    assert run(str(TABLES), "--page", str(page), "--check").returncode == 0
    page.write_text(filled.replace("| factored_scan forward | ", "| factored_scan forward | 1", 1))
    changed = run(str(TABLES), "--page", str(page), "--check")
    assert changed.returncode == 1 and changed.stderr.startswith("error: page.md differs from ../numbers.json")


def test_results_of_one_state_share_a_file(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = module("harness")

    def write(**values: float) -> dict[Path, dict[str, float]]:
        bench = harness.Bench(quick=False)
        for case, value in values.items():
            bench.record("scan", case, {"N": 3}, value)
        harness.write_results(tmp_path, bench.rows)
        files = {path: json.loads(path.read_text())["rows"] for path in sorted(tmp_path.iterdir())}
        return {path: {row["case"]: row["value"] for row in rows} for path, rows in files.items()}

    write(a=1.0, b=2.0)
    assert list(write(a=1.6).values()) == [{"b": 2.0, "a": 1.6}], "measured again, replaced; the other one stays"
    monkeypatch.setattr(harness, "source_digest", lambda: "other sources")
    assert {"a": 1.7} in write(a=1.7).values() and len(list(tmp_path.iterdir())) == 2


def test_a_wrong_result_is_refused(module: Any) -> None:
    harness, right = module("harness"), torch.ones(4, dtype=torch.float64)
    assert harness.check("sum", [right.float() * (1 + 1e-6)], [right], 1e-5) < 1e-5
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(harness.WrongResult, match="sum: result 0"):
            harness.check("sum", [wrong], [right], 1e-5)


def test_the_pages_agree_with_their_results_file() -> None:
    checked = run(*UTF_8, str(TABLES), "--check")
    assert checked.returncode == 0, checked.stderr
    named = [re.findall(r"generated by \S+ from \S*bench/results/(\S+\.json)", page.read_text()) for page in PAGES]
    assert len({*named[0], *named[1]}) == 1, "the pages show the same run"


def assert_columns_differ(markdown: str) -> None:
    headers = re.findall(r"^\| (.*) \|\n\| ---", markdown, flags=re.MULTILINE)
    assert headers
    for header in headers:
        names = header.split(" | ")
        assert len(set(names)) == len(names), header


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_clear(page: Path) -> None:
    """No two columns have the same name, and every table says which direction is better."""
    for section in re.findall(r"<!-- generated by .*?<!-- /bench", page.read_text(), flags=re.DOTALL):
        assert_columns_differ(section)
        for title, following in re.findall(r"^\*\*(.+)\*\*\n\n(.*?)\n\|", section, flags=re.M | re.S):
            assert "er is better" in following, title
