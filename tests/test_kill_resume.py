"""A run that is killed at random moments and resumed ends with the bits of an uninterrupted run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from torch import Tensor, equal

from orthokern.training import load_checkpoint, read_metrics
from orthokern.training.metrics import TIMING_FIELDS

OPTIONS = ["--iterations", 100, "--checkpoint-every", 2, "--dropout", 0.2, "--no-plots", "--threads", 1]
LONGEST_DELAY = 0.3  # seconds; a run that nobody kills takes about half a second


def records(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in read_metrics(folder / "metrics.jsonl")]


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, but for wall times."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, fork_server: ForkServer, tmp_path: Path) -> None:
    draw = random.Random(kills)
    moments = []  # the checkpoint that each kill left
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert fork_server.start("--out", whole, *OPTIONS).wait() == 0
    finished = 0
    while len(moments) < kills or finished == 0:
        if (folder / "config.json").exists():
            run = fork_server.start("--resume", folder)
        else:  # killed before there was a run, or a new one
            shutil.rmtree(folder, ignore_errors=True)
            run = fork_server.start("--out", folder, *OPTIONS)
        if len(moments) < kills:
            time.sleep(draw.uniform(0.0, LONGEST_DELAY))
            os.kill(run.pid, signal.SIGKILL)
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
