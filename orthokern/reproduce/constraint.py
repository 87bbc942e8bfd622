"""What the constraint is worth: four tasks, each trained for the same time with and without each part of the method.

The runs of a task are an experiment of their own. The study `constraint` puts the results of the four experiments into
one table and one figure; it reads their JSON files and trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from orthokern._files import read_object
from orthokern.commandline import Settings
from orthokern.errors import InputError
from orthokern.reproduce.page import drawn, paragraph, table, written
from orthokern.reproduce.report import spread
from orthokern.reproduce.spec import Experiment, Measure, Run, over_seeds
from orthokern.reproduce.study import Study

MINUTES = "1"
SEEDS = 2
MARGINS = ("0", "0.01", "0.1", "1", "none")
NONLINEARITIES = ("identity", "relu", "tanh", "modrelu")
RATES = ("1e-2", "1e-3")

MARGIN, HELD, FUNCTION, OTHER = "margin, U and V trained", "margin, U and V fixed", "non-linearity", "other network"


@dataclass(frozen=True)
class Subject:
    """A task, and what its runs have in common.

    Attributes:
        title: of its column and panel, with the unit.
        task: a module of orthokern.tasks.
        options: of every run.
        nonlinearity: the default of the task, which the rows of MARGIN have.
        unconstrained: further options of networks without the constraint.
        constrained: of networks with it.
        units: hidden units of an LSTM and of a GRU with as many parameters as a factorized network of 128, where an
            orthogonal matrix counts as N (N - 1) / 2.
        measure: the number of a run.
        data: folder of the data set under --data, or None.
    """

    title: str
    task: str
    options: tuple[str, ...]
    nonlinearity: str
    unconstrained: tuple[str, ...]
    units: tuple[str, str]
    measure: Measure
    data: str | None = None
    constrained: tuple[str, ...] = ()


_LONG = ("--iterations", "1000000")
_EPOCHS = ("--epochs", "1000", "--hidden", "128", "--schedule", "constant", "--average", "0.999")
SUBJECTS = {
    "copy": Subject(
        "copy, T = 1000: recall (%)", "copy", ("--T", "1000", *_LONG), "identity",
        ("--start", "glorot-normal", "--schedule", "constant", "--clip", "1"), ("64", "74"),
        Measure("best held-out recall (%)", "best_accuracy", scale=100.0),
    ),
    "adding": Subject(
        "adding, T = 750: squared error", "adding", ("--T", "750", *_LONG), "relu", ("--start", "torch",), ("63", "73"),
        Measure("best held-out error", "best_loss", digits=4, higher_is_better=False),
    ),
    "pixels": Subject(
        "permuted digits, T = 196: accuracy (%)", "pixel_mnist", ("--permuted", "--pool", "2", *_EPOCHS), "modrelu", (),
        ("63", "73"), Measure("best validation accuracy (%)", "best_accuracy", scale=100.0), "mnist",
        ("--max-angle", "none"),
    ),
    "characters": Subject(
        "Penn Treebank: bits per character", "char_lm", _EPOCHS, "modrelu", (), ("60", "70"),
        Measure("best validation bits per character", "best_bpc", digits=3, higher_is_better=False), "ptb",
    ),
}  # fmt: skip


def _variants(subject: Subject) -> dict[tuple[str, str], tuple[str, ...]]:
    """(part of the method, label) -> options: the rows of the joint table."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for margin in MARGINS:
        found[MARGIN, margin] = ("--margin", margin, *subject.constrained)
    for margin in MARGINS:
        found[HELD, margin] = ("--margin", margin, "--geodesic-lr", "0", *subject.constrained)
    for name in NONLINEARITIES:
        same = name == subject.nonlinearity
        found[FUNCTION, name] = ("--margin", "0.1", *(() if same else ("--nonlinearity", name)), *subject.constrained)
    found[OTHER, "expRNN"] = ("--model", "exprnn", *subject.constrained)
    plain = ("--model", "rnn", "--nonlinearity", "tanh", "--init", "glorot-uniform")
    for name, options in (("RNN", plain), ("LSTM", ("--model", "lstm")), ("GRU", ("--model", "gru"))):
        size = () if name == "RNN" else ("--hidden", subject.units[name == "GRU"])
        for rate in RATES:
            found[OTHER, f"{name}, rate {rate}"] = (*options, *size, *subject.unconstrained, "--lr", rate)
    return found


def _runs(name: str, subject: Subject) -> dict[tuple[str, ...], tuple[Run, ...]]:
    """Options -> runs, one per seed: two rows of the joint table may be the same runs."""
    runs: dict[tuple[str, ...], tuple[Run, ...]] = {}
    for (part, label), options in _variants(subject).items():
        given = (*subject.options, *options, "--minutes", MINUTES)
        labels = {"part": part, "value": label}
        run = Run(f"constraint-{name}-{len(runs):02d}", subject.task, given, ("--minutes", "0.05"), labels)
        runs.setdefault(options, over_seeds(run, range(SEEDS)))
    return runs


NOTE = (
    f"Every run trains for {MINUTES} minute, and ends early when it is solved. Each network has {SEEDS} seeds, if no "
    "other number is stated. Rates are the defaults of the task where none is stated; in the tasks with data they are "
    "constant, and evaluations use a moving average of the parameters. The LSTM and the GRU have as many trained "
    "parameters as the factorized network of 128 units; the RNN has 128 units, starts Glorot-uniform, and uses tanh."
)

