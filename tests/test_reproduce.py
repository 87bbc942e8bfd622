"""`python -m orthokern.reproduce`: trains what is missing, goes on where it was, and tells published from ours."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orthokern.reproduce import __main__ as command
from orthokern.reproduce import kanai, vorontsov
from orthokern.reproduce.spec import Experiment, Measure, Run
from orthokern.tasks import adding, char_lm, copy, music, pixel_mnist, word_lm
from orthokern.training import read_metrics

MODULES = {
    "copy": copy,
    "adding": adding,
    "pixel_mnist": pixel_mnist,
    "char_lm": char_lm,
    "music": music,
    "word_lm": word_lm,
}
ACCURACY = Measure("accuracy (%)", "best_accuracy", scale=100.0)
LOSS = Measure("loss", "best_loss", digits=3, higher_is_better=False)


def toy(margin: str) -> Run:
    return Run(
        name=f"toy-{margin}",
        task="copy",
        options=("--T", "4", "--hidden", "8", "--margin", margin, "--iterations", "6", "--goal", "100"),
        quick=("--iterations", "3"),
        labels={"margin": margin},
        published={ACCURACY.title: 50.0},
    )


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Experiment]:
    experiment = Experiment(
        "toy", "A toy", "Nobody 2000, Table 9", (toy("0"), toy("0.1")), (ACCURACY, LOSS),
        figure="curves", quantity="loss", legend=("margin",), epochs=False,
    )  # fmt: skip
    monkeypatch.setitem(command.EXPERIMENTS, "toy", experiment)
    yield experiment


def reproduce(*options: object) -> int:
    return command.main([str(option) for option in options])


def test_a_table(toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("toy", "--out", tmp_path, "--jobs", 2, "--threads", 1) == 0
    folder = tmp_path / "full"
    table = (folder / "toy.md").read_text()
    assert "Nobody 2000, Table 9" in table and table in capsys.readouterr().out
    summary = json.loads((folder / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["done", "done"]
    for row in summary["rows"]:
        records = read_metrics(folder / row["name"] / "metrics.jsonl")
        assert len(records) == row["iterations"] == 6
        ours = 100 * max(r["held_out_accuracy"] for r in records if "held_out_accuracy" in r)
        assert row["ours"][ACCURACY.title] == pytest.approx(ours)
        line = next(line for line in table.splitlines() if line.startswith(f"| {row['labels']['margin']} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:4] == ["50.00", f"{ours:.2f}", f"{ours - 50:+.2f}"]
        assert cells[4] == "–"  # the paper says nothing of the loss
    assert (folder / "toy.png").read_bytes().startswith(b"\x89PNG")

    # again: nothing is trained
    before = (folder / "toy-0" / "metrics.jsonl").stat().st_mtime_ns
    assert reproduce("toy", "--out", tmp_path) == 0
    assert "2 of 2 runs are done already" in capsys.readouterr().out
    assert (folder / "toy-0" / "metrics.jsonl").stat().st_mtime_ns == before

    # longer: every run goes on
    assert reproduce("toy", "--out", tmp_path, "--iterations", 8, "--only", "toy-0.1", "--threads", 1) == 0
    assert len(read_metrics(folder / "toy-0.1" / "metrics.jsonl")) == 8
    assert len(read_metrics(folder / "toy-0" / "metrics.jsonl")) == 6


def test_quick_and_partial(toys: Experiment, tmp_path: Path) -> None:
    """The quick version has folders of its own; a table of what is there can be drawn at any time."""
    assert reproduce("toy", "--quick", "--only", "toy-0.1", "--out", tmp_path, "--threads", 1) == 0
    summary = json.loads((tmp_path / "quick" / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["not run", "done"] and summary["quick"]
    assert "Scaled down" in (tmp_path / "quick" / "toy.md").read_text()
    assert reproduce("toy", "--report", "--out", tmp_path) == 0
    assert not (tmp_path / "full" / "toy.png").exists()


def test_bad_input(toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["tabel1"], "did you mean 'table1'"),
        (["toy", "--only", "none"], "no run of toy has that in its name; they are toy-0, toy-0.1"),
        (["toy", "--epochs", "3"], "the runs of toy are counted in iterations; give --iterations"),
        (["table1", "--data", tmp_path / "no"], "no such folder"),
        (["table5", "--jobs", "2"], "the runs of table5 are timed, so one at a time"),
        (["toy", "--jobs", "0"], "'0' is not an integer of at least 1"),
    ):
        assert reproduce(*options, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    # what a task refuses is one line, too
    (tmp_path / "mnist").mkdir()
    assert reproduce("table1", "--data", tmp_path, "--only", "lstm", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train-images" in error


def test_the_steps_of_learned_orthogonality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("oinit-steps", "--quick", "--out", tmp_path) == 0
    table = (tmp_path / "quick" / "oinit-steps.md").read_text()
    assert table in capsys.readouterr().out
    rows = json.loads((tmp_path / "quick" / "oinit-steps.json").read_text())["rows"]
    for row in rows:
        if row["published_evaluations"] is not None:
            assert row["success_percent"] == 100 and row["rule"] == "plain"
            assert abs(row["mean_evaluations"] - row["published_evaluations"]) < 4 * row["standard_error"]
        if row["rule"] == "guarded":
            assert row["success_percent"] == 100
    plain = {(row["law"], row["side"]): row["success_percent"] for row in rows if row["rule"] == "plain"}
    assert plain["N(0, 0.1)", 200] == plain["N(0, 0.1)", 400] == 0 and plain["Glorot-uniform", 400] == 100
    assert reproduce("oinit-steps", "--epochs", 3, "--out", tmp_path) == 2
    assert capsys.readouterr().err == "error: --epochs: oinit-steps does not take it\n"


def test_the_cost_of_the_constraint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 3 of Kanai et al.: measured in one run, the two ways to project agree, and the numbers follow."""
    (tmp_path / "ptb").mkdir()
    draw = random.Random(0)
    for part, count in (("train", 400), ("valid", 10), ("test", 10)):
        lines = [" ".join(draw.choices("abcdefgh", k=9)) for _ in range(count)]
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in lines))
    assert reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 12, "--out", tmp_path) == 0
    assert (tmp_path / "quick" / "gru-table3.md").read_text() in capsys.readouterr().out
    found = json.loads((tmp_path / "quick" / "gru-table3.json").read_text())
    assert found["counts"]["steps"] == 12 and found["largest_difference"] < 1e-5
    rows = {row["method"]: row for row in found["rows"]}
    for row in rows.values():
        assert row["ms_per_iteration"] > 0
        assert row["percent_of_iteration"] == pytest.approx(100 * row["ms_per_iteration"] / found["iteration_ms"])
    assert rows["naive SVD"]["published_seconds"] == 5.02e4
    assert reproduce("gru-table3", "--epochs", 3, "--out", tmp_path) == 2
    assert capsys.readouterr().err == "error: --epochs: gru-table3 does not take it\n"
    assert reproduce("gru-table3", "--data", tmp_path / "no", "--out", tmp_path) == 2
    assert "no such folder" in capsys.readouterr().err


