"""What the constraint is worth: four tasks, each trained for the same time with and without each part of the method.

The runs of a task are an experiment of their own. The study `constraint` puts the results of the four experiments into
one table and one figure; it reads their JSON files and trains nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from orthokern._files import read_object
from orthokern.commandline import Settings
from orthokern.errors import InputError
from orthokern.reproduce.page import drawn, paragraph, table, written
from orthokern.reproduce.spec import Experiment, Measure, Run
from orthokern.reproduce.study import Study

MINUTES = "1"
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


def _runs(name: str, subject: Subject) -> dict[tuple[str, ...], Run]:
    """Options -> run: two rows of the joint table may be the same run."""
    runs: dict[tuple[str, ...], Run] = {}
    for (part, label), options in _variants(subject).items():
        given = (*subject.options, *options, "--minutes", MINUTES)
        labels = {"part": part, "value": label}
        run = Run(f"constraint-{name}-{len(runs):02d}", subject.task, given, ("--minutes", "0.05"), labels)
        runs.setdefault(options, run)
    return runs


NOTE = (
    f"Every run trains for {MINUTES} minute with one seed, and ends early when it is solved. Rates are the defaults of "
    "the task where none is stated; in the tasks with data they are constant, and evaluations use a moving average of "
    "the parameters. The LSTM and the GRU have as many trained parameters as the factorized network of 128 units; the "
    "RNN has 128 units, starts Glorot-uniform, and uses tanh."
)

EXPERIMENTS = tuple(
    Experiment(
        f"constraint-{name}",
        f"What the constraint is worth, {subject.title.split(':')[0]}",
        "Not in a paper",
        tuple(_runs(name, subject).values()),
        (subject.measure,),
        data=subject.data,
        epochs=subject.data is not None,
        alone=True,
        note=NOTE,
    )
    for name, subject in SUBJECTS.items()
)


# ---- the joint page --------------------------------------------------------------------------------------------------


def _results(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Name of the task -> name of the run -> row of its report; {} for an experiment without a report.

    Raises:
        InputError: a report is damaged, or there is none.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in SUBJECTS:
        path = folder / f"constraint-{name}.json"
        try:
            found[name] = {row["name"]: row for row in read_object(path)["rows"]} if path.exists() else {}
        except (KeyError, TypeError):
            raise InputError(f"{path} is not a report of this program: move it away, or repair it") from None
    if not any(found.values()):
        names = ", ".join(experiment.name for experiment in EXPERIMENTS)
        raise InputError(f"no reports in {folder}: first train {names}")
    return found


def _rows(found: Mapping[str, Mapping[str, dict[str, Any]]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(part, label) -> name of the task -> row of the run."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, subject in SUBJECTS.items():
        runs = _runs(name, subject)
        for variant, options in _variants(subject).items():
            row = found[name].get(runs[options].name)
            rows.setdefault(variant, {})
            if row is not None:
                rows[variant][name] = row
    return rows


def _cell(subject: Subject, row: dict[str, Any] | None) -> str:
    value = None if row is None else row["ours"].get(subject.measure.title)
    if row is None or value is None:
        return row["state"] if row is not None else "not run"
    seconds = row.get("seconds")
    after = f" in {seconds:.0f} s" if row["state"] == "solved" and seconds is not None else ""
    return f"{value:.{subject.measure.digits}f}{after}"


def _page(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    study = STUDIES[0]
    found = _results(folder)
    rows = _rows(found)
    lines = [
        [part, label, *(_cell(subject, per.get(name)) for name, subject in SUBJECTS.items())]
        for (part, label), per in rows.items()
    ]
    values = {
        subject.title: {
            variant: per[name]["ours"].get(subject.measure.title) for variant, per in rows.items() if name in per
        }
        for name, subject in SUBJECTS.items()
    }
    figure = drawn(folder / f"{study.name}.png", lambda plots: plots.compare_parts(values, study.title))
    trained = [row for per in found.values() for row in per.values() if "machine" in row]
    machines = ", ".join(sorted({row["machine"] for row in trained})) or "nothing trained yet"
    directions = "Higher is better for recall and accuracy, lower for error and bits."
    text = [f"# {study.name}: {study.title}", "", f"{study.source}. {directions}", ""]
    text += [*([] if figure is None else [f"![{study.title}]({figure.name})", ""])]
    text += [*table(["part", "value", *(subject.title for subject in SUBJECTS.values())], lines), ""]
    pages = ", ".join(f"[{each.name}]({each.name}.md)" for each in EXPERIMENTS)
    text += [paragraph(NOTE), "", paragraph(f"Commands and progress of every run: {pages}."), ""]
    text += [f"{machines}; {time.strftime('%Y-%m-%d')}."]
    summary = {
        "experiment": study.name,
        "rows": [
            {"part": part, "value": label, **{name: row["ours"] for name, row in per.items()}}
            for (part, label), per in rows.items()
        ],
    }
    return written(folder, study.name, "\n".join(text) + "\n", summary, figure)


STUDIES = (Study("constraint", "What the constraint is worth, by task", "Not in a paper", (), _page),)
