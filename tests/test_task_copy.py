"""`python -m orthokern.tasks.copy`: it learns, resumes to the same bits after any kill, and rejects bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from runs import assert_refused, assert_resumes, build, records, run

from orthokern.tasks import copy

SMALL = ["--T", "5", "--hidden", "16", "--batch", "10", "--threads", "1", "--no-plots"]


def test_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T = 10: solved in about sixty iterations, with all that a run leaves behind except its plots."""
    folder = tmp_path / "run"
    options = "--T 10 --hidden 96 --iterations 300 --threads 1 --goal 99 --no-plots".split()
    assert run("copy", *options, "--out", folder) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(
        r"solved: recall accuracy ([\d.]+) % on 200 fresh sequences \(goal 99 %\), iteration (\d+), ([\d.]+) s", last
    )
    assert match and float(match[1]) >= 99.0
    metrics = records(folder)
    assert len(metrics) == int(match[2]) < 300
    baseline = 10 * torch.log(torch.tensor(8.0)).item() / 30
    assert metrics[-1]["loss"] < 0.5 * baseline
    assert metrics[-1]["held_out_accuracy"] >= 0.99 and metrics[-1]["held_out_sequences"] == 200
    names = {"config.json", "metrics.jsonl", "checkpoint.pt", "best.pt", "result.json"}
    assert {p.name for p in folder.iterdir()} == names
    looked = [r for r in metrics if "spectrum" in r]
    assert [r["iteration"] for r in looked] == list(range(1, len(metrics) + 1, 10))
    assert all(0.999 <= r["spectrum"]["min"] <= r["spectrum"]["max"] <= 1.001 for r in looked)
    assert all(r["orthogonality_error"] < 1e-5 for r in looked)
    assert len(looked[-1]["grad_norm_through_time"]) == 30
    assert json.loads((folder / "config.json").read_text())["settings"]["geodesic_lr"] == 1e-4


@pytest.mark.parametrize("marker", [[], ["--marker", "9"]])
def test_scalar_inputs(marker: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("copy", *SMALL, "--iterations", 4, "--out", tmp_path / "run", "--input", "scalar", *marker) == 0
    metrics = records(tmp_path / "run")
    assert len(metrics) == 4 and all(r["loss"] > 0 for r in metrics)
    assert capsys.readouterr().out.splitlines()[-1].startswith("not solved: recall accuracy")


def test_an_evaluation_reads_what_fits_into_one_batch() -> None:
    """All of its sequences at T = 5, however many are wrong, so that best values do not come from few of them."""
    task = build("copy", [*SMALL, "--goal", "100"])
    evaluation = task.evaluate(1)
    assert evaluation["accuracy"] < 0.5 and evaluation["sequences"] == 200


def test_seeds_and_streams(tmp_path: Path) -> None:
    """The same seed gives the same run, another seed another; evaluating more often changes nothing else."""
    for name, options in {"a": [], "b": [], "c": ["--seed", 1], "d": ["--eval-every", 3]}.items():
        assert run("copy", *SMALL, "--iterations", 12, "--out", tmp_path / name, *options) == 0
    a, b, c, d = (records(tmp_path / name) for name in "abcd")
    assert a == b
    assert a[0]["loss"] == c[0]["loss"]  # nothing but the blank's bias speaks yet
    assert all(x["loss"] != y["loss"] for x, y in zip(a[1:], c[1:], strict=True))
    assert [r["loss"] for r in a] == [r["loss"] for r in d]
    assert [r["iteration"] for r in d if "held_out_loss" in r] == [3, 6, 9, 12]


def test_a_batch_at_the_goal_is_evaluated() -> None:
    """In rounding: 99.9 / 100 is above 0.999. Other batches are not evaluated between two scheduled evaluations."""
    task = build("copy", [*SMALL, "--goal", "99.9", "--eval-every", "1000"])
    assert [task.wants_evaluation(1, {"accuracy": right / 1000}) for right in (998, 999)] == [False, True]


def test_the_blank_may_be_learned() -> None:
    """Held at zero by default; with --learn-blank it starts as the other columns do, which stay as they were, and
    moves."""
    columns = {}
    for learned in (False, True):
        task = build("copy", SMALL, learn_blank=learned)
        table = task.rnn.get_parameter("weight_ih_l0")
        before = table.detach().clone()
        with torch.no_grad():
            task.readout.get_parameter("weight").normal_()
        task.loss(task.next_batch())[0].backward()
        task.clip_gradients()
        task.optimizer.step()
        columns[learned] = before[:, 0], table.detach()[:, 0], before[:, 1:]
    assert not columns[False][0].any() and not columns[False][1].any()
    assert (columns[True][0] != columns[True][1]).all() and columns[True][0].std() > 0.1
    assert torch.equal(columns[False][2], columns[True][2])


def test_the_paper_preset(tmp_path: Path) -> None:
    assert run("copy", *SMALL, "--preset", "paper", "--iterations", 1, "--lr", "3e-4", "--out", tmp_path / "run") == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["geodesic_lr"], settings["input_lr"], settings["clip"]) == (1e-6, 1e-4, 100.0)
    assert settings["lr"] == 3e-4  # the command line is stronger
    assert copy.COMMAND.complete({**copy.COMMAND.presets["paper"], "T": 10_000}).margin == 0.001


def test_modal_as_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run within rounding, records through time included; and the first line names the algorithm."""
    runs = {}
    for name in ("modal", "sequential"):
        folder = tmp_path / name
        # the paper's small steps from a random start: nothing is zero there, whose rounding RMSprop would blow up
        options = ["--T", 70, "--start", "random", "--lr", "1e-3", "--algorithm", name, "--iterations", 11]
        assert run("copy", *SMALL, *options, "--last-step-gradient", "--out", folder) == 0
        told = {"modal": "modal (8 modes of W, condition of their basis 1)", "sequential": "sequential"}[name]
        assert capsys.readouterr().out.splitlines()[0].startswith(f"run folder {folder}; algorithm {told}")
        runs[name] = records(folder)
    for a, b in zip(*runs.values(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["accuracy"] == b["accuracy"]
        assert ("grad_norm_through_time" in a) == ("grad_norm_through_time" in b)
    first, other = (runs[name][0] for name in runs)
    for key in ("grad_norm_through_time", "state_norm_through_time", "last_grad_norm_through_time"):
        assert len(first[key]) == 64 and first[key] == pytest.approx(other[key], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["modal", "sequential"])
def test_resume_is_exact(algorithm: str, tmp_path: Path) -> None:
    """The modal algorithm has a state of its own, the basis."""
    often = ["--checkpoint-every", 7, "--eval-every", 5, "--diagnose-every", 4, "--goal", 100, "--algorithm", algorithm]
    assert_resumes("copy", [*SMALL, *often], tmp_path, 3, 23, 40)


def test_resume_takes_the_settings_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run("copy", *SMALL, "--iterations", 6, "--margin", "none", "--out", folder) == 0
    assert run("copy", "--resume", folder, "--iterations", 9, "--T", 5, "--margin", "none") == 0
    assert len(records(folder)) == 9
    resume = ["--resume", folder]
    assert_refused(capsys, "--hidden 32: the run to resume has --hidden 16", copy.main, *resume, "--hidden", 32)
    assert_refused(capsys, "resumed in its own folder", copy.main, *resume, "--out", tmp_path / "other")
    assert len(records(folder)) == 9
