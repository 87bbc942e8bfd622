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

import pytest
import torch

from orthokern import cpu

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "bench" / "tables.py"
CASES = sorted((ROOT / "bench").glob("bench_*.py"))
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
UTF_8 = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")  # no file in the encoding of the locale
RECORDED = re.compile(r'bench\.record\(\s*"([^"]+)"')

pytestmark = pytest.mark.skipif(not TABLES.exists(), reason="not a source tree with benchmarks")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # One thread: on a machine that is busy with other tests, two that wait for each other take many times as long.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Nothing of the pytest around it: in a worker of pytest-xdist benchmarks are switched off.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**ours, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of a quick run of everything."""
    if not cpu.AVAILABLE:
        pytest.skip(cpu.REASON)
    pytest.importorskip("pytest_benchmark")
    folder = tmp_path_factory.mktemp("results")
    command = ["-m", "pytest", "bench", "--benchmark-only", "--quick", "-p", "no:cacheprovider", "-q"]
    done = run(*command, "--bench-results", str(folder))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Table 5" in done.stdout
    (found,) = folder.glob("*.json")
    return found


def assert_every_column_has_a_name_of_its_own(markdown: str) -> None:
    found = re.findall(r"^\| (.*) \|\n\| ---", markdown, flags=re.MULTILINE)
    assert found
    for header in found:
        names = header.split(" | ")
        assert len(set(names)) == len(names), header


def test_a_quick_run_reports_every_table(results: Path) -> None:
    text = results.read_text()
    found = json.loads(text)
    tables = {row["table"] for row in found["rows"]}
    expected = {"scan", "loops", "modules", "table5", "copy", "memory", "accuracy", "scaling", "activations", "readout"}
    expected |= {"modal", "modal_forward", "diagnostics", "oinit", "second", "skew_exp", "parametrize", "overhead"}
    expected |= {"small", "lengths"}
    assert expected <= tables
    assert all(row["reached"] is None and row["bar"] is None for row in found["rows"]), "tiny sizes have no bars"
    assert set(found["conditions"]) >= {"machine", "versions", "commit", "threads", "source"}
    assert str(ROOT) not in text and f'"{platform.node()}"' not in text, "the file is published"
    assert {row["file"] for row in found["rows"]} <= {path.name for path in CASES}
    assert results.with_name(f"{results.stem}-scaling.png").stat().st_size > 0


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
    assert_every_column_has_a_name_of_its_own(filled)
    assert "](../numbers.json)" in filled and "| factored_scan forward |" in filled and "geodesic" in filled
    assert run(str(TABLES), str(tmp_path / "numbers.json"), "--page", str(page)).returncode == 0
    assert page.read_text() == filled, "writing twice changes nothing"
    assert run(str(TABLES), "--page", str(page), "--check").returncode == 0
    page.write_text(filled.replace("| factored_scan forward | ", "| factored_scan forward | 1", 1))
    changed = run(str(TABLES), "--page", str(page), "--check")
    assert changed.returncode == 1 and changed.stderr.startswith("error: page.md differs from ../numbers.json")


def test_results_of_one_state_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    harness = importlib.import_module("harness")
    bench = harness.Bench(quick=False)
    for case, value in (("a", 1.0), ("b", 2.0)):
        bench.record("scan", case, {"N": 3}, "share", value, bar=1.5, goal=1.8)
    assert [row["reached"] for row in bench.rows] == ["no", "goal"]
    path = harness.write_results(tmp_path, bench.rows, [], "pytest bench")
    again = harness.Bench(quick=False)
    again.record("scan", "a", {"N": 3}, "share", 1.6, bar=1.5, goal=1.8)
    assert harness.write_results(tmp_path, again.rows, [], "pytest bench -k a") == path
    rows = {row["case"]: (row["value"], row["reached"]) for row in json.loads(path.read_text())["rows"]}
    assert rows == {"b": (2.0, "goal"), "a": (1.6, "bar")}, "measured again, replaced; the other one stays"

    monkeypatch.setattr(harness, "source_digest", lambda: "other sources")
    other = harness.write_results(tmp_path, again.rows, [], "pytest bench")
    assert (
        other != path
        and len(json.loads(other.read_text())["rows"]) == 1
        and len(json.loads(path.read_text())["rows"]) == 2
    )


