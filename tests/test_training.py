"""The training loop on a tiny task: files, resuming, kills, full disks, divergence, signals."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused
from runs import TIMING_FIELDS, assert_same_run, records
from torch import Tensor
from toy_task import Toy, ToyOptions

from orthokern.errors import CheckpointError, InputError
from orthokern.training import (
    LoopSettings,
    Outcome,
    RunFolder,
    load_checkpoint,
    loop,
    read_metrics,
    signals,
    train,
)

OPTIONS = ToyOptions(dropout=0.1)
SETTINGS = asdict(OPTIONS)


class Probe(Toy):
    """The toy task with things that happen on the way.

    Args:
        at: iteration -> what to do while its batch is made.
        goal: loss below which the run is done.
    """

    def __init__(self, at: dict[int, Any] | None = None, goal: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(OPTIONS)
        self.at, self.goal = at or {}, goal
        self.factor = 1.0  # of the loss of the next batches

    def next_batch(self) -> tuple[Tensor, Tensor]:
        if self.batches + 1 in self.at:
            self.at[self.batches + 1](self)
        return super().next_batch()

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super().loss(batch)
        return loss * self.factor, numbers

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        return iteration % 4 == 0

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        return evaluation["loss"] < self.goal


def go(folder: Path, task: Probe, *, resume: bool = False, iterations: int = 20, plots: bool = False) -> Outcome:
    run = RunFolder.open(folder, "toy") if resume else RunFolder.create(folder, "toy", SETTINGS)
    settings = LoopSettings(iterations, checkpoint_every=6, diagnose_every=3, plots=plots)
    return train(task, run, settings, resume=resume)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run of 20 iterations that was never stopped."""
    folder = tmp_path / "whole"
    assert go(folder, Probe()).exit_code == 0
    return folder


def test_a_run_writes_its_folder(tmp_path: Path) -> None:
    whole = tmp_path / "run"
    assert go(whole, Probe(), plots=True).exit_code == 0
    files = {"best.pt", "checkpoint.pt", "config.json", "learning.png", "metrics.jsonl", "result.json"}
    assert files <= {p.name for p in whole.iterdir()}
    config = json.loads((whole / "config.json").read_text())
    assert config["task"] == "toy" and config["settings"]["hidden"] == 12
    assert {"orthokern", "torch", "python"} <= config["versions"].keys()
    metrics = read_metrics(whole / "metrics.jsonl")
    assert [r["iteration"] for r in metrics] == list(range(1, 21))
    assert all({"loss", "last_error", "grad_norm", *TIMING_FIELDS} <= r.keys() for r in metrics)
    assert [r["iteration"] for r in metrics if "orthogonality_error" in r] == [1, 4, 7, 10, 13, 16, 19]
    assert [r["iteration"] for r in metrics if "held_out_loss" in r] == [4, 8, 12, 16, 20]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    payload = load_checkpoint(whole / "checkpoint.pt")
    assert payload["iteration"] == 20 and payload["task"] == "toy"
    best = min((r["held_out_loss"], r["iteration"]) for r in metrics if "held_out_loss" in r)
    assert load_checkpoint(whole / "best.pt")["iteration"] == best[1] == payload["best"]["iteration"]


def test_the_goal_ends_a_run(tmp_path: Path) -> None:
    outcome = go(tmp_path / "run", Probe(goal=0.2), iterations=500)
    assert (outcome.exit_code, outcome.reached) == (0, True)
    assert outcome.iteration < 500 and outcome.message == f"done at {outcome.iteration}"
    again = go(tmp_path / "run", Probe(goal=0.2), iterations=500, resume=True)
    assert "the run had ended before, and nothing was trained" in again.message
    assert again.reached and again.iteration == outcome.iteration  # nothing left to do
    assert len(records(tmp_path / "run")) == outcome.iteration


