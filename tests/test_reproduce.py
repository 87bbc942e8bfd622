"""`python -m orthokern.reproduce`: it trains missing runs, resumes interrupted ones, and reports published and our
numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from matplotlib.image import imread
from runs import command as command_of
from runs import run as run_task
from runs import settings_of

from orthokern.diagnostics import plots
from orthokern.errors import InputError
from orthokern.reproduce import __main__ as command
from orthokern.reproduce import constraint, kanai, nnrnn, oinit, runner, vorontsov
from orthokern.reproduce.report import _labels, _name, markdown
from orthokern.reproduce.runner import is_done
from orthokern.reproduce.search import Search, report_searches
from orthokern.reproduce.spec import Experiment, Measure, Run, is_planned, over_seeds, planned
from orthokern.tasks import word_lm
from orthokern.training import read_metrics

ROOT = Path(__file__).resolve().parent.parent
ALL = (*vorontsov.EXPERIMENTS, *oinit.EXPERIMENTS, *nnrnn.EXPERIMENTS, *kanai.EXPERIMENTS, *constraint.EXPERIMENTS)
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
        "toy",
        "A toy",
        "Nobody 2000, Table 9",
        (toy("0"), toy("0.1")),
        (ACCURACY, LOSS),
        figure="curves",
        quantity="loss",
        legend=("margin",),
        epochs=False,
    )
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
        assert float(cells[4]) == pytest.approx(row["ours"][LOSS.title], abs=1e-3)  # the paper says nothing of it
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

    # stopped on the way to a new end: what is there was measured at the old one
    result = folder / "toy-0.1" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "iteration": 6}))
    assert reproduce("toy", "--report", "--out", tmp_path) == 0
    summary = json.loads((folder / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["done", "unfinished"]


def test_a_run_of_another_length_goes_on_to_the_planned_one(
    toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = tmp_path / "full", ("toy", "--out", tmp_path, "--only", "toy-0.1", "--threads", 1)
    assert reproduce(*options, "--iterations", 2) == 0
    assert len(read_metrics(folder / "toy-0.1" / "metrics.jsonl")) == 2
    short = (folder / "toy.json").read_text()
    assert reproduce(*options) == 0
    assert len(read_metrics(folder / "toy-0.1" / "metrics.jsonl")) == 6
    shutil.rmtree(folder / "toy-0.1")
    (folder / "toy.json").write_text(short)
    capsys.readouterr()
    assert reproduce(*options) == 0  # not again from the start, but told
    assert "toy.json, 1 of them shorter than planned; to train" in capsys.readouterr().out


def test_quick_and_partial(toys: Experiment, tmp_path: Path) -> None:
    """The quick version has folders of its own; a table of what is there can be drawn at any time."""
    assert reproduce("toy", "--quick", "--only", "toy-0.1", "--out", tmp_path, "--threads", 1) == 0
    summary = json.loads((tmp_path / "quick" / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["not run", "done"] and summary["quick"]
    assert "Scaled down" in (tmp_path / "quick" / "toy.md").read_text()
    assert reproduce("toy", "--report", "--out", tmp_path) == 0
    assert not (tmp_path / "full" / "toy.png").exists()
    with open(tmp_path / "quick" / "toy-0.1" / "metrics.jsonl", "a") as metrics:
        metrics.write("noise\n")
    assert reproduce("toy", "--quick", "--report", "--out", tmp_path) == 0  # not as if nothing had been there
    summary = json.loads((tmp_path / "quick" / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["not run", "damaged"]
    (tmp_path / "quick" / "toy-0.1" / "result.json").write_text("[]")
    assert not is_done(tmp_path / "quick" / "toy-0.1")


@pytest.mark.parametrize(
    "name", ["figure1", "figure1-defaults", "figure5", "table5", "nnrnn-copy", "nnrnn-adding", "adding-defaults"]
)
def test_a_quick_table_tells_what_it_runs(name: str, tmp_path: Path) -> None:
    """The lengths and widths of the quick runs, not of those that they stand for; no option twice in a command."""
    for scale in (["--quick"], []):
        assert reproduce(name, *scale, "--report", "--out", tmp_path) == 0
        title, *lines = (tmp_path / ("quick" if scale else "full") / f"{name}.md").read_text().splitlines()
        experiment = command.EXPERIMENTS[name]
        runs = {run.group or run.name: run for run in reversed(experiment.runs)}  # the first of each group
        wanted = [planned(run, bool(scale)) for run in reversed(runs.values())]
        told = re.search(r"T = (\d+)", title)
        assert told is None or {int(told[1])} == {settings["T"] for settings in wanted}
        table_of_commands = lines[lines.index("How each row was trained:") :]
        numbers = lines[: -len(table_of_commands)]
        table = [line.strip("| ").split(" | ") for line in numbers if line.startswith("|")]
        for heading, key in (("T", "T"), ("units", "hidden"), ("hidden units", "hidden")):
            if heading in table[0]:
                column = table[0].index(heading)
                assert [row[column] for row in table[2:]] == [str(settings[key]) for settings in wanted]
        commands = [line.split("`")[1].split() for line in table_of_commands if "`" in line]
        assert len(commands) == len(runs)
        for words, settings in zip(commands, wanted, strict=True):
            options = [word for word in words if word.startswith("--")]
            assert len(options) == len(set(options)), words
            given = command_of(experiment.runs[0].task).parser().parse(words[3:])
            assert given.items() <= settings.items()


def test_a_command_tells_how_long_its_own_run_was(
    toys: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what this call was given: 3 iterations, then 5 more of one run; the other one is still to come."""
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=RunHere, STDOUT=subprocess.STDOUT))

    def iterations(*options: object) -> list[str]:
        assert reproduce("toy", "--out", tmp_path, *options) == 0
        return re.findall(r"--iterations (\d+)", (tmp_path / "full" / "toy.md").read_text())

    assert iterations("--iterations", 3, "--only", "toy-0.1") == ["3", "3"]
    assert iterations("--report") == ["6", "3"]
    assert iterations("--iterations", 8, "--only", "toy-0.1") == ["8", "8"]
    assert iterations("--report") == ["6", "8"]


