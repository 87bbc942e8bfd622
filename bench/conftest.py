"""`pytest bench --benchmark-only`: options, the sizes of cases, and the tables and the results file at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import curves
import pytest
import tables
import torch
from harness import ROOT, Bench, write_results

from orthokern import cpu

RESULTS = ROOT / "bench" / "results"


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
        help="write the results file to DIR (default bench/results; a quick run writes only when this is given)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sizes(full, quick): values of the case's argument `size`, by kind of run")
    config.addinivalue_line("markers", "headline: rows of the README's table of speed; `-m headline` runs them alone")
    config.stash[_BENCH] = Bench(config.getoption("quick"))
    # Before any thread of torch's pool exists, so that all of them inherit it. The kernels flush denormals themselves;
    # without this, torch takes tens of times as long where adjoints fade, as in Table 5.
    torch.set_flush_denormal(True)


_BENCH = pytest.StashKey[Bench]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("sizes")
    if mark is not None:
        sizes = mark.kwargs["quick"] if metafunc.config.getoption("quick") else mark.args[0]
        ids = ["-".join(f"{letter}{value}" for letter, value in size.items()) for size in sizes]
        headline = mark.kwargs.get("headline", ())
        marked = [pytest.param(size, marks=[pytest.mark.headline] if size in headline else []) for size in sizes]
        metafunc.parametrize("size", marked, ids=ids)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The session's Bench. Cases that need it measure native kernels: without them there is nothing to measure."""
    if not cpu.AVAILABLE:
        pytest.skip(cpu.REASON)
    torch.manual_seed(0)
    session = request.config.stash[_BENCH]
    session.file = request.path.name
    yield session
    cpu.empty_cache()


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether this is a quick run, for cases that use nothing else of the session."""
    return bool(request.config.getoption("quick"))


def _timings(config: pytest.Config) -> list[dict[str, Any]]:
    """pytest-benchmark's statistics of every case, in ms: the only record of cases that add no rows of their own."""
    session = getattr(config, "_benchmarksession", None)
    found = []
    for case in getattr(session, "benchmarks", []):
        if case.has_error or not case.stats:
            continue
        found.append(
            {
                "name": case.fullname,
                "group": case.group,
                "ms": {key: round(1e3 * getattr(case.stats, key), 6) for key in ("median", "min", "max")},
                "rounds": case.stats.rounds,
                "extra_info": case.extra_info,
            }
        )
    return found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Print every table, Table 5 last, and write the results file."""
    bench = config.stash.get(_BENCH, None)
    if bench is None:
        return
    timings = _timings(config)
    if not bench.rows and not timings:
        return
    write = terminalreporter.write_line
    folder = config.getoption("bench_results") or (None if bench.quick else RESULTS)
    if config.getoption("benchmark_disable"):  # every case ran once, as a check
        folder = None
    path = None
    if folder is not None:
        arguments = " ".join(argument for argument in sys.argv[1:] if not Path(argument).is_absolute())
        path = write_results(folder, bench.rows, timings, f"pytest {arguments}".strip())
        plot = curves.plot_scaling(tables.load(path), path.with_name(f"{path.stem}-scaling.png"))
    results = {"rows": bench.rows, "timings": timings}
    for title, text in tables.text_tables(results):
        terminalreporter.section(title)
        for line in text.splitlines():
            write(line)
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    if failed:
        write("")
        write("No number for these, their check or their run failed: " + ", ".join(failed), red=True)
    write("")
    if path is None:
        write("a quick or disabled run: these numbers are meaningless, no results file written")
    else:
        write(f"results: {_shown(path)}" + (f", plot: {_shown(plot)}" if plot else ""))


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