EXPERIMENTS = tuple(
    Experiment(
        f"constraint-{name}",
        f"What the constraint is worth, {subject.title.split(':')[0]}",
        "Not in a paper",
        # every variant with the first seed, then with the next one: a budget that ends early leaves a whole table
        tuple(run for of_a_seed in zip(*_runs(name, subject).values(), strict=True) for run in of_a_seed),
        (subject.measure,),
        data=subject.data,
        epochs=subject.data is not None,
        alone=True,
        note=NOTE,
    )
    for name, subject in SUBJECTS.items()
)


# ---- the joint page --------------------------------------------------------------------------------------------------

Rows = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]
"""(part, label) -> name of the task -> rows of its report, one per seed."""


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Name of the task -> the report of its experiment, for those that have one.

    Raises:
        InputError: there is no report.
    """
    paths = {name: folder / f"constraint-{name}.json" for name in SUBJECTS}
    found = {name: read_object(path) for name, path in paths.items() if path.exists()}
    if not found:
        names = ", ".join(experiment.name for experiment in EXPERIMENTS)
        raise InputError(f"no reports in {folder}: first train {names}")
    return found


def _rows(reports: Mapping[str, dict[str, Any]]) -> Rows:
    rows: Rows = {}
    for name, subject in SUBJECTS.items():
        runs = _runs(name, subject)
        found = {row["name"]: row for row in reports.get(name, {"rows": ()})["rows"]}
        for variant, options in _variants(subject).items():
            rows.setdefault(variant, {})[name] = [found[run.name] for run in runs[options] if run.name in found]
    return rows


def _values(subject: Subject, rows: Sequence[dict[str, Any]]) -> list[float]:
    """The numbers of the seeds that have one."""
    values = (row["ours"].get(subject.measure.title) for row in rows)
    return [value for value in values if value is not None]


def _seeds(rows: Rows, name: str) -> int:
    """The number of seeds that were run, of the variant of a task that has most."""
    return max(len(_values(SUBJECTS[name], per[name])) for per in rows.values())


def _heading(subject: Subject, seeds: int) -> str:
    """The title of a column, with the number of seeds where it is not the planned one."""
    return subject.title if seeds in (0, SEEDS) else f"{subject.title}, {seeds} of {SEEDS} seeds"


def _cell(subject: Subject, rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """The numbers of the seeds that were run, and how many if they are fewer than `seeds`; where all of them solved the
    task, the seconds that it took."""
    values, solved = _values(subject, rows), [row for row in rows if row["state"] == "solved"]
    if not values:
        return ", ".join(dict.fromkeys(row["state"] for row in rows)) or "not run"
    if len(solved) == len(values):
        text = f"solved in {spread([row['seconds'] for row in solved], '{:.0f}'.format)} s"
    else:
        form = f"{{:.{subject.measure.digits}f}}".format
        text = spread(values, form) + (f", {len(solved)} of {len(values)} solved" if solved else "")
    return text if len(values) == seeds else f"{text}, {len(values)} of {seeds} seeds run"


def _page(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    reports = _reports(folder)
    try:
        return _written(folder, _rows(reports), max(report["date"] for report in reports.values()))
    except (KeyError, TypeError):
        names = ", ".join(f"constraint-{name}.json" for name in reports)
        raise InputError(
            f"{folder}: one of {names} is not a report of this program: write it again, or move it away"
        ) from None


def _written(folder: Path, rows: Rows, date: str) -> list[Path]:
    """The page, its numbers and its figure."""
    study = STUDIES[0]
    seeds = {name: _seeds(rows, name) for name in SUBJECTS}
    headings = ["part", "value", *(_heading(subject, seeds[name]) for name, subject in SUBJECTS.items())]
    lines = [
        [part, label, *(_cell(subject, per[name], seeds[name]) for name, subject in SUBJECTS.items())]
        for (part, label), per in rows.items()
    ]
    values = {
        subject.title: {variant: _values(subject, per[name]) for variant, per in rows.items()}
        for name, subject in SUBJECTS.items()
    }
    figure = drawn(folder / f"{study.name}.png", lambda plots: plots.compare_parts(values, study.title))
    machines = {
        row["machine"] for per in rows.values() for of_seeds in per.values() for row in of_seeds if "machine" in row
    }
    directions = (
        "Higher is better for recall and accuracy, lower for error and bits. Median over the seeds, and the range in "
        "parentheses."
    )
    text = [f"# {study.name}: {study.title}", "", paragraph(f"{study.source}. {directions}"), ""]
    text += [*([] if figure is None else [f"![{study.title}]({figure.name})", ""])]
    text += [*table(headings, lines), ""]
    pages = ", ".join(f"[{each.name}]({each.name}.md)" for each in EXPERIMENTS)
    text += [paragraph(NOTE), "", paragraph(f"Commands and progress of every run: {pages}."), ""]
    text += [f"{', '.join(sorted(machines)) or 'nothing trained yet'}; {date}."]
    numbers = [
        {"part": part, "value": label, **{name: [row["ours"] for row in of_seeds] for name, of_seeds in per.items()}}
        for (part, label), per in rows.items()
    ]
    return written(folder, study.name, "\n".join(text) + "\n", {"experiment": study.name, "rows": numbers}, figure)


STUDIES = (Study("constraint", "What the constraint is worth, by task", "Not in a paper", (), _page),)