@pytest.mark.parametrize(
    ("stop", "number"), [(1, signal.SIGINT), (6, signal.SIGTERM), (7, signal.SIGHUP), (20, signal.SIGINT)]
)
@pytest.mark.usefixtures("signals_not_ignored")
def test_a_signal_saves_and_a_resumed_run_equals_one_never_stopped(
    whole: Path, tmp_path: Path, stop: int, number: signal.Signals
) -> None:
    folder, before = tmp_path / "stopped", signal.getsignal(number)
    outcome = go(folder, Probe(at={stop: lambda _: os.kill(os.getpid(), number)}))
    if stop < 20:  # the run still had something to do
        assert outcome.exit_code == 128 + number
        assert f"{number.name} after iteration {stop}, saved" in outcome.message and "--resume" in outcome.message
        assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == stop
    assert signal.getsignal(number) == before
    assert go(folder, Probe(), resume=True).exit_code == 0
    assert_same_run(whole, folder)


@pytest.mark.usefixtures("signals_not_ignored")
def test_a_resumed_run_that_is_over_is_evaluated(tmp_path: Path) -> None:
    """Stopped between two evaluations, and ended there by another number of iterations."""
    folder = tmp_path / "stopped"
    go(folder, Probe(at={10: lambda _: os.kill(os.getpid(), signal.SIGTERM)}))
    assert load_checkpoint(folder / "checkpoint.pt")["evaluated"] == 8
    assert go(folder, Probe(), resume=True, iterations=10).exit_code == 0
    saved = load_checkpoint(folder / "checkpoint.pt")
    assert saved["iteration"] == saved["evaluated"] == 10
    result = json.loads((folder / "result.json").read_text())
    assert result["iteration"] == 10 and result["last"] == saved["evaluation"]


@pytest.mark.usefixtures("signals_not_ignored")
def test_a_later_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signals, "SAME", -1.0)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", Probe(at={3: lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(2)]}))


@pytest.mark.parametrize("lost", [[], ["best.pt", "result.json"]])
def test_a_run_without_its_checkpoint_is_not_overwritten(whole: Path, lost: list[str]) -> None:
    for name in ["checkpoint.pt", *lost]:
        (whole / name).unlink()
    before = {file.name: file.read_bytes() for file in whole.iterdir()}
    with pytest.raises(CheckpointError, match="no checkpoint.pt there, though metrics.jsonl ends at iteration 20"):
        go(whole, Probe(), resume=True)
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == before


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "result.json"])
def test_a_full_disk_ends_a_run_which_resumes(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and the last checkpoint stays."""
    folder = tmp_path / "full"
    with monkeypatch.context() as patch:
        if name == "metrics.jsonl":
            at = {9: lambda _: patch.setattr(os, "fsync", no_space)}
        else:
            replace = os.replace
            full = lambda source, target: no_space() if Path(target).name == name else replace(source, target)  # noqa: E731
            at = {9: lambda _: patch.setattr(os, "replace", full)}
        with pytest.raises(OSError, match="No space left") as error:
            go(folder, Probe(at=at))
    assert error.value.filename == str(folder / name)
    assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == (20 if name == "result.json" else 8)
    assert go(folder, Probe(), resume=True).exit_code == 0
    assert_same_run(whole, folder)


def test_a_plot_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPLBACKEND of an unknown name makes importing matplotlib a ValueError, for one."""

    def fail(*_: Any) -> Any:
        raise ValueError("Key backend: 'foo' is\nnot a valid value")

    monkeypatch.setattr(loop, "draw_run", fail)
    assert go(tmp_path / "run", Probe(), plots=True).exit_code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_bytes())["iteration"] == 20
    assert "warning: plots not drawn: ValueError: Key backend: 'foo' is not a valid value\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    def explode(task: Probe) -> None:
        task.factor = value

    outcome = go(tmp_path / "run", Probe(at={15: explode}))
    assert (outcome.exit_code, outcome.iteration) == (3, 15)
    assert f"diverged: the loss is {value} at iteration 15; last good checkpoint: iteration 12" in outcome.message
    payload = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert payload["iteration"] == 12
    assert all(torch.isfinite(p).all() for p in payload["model"].values())
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["iteration"] == 15 and last["loss"] is None


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    def spoil(task: Probe) -> None:
        task.optimizer.register_step_post_hook(lambda *_: task.model.readout.bias.data.fill_(math.nan))

    outcome = go(tmp_path / "run", Probe(at={12: spoil}))
    assert outcome.exit_code == 3 and "a parameter is no longer finite" in outcome.message
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["iteration"] == 8