def test_seeds_share_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = over_seeds(toy("0"), (3, 4, 5))
    experiment = Experiment("seeds", "Seeds", "Nobody 2000", runs, (ACCURACY, LOSS), epochs=False)
    monkeypatch.setitem(command.EXPERIMENTS, "seeds", experiment)
    assert reproduce("seeds", "--out", tmp_path, "--threads", 1) == 0
    summary = json.loads((tmp_path / "full" / "seeds.json").read_text())
    assert [row["settings"]["seed"] for row in summary["rows"]] == [3, 4, 5]
    losses = sorted(row["ours"]["loss"] for row in summary["rows"])
    assert losses[0] < losses[2]
    page = (tmp_path / "full" / "seeds.md").read_text()
    spread = f"{losses[1]:.3f} ({losses[0]:.3f} to {losses[2]:.3f})"
    row = next(line for line in page.splitlines() if line.startswith("| 0 |"))
    assert spread in row and "3 of 3 done" in row and "| 50.00 |" in row
    assert "--seed 3`, and so to `--seed 5`" in page


def test_a_rate_is_the_mean_over_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rate = dataclasses.replace(LOSS, title="rate", rate=True)
    runs = tuple(dataclasses.replace(run, published={"rate": 1.0}) for run in over_seeds(toy("0"), (3, 4, 5)))
    experiment = Experiment("seeds", "Seeds", "Nobody 2000", runs, (rate, LOSS), epochs=False)
    monkeypatch.setitem(command.EXPERIMENTS, "seeds", experiment)
    assert reproduce("seeds", "--out", tmp_path, "--threads", 1) == 0
    losses = [row["ours"]["rate"] for row in json.loads((tmp_path / "full" / "seeds.json").read_text())["rows"]]
    mean = sum(losses) / 3
    page = (tmp_path / "full" / "seeds.md").read_text()
    assert f"| 0 | 1.000 | {mean:.3f} | {mean - 1.0:+.3f} | {sorted(losses)[1]:.3f} (" in page
    assert "the range in parentheses; of rate the mean." in page
    summary = json.loads((tmp_path / "full" / "seeds.json").read_text())
    summary["rows"][0]["ours"]["rate"] = 3e12  # of a run that diverged
    assert "| 0 | 1.000 | 1.0e+12 | +1.0e+12 | " in markdown(experiment, summary)


