"""Runs the toy task in separate processes without the seconds of importing torch: a fork server has imported it. It has
started no threads, so that a fork is equivalent to a new process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
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

    def start(self, *arguments: object, env: dict[str, str] | None = None, task: str = "toy_task") -> Run:
        """One process with these arguments of a module with a ``main``, by default the toy task."""
        self.count += 1
        log = self.folder / f"run{self.count}"
        words = [str(word) for word in arguments]
        process = self.context.Process(target=child, args=(task, words, env or {}, str(log)))
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):  # the first call starts it
            process.start()
        return Run(process, log)

    def start_ranks(
        self, world: int, *arguments: object, strike: str | None = None, task: str = "toy_task"
    ) -> list[Run]:
        """As many processes as torchrun would start, with the variables that it sets."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        if strike is not None:
            env["TOY_STRIKE"] = strike
        return [
            self.start(*arguments, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, task=task)
            for rank in range(world)
        ]


def child(task: str, arguments: list[str], env: dict[str, str], log: str) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    os.environ.update(env)
    sys.exit(importlib.import_module(task).main(arguments))
