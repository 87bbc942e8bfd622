"""`python -m orthokern.reproduce`: it trains missing runs, resumes interrupted ones, and reports published and our
numbers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.image import imread
from reproducing import ACCURACY, LOSS, TOY, Command, toy, toy_command
from runs import settings_of

from orthokern.reproduce import __main__ as command
from orthokern.reproduce import runner
from orthokern.reproduce.report import figure_name, labels, markdown
from orthokern.reproduce.spec import Experiment, is_planned, over_seeds, planned
from orthokern.training import read_metrics

PAGES = Path(__file__).resolve().parent.parent / "docs" / "results"
ALL = tuple(command.EXPERIMENTS.values())
PUBLISHED = [each for each in ALL if (PAGES / f"{each.name}.json").exists()]


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return toy_command(monkeypatch, capsys, tmp_path)


def test_a_table(reproduce: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "subprocess", subprocess)
    out, _ = reproduce("toy", "--jobs", 2, "--threads", 1)
    table = (reproduce.full / "toy.md").read_text()
    assert "Nobody 2000, Table 9" in table and table in out and reproduce.states() == ["done", "done"]
    for row in reproduce.rows():
        records = read_metrics(reproduce.full / row["name"] / "metrics.jsonl")
        assert len(records) == row["iterations"] == 6
        ours = 100 * max(r["held_out_accuracy"] for r in records if "held_out_accuracy" in r)
        assert row["ours"][ACCURACY.title] == pytest.approx(ours)
        assert [value for _, value in row["curves"]["loss"]] == pytest.approx([r["loss"] for r in records], rel=1e-5)
        line = next(line for line in table.splitlines() if line.startswith(f"| {row['labels']['margin']} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:4] == ["50.00", f"{ours:.2f}", f"{ours - 50:+.2f}"]
        assert float(cells[4]) == pytest.approx(row["ours"][LOSS.title], abs=1e-3)  # not in the paper
    assert (reproduce.full / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_a_repeated_command_trains_what_is_missing(reproduce: Command) -> None:
    def lengths() -> list[int]:
        return [len(read_metrics(reproduce.full / run.name / "metrics.jsonl")) for run in TOY.runs]

    def told() -> list[str]:
        return re.findall(r"--iterations (\d+)", (reproduce.full / "toy.md").read_text())

    reproduce("toy", "--iterations", 3, "--only", "toy-0.1")  # shorter than planned
    assert lengths() == [0, 3] and told() == ["3", "3"] and reproduce.states() == ["not run", "done"]
    reproduce("toy")
    assert lengths() == [6, 6] and told() == ["6", "6"]
    assert "2 of 2 runs are done already" in reproduce("toy")[0]
    reproduce("toy", "--iterations", 8, "--only", "toy-0.1")
    assert lengths() == [6, 8] and told() == ["6", "8"]  # of each run its own length
    # stopped before a new end
    result = reproduce.full / "toy-0.1" / "result.json"
    result.unlink()
    reproduce("toy", "--report")
    assert reproduce.states() == ["done", "unfinished"]
    with open(reproduce.full / "toy-0.1" / "metrics.jsonl", "a") as metrics:
        metrics.write("noise\n")
    result.write_text("[]")
    reproduce("toy", "--report")
    assert reproduce.states() == ["done", "damaged"]


def test_the_quick_version_has_folders_of_its_own(reproduce: Command) -> None:
    reproduce("toy", "--quick", "--only", "toy-0.1")
    summary = json.loads((reproduce.out / "quick" / "toy.json").read_text())
    assert [row["state"] for row in summary["rows"]] == ["not run", "done"] and summary["quick"]
    assert summary["rows"][1]["iterations"] == 3
    assert "Scaled down" in (reproduce.out / "quick" / "toy.md").read_text()
    reproduce("toy", "--report")
    assert reproduce.states() == ["not run", "not run"] and not (reproduce.full / "toy.png").exists()


def test_seeds_share_a_row(reproduce: Command) -> None:
    """The median of the seeds, or the mean of a rate."""
    rate = replace(LOSS, title="rate", rate=True)
    runs = tuple(replace(run, published={"rate": 1.0}) for run in over_seeds(toy("0"), 3))
    experiment = Experiment("seeds", "Seeds", "Nobody 2000", runs, (rate, LOSS), epochs=False)
    reproduce.add(experiment)
    reproduce("seeds")
    rows = reproduce.rows("seeds")
    assert [row["settings"]["seed"] for row in rows] == [0, 1, 2]
    losses = sorted(row["ours"]["loss"] for row in rows)
    mean, spread = sum(losses) / 3, f"{losses[1]:.3f} ({losses[0]:.3f} to {losses[2]:.3f})"
    page = (reproduce.full / "seeds.md").read_text()
    assert f"| 0 | 1.000 | {mean:.3f} | {mean - 1.0:+.3f} | {spread} |" in page and "3 of 3 done" in page
    assert "--seed 0`, and so to `--seed 2`" in page and "the range in parentheses; of rate the mean." in page
    summary = json.loads((reproduce.full / "seeds.json").read_text())
    summary["rows"][0]["ours"]["rate"] = 3e12  # of a run that diverged
    assert "| 0 | 1.000 | 1.0e+12 | +1.0e+12 | " in markdown(experiment, summary)


def test_a_row_shows_the_command_of_its_numbers(reproduce: Command) -> None:
    """Not numbers of a run that was trained before the options of the experiment were changed."""
    reproduce("toy")
    first, second = TOY.runs
    reproduce.add(replace(TOY, runs=(first, replace(second, options=(*second.options, "--lr", "0.5")))))
    reproduce("toy", "--report")
    assert reproduce.states() == ["done", "other settings"] and "--lr 0.5" in reproduce.rows()[1]["command"]


def test_a_margin_by_the_length_is_that_of_the_command() -> None:
    run = replace(TOY.runs[0], task="copy", options=("--preset", "paper", "--T", "200", "--model", "rnn"))
    settings = vars(settings_of("copy", run.options))
    assert is_planned(settings, run, quick=False)
    assert not is_planned({**settings, "margin": 0.001}, run, quick=False)


def test_iterations_replace_the_epochs_of_a_preset() -> None:
    run = replace(TOY.runs[0], task="pixel_mnist", options=("--preset", "paper", "--iterations", "5"))
    settings = planned(run, quick=False)
    assert (settings["iterations"], settings["epochs"]) == (5, None)


@pytest.mark.parametrize(
    ("figure", "options"),
    [
        ("gradients", ("--last-step-gradient", "--diagnose-every", "2")),
        ("spectrum", ("--diagnose-every", "2")),
        ("dynamics", ("--model", "rnn", "--diagnose-every", "2")),
    ],
)
def test_figures(figure: str, options: tuple[str, ...], reproduce: Command) -> None:
    run = replace(TOY.runs[0], options=(*"--T 4 --hidden 8 --iterations 6 --no-plots".split(), *options))
    reproduce.add(replace(TOY, figure=figure, runs=(run,)))
    reproduce("toy")
    assert imread(reproduce.full / "toy.png").std() > 0


def test_no_arguments_list_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*command.EXPERIMENTS, *command.STUDIES]


def test_bad_input(reproduce: Command, tmp_path: Path) -> None:
    for options, message in (
        (["tabel1"], "did you mean 'table1'"),
        (["toy", "--only", "none"], "no run of toy has this text in its name; the runs are toy-0, toy-0.1"),
        (["toy", "--epochs", "3"], "the length of the runs of toy is in iterations; use --iterations"),
        (["toy", "--data", tmp_path], "the runs of toy generate their data"),
        (["table5", "--jobs", "2"], "the runs of table5 are timed and run one at a time"),
        (["oinit-table1", "--report", "--only", "srnn"], "--only: has no effect with --report"),
        (["oinit-table1", "--only", "none"], "no run of oinit-table1 has this text in its name; the runs are "),
        (["nnrnn-fisher", "--epochs", "3"], "--epochs: nnrnn-fisher does not accept it"),
        (["table1", "--data", tmp_path / "no"], "no such folder"),
        (["constraint"], "first train constraint-copy, constraint-adding"),
    ):
        reproduce.refused(message, *options)
    (tmp_path / "mnist").mkdir()  # what a task refuses is one line, too
    reproduce.refused("train-images", "table1", "--data", tmp_path, "--only", "lstm")
    (tmp_path / "file").write_text("")
    reproduce.out = tmp_path / "file"
    reproduce.refused(str(tmp_path / "file"), "toy", "--report")


@pytest.mark.parametrize("experiment", PUBLISHED, ids=lambda each: each.name)
def test_a_page_follows_from_its_numbers(experiment: Experiment) -> None:
    """And its rows have the commands of its runs."""
    summary = json.loads((PAGES / f"{experiment.name}.json").read_text())
    assert markdown(experiment, summary) == (PAGES / f"{experiment.name}.md").read_text()
    runs = {run.name: run for run in experiment.runs}

    def without_length(words: Sequence[str]) -> list[str]:
        return re.sub(r"--(epochs|iterations) \S+", "", " ".join(words)).split()

    for row in summary["rows"]:
        options = runner.Plan(PAGES).options(runs[row["name"]], ())
        assert without_length(row["command"].split()[3:]) == without_length(options), row["name"]
        assert all(len(points) <= 300 for points in row.get("curves", {}).values())


@pytest.mark.parametrize("experiment", ALL, ids=lambda each: each.name)
def test_command_lines_are_accepted(experiment: Experiment, tmp_path: Path) -> None:
    """Every run's options parse, go together, and name the settings that legend and panel show; no two rows of a panel
    of a figure have the same legend. A run that has begun has one length: two would be refused."""
    assert len({run.name for run in experiment.runs}) == len(experiment.runs)
    titles = {measure.title for measure in experiment.measures}
    names = (*(experiment.legend or ()), *([experiment.panel] if experiment.panel else []))
    rows = {run.group or run.name: run for run in experiment.runs}  # one of several seeds
    for quick in (False, True):
        told = set()
        plan = runner.Plan(tmp_path, quick=quick)
        for run in rows.values():
            options = (*run.options, *(run.quick if quick else ()))
            settings = settings_of(run.task, options, **({"data": "x"} if experiment.data else {}))
            cells = labels(run, vars(settings))
            name = figure_name(experiment, cells)
            assert name == ", ".join(cells[heading] for heading in experiment.named_by)
            told.add((*(getattr(settings, each) for each in names), name))
            assert set(run.published) <= titles
            plan.run_folder(run).mkdir(exist_ok=True)
            (plan.run_folder(run) / "config.json").write_text("{}")
            words = plan.command(run)
            assert ("--epochs" in words) + ("--iterations" in words) <= 1, words
            dashed = [word for word in words if word.startswith("--")]
            assert len(set(dashed)) == len(dashed)
        named = experiment.figure and (experiment.legend or experiment.named_by)
        shortened = quick and experiment.panel == "T"  # to the same T
        assert len(told) == len(rows) or not named or shortened


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("signals_not_ignored")
def test_a_signal_ends_the_runs_too(
    number: signal.Signals, code: int, reproduce: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They save themselves, and no process continues; also if they ignore SIGINT, as in the background of a shell."""
    started, before = [tmp_path / "started-0", tmp_path / "started-1"], signal.getsignal(number)
    files, sleep = iter(started), time.sleep

    def pause(seconds: float) -> None:
        sleep(0.05)
        if all(file.exists() for file in started):
            signal.raise_signal(number)

    monkeypatch.setattr(runner, "subprocess", subprocess)
    monkeypatch.setattr(runner.Plan, "command", lambda self, run: [sys.executable, "-c", STAND_IN, str(next(files))])
    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=pause))
    reproduce("toy", "--jobs", 2, code=code)
    assert [(reproduce.full / f"{run.name}.log").read_text() for run in TOY.runs] == ["saved\n", "saved\n"]
    assert signal.getsignal(number) == before
