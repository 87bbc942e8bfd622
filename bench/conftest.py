"""`pytest bench --benchmark-only`: options, the sizes of cases, and the tables and the results file at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tables
import torch
from harness import ROOT, Bench, write_results

from orthokern import cpu

RESULTS = ROOT / "bench" / "results"
_BENCH = pytest.StashKey[Bench]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("orthokern benchmarks")
    group.addoption(
        "--quick",
        action="store_true",
        help="tiny sizes and two rounds, to check that every case runs; the numbers are meaningless and not written",
    )
    group.addoption(
        "--bench-results",
        metavar="DIR",
        type=Path,
        help="write the results file to DIR (default bench/results; a quick run writes only when this is set)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sizes(full, quick): values of the case's argument `size`, by kind of run")
    config.addinivalue_line("markers", "headline: rows of the README's table of speed; `-m headline` runs them alone")
    config.stash[_BENCH] = Bench(config.getoption("quick"))
    # Before any thread of torch's pool exists, so that all of them inherit it. The kernels flush denormals themselves;
    # without this, torch takes tens of times as long where adjoints fade, as in Table 5.
    torch.set_flush_denormal(True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("sizes")
    if mark is not None:
        sizes = mark.kwargs["quick"] if metafunc.config.getoption("quick") else mark.args[0]
        ids = ["-".join(f"{letter}{value}" for letter, value in size.items()) for size in sizes]
        headline = mark.kwargs.get("headline", ())
        marked = [pytest.param(size, marks=[pytest.mark.headline] if size in headline else []) for size in sizes]
        metafunc.parametrize("size", marked, ids=ids)


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Bench]:
    """The session's Bench. Cases that need it measure native kernels: without them there is nothing to measure."""
    if not cpu.AVAILABLE:
        pytest.skip(cpu.REASON)
    torch.manual_seed(0)
    bench = request.config.stash[_BENCH]
    bench.benchmark = benchmark
    yield bench
    cpu.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print every table, Table 5 last, and write the results file."""
    bench = config.stash.get(_BENCH, None)
    if bench is None or not bench.rows:
        return
    for table in tables.all_tables({"rows": bench.rows}):
        terminalreporter.section(table.title)
        terminalreporter.write_line(table.markdown())
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    if failed:
        terminalreporter.write_line("No number for these, their check or run failed: " + ", ".join(failed), red=True)
    folder = config.getoption("bench_results") or (None if bench.quick else RESULTS)
    if folder is None or config.getoption("benchmark_disable"):  # every case ran once, as a check
        terminalreporter.write_line("a quick or disabled run: these numbers are meaningless, no results file written")
    else:
        path = write_results(folder, bench.rows)
        terminalreporter.write_line(f"results: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
