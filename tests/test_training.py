"""The training loop on a tiny task: files, resuming, kills, full disks, divergence, signals."""

from __future__ import annotations

import builtins
import errno
import io
import json
import math
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import records, same
from torch import Tensor, nn

from orthokern.errors import CheckpointError, InputError
from orthokern.training import (
    LoopSettings,
    Outcome,
    RunFolder,
    Task,
    load_checkpoint,
    loop,
    read_metrics,
    signals,
    train,
)
from orthokern.training import checkpoint as checkpoint_module
from orthokern.training.checkpoint import rng_state, save_checkpoint, set_rng_state
from orthokern.training.metrics import TIMING_FIELDS, MetricsLog
from orthokern.training.progress import Progress

SETTINGS = {"seed": 0, "device": "cpu", "threads": 1, "width": 5, "iterations": 20, "checkpoint_every": 6}


class Regression(Task):
    """Linear regression with dropout: draws from the task's own generator and from torch's global one.

    Args:
        width: number of features.
        at: iteration -> what to do while its batch is made.
        goal: loss below which the run is done.
    """

    name = "regression"
    time_steps = 4
    baseline = 1.0
    device = torch.device("cpu")

    def __init__(self, width: int = 5, at: dict[int, Any] | None = None, goal: float = 0.0, lr: float = 0.05) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, 1), nn.Dropout(0.1))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 1 / (1 + 0.1 * i))
        self.generator = torch.Generator().manual_seed(1)
        self.at, self.goal, self.width, self.batches = at or {}, goal, width, 0
        self.lost = 1.0  # the next batches' loss is multiplied by it

    def next_batch(self) -> Tensor:
        self.batches += 1
        if self.batches in self.at:
            self.at[self.batches](self)
        return torch.randn(8, self.width, generator=self.generator)

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = (self.model(batch)[:, 0] - batch.sum(1)).square().mean()
        return error * self.lost, {"doubled": 2 * error.detach()}

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        return iteration % 4 == 0

    def evaluate(self, iteration: int) -> dict[str, float]:
        assert not self.model.training and not torch.is_grad_enabled()
        batch = torch.randn(8, self.width, generator=torch.Generator().manual_seed(iteration))
        return {"loss": (self.model(batch)[:, 0] - batch.sum(1)).square().mean().item()}

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        return evaluation["loss"] < self.goal

    def diagnose(self) -> dict[str, Any]:
        return {"norm": float(self.model[0].weight.detach().norm())}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.batches = state["batches"]

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        return f"{'solved' if reached else 'not solved'} at {iteration}"


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing in the loop may clean up after it."""


def go(folder: Path, task: Regression, *, resume: bool = False, iterations: int = 20, every: int = 6) -> Outcome:
    if resume:
        run = RunFolder.open(folder, "regression")
    else:
        run = RunFolder.create(folder, "regression", {**SETTINGS, "width": task.width})
    progress = Progress(iterations, io.StringIO(), every=1e9)
    outcome = train(task, run, LoopSettings(iterations, every, diagnose_every=3), resume=resume, progress=progress)
    outcome_output.append(progress.stream.getvalue())  # type: ignore[attr-defined]
    return outcome


outcome_output: list[str] = []


def assert_same_run(a: Path, b: Path) -> None:
    assert records(a) == records(b)
    assert same(load_checkpoint(a / "checkpoint.pt"), load_checkpoint(b / "checkpoint.pt"))
    assert same(load_checkpoint(a / "best.pt"), load_checkpoint(b / "best.pt"))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run of 20 iterations that was never stopped."""
    folder = tmp_path / "whole"
    assert go(folder, Regression()).exit_code == 0
    return folder


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run_writes_its_folder(whole: Path) -> None:
    assert sorted(p.name for p in whole.iterdir()) == [
        "best.pt",
        "checkpoint.pt",
        "config.json",
        "learning.png",
        "metrics.jsonl",
        "result.json",
    ]
    config = json.loads((whole / "config.json").read_text())
    assert config["task"] == "regression" and config["settings"]["width"] == 5
    assert {"orthokern", "torch", "python"} <= config["versions"].keys()
    metrics = read_metrics(whole / "metrics.jsonl")
    assert [r["iteration"] for r in metrics] == list(range(1, 21))
    assert all({"loss", "doubled", "grad_norm", *TIMING_FIELDS} <= r.keys() for r in metrics)
    assert [r["iteration"] for r in metrics if "norm" in r] == [1, 4, 7, 10, 13, 16, 19]
    assert [r["iteration"] for r in metrics if "held_out_loss" in r] == [4, 8, 12, 16, 20]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    payload = load_checkpoint(whole / "checkpoint.pt")
    assert payload["iteration"] == 20 and payload["task"] == "regression"
    best = min((r["held_out_loss"], r["iteration"]) for r in metrics if "held_out_loss" in r)
    assert load_checkpoint(whole / "best.pt")["iteration"] == best[1] == payload["best"]["iteration"]


