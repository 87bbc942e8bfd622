"""Tests that need a CUDA device. Without a device all are skipped; with a device, at least one must have run.

An illegal address breaks the CUDA context of the process, and every later test of the process fails too. A kernel that
waits for ever cannot be interrupted from Python. In both cases the process ends, so that the log names the test. Under
pytest-xdist (`-n 1`) another worker takes the place of the one that ended, and continues with the next test.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIMIT = 300  # seconds for a test that is not marked slow
WORKER = "PYTEST_XDIST_WORKER" in os.environ
_ran = 0
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # while a test runs, its output is captured, and lost if the process ends


@pytest.fixture(autouse=True)
def limited_time(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("slow") is not None:
        yield
        return
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=request.config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def broken_context() -> str:
    """The error that every call of this process on the device now gives; empty if there is none."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _ran
    if "tests/gpu/" not in report.nodeid:
        return
    if report.when == "call" and not report.skipped:
        _ran += 1
    # the controller of workers only gathers their reports: its own context is not theirs
    if report.failed and getattr(report, "node", None) is None and (why := broken_context()):
        if WORKER:
            os._exit(1)
        pytest.exit(f"{report.nodeid} has broken the CUDA context ({why}): the tests after it have not run", 1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A GPU that no test touched is a misconfiguration, not a success."""
    ours = [item for item in session.items if HERE in item.path.parents]
    asked_to_run = ours and not session.config.option.collectonly
    if torch.cuda.is_available() and asked_to_run and not _ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\ntests/gpu: a CUDA device is there, and every test was skipped")
