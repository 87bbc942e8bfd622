"""Tests that need a CUDA device. Without a device all are skipped; with a device, at least one must have run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
_ran = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _ran
    if report.when == "call" and not report.skipped and "tests/gpu/" in report.nodeid:
        _ran += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A GPU that no test touched is a misconfiguration, not a success."""
    ours = [item for item in session.items if HERE in item.path.parents]
    asked_to_run = ours and not session.config.option.collectonly
    if torch.cuda.is_available() and asked_to_run and not _ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\ntests/gpu: a CUDA device is there, and every test was skipped")