ALL = (*vorontsov.EXPERIMENTS, *kanai.EXPERIMENTS)


@pytest.mark.parametrize("experiment", ALL, ids=lambda e: e.name)
def test_command_lines_are_accepted(experiment: Experiment) -> None:
    """Every run's options parse, go together, and name the settings that legend and panel tell."""
    assert len({run.name for run in experiment.runs}) == len(experiment.runs)
    titles = {measure.title for measure in experiment.measures}
    for run in experiment.runs:
        module = MODULES[run.task]
        for options in (run.options, (*run.options, *run.quick)):
            given: dict[str, Any] = module._parser().parse(list(options))
            preset = module.PRESETS.get(given.get("preset", ""), {})
            settings = {**module.DEFAULTS, **preset, **given, **({"data": "x"} if experiment.data else {})}
            complete = getattr(module, "complete", adding.recurrent.complete)
            assert complete(settings)
            for name in (*(experiment.legend or ()), *([experiment.panel] if experiment.panel else [])):
                assert name in settings
        assert set(run.published) <= titles


def test_runs_that_two_experiments_share_are_the_same() -> None:
    seen: dict[str, Run] = {}
    for experiment in ALL:
        for run in experiment.runs:
            first = seen.setdefault(run.name, run)
            assert (run.task, run.options, run.quick) == (first.task, first.options, first.quick)