def test_the_goal_ends_a_run(tmp_path: Path) -> None:
    outcome = go(tmp_path / "run", Regression(goal=3.0), iterations=500)
    assert (outcome.exit_code, outcome.reached) == (0, True)
    assert outcome.iteration < 500 and outcome.message == f"solved at {outcome.iteration}"
    again = go(tmp_path / "run", Regression(goal=3.0), iterations=500, resume=True)
    assert again.reached and again.iteration == outcome.iteration  # nothing left to do
    assert len(records(tmp_path / "run")) == outcome.iteration


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 6, 20])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("signals_not_ignored")
def test_a_signal_saves_and_a_resumed_run_equals_one_never_stopped(
    whole: Path, tmp_path: Path, stop: int, number: signal.Signals
) -> None:
    folder, before = tmp_path / "stopped", signal.getsignal(number)
    outcome = go(folder, Regression(at={stop: lambda _: os.kill(os.getpid(), number)}))
    if stop < 20:  # the run still had something to do
        assert outcome.exit_code == 128 + number
        assert f"{number.name} after iteration {stop}, saved" in outcome.message and "--resume" in outcome.message
        assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == stop
    assert signal.getsignal(number) == before
    assert go(folder, Regression(), resume=True).exit_code == 0
    assert_same_run(whole, folder)