class Stranger:
    """Unpickling it would run code."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize("kind", ["pickle", "torch pickle"])
def test_foreign_checkpoint(whole: Path, kind: str) -> None:
    path, trace = whole / "checkpoint.pt", whole / "code ran"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Stranger(trace)))
    else:
        torch.save({"format": "orthokern.checkpoint", "version": 1, "x": Stranger(trace)}, path)
    with pytest.raises(CheckpointError) as error:
        go(whole, Probe(), resume=True)
    assert str(path) in str(error.value) and str(error.value).isprintable()
    assert not trace.exists()


def test_metrics_that_end_too_early(whole: Path) -> None:
    (whole / "metrics.jsonl").write_bytes(b'{"iteration": 1}\n{"iteration": 2')
    with pytest.raises(CheckpointError, match="has 1 records, but its checkpoint is of iteration 20"):
        go(whole, Probe(), resume=True)


def test_lines_after_the_checkpoint_are_dropped(whole: Path) -> None:
    """Whatever is in them, as after a power failure."""
    before = records(whole)
    with (whole / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\n{")
    assert go(whole, Probe(), resume=True, iterations=24).exit_code == 0
    assert records(whole)[:20] == before and len(records(whole)) == 24


def test_a_run_that_is_going_on_is_not_resumed(tmp_path: Path) -> None:
    """Two processes in one folder would write over each other; the second one is told, and touches nothing."""
    path, messages = tmp_path / "run", []

    def resume(_: Probe) -> None:
        before = (path / "metrics.jsonl").read_bytes()
        told = f"another process is training in the run folder {path}; wait"
        messages.append(refused(lambda: go(path, Probe(), resume=True), told))
        assert (path / "metrics.jsonl").read_bytes() == before != b""

    assert go(path, Probe(at={9: resume}), iterations=12).exit_code == 0
    assert len(messages) == 1 and [r["iteration"] for r in records(path)] == list(range(1, 13))
    assert go(path, Probe(), resume=True).exit_code == 0  # a run that is over is free


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run: no config.json there"),
        (b"", "config.json is damaged: not a JSON object"),
        (b"\xff", "config.json is damaged: not a JSON object"),
        (b'{"task": "toy", "settings": []}', "must hold a run of the task 'toy', got 'toy'"),
        (b'{"task": "adding", "settings": {}}', "must hold a run of the task 'toy', got 'adding'"),
    ],
)
def test_nothing_to_resume(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "run"
    path.mkdir()
    if content is not None:
        (path / "config.json").write_bytes(content)
    refused(lambda: RunFolder.open(path, "toy"), message)


def test_folders_that_cannot_be_used(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out .*whole is in use \(not empty\)"):
        RunFolder.create(whole, "toy", SETTINGS)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=str(tmp_path / "file")):  # one line of the command line
            RunFolder.create(path, "toy", SETTINGS)


def test_the_default_folder_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of runs that start together, as a shell's `&` in a loop does it: none sees that another is about to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    paths = {str(RunFolder.create(None, "toy", SETTINGS).path) for _ in range(3)}
    assert paths == {f"runs/toy-now{number}" for number in ("", "-2", "-3")}


def test_a_run_continues_without_its_best_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    go(folder, Probe(), iterations=10)
    (folder / "best.pt").unlink()
    assert go(folder, Probe(), resume=True).exit_code == 0
    assert "the best evaluation before is not known" in capsys.readouterr().err
    assert load_checkpoint(folder / "best.pt")["iteration"] > 10


def test_best_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go(folder, Probe(), iterations=10)
    best = load_checkpoint(folder / "best.pt")
    torch.save({**best, "model": {"other": torch.ones(2)}}, folder / "best.pt")
    with pytest.raises(CheckpointError, match="best.pt is not of this run; delete it to continue without it"):
        go(folder, Probe(), resume=True)
