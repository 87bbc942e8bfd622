"""A run that is killed at random moments and resumed ends with the bits of an uninterrupted run."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import assert_same_run, records

from orthokern.training import load_checkpoint

OPTIONS = ["--iterations", 100, "--checkpoint-every", 2, "--dropout", 0.2, "--no-plots", "--threads", 1]
LONGEST_DELAY = 0.6  # before a kill, in units of the time of a run that nobody kills


def child(arguments: list[str], log: str) -> None:
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    sys.exit(importlib.import_module("toy_task").main(arguments))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a process of the toy task. The server that forks it has imported torch and has started no threads, so that
    a fork is equivalent to a new process. Output goes to `output` in the test's folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toy_task", "torch._dynamo"])
    folder = Path(__file__).resolve().parent
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)  # the first process starts the server
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: object) -> Any:
        process = context.Process(target=child, args=([str(word) for word in arguments], str(tmp_path / "output")))
        process.start()
        return process

    return run


def ended(process: Any, timeout: float = 60.0) -> int:
    """The exit code, or minus the number of the signal that ended it."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, f"still running after {timeout} s"
    return int(process.exitcode)


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, start: Callable[..., Any], tmp_path: Path) -> None:
    draw = random.Random(kills)
    moments = []  # the checkpoint that each kill left
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run = start("--out", whole, *OPTIONS)
    started = time.monotonic()  # after the start of the server
    assert ended(run) == 0
    longest = LONGEST_DELAY * (time.monotonic() - started)
    finished = 0
    while len(moments) < kills or finished == 0:
        if (folder / "config.json").exists():
            run = start("--resume", folder)
        else:  # killed before there was a run, or a new one
            shutil.rmtree(folder, ignore_errors=True)
            run = start("--out", folder, *OPTIONS)
        if len(moments) < kills:
            time.sleep(draw.uniform(0.0, longest))
            run.kill()
        code = ended(run)
        assert code in (0, -signal.SIGKILL), (tmp_path / "output").read_text()
        path = folder / "checkpoint.pt"
        if code:
            moments.append(load_checkpoint(path)["iteration"] if path.exists() else 0)
            continue
        assert len(records(whole)) == 100
        assert_same_run(folder, whole)
        finished += 1
        shutil.rmtree(folder)
    assert len(set(moments)) > len(moments) / 3, f"the kills all came at the same moments: {moments}"
