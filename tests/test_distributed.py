"""Training in several processes: the same loss curve as in one, equal parameters on all ranks, and one error line if a
process is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import TESTS, ForkServer, Run
from test_kill_resume import records, same

from orthokern.training import load_checkpoint, read_metrics

OPTIONS = ["--iterations", 24, "--threads", 1, "--no-plots"]


def ended(runs: list[Run], code: int) -> list[Run]:
    codes = [run.wait() for run in runs]
    assert codes == [code] * len(runs), "\n".join(run.out + run.err for run in runs)
    return runs


def close(a: Any, b: Any) -> bool:
    """Equal to the rounding of float64 over a few dozen iterations: 1e-12 is a thousand times the largest difference
    seen, and a millionth of what another order of the data makes. The gradient's norm is float32."""
    if isinstance(a, dict):
        a, b = ({key: x for key, x in each.items() if "through_time" not in key} for each in (a, b))  # of rank 0's rows
        return a.keys() == b.keys() and all(
            a[k] == pytest.approx(b[k], rel=1e-6)
            if k == "grad_norm"
            else k == "orthogonality_error" or close(a[k], b[k])
            for k in a
        )
    return bool(a == pytest.approx(b, rel=1e-12, abs=1e-12))


@pytest.mark.parametrize("world, accumulate", [(2, 1), (2, 3), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_processes_train_as_one_with_the_joint_batch(
    fork_server: ForkServer, tmp_path: Path, world: int, accumulate: int
) -> None:
    options = [*OPTIONS, "--accumulate", accumulate, "--diagnose-every", 0]
    one = fork_server.start("--out", tmp_path / "one", "--dump", tmp_path / "one", *options)
    assert one.wait() == 0, one.err
    runs = ended(fork_server.start_ranks(world, "--out", tmp_path / "all", "--dump", tmp_path / "rank", *options), 0)
    a, b = records(tmp_path / "one"), records(tmp_path / "all")
    assert len(a) == len(b) == 24
    assert all(map(close, a, b))
    assert a[-1]["loss"] < 0.8 * a[0]["loss"]
    ranks = [torch.load(tmp_path / f"rank.{rank}") for rank in range(world)]
    assert all(same(ranks[0], other) for other in ranks[1:])  # bit for bit, bases included
    assert all(torch.allclose(p, ranks[0][k], rtol=0, atol=1e-12) for k, p in torch.load(tmp_path / "one.0").items())
    # Rank 0 alone writes and talks.
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == [
        "best.pt",
        "checkpoint.pt",
        "config.json",
        "metrics.jsonl",
        "result.json",
    ]
    assert "done at 24" in runs[0].out
    assert [run.out for run in runs[1:]] == [""] * (world - 1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_signal_on_one_rank_stops_all_and_a_resumed_run_equals_one_never_stopped(
    fork_server: ForkServer, tmp_path: Path, world: int
) -> None:
    """Dropout draws differently on every rank, and goes on there."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = [*OPTIONS, "--dropout", 0.3, "--batch", 4 * world]
    ended(fork_server.start_ranks(world, "--out", whole, *options), 0)
    runs = ended(fork_server.start_ranks(world, "--out", stopped, *options, strike="11,1,SIGTERM"), 143)
    told = f"stopped by SIGTERM after iteration 11, saved; continue with --resume {stopped}\n"
    assert [run.err for run in runs] == [told] + [""] * (world - 1)
    payload = load_checkpoint(stopped / "checkpoint.pt")
    assert payload["iteration"] == 11 and len(records(stopped)) == 11
    others = payload["rng_of_other_ranks"]
    assert len(others) == world - 1
    assert all(not torch.equal(payload["rng"]["torch"], other["torch"]) for other in others)
    ended(fork_server.start_ranks(world, "--resume", stopped), 0)
    assert records(stopped) == records(whole)
    for name in ("checkpoint.pt", "best.pt"):
        assert same(load_checkpoint(whole / name), load_checkpoint(stopped / name))


def test_another_number_of_processes_may_go_on(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended(fork_server.start_ranks(2, "--out", folder, *OPTIONS), 0)
    shutil.copytree(folder, tmp_path / "one")
    ended(fork_server.start_ranks(4, "--resume", folder, "--iterations", 30), 0)
    assert fork_server.start("--resume", tmp_path / "one", "--iterations", 30).wait() == 0
    assert len(records(folder)) == 30
    assert all(map(close, records(folder), records(tmp_path / "one")))


def test_ranks_that_drift_apart_are_noticed(fork_server: ForkServer, tmp_path: Path) -> None:
    """One bit of one basis."""
    runs = ended(fork_server.start_ranks(2, "--out", tmp_path / "run", *OPTIONS, "--drift"), 2)
    assert "iteration 8: the parameters of rank 1 differ from those of rank 0" in runs[0].err
    assert runs[0].err.count("\n") == 1 and runs[1].err == ""


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch", 7], "--batch must be a multiple of the 2 processes, got 7"),
        (["--out", TESTS], "is in use (not empty)"),
        (["--resume", "nowhere"], "nothing to resume in nowhere"),
        (["--minutes", 3], "--minutes 3: for one process, not under torchrun; give --iterations"),
        (["--iterations", 0], "--iterations: '0' is not an integer of at least 1"),
    ],
)
def test_one_line_for_all_ranks(fork_server: ForkServer, tmp_path: Path, options: list[Any], message: str) -> None:
    where = [] if "--out" in options or "--resume" in options else ["--out", tmp_path / "run"]
    runs = ended(fork_server.start_ranks(2, *where, *options), 2)
    assert runs[0].err.startswith("error: ") and runs[0].err.count("\n") == 1 and message in runs[0].err
    assert runs[1].err == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    words = [*command, TESTS / "toy_task.py", "--out", tmp_path / "run", *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("done at 24\n"), done.stderr
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 24
