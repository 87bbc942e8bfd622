"""Runs the toy task in separate processes without the seconds of importing torch: a fork server has imported it. It has
started no threads, so that a fork is equivalent to a new process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parent


class Run:
    """A run under way.

    Attributes:
        process: its process.
        log: path of what it writes, without ".out" and ".err".
    """

    def __init__(self, process: multiprocessing.process.BaseProcess, log: Path) -> None:
        self.process, self.log = process, log

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, or minus the number of the signal that ended it."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
        assert self.process.exitcode is not None, f"still running after {timeout} s: {self.err}"
        return self.process.exitcode

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()


class ForkServer:
    """Starts processes, whose output goes to files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["toy_task", "torch._dynamo"])

    def start(self, *arguments: object) -> Run:
        """One process of the toy task with these arguments."""
        self.count += 1
        log = self.folder / f"run{self.count}"
        words = [str(word) for word in arguments]
        process = self.context.Process(target=child, args=(words, str(log)))
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):  # the first call starts it
            process.start()
        return Run(process, log)


def child(arguments: list[str], log: str) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    sys.exit(importlib.import_module("toy_task").main(arguments))
