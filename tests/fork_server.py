"""Runs the toy task in separate processes without the seconds of importing torch: one process imports torch and forks
for every run. It has started no threads, so that a fork is equivalent to a new process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


class Run:
    """A run under way.

    Attributes:
        pid: its process.
        log: path of what it writes, without ".out" and ".err".
    """

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self.server, self.pid, self.log = server, pid, log

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, or minus the number of the signal that ended it."""
        code = self.server.ask({"wait": self.pid, "timeout": timeout})
        assert code is not None, f"still running after {timeout} s: {self.err}"
        return int(code)

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()


class ForkServer:
    """Starts on entering a `with` block, and ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __enter__(self) -> ForkServer:
        path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(timeout=30)

    def ask(self, request: dict[str, Any]) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return json.loads(self.process.stdout.readline())  # type: ignore[union-attr]

    def start(self, *arguments: object, env: dict[str, str] | None = None, task: str = "toy_task") -> Run:
        """One process with these arguments of a module with a ``main``, by default the toy task."""
        self.count += 1
        log = self.folder / f"run{self.count}"
        words = [str(word) for word in arguments]
        pid = self.ask({"task": task, "arguments": words, "env": env or {}, "log": str(log)})
        return Run(self, pid, log)

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


def child(request: dict[str, Any]) -> None:
    task = importlib.import_module(request["task"])
    for stream, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(request["log"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, stream)
    os.environ.update(request["env"])
    code = 1
    try:
        code = task.main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


def serve() -> None:
    import torch
    import toy_task

    torch.set_num_threads(1)
    task = toy_task.Toy(toy_task.ToyOptions())  # loads what is loaded on first use: optimizers, native kernels
    with torch.no_grad():
        task.loss(task.next_batch())  # but no backward: autograd does not outlive a fork
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                child(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
