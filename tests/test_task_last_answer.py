"""The tasks temporal_order and random_permutation: they learn, use the requested initialisation, resume to the same
bits, and reject bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import gram_error
from runs import assert_resumes, build, records, trained

from orthokern.tasks import epochs

SMALL = (
    "--T 10 --hidden 16 --iterations 30 --eval-every 10 --eval-sequences 60 --batch 20 --threads 1 --no-plots".split()
)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("temporal_order", "--T 12 --hidden 32 --lr 3e-3"),
        ("temporal_order", "--T 12 --hidden 32 --lr 3e-3 --bits 3"),
        ("random_permutation", "--T 10 --hidden 32 --preset oinit --lr 0.1"),
    ],
)
def test_solved(task: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = "--iterations 3000 --eval-sequences 500 --threads 1 --no-plots --goal 99".split()
    result = trained(tmp_path / "run", task, *options.split(), *common)
    assert result["reached"] and result["last"]["accuracy"] >= 0.99
    assert "solved: 9" in capsys.readouterr().out or result["last"]["accuracy"] == 1
    last = records(tmp_path / "run")[-1]
    assert last["iteration"] % 100 == 0 and last["iteration"] < 3000  # found by an evaluation, not at the end


def test_an_evaluation_counts_every_sequence_once() -> None:
    """Whatever the rest that the last batch of an evaluation leaves: on the same draws, by hand."""
    task = build("temporal_order", [*SMALL, "--eval-sequences", "610"])
    with torch.no_grad():
        result = task.evaluate(7)
        generator = torch.Generator().manual_seed(epochs.stream_seed(0, "held-out 7"))
        parts = [task.drawn.batch(250, generator) for _ in range(3)]
        inputs = torch.cat([x for x, _ in parts], 1)[:, :610]
        targets = torch.cat([y for _, y in parts])[:610]
        loss, numbers = task.model(inputs, targets)
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["accuracy"] == pytest.approx(numbers["accuracy"].item())
    assert not task.goal_reached({"loss": 0.0, "accuracy": 0.9999}) and task.goal_reached(
        {"loss": 0.0, "accuracy": 1.0}
    )


def test_short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """End where the goal is out of reach, and not before: they never change whether it is reached."""
    for wrong, goal, seen in ((0, 100, 1000), (1, 100, 250), (1, 99.9, 1000), (2, 99.9, 250), (10, 99, 1000)):
        options = [*SMALL, "--eval-sequences", "1000", "--goal", str(goal), "--short-evaluations"]
        task = build("random_permutation", options)
        sizes: list[int] = []

        def answer(inputs: torch.Tensor, targets: torch.Tensor, sizes: list[int] = sizes, wrong: int = wrong) -> Any:
            sizes.append(len(targets))
            right = len(targets) - (wrong if len(sizes) == 1 else 0)
            return torch.tensor(1.0), {"accuracy": torch.tensor(right / len(targets), dtype=torch.float64)}

        monkeypatch.setattr(task, "model", answer)
        result = task.evaluate(3)
        assert sum(sizes) == seen, (wrong, goal)
        assert result["accuracy"] == pytest.approx(1 - wrong / seen) and result["loss"] == 1.0
        assert task.goal_reached(result) == (wrong <= 1000 * (1 - goal / 100) + 1e-9)


@pytest.mark.parametrize("task", ["temporal_order", "random_permutation"])
def test_presets_start_as_the_paper_says(task: str) -> None:
    for preset in ("srnn", "open", "oinit"):
        experiment = build(task, ["--T", "20", "--preset", preset])
        weights = [experiment.rnn.weight_ih_l0, experiment.rnn.weight_hh_l0, experiment.readout.weight]
        for w in weights:
            assert (gram_error(w) < 1e-6) == (preset == "oinit")
            if preset != "oinit":
                limit = (6 / sum(w.shape)) ** 0.5
                assert 0.97 * limit < float(w.detach().abs().max()) <= limit
        assert not any(p.any() for name, p in experiment.model.named_parameters() if "bias" in name)
        batch = experiment.next_batch()
        added = experiment.loss(batch)[0] - experiment.model(*batch)[0]
        expected = float(gram_error(weights[1])) ** 0.5 if preset == "open" else 0.0
        assert added.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_resume_is_exact(tmp_path: Path) -> None:
    """The two tasks differ in their data alone."""
    assert_resumes("temporal_order", SMALL, tmp_path, 10, 30)