def test_a_budget(toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("toy", "--out", tmp_path, "--threads", 1, "--budget", "0.01s") == 4
    assert "runs are not done; the same command goes on" in capsys.readouterr().out
    states = [row["state"] for row in json.loads((tmp_path / "full" / "toy.json").read_text())["rows"]]
    assert "not run" in states  # the first run may have come to its end
    assert reproduce("toy", "--out", tmp_path, "--threads", 1, "--budget", "1h") == 0
    states = [row["state"] for row in json.loads((tmp_path / "full" / "toy.json").read_text())["rows"]]
    assert states == ["done", "done"]
    assert reproduce("toy", "--budget", "2 hours") == 2
    assert "'2 hours' is not a length of time such as 90s, 30m or 2h" in capsys.readouterr().err


def test_the_joint_page_of_the_constraint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number stands in the row of its options and in the column of its task, also where two rows share a run."""
    assert reproduce("constraint", "--out", tmp_path) == 2
    assert "first train constraint-copy, constraint-adding" in capsys.readouterr().err
    for experiment in constraint.EXPERIMENTS:
        assert reproduce(experiment.name, "--report", "--out", tmp_path) == 0
    path = tmp_path / "full" / "constraint-adding.json"
    summary = json.loads(path.read_text())
    for row in summary["rows"]:
        number, seed = (int(text) for text in re.findall(r"\d+", row["name"]))
        row["ours"], row["state"] = {"best held-out error": 0.01 * number + 0.001 * seed}, "done"
        if number in (1, 2):
            row |= {"state": "solved" if number + seed > 1 else "done", "seconds": 31.4 + seed, "machine": "one core"}
        elif number == 3 and seed == 1:
            row |= {"ours": {}, "state": "not run"}
    path.write_text(json.dumps(summary))
    assert reproduce("constraint", "--out", tmp_path) == 0
    page = (tmp_path / "full" / "constraint.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    assert lines[0] == ["part", "value", *(subject.title for subject in constraint.SUBJECTS.values())]
    cells = {(line[0], line[1]): line[2:] for line in lines[2:]}
    assert len(cells) == 21
    assert cells[constraint.MARGIN, "0.1"] == ["not run", "solved in 32 (31 to 32) s", "not run", "not run"]
    assert cells[constraint.MARGIN, "0.01"][1] == "0.0105 (0.0100 to 0.0110), 1 of 2 solved"
    assert cells[constraint.MARGIN, "1"][1] == "0.0300, 1 of 2 seeds run"
    assert cells[constraint.FUNCTION, "relu"] == cells[constraint.MARGIN, "0.1"]  # relu is the task's own
    assert cells[constraint.HELD, "none"] == ["not run", "0.0905 (0.0900 to 0.0910)", "not run", "not run"]
    assert page.rstrip().splitlines()[-1].startswith("one core; ")
    subject = constraint.SUBJECTS["copy"]  # a column of fewer seeds than planned says so once
    assert constraint._heading(subject, 1) == f"{subject.title}, 1 of 2 seeds"
    assert (tmp_path / "full" / "constraint.png").stat().st_size > 10_000


PAGES = ROOT / "docs" / "results"


def test_a_setting_that_an_older_version_did_not_have_was_the_first_default() -> None:
    plain = Run("plain", "pixel_mnist", ("--lr", "1e-3"))
    averaged = Run("averaged", "pixel_mnist", ("--lr", "1e-3", "--average", "0.9"))
    old = {name: value for name, value in planned(plain, False).items() if name != "average"}
    assert is_planned(old, plain, False) and not is_planned(old, averaged, False)
    assert is_planned(planned(averaged, False), averaged, False)
    assert not is_planned({**old, "lr": 1e-4}, plain, False)
    # an option that came later, with a default that changes what a run does
    published = Run("published", "pixel_mnist", ("--max-angle", "none"))
    older = {name: value for name, value in planned(published, False).items() if name != "max_angle"}
    slow = Run("slow", "pixel_mnist", ())
    assert is_planned(older, published, False) and not is_planned(older, slow, False)
    assert not is_planned(planned(slow, False), published, False)  # none is a value like others


def test_a_setting_without_effect_is_not_compared() -> None:
    run = Run("exp", "pixel_mnist", ("--model", "exprnn"))
    settings = planned(run, False)
    assert is_planned({**settings, "geodesic_lr": 1.0}, run, False)
    assert not is_planned({**settings, "lr": 1.0}, run, False)


@pytest.mark.parametrize(
    "experiment", [each for each in ALL if (PAGES / f"{each.name}.json").exists()], ids=lambda each: each.name
)
def test_a_page_follows_from_its_numbers(experiment: Experiment) -> None:
    summary = json.loads((PAGES / f"{experiment.name}.json").read_text())
    assert markdown(experiment, summary) == (PAGES / f"{experiment.name}.md").read_text()


def test_rows_without_run_folders(toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose folder is on another machine keeps its row and its curve."""
    assert reproduce("toy", "--out", tmp_path, "--only", "toy-0.1", "--threads", 1) == 0
    folder = tmp_path / "full"
    before = json.loads((folder / "toy.json").read_text())["rows"]
    losses = [r["loss"] for r in read_metrics(folder / "toy-0.1" / "metrics.jsonl")]
    assert [value for _, value in before[1]["curve"]] == pytest.approx(losses, rel=1e-5)
    shutil.rmtree(folder / "toy-0.1")
    (folder / "toy.png").unlink()
    assert reproduce("toy", "--out", tmp_path, "--report") == 0
    assert json.loads((folder / "toy.json").read_text())["rows"] == before
    assert (folder / "toy.png").exists()
    capsys.readouterr()
    assert reproduce("toy", "--out", tmp_path, "--only", "toy-0", "--threads", 1) == 0  # both have it in their names
    assert "1 of 2 runs are finished according to " in capsys.readouterr().out
    assert not (folder / "toy-0.1").exists()
    after = json.loads((folder / "toy.json").read_text())["rows"]
    assert [row["state"] for row in after] == ["done", "done"] and after[1] == before[1]
    longer = 2 * before[1]["iterations"]
    assert reproduce("toy", "--out", tmp_path, "--only", "toy-0.1", "--threads", 1, "--iterations", longer) == 0
    assert json.loads((folder / "toy.json").read_text())["rows"][1]["iterations"] == longer
    (folder / "toy.json").write_text('{"experiment": "toy", "quick": false, "rows": [1]}')
    capsys.readouterr()
    assert reproduce("toy", "--out", tmp_path, "--report") == 2
    assert "toy.json is not a report of this program" in capsys.readouterr().err


def test_a_row_shows_the_command_of_its_numbers(
    toys: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not numbers of a run that was trained before the options of the experiment were changed."""
    assert reproduce("toy", "--out", tmp_path, "--threads", 1) == 0
    folder = tmp_path / "full"
    first, second = toys.runs
    changed = dataclasses.replace(
        toys, runs=(first, dataclasses.replace(second, options=(*second.options, "--lr", "0.5")))
    )
    monkeypatch.setitem(command.EXPERIMENTS, "toy", changed)

    def states() -> list[str]:
        assert reproduce("toy", "--out", tmp_path, "--report") == 0
        rows = json.loads((folder / "toy.json").read_text())["rows"]
        assert "--lr 0.5" in rows[1]["command"]
        return [row["state"] for row in rows]

    before = (folder / "toy.json").read_text()
    assert states() == ["done", "other settings"]
    shutil.rmtree(folder / "toy-0.1")
    (folder / "toy.json").write_text(before)
    assert states() == ["done", "not run"]


@pytest.mark.parametrize(
    "experiment", [each for each in ALL if (PAGES / f"{each.name}.json").exists()], ids=lambda each: each.name
)
def test_a_page_has_the_settings_of_its_commands(experiment: Experiment) -> None:
    """Defaults included: a default that changes asks for the runs again, or for an option that keeps the old one."""
    runs = {run.name: run for run in experiment.runs}
    summary = json.loads((PAGES / f"{experiment.name}.json").read_text())
    for row in summary["rows"]:
        assert is_planned(row.get("settings", {}), runs[row["name"]], summary["quick"]), row["name"]


@pytest.mark.parametrize("experiment", ALL, ids=lambda each: each.name)
def test_a_page_is_made_from_its_json_file(experiment: Experiment) -> None:
    page = PAGES / f"{experiment.name}.md"
    if page.exists():
        assert page.read_text() == markdown(experiment, json.loads(page.with_suffix(".json").read_text()))


@pytest.mark.parametrize(
    ("figure", "options"),
    [
        ("gradients", ("--last-step-gradient", "--diagnose-every", "2")),
        ("spectrum", ("--diagnose-every", "2")),
        ("dynamics", ("--model", "rnn", "--diagnose-every", "2")),
    ],
)
def test_a_figure_without_run_folders(
    figure: str, options: tuple[str, ...], toys: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The JSON file holds what each kind of figure shows, and a page that is written again keeps its date."""
    run = dataclasses.replace(toys.runs[0], options=(*"--T 4 --hidden 8 --iterations 6".split(), *options))
    monkeypatch.setitem(command.EXPERIMENTS, "toy", dataclasses.replace(toys, figure=figure, runs=(run,)))
    assert reproduce("toy", "--out", tmp_path, "--threads", 1) == 0
    folder = tmp_path / "full"
    before = imread(folder / "toy.png")
    shutil.rmtree(folder / run.name)
    (folder / "toy.png").unlink()
    monkeypatch.setattr("time.strftime", lambda form: "2000-01-01")
    pages = [(folder / name).read_text() for name in ("toy.md", "toy.json")]
    assert reproduce("toy", "--out", tmp_path, "--report") == 0
    difference = abs(imread(folder / "toy.png") - before)  # between 0 and 1; the JSON file has rounded numbers
    assert difference.mean() < 1e-4 < before.std()
    assert [(folder / name).read_text() for name in ("toy.md", "toy.json")] == pages


@pytest.mark.parametrize("experiment", [each for each in ALL if each.named_by], ids=lambda each: each.name)
def test_a_figure_names_its_runs_as_the_table_does(experiment: Experiment) -> None:
    """In a panel, runs have the same name if they are of the same row."""
    rows: dict[tuple[object, str], set[str]] = {}
    for run in experiment.runs:
        settings = planned(run, False)
        labels = _labels(run, settings)
        name = _name(experiment, labels)
        panel = None if experiment.panel is None else settings[experiment.panel]
        rows.setdefault((panel, name), set()).add(run.group or run.name)
        assert name == ", ".join(labels[heading] for heading in experiment.named_by)
    assert all(len(found) == 1 for found in rows.values())


def test_a_figure_shows_the_names_of_its_rows(
    toys: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Any] = {}
    draw = plots.compare_curves
    monkeypatch.setattr(
        plots, "compare_curves", lambda *runs, **options: drawn.setdefault("it", draw(*runs, **options))
    )
    monkeypatch.setitem(command.EXPERIMENTS, "toy", dataclasses.replace(toys, legend=None, named_by=("margin",)))
    assert reproduce("toy", "--out", tmp_path, "--threads", 1) == 0
    (legend,) = drawn["it"].legends
    assert legend.get_title().get_text() == "margin"
    assert {text.get_text() for text in legend.get_texts()} >= {"0", "0.1"}


def test_searches_without_run_folders(tmp_path: Path) -> None:
    """As test_rows_without_run_folders: a report of a search keeps what an earlier one found."""
    network = Search("toy-net", "toy", "net", "rate 1", "temporal_order", ("--lr", "1"), published=20)
    unknown = dataclasses.replace(network, name="toy-other", network="other")
    plan = runner.Plan(tmp_path / "full", None, False, 1, 1)
    rows = [
        {"name": "toy-net", "iterations": {"10": 100, "20": 300}, "failed": 30, "outcome": "not in 500 iterations",
         "complete": True, "seconds": 7200.0, "machine": "a CPU", "length": None, "state": "done"},
    ]  # fmt: skip
    plan.folder.mkdir()
    summary = plan.folder / "toy.json"
    summary.write_text(json.dumps({"experiment": "toy", "quick": False, "rows": rows}))
    for _ in range(2):  # the second time from what the first has written
        report_searches("toy", "A search", "a source", "A note.", (network, unknown), plan)
        found = {row["name"]: row for row in json.loads(summary.read_text())["rows"]}
        assert rows[0].items() <= found["toy-net"].items() and found["toy-net"]["longest"] == 20
        assert found["toy-other"]["state"] == "not run" and found["toy-other"]["longest"] is None
    page = (plan.folder / "toy.md").read_text()
    assert "| toy | net | rate 1 | 20 | 20 | +0 | 300 | 30: not in 500 iterations | 2.00 | done |" in page
    del rows[0]["seconds"]
    summary.write_text(json.dumps({"experiment": "toy", "quick": False, "rows": rows}))
    with pytest.raises(InputError, match="row 'toy-net' of an earlier report is damaged"):
        report_searches("toy", "A search", "a source", "A note.", (network,), plan)


def test_bad_input(toys: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["tabel1"], "did you mean 'table1'"),
        (["toy", "--only", "none"], "no run of toy has this text in its name; the runs are toy-0, toy-0.1"),
        (["toy", "--epochs", "3"], "the length of the runs of toy is in iterations; give --iterations"),
        (["table1", "--data", tmp_path / "no"], "no such folder"),
        (["table5", "--jobs", "2"], "the runs of table5 are timed and run one at a time"),
        (["toy", "--jobs", "0"], "'0' is not an integer of at least 1"),
        (["toy", "--report", "--budget", "2h"], "--budget: for runs without --report; here --report is given"),
        (["oinit-table1", "--report", "--only", "srnn"], "--only: for runs without --report"),
    ):
        assert reproduce(*options, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    for name in ("table1", "gru-table3"):  # where the message sends its reader there is something to read
        assert reproduce(name, "--data", tmp_path / "no", "--out", tmp_path / "out") == 2
        told = re.search(r"see (\S+), (\w+)\)", capsys.readouterr().err)
        assert told is not None and f"\n## {told[2]}\n" in (ROOT / told[1]).read_text()
    # what a task refuses is one line, too
    (tmp_path / "mnist").mkdir()
    assert reproduce("table1", "--data", tmp_path, "--only", "lstm", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train-images" in error


def test_the_steps_of_learned_orthogonality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oinit, "GUARDED", 100)
    # on one thread: products of matrices this small lose more by waiting for threads than they gain
    assert reproduce("oinit-steps", "--quick", "--threads", 1, "--out", tmp_path) == 0
    assert torch.get_num_threads() == 1
    table = (tmp_path / "quick" / "oinit-steps.md").read_text()
    assert table in capsys.readouterr().out
    rows = json.loads((tmp_path / "quick" / "oinit-steps.json").read_text())["rows"]
    for row in rows:
        if row["published_evaluations"] is not None:
            assert row["success_percent"] == 100 and row["rule"] == "plain"
            assert abs(row["mean_evaluations"] - row["published_evaluations"]) < 4 * row["standard_error"]
        if row["rule"] == "guarded":
            assert row["success_percent"] == 100
    counts = {(row["law"], row["side"], row["rule"]): row["matrices"] for row in rows}
    assert counts["N(0, 0.1)", 100, "plain"] == 200 and counts["N(0, 0.1)", 100, "guarded"] == 100
    assert "| N(0, 0.1) | 100 | 100 | guarded |" in table and counts["N(0, 0.1)", 150, "guarded"] == 20
    plain = {(row["law"], row["side"]): row["success_percent"] for row in rows if row["rule"] == "plain"}
    assert plain["N(0, 0.1)", 200] == plain["N(0, 0.1)", 400] == 0 and plain["Glorot-uniform", 400] == 100
    assert reproduce("oinit-steps", "--epochs", 3, "--out", tmp_path) == 2
    assert capsys.readouterr().err == "error: --epochs: oinit-steps does not accept it\n"


def test_the_cost_of_the_constraint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table 3 of Kanai et al.: measured in one run, the two ways to project agree, and the numbers follow."""
    (tmp_path / "ptb").mkdir()
    draw = random.Random(0)
    for part, count in (("train", 400), ("valid", 10), ("test", 10)):
        lines = [" ".join(draw.choices("abcdefgh", k=9)) for _ in range(count)]
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in lines))
    assert reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 12, "--out", tmp_path) == 0
    assert (tmp_path / "quick" / "gru-table3.md").read_text() in capsys.readouterr().out
    found = json.loads((tmp_path / "quick" / "gru-table3.json").read_text())
    # every step has work, and what a float32 SVD rounds is all that the two differ in
    assert found["counts"]["steps"] == 12 and found["counts"]["projections"] > 6
    assert found["largest_difference"] < 3e-6
    rows = {row["method"]: row for row in found["rows"]}
    for row in rows.values():
        assert row["ms_per_iteration"] > 0
        assert row["percent_of_iteration"] == pytest.approx(100 * row["ms_per_iteration"] / found["iteration_ms"])
    assert rows["naive SVD"]["published_seconds"] == 5.02e4
    # the run of Table 1, if there is one, is where the timed iterations begin
    assert reproduce("gru-table1", "--quick", "--data", tmp_path, "--out", tmp_path, "--only", "delta-0.2") == 0
    assert reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 1, "--out", tmp_path) == 2
    assert "of the run words-delta-0.2: there was no projection to time" in capsys.readouterr().err
    monkeypatch.setattr(word_lm, "DEFAULTS", {**word_lm.DEFAULTS, "layers": 2})
    capsys.readouterr()
    assert reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 1, "--out", tmp_path) == 2
    assert "checkpoint.pt is of another model than this command times: model" in capsys.readouterr().err
    monkeypatch.undo()
    # where nothing grows nothing is measured, and no table says so
    monkeypatch.setattr(kanai, "_growth", lambda w: -0.1 * w)
    assert reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 2, "--out", tmp_path / "idle") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: gru-table3: no singular value rose above 1.8 in 2 iterations")
    assert error.count("\n") == 1 and not list((tmp_path / "idle").rglob("*.md"))
    assert reproduce("gru-table3", "--epochs", 3, "--out", tmp_path) == 2
    assert capsys.readouterr().err == "error: --epochs: gru-table3 does not accept it\n"
    assert reproduce("gru-table3", "--data", tmp_path / "no", "--out", tmp_path) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("experiment", ALL, ids=lambda e: e.name)
def test_command_lines_are_accepted(experiment: Experiment) -> None:
    """Every run's options parse, go together, and name the settings that legend and panel tell; no two rows of a panel
    of a figure have the same legend."""
    assert len({run.name for run in experiment.runs}) == len(experiment.runs)
    titles = {measure.title for measure in experiment.measures}
    names = (*(experiment.legend or ()), *([experiment.panel] if experiment.panel else []))
    for extra in (False, True):
        told = set()
        for run in experiment.runs:
            options = (*run.options, *(run.quick if extra else ()))
            settings = settings_of(run.task, options, **({"data": "x"} if experiment.data else {}))
            parser = command_of(run.task).parser()
            parser.check_all_play(parser.parse(list(options)), settings)
            labels = _labels(run, vars(settings))
            cells = (labels[heading] for heading in experiment.named_by)
            told.add((*(getattr(settings, name) for name in names), *cells))
            assert set(run.published) <= titles
        rows = {run.group or run.name for run in experiment.runs}
        named = experiment.figure and (experiment.legend or experiment.named_by)
        shortened = extra and experiment.panel == "T"  # to the same T
        assert len(told) == len(rows) or not named or shortened


def test_runs_that_two_experiments_share_are_the_same() -> None:
    seen: dict[str, Run] = {}
    for experiment in ALL:
        for run in experiment.runs:
            first = seen.setdefault(run.name, run)
            assert (run.task, run.options, run.quick) == (first.task, first.options, first.quick)


# ---- the search for the longest T ------------------------------------------------------------------------------------


def test_searches_ask_for_what_the_paper_says() -> None:
    """Every search's command line parses; those of Table I have its rates, sizes and criterion."""
    assert len({search.name for search in oinit.SEARCHES}) == len(oinit.SEARCHES) == 20
    assert len({(search.problem, search.network) for search in oinit.SEARCHES}) == 20  # the figure tells them by these
    assert sum(search.published is not None for search in oinit.SEARCHES) == len(oinit.TABLE1) == 12
    for search in oinit.SEARCHES:
        run = search.run(120)
        settings = settings_of(run.task, (*run.options, *run.quick))
        assert settings.hidden == 40 and settings.T == 120
        settings = settings_of(run.task, run.options)
        assert (settings.hidden, settings.batch, settings.iterations) == (100, 20, 100_000)
        assert (settings.eval_every, settings.eval_sequences, settings.short_evaluations) == (100, 10_000, True)
        if run.task == "adding":
            assert (settings.goal, settings.right) == (0, 100)
            assert (settings.target, settings.positions) == ("mean", "pascanu")
        else:
            assert settings.goal == 100
        if search.published is not None:
            assert settings.model == "rnn" and settings.nonlinearity == "tanh"
            assert settings.optimizer == "sgd" and settings.momentum == 0 and settings.clip is None
            assert float(search.parameters.split("α = ")[1].split(",")[0]) == settings.lr
            assert ("λ" in search.parameters) == bool(settings.soft_orthogonality)
    assert {search.problem for search in oinit.SEARCHES if "--bits" in search.options} == {"3-bit temporal order"}


def toy_search(name: str, *options: str, longest: int = 30) -> Search:
    common = "--hidden 16 --eval-every 5 --eval-sequences 20 --no-plots --short-evaluations".split()
    return Search(
        name, "first symbol", name, "none", "random_permutation", (*common, *options), published=10, longest=longest
    )


class RunHere:
    """Stands in for subprocess.Popen: a task's command line runs in this process, in a tenth of the time."""

    def __init__(self, command: list[str], stdout: IO[bytes], stderr: int) -> None:
        assert command[:2] == [sys.executable, "-m"] and stderr == subprocess.STDOUT
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            self.code = run_task(command[2].removeprefix("orthokern.tasks."), *command[3:])
        stdout.write(text.getvalue().encode())

    def poll(self) -> int:
        return self.code


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that solves everything up to its end (a goal of 0 %), one that solves nothing."""
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=RunHere, STDOUT=subprocess.STDOUT))
    easy = toy_search("easy", "--goal", "0", "--iterations", "10", longest=20)
    hard = toy_search("hard", "--iterations", "10", "--lr", "0")
    monkeypatch.setattr(oinit, "SEARCHES", (easy, hard))


# Stands in for a run: it says that it has started, and how it ended; it ignores the signal of a Ctrl-C.
STAND_IN = """
import signal, sys, time
def end(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def stand_ins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: Callable[[], None]
) -> tuple[runner.Plan, list[Run]]:
    """The plan of two runs that are stand-ins; once both have started, `act` is called in place of a pause."""
    runs, started = [toy("0.1"), toy("0.2")], [tmp_path / "started-0", tmp_path / "started-1"]
    files = iter(started)
    command = [sys.executable, "-c", STAND_IN]
    monkeypatch.setattr(runner.Plan, "command", lambda self, run: [*command, str(next(files))])
    sleep = time.sleep

    def pause(seconds: float) -> None:
        sleep(seconds)
        if all(file.exists() for file in started):
            act()

    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    return runner.Plan(tmp_path / "runs", None, False, 2, 1), runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("signals_not_ignored")
def test_a_signal_ends_the_runs_too(number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They save themselves, and no process goes on; also if they ignore SIGINT, as in the background of a shell."""
    before = signal.getsignal(number)
    plan, runs = stand_ins(monkeypatch, tmp_path, lambda: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        runner.train_all(plan, runs, io.StringIO())
    assert [(plan.folder / f"{run.name}.log").read_text() for run in runs] == ["saved\n", "saved\n"]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("signals_not_ignored")
def test_the_exit_code_after_a_signal(
    number: signal.Signals, code: int, toys: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_ins(monkeypatch, tmp_path, lambda: signal.raise_signal(number))
    assert reproduce("toy", "--out", tmp_path, "--jobs", 2, "--threads", 1) == code


def test_no_arguments_list_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce() == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*command.EXPERIMENTS, *command.STUDIES]


def test_a_run_that_the_system_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its line tells the signal, and nothing from the log of an earlier process."""
    children: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=Noted, STDOUT=subprocess.STDOUT))
    plan, runs = stand_ins(monkeypatch, tmp_path, lambda: [child.kill() for child in children])
    plan.folder.mkdir()
    (plan.folder / f"{runs[0].name}.log").write_text("solved: accuracy 100 %\n")
    line = "ended by SIGKILL, perhaps by the system for lack of memory; the last line was: no output"
    assert runner.train_all(plan, runs, io.StringIO()) == {run.name: line for run in runs}


@pytest.mark.parametrize("quick", [False, True])
def test_a_begun_run_has_one_length(quick: bool, tmp_path: Path) -> None:
    """Its command would be refused with two of them."""
    for experiment in ALL:
        for run in experiment.runs:
            plan = runner.Plan(tmp_path, None, quick, 1, 1)
            folder = plan.run_folder(run)
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")
            given = plan.command(run)
            assert ("--epochs" in given) + ("--iterations" in given) <= 1, given
            settings = planned(run, quick)
            assert "--iterations" not in run.options or settings["epochs"] is None, run.name


@pytest.mark.usefixtures("searches")
def test_a_search_that_fails_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_all(*_: Any) -> dict[str, str]:
        raise runner.BudgetSpent({"easy-T10": "ended by SIGKILL"})

    monkeypatch.setattr("orthokern.reproduce.search.train_all", train_all)
    assert reproduce("oinit-table1", "--out", tmp_path, "--budget", "1m") == 3
    assert capsys.readouterr().err == "easy-T10: ended by SIGKILL\n"


@pytest.mark.usefixtures("searches")
def test_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_line = ("oinit-table1", "--out", tmp_path, "--jobs", 2, "--threads", 1)
    told = re.compile(r"--iterations (\d+)")
    assert reproduce(*command_line) == 0
    folder = tmp_path / "full"
    shown = capsys.readouterr().out
    assert (folder / "oinit-table1.md").read_text() in shown
    easy, hard = json.loads((folder / "oinit-table1.json").read_text())["rows"]
    assert easy["iterations"] == {"10": 5, "20": 5} and easy["longest"] == 20 and easy["failed"] is None
    assert hard["iterations"] == {} and hard["longest"] == 0 and hard["failed"] == 10 and hard["complete"]
    table = {line.split(" | ")[1]: line for line in shown.splitlines() if line.startswith("| first symbol")}
    assert "| 10 | ≥ 20 | +10 | 5 | – |" in table["easy"]
    assert "| 10 | 0 | -10 | – | 10: not in 10 iterations" in table["hard"]
    assert not (folder / "easy-T30").exists() and not (folder / "hard-T20").exists()

    # again: nothing is trained; one of two, and longer: only what failed goes on
    before = (folder / "hard-T10" / "metrics.jsonl").stat().st_mtime_ns
    assert reproduce(*command_line) == 0
    assert "2 of 2 searches are done already" in capsys.readouterr().out
    assert (folder / "hard-T10" / "metrics.jsonl").stat().st_mtime_ns == before
    assert reproduce(*command_line, "--iterations", 15, "--only", "hard") == 0
    assert len(read_metrics(folder / "hard-T10" / "metrics.jsonl")) == 15
    assert len(read_metrics(folder / "easy-T10" / "metrics.jsonl")) == 5
    assert told.findall((folder / "oinit-table1.md").read_text()) == ["10", "15"]
    capsys.readouterr()
    assert reproduce(*command_line, "--iterations", 15) == 0
    assert "2 of 2 searches are done already" in capsys.readouterr().out


@pytest.mark.usefixtures("searches")
def test_a_search_goes_on(tmp_path: Path) -> None:
    """After a run that was stopped; what is there can be told at any time."""
    folder = tmp_path / "full"
    for search, iterations in zip(oinit.SEARCHES, ("10", "3"), strict=True):
        run = search.run(10)
        where = ["--iterations", iterations, "--threads", "1", "--out", str(folder / run.name)]
        assert run_task("random_permutation", *run.options, *where) == 0
    (folder / "hard-T10" / "result.json").unlink()
    assert reproduce("oinit-table1", "--report", "--out", tmp_path) == 0
    easy, hard = json.loads((folder / "oinit-table1.json").read_text())["rows"]
    assert easy["longest"] == 10 and not easy["complete"] and easy["failed"] is None
    assert hard["failed"] == 10 and not hard["complete"] and "still at 3 iterations" in hard["outcome"]
    assert reproduce("oinit-table1", "--iterations", 10, "--out", tmp_path, "--threads", 1) == 0
    easy, hard = json.loads((folder / "oinit-table1.json").read_text())["rows"]
    assert easy["longest"] == 20 and easy["complete"] and hard["complete"]
    assert [r["iteration"] for r in read_metrics(folder / "hard-T10" / "metrics.jsonl")] == list(range(1, 11))


@pytest.mark.usefixtures("searches")
def test_a_search_goes_on_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the JSON file alone: what it has as solved or failed is not trained again, and the hours add up."""
    command_line = ("oinit-table1", "--out", tmp_path, "--threads", 1)
    assert reproduce(*command_line) == 0
    folder = tmp_path / "full"
    for run in ("easy-T10", "easy-T20", "hard-T10"):
        shutil.rmtree(folder / run)
    page = folder / "oinit-table1.json"
    before = json.loads(page.read_text())["rows"]
    capsys.readouterr()
    assert reproduce(*command_line) == 0
    assert f"2 of 2 searches are finished according to {page}" in capsys.readouterr().out
    assert json.loads(page.read_text())["rows"] == before and not (folder / "hard-T10").exists()

    # a search that was stopped on the other machine, by a report that has the sum of the seconds alone
    easy, hard = json.loads(page.read_text())["rows"]
    del easy["iterations"]["20"], easy["seconds_by_length"]
    easy |= {"longest": 10, "complete": False, "seconds": 100.0, "state": "unfinished"}
    page.write_text(json.dumps({"experiment": "oinit-table1", "quick": False, "rows": [easy, hard]}))
    for _ in range(2):  # the second time, with the folder that the first has made
        assert reproduce(*command_line) == 0
        easy, hard = json.loads(page.read_text())["rows"]
        assert easy["iterations"] == {"10": 5, "20": 5} and easy["complete"] and hard == before[1]
        assert 100.0 < easy["seconds"] < 101.0
        assert not (folder / "easy-T10").exists() and not (folder / "hard-T10").exists()

    # more iterations: what failed is tried again
    assert reproduce(*command_line, "--iterations", 15) == 0
    hard = json.loads(page.read_text())["rows"][1]
    assert "not in 15 iterations" in hard["outcome"] and hard["complete"]


@pytest.mark.usefixtures("searches")
def test_bad_input_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--only", "none"], "no search of oinit-table1 has this text in its name; the searches are easy, hard"),
        (["--epochs", "3"], "--epochs: oinit-table1 does not accept it"),
        (["--iterations", "0"], "'0' is not an integer of at least 1"),
    ):
        assert reproduce("oinit-table1", *options, "--out", tmp_path) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