def test_raw_times_are_of_files_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    tables = importlib.import_module("tables")
    ms = {"median": 1.0, "min": 1.0, "max": 1.0}
    timings = [
        {"name": f"bench/{file}::test_a", "group": file, "ms": ms, "rounds": 1}
        for file in ("bench_with.py", "bench_without.py")
    ]
    rows = [{"table": "scan", "file": "bench_with.py"}]
    assert [table.title for table in tables.timings_of({"rows": rows, "timings": timings})] == ["bench_without.py"]
    for path in (ROOT / "bench" / "results").glob("*.json"):
        published = tables.load(path)
        assert published["timings"] and tables.timings_of(published) == []
        assert tables.files_with_rows(published) <= {case.name for case in CASES}


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    harness = importlib.import_module("harness")
    right = torch.ones(4, dtype=torch.float64)
    assert harness.check("sum", [right.float() * (1 + 1e-6)], [right], 1e-5) < 1e-5
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(harness.WrongResult, match="sum: result 0"):
            harness.check("sum", [wrong], [right], 1e-5)


def test_the_pages_agree_with_their_results_file(tmp_path: Path) -> None:
    checked = run(*UTF_8, str(TABLES), "--check")
    assert checked.returncode == 0, checked.stderr
    copied = tmp_path / "docs" / "page.md"
    copied.parent.mkdir()
    copied.write_bytes(PAGES[1].read_bytes())
    (found,) = {re.search(r"from \S*bench/results/(\S+\.json)", page.read_text())[1] for page in PAGES[1:]}  # type: ignore[index]
    written = run(*UTF_8, str(TABLES), str(ROOT / "bench" / "results" / found), "--page", str(copied))
    assert written.returncode == 0, written.stderr
    named = {re.search(r"from \S*bench/results/(\S+\.json)", page.read_text())[1] for page in PAGES}  # type: ignore[index]
    assert len(named) == 1, "the pages show the same run"


def test_no_two_columns_of_a_page_have_the_same_name() -> None:
    for page in PAGES:
        for section in re.findall(r"<!-- generated by .*?<!-- /bench", page.read_text(), flags=re.DOTALL):
            assert_every_column_has_a_name_of_its_own(section)


def test_a_letter_is_left_out_where_all_rows_have_it_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    layout = importlib.import_module("layout")

    def header(*sizes: dict[str, int]) -> list[str]:
        rows = [
            {"case": "a", "size": size, "value": 1.0, "better": "lower", "bar": None, "reached": None} for size in sizes
        ]
        found: list[str] = layout.by_size(rows, "title", lambda row: "", None).header
        return found

    assert header({"N": 3, "B": 5, "D": 2}, {"N": 4, "B": 5, "D": 2}) == ["", "N=3", "N=4"]
    assert header({"N": 3, "B": 5}, {"N": 3, "B": 1}) == ["", "N=3, B=1", "N=3, B=5"]
    assert header({"N": 3, "B": 5}, {"N": 3, "B": 5, "D": 2}) == ["", "N=3", "N=3, D=2"]
    assert header({"N": 3, "K": 1, "R": 2}, {"N": 3, "K": 2, "R": 2}) == ["", "N=3, K=1, R=2", "N=3, K=2, R=2"]


def test_every_generated_table_says_which_direction_is_better() -> None:
    for page in PAGES:
        generated = re.findall(r"<!-- generated by .*?<!-- /bench", page.read_text(), flags=re.DOTALL)
        assert generated
        for title, following in re.findall(r"^\*\*(.+)\*\*\n\n(.*?)\n\|", "\n".join(generated), flags=re.M | re.S):
            assert "er is better" in following, title


def test_every_table_has_a_title_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No title is the key that the rows have in the results file."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    tables = importlib.import_module("tables")
    recorded = {name for path in CASES for name in RECORDED.findall(path.read_text())}
    assert {"scan", "gru", "gpu scan"} <= recorded <= {*tables.KNOWN, *tables.SUBJECTS, "loops", "lengths"}