def test_a_run_under_nohup_goes_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = go(tmp_path / "run", Regression(at={3: lambda _: signal.raise_signal(signal.SIGHUP)}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome.exit_code == 0


@pytest.mark.usefixtures("signals_not_ignored")
def test_a_later_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signals, "SAME", -1.0)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", Regression(at={3: lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(2)]}))


@pytest.mark.parametrize("at", [2, 11])
def test_a_kill_loses_no_more_than_the_iterations_since_the_checkpoint(whole: Path, tmp_path: Path, at: int) -> None:
    def kill(_: Regression) -> None:
        raise Killed

    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        go(folder, Regression(at={at: kill}))
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"iteration": 99, "lo')  # the write was cut short too
    assert go(folder, Regression(), resume=True).exit_code == 0
    assert_same_run(whole, folder)


@pytest.mark.parametrize("moment", ["before the rename", "in the middle of the write"])
def test_a_kill_during_a_checkpoint_leaves_the_old_one(
    whole: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace = tmp_path / "killed", os.replace

    def kill(source: Path, target: Path) -> None:
        if Path(target).name == "checkpoint.pt" and (folder / "checkpoint.pt").exists():
            if moment == "in the middle of the write":
                os.truncate(source, os.path.getsize(source) // 2)
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(Killed):
        go(folder, Regression())
    monkeypatch.setattr(os, "replace", replace)
    assert (folder / "checkpoint.pt.tmp").exists()  # a killed process cleans up nothing
    assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == 4
    assert len(read_metrics(folder / "metrics.jsonl")) == 6
    assert go(folder, Regression(), resume=True).exit_code == 0
    assert_same_run(whole, folder)
    assert not (folder / "checkpoint.pt.tmp").exists()


@pytest.mark.parametrize("lost", [[], ["best.pt", "result.json"]])
def test_a_run_without_its_checkpoint_is_not_overwritten(whole: Path, lost: list[str]) -> None:
    for name in ["checkpoint.pt", *lost]:
        (whole / name).unlink()
    before = {file.name: file.read_bytes() for file in whole.iterdir()}
    with pytest.raises(CheckpointError, match="no checkpoint.pt there, though metrics.jsonl ends at iteration 20"):
        go(whole, Regression(), resume=True)
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == before


def test_rng_states_come_back() -> None:
    import random

    import numpy as np

    def draw() -> list[Any]:
        numbers = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]  # noqa: NPY002
        return [*numbers, random.random()]

    draw()
    state = rng_state()
    first = draw()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    draw()
    set_rng_state(torch.load(buffer, weights_only=True))
    assert draw() == first


# ---- a full disk ---------------------------------------------------------------------------------


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile(io.FileIO):
    """Takes a hundred bytes and is full."""

    def write(self, content: Any) -> int:
        super().write(memoryview(content)[:100])
        return no_space()


@pytest.mark.parametrize("point", ["open", "write", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"iteration": 1})
    with monkeypatch.context() as patch:
        if point == "open":
            patch.setattr(builtins, "open", no_space)
        elif point == "write":
            patch.setattr(builtins, "open", lambda name, mode: FullFile(name, mode))
        else:
            patch.setattr(checkpoint_module.os, point, no_space)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(path, {"iteration": 2})
    assert load_checkpoint(path)["iteration"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]  # the half-written file is gone: it takes space


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
            go(folder, Regression(at=at))
    assert error.value.filename == str(folder / name)
    assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == (20 if name == "result.json" else 8)
    assert go(folder, Regression(), resume=True).exit_code == 0
    assert_same_run(whole, folder)


def test_a_record_that_does_not_fit_is_written_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start()
    log.append({"iteration": 1, "loss": math.nan})
    own, log._file = log._file, FullFile(tmp_path / "metrics.jsonl", "ab")
    with pytest.raises(OSError, match="No space left"):
        log.append({"iteration": 2, "loss": [0.5] * 100})
    log._file.close()
    log._file = own
    assert [(r["iteration"], r["loss"]) for r in read_metrics(log.path)] == [(1, None)]
    log.start(keep=1)
    assert log.path.read_bytes().count(b"\n") == 1  # no half line either
    log.close()


def test_a_plot_that_fails_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPLBACKEND of an unknown name makes importing matplotlib a ValueError, for one."""

    def fail(*_: Any) -> Any:
        raise ValueError("Key backend: 'foo' is\nnot a valid value")

    monkeypatch.setattr(loop, "draw_run", fail)
    assert go(tmp_path / "run", Regression()).exit_code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_bytes())["iteration"] == 20
    assert "warning: plots not drawn: ValueError: Key backend: 'foo' is not a valid value\n" in outcome_output[-1]


def test_no_file_holds_what_is_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and tests may be NaN or infinite where the training loss isn't: null for readers that are strict."""
    monkeypatch.setattr(Regression, "evaluate", lambda self, iteration: {"loss": math.nan})
    monkeypatch.setattr(Regression, "test", lambda self: {"loss": math.inf, "accuracy": 0.5}, raising=False)
    assert go(tmp_path / "run", Regression()).exit_code == 0

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    texts = [(tmp_path / "run" / name).read_text() for name in ("config.json", "result.json")]
    for text in [*texts, *(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]:
        json.loads(text, parse_constant=refuse)
    result = json.loads(texts[1])
    assert result["last"] == {"loss": None} and result["test"] == {"loss": None, "accuracy": 0.5}


# ---- divergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    def explode(task: Regression) -> None:
        task.lost = value

    outcome = go(tmp_path / "run", Regression(at={15: explode}))
    assert (outcome.exit_code, outcome.iteration) == (3, 15)
    assert f"diverged: the loss is {value} at iteration 15; last good checkpoint: iteration 12" in outcome.message
    payload = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert payload["iteration"] == 12
    assert all(torch.isfinite(p).all() for p in payload["model"].values())
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["iteration"] == 15 and last["loss"] is None


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    def spoil(task: Regression) -> None:
        task.optimizer.register_step_post_hook(lambda *_: task.model[0].bias.data.fill_(math.nan))

    outcome = go(tmp_path / "run", Regression(at={12: spoil}))
    assert outcome.exit_code == 3 and "a parameter is no longer finite" in outcome.message
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["iteration"] == 8


# ---- checkpoints and folders that are not what they should be ------------------------------------


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


class Stranger:
    """Unpickling it would run code."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.trace),))


HEAD = {"format": "orthokern.checkpoint"}
FOREIGN: dict[str, Any] = {
    "torch pickle": lambda trace: {**HEAD, "version": 1, "x": Stranger(trace)},
    "state_dict": lambda trace: nn.Linear(2, 2).state_dict(),
    "tensor": lambda trace: torch.zeros(3),
    "newer": lambda trace: {**HEAD, "version": 99},
    "empty": lambda trace: {**HEAD, "version": 1},
}


@pytest.mark.parametrize("kind", ["pickle", *FOREIGN])
def test_foreign_checkpoint(whole: Path, kind: str) -> None:
    path, trace = whole / "checkpoint.pt", whole / "code ran"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Stranger(trace)))
    else:
        torch.save(FOREIGN[kind](trace), path)
    with pytest.raises(CheckpointError) as error:
        go(whole, Regression(), resume=True)
    assert str(path) in one_line(error) and "\x1b" not in str(error.value)
    assert not trace.exists()


def test_metrics_that_end_too_early(whole: Path) -> None:
    (whole / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match="ends at iteration 0, but its checkpoint is of iteration 20"):
        go(whole, Regression(), resume=True)


def test_a_run_that_is_going_on_is_not_resumed(tmp_path: Path) -> None:
    """Two processes in one folder would write over each other; the second one is told, and touches nothing."""
    path, refused = tmp_path / "run", []

    def resume(_: Regression) -> None:
        before = (path / "metrics.jsonl").read_bytes()
        with pytest.raises(CheckpointError, match="another process is training in the run folder .*run; wait") as error:
            go(path, Regression(), resume=True)
        assert (path / "metrics.jsonl").read_bytes() == before != b""
        refused.append(one_line(error))

    assert go(path, Regression(at={9: resume}), iterations=12).exit_code == 0
    assert len(refused) == 1 and [r["iteration"] for r in records(path)] == list(range(1, 13))
    assert go(path, Regression(), resume=True).exit_code == 0  # a run that is over is free


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume in .*nowhere: no config.json"):
        RunFolder.open(tmp_path / "nowhere", "regression")
    for content, message in (
        ('{"task": 1, "settings": {}}', "must hold a run of the task 'regression', got 1"),
        ('{"task": "adding", "settings": {}}', "must hold a run of the task 'regression', got 'adding'"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            RunFolder.open(tmp_path, "regression")


def test_folders_that_cannot_be_used(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out .*whole is in use \(not empty\)"):
        RunFolder.create(whole, "regression", SETTINGS)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="the run folder .* cannot be written") as error:
            RunFolder.create(path, "regression", SETTINGS)
        one_line(error)


def test_the_default_folder_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of runs that start together, as a shell's `&` in a loop does it: none sees that another is about to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    paths = {str(RunFolder.create(None, "regression", SETTINGS).path) for _ in range(3)}
    assert paths == {f"runs/regression-now{number}" for number in ("", "-2", "-3")}
