"""A run that is killed at random moments and resumed ends with the bits of an uninterrupted run."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from runs import records, same

from orthokern.training import load_checkpoint

OPTIONS = ["--iterations", 100, "--checkpoint-every", 2, "--dropout", 0.2, "--no-plots", "--threads", 1]
LONGEST_DELAY = 0.6  # before a kill, in units of the time of a run that nobody kills


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, fork_server: ForkServer, tmp_path: Path) -> None:
    draw = random.Random(kills)
    moments = []  # the checkpoint that each kill left
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run = fork_server.start("--out", whole, *OPTIONS)
    started = time.monotonic()  # after the start of the server
    assert run.wait() == 0
    longest = LONGEST_DELAY * (time.monotonic() - started)
    finished = 0
    while len(moments) < kills or finished == 0:
        if (folder / "config.json").exists():
            run = fork_server.start("--resume", folder)
        else:  # killed before there was a run, or a new one
            shutil.rmtree(folder, ignore_errors=True)
            run = fork_server.start("--out", folder, *OPTIONS)
        if len(moments) < kills:
            time.sleep(draw.uniform(0.0, longest))
            run.process.kill()
        code = run.wait()
        assert code in (0, -signal.SIGKILL), run.err
        path = folder / "checkpoint.pt"
        if code:
            moments.append(load_checkpoint(path)["iteration"] if path.exists() else 0)
            continue
        assert len(records(whole)) == 100
        assert records(folder) == records(whole)
        for name in ("checkpoint.pt", "best.pt"):
            assert same(load_checkpoint(folder / name), load_checkpoint(whole / name))
        finished += 1
        shutil.rmtree(folder)
    assert len(set(moments)) > len(moments) / 3, f"the kills all came at the same moments: {moments}"
