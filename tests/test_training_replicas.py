"""--replicas: several seeds of a task in one process are the runs that they are alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import records

from orthokern.tasks import adding, char_lm, copy
from orthokern.training import LoopSettings, load_checkpoint, replicas

TASKS = {"copy": copy, "adding": adding}
OPTIONS = ["--T", "12", "--hidden", "9", "--batch", "6", "--threads", "1", "--no-plots", "--eval-every", "4"]
SMALL = [*OPTIONS, "--iterations", "7", "--diagnose-every", "3", "--eval-sequences", "20"]
SEQUENTIAL = [*SMALL, "--algorithm", "sequential"]


def assert_same_run(found: Path, wanted: Path) -> None:
    """Equal settings, and numbers that agree to rounding."""
    settings = [json.loads((folder / "config.json").read_text())["settings"] for folder in (found, wanted)]
    assert settings[0] == settings[1]
    assert len(records(found)) == len(records(wanted)) > 0
    for ours, theirs in zip(records(found), records(wanted), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not isinstance(value, dict):
                torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(value), rtol=1e-4, atol=1e-5)
    ours, theirs = (load_checkpoint(folder / "checkpoint.pt") for folder in (found, wanted))
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours["task_state"]["generator"], theirs["task_state"]["generator"])


@pytest.mark.parametrize(
    ("task", "options", "stacked"),
    [
        ("copy", SEQUENTIAL, True),
        ("copy", [*SMALL, "--algorithm", "modal"], False),
        ("copy", [*SMALL, "--nonlinearity", "modrelu", "--weight-decay", "1e-2", "--clip", "0.1"], True),
        # RMSprop would make a step of full length of the rounding of a gradient that is zero
        ("copy", [*SEQUENTIAL, "--model", "nnrnn", "--modulus-penalty", "0.1", "--optimizer", "sgd"], True),
        ("copy", [*SMALL, "--model", "lstm"], False),
        ("copy", [*SEQUENTIAL, "--accumulate", "2"], False),
        ("adding", SMALL, True),
        # two biases with one gradient, which clipping scales
        ("adding", [*SMALL, "--model", "rnn", "--start", "torch", "--soft-orthogonality", "0.1"], True),
        ("adding", [*SMALL, "--model", "exprnn", "--rebase-every", "2"], False),
    ],
)
def test_the_numbers_are_those_of_single_runs(
    task: str, options: list[str], stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    differentiate = replicas.Stacked._differentiate

    def counted(self: Any, runs: list[int]) -> None:
        calls.append(len(runs))
        differentiate(self, runs)

    monkeypatch.setattr(replicas.Stacked, "_differentiate", counted)
    main = TASKS[task].main
    assert main([*options, "--out", str(tmp_path / "all"), "--replicas", "3", "--seed", "4"]) == 0
    assert calls == ([3] * 4 if stacked else [])  # 3 of the 7 iterations record diagnostics
    for seed in (4, 6):
        assert main([*options, "--out", str(tmp_path / "one"), "--seed", str(seed)]) == 0
        assert_same_run(tmp_path / f"all-seed-{seed}", tmp_path / "one")
        (tmp_path / "one").rename(tmp_path / f"one-{seed}")


def test_memory_limits_how_many_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    class One:
        stacked_bytes, device = replicas.CACHED // 3, torch.device("cpu")

    together = replicas.Stacked([One()] * 8, LoopSettings(1))  # type: ignore[list-item]
    groups: list[list[int]] = []
    monkeypatch.setattr(together, "_differentiate", groups.append)
    together.prepare([0, 1, 2, 4, 7])
    together.prepare([0, 3, 4, 5])
    assert groups == [[0, 1, 2], [4, 7], [0, 3, 4]]
    One.stacked_bytes += 1  # room for two only
    assert replicas.Stacked([One()] * 8, LoopSettings(1)).most == 1  # type: ignore[list-item]


def test_an_interrupt_saves_all_and_each_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    assert copy.main([*SEQUENTIAL, "--out", whole, "--replicas", "3"]) == 0
    clip, clipped = copy.CopyExperiment.clip_gradients, []

    def interrupt(self: copy.CopyExperiment) -> None:
        clipped.append(self)
        if len(clipped) == 3 * 4 + 2:  # in the fifth iteration of the second model
            os.kill(os.getpid(), signal.SIGINT)
        clip(self)

    monkeypatch.setattr(copy.CopyExperiment, "clip_gradients", interrupt)
    assert copy.main([*SEQUENTIAL, "--out", stopped, "--replicas", "3"]) == 130
    monkeypatch.undo()
    at = [load_checkpoint(Path(f"{stopped}-seed-{seed}") / "checkpoint.pt")["iteration"] for seed in range(3)]
    assert at == [6, 5, 5]  # the first one had looked for a signal before
    assert copy.main(["--resume", f"{stopped}-seed-1", "--no-plots"]) == 0  # as a single run
    assert copy.main(["--resume", stopped, "--replicas", "3", "--no-plots"]) == 0
    for seed in range(3):
        assert_same_run(Path(f"{stopped}-seed-{seed}"), Path(f"{whole}-seed-{seed}"))


def test_a_run_that_ends_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One diverges, one reaches its goal; the exit code is the largest."""
    usual = copy.CopyExperiment.evaluate

    def evaluate(self: copy.CopyExperiment, iteration: int) -> dict[str, float]:
        found = usual(self, iteration)
        return {**found, "reached": float(self.settings.seed == 1)}

    def diverge(self: copy.CopyExperiment) -> None:
        if self.settings.seed == 0 and self.scheduler is not None and self.scheduler.last_epoch == 2:
            self.rnn.get_parameter("u_l0").data.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy.CopyExperiment, "evaluate", evaluate)
        patch.setattr(copy.CopyExperiment, "clip_gradients", diverge)
        assert copy.main([*SEQUENTIAL, "--out", str(tmp_path / "all"), "--replicas", "3"]) == 3
    lengths = [len(records(tmp_path / f"all-seed-{seed}")) for seed in range(3)]
    assert lengths[0] < 7 and lengths[1:] == [4, 7]
    out, err = capsys.readouterr()
    assert "seed 0: diverged: " in err and "seed 1: solved: " in out and "seed 2: not solved: " in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--replicas", "0"], "'0' is not an integer of at least 1"),
        (["--replicas", "2", "--profile"], "--replicas 2: not with --profile, which is for one run"),
        (["--replicas", "2", "--cuda-graph"], "--replicas 2: not with --cuda-graph, which is for one run"),
        (["--replicas", "2", "--resume"], "--resume needs the folder of the run"),
        (["--replicas", "2", "--seed", str(2**63 - 1)], f"on: accepted: seeds of at most {2**63 - 1}"),
    ],
)
def test_refusals(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert copy.main([*OPTIONS, *options]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def test_a_folder_in_use_is_refused_before_any_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all-seed-1").mkdir()
    (tmp_path / "all-seed-1" / "file").write_text("mine")
    assert copy.main([*SEQUENTIAL, "--out", str(tmp_path / "all"), "--replicas", "2"]) == 2
    assert "all-seed-1: the folder is in use" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-seed-1"]


def test_other_tasks_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout draws from the generator of the process, which the models would share."""
    assert char_lm.main(["--replicas", "2"]) == 2
    assert capsys.readouterr().err == "error: --replicas 2: for tasks that generate their sequences, not char_lm\n"


def test_the_runs_that_a_wrong_folder_may_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / f"c-20-seed-{seed}" for seed in (1, 2)]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    base = tmp_path / "c-20"
    both = f"--replicas 2 --seed 1 --resume {base}"
    inside = f"; {tmp_path} holds 2 run folder(s): give one, as --resume {folders[0]}, or {both}"
    expected = {
        tmp_path: inside,
        base: f"; the runs of several seeds are resumed by {both}",
        tmp_path / "d": "",
        tmp_path / "c-20-seed-3": "",
    }
    for path, hint in expected.items():
        assert copy.main(["--resume", str(path)]) == 2
        assert capsys.readouterr().err == f"error: nothing to resume in {path}: no config.json there{hint}\n"
    assert copy.main(["--resume", str(tmp_path), "--replicas", "2"]) == 2
    assert capsys.readouterr().err.endswith(f"no config.json there{inside}\n")
    (folders[0] / "config.json").unlink()
    assert copy.main(["--resume", str(base)]) == 2
    assert capsys.readouterr().err.endswith(f"; give the run of one seed, as --resume {folders[1]}\n")
