"""What the constraint is worth: the results of the four experiments of specs/constraint.toml in one table and one
figure. It reads their JSON files and trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from orthokern.errors import InputError
from orthokern.reproduce.page import drawn, machines, paragraph, read_json, table, written
from orthokern.reproduce.report import Row, spread
from orthokern.reproduce.spec import Experiment
from orthokern.reproduce.study import Outcome, Study, output_folder

SEEDS = 2
# name of the task -> title of its column and panel, and the non-linearity that is the default of the task
SUBJECTS = {
    "copy": ("copy, T = 1000: recall (%)", "identity"),
    "adding": ("adding, T = 750: squared error", "relu"),
    "pixels": ("permuted digits, T = 196: accuracy (%)", "modrelu"),
    "characters": ("Penn Treebank: bits per character", "modrelu"),
}
TRAINED, NONLINEARITY = "margin, U and V trained", "non-linearity"

Rows = dict[tuple[str, str], dict[str, list[Row]]]
"""(part, value) -> name of the task -> rows of its report, one per seed."""


def _rows(experiments: Mapping[str, Experiment], reports: Mapping[str, Row]) -> Rows:
    rows: Rows = {}
    for name, (_, usual) in SUBJECTS.items():
        reported = {row["name"]: row for row in reports.get(name, {}).get("rows", ())}
        of_task: dict[tuple[str, str], list[Row]] = {}
        for run in experiments[name].runs:
            of_seeds = of_task.setdefault((run.labels["part"], run.labels["value"]), [])
            of_seeds += [reported[run.name]] if run.name in reported else []
        of_task[NONLINEARITY, usual] = of_task[TRAINED, "0.1"]
        for variant, of_seeds in of_task.items():
            rows.setdefault(variant, {})[name] = of_seeds
    # the usual non-linearities stand in the order of the others
    order = ["margin", NONLINEARITY, "other network"]
    names = ["identity", "relu", "tanh", "modrelu"]

    def place(variant: tuple[str, str]) -> tuple[int, int]:
        part = next(i for i, prefix in enumerate(order) if variant[0].startswith(prefix))
        return part, names.index(variant[1]) if part == 1 else 0

    return {variant: rows[variant] for variant in sorted(rows, key=place)}


def _values(experiment: Experiment, rows: Sequence[Row]) -> list[float]:
    """The numbers of the seeds that have one."""
    values = (row["ours"].get(experiment.measures[0].title) for row in rows)
    return [value for value in values if value is not None]


def _cell(experiment: Experiment, rows: Sequence[Row], seeds: int) -> str:
    """The numbers of the seeds that were run, and how many if they are fewer than `seeds`; where all of them solved the
    task, the seconds that it took."""
    values, solved = _values(experiment, rows), [row for row in rows if row["state"] == "solved"]
    if not values:
        return ", ".join(dict.fromkeys(row["state"] for row in rows)) or "not run"
    if len(solved) == len(values):
        text = f"solved in {spread([row['seconds'] for row in solved], '{:.0f}'.format)} s"
    else:
        form = f"{{:.{experiment.measures[0].digits}f}}".format
        text = spread(values, form) + (f", {len(solved)} of {len(values)} solved" if solved else "")
    return text if len(values) == seeds else f"{text}, {len(values)} of {seeds} seeds run"


def _written(folder: Path, study: Study, experiments: Mapping[str, Experiment], rows: Rows, date: str) -> list[Path]:
    """The page, its numbers and its figure."""
    # the number of seeds that were run, of the variant of a task that has most
    seeds = {name: max(len(_values(experiments[name], per[name])) for per in rows.values()) for name in SUBJECTS}
    headings = ["part", "value"]
    for name, (title, _) in SUBJECTS.items():
        headings.append(title if seeds[name] in (0, SEEDS) else f"{title}, {seeds[name]} of {SEEDS} seeds")
    lines = [
        [*variant, *(_cell(experiments[name], per[name], seeds[name]) for name in SUBJECTS)]
        for variant, per in rows.items()
    ]
    values = {
        title: {variant: _values(experiments[name], per[name]) for variant, per in rows.items()}
        for name, (title, _) in SUBJECTS.items()
    }
    figure = drawn(folder / f"{study.name}.png", lambda plots: plots.compare_parts(values, study.title))
    directions = (
        "Higher is better for recall and accuracy, lower for error and bits. Median over the seeds, and the range in "
        "parentheses."
    )
    text = [f"# {study.name}: {study.title}", "", paragraph(f"{study.source}. {directions}"), ""]
    text += [] if figure is None else [f"![{study.title}]({figure.name})", ""]
    text += [*table(headings, lines), "", paragraph(experiments["copy"].note), ""]
    pages = ", ".join(f"[{each.name}]({each.name}.md)" for each in experiments.values())
    text += [paragraph(f"Commands and progress of every run: {pages}."), ""]
    names = machines(row.get("machine") for per in rows.values() for of_seeds in per.values() for row in of_seeds)
    text += [f"{names}; {date}."]
    numbers = [
        {"part": part, "value": label, **{name: [row["ours"] for row in of_seeds] for name, of_seeds in per.items()}}
        for (part, label), per in rows.items()
    ]
    return written(folder, study.name, "\n".join(text) + "\n", {"experiment": study.name, "rows": numbers}, figure)


def constraint_study(experiments: Mapping[str, Experiment]) -> Study:
    """The joint page of the experiments constraint-NAME."""
    parts = {name: experiments[f"constraint-{name}"] for name in SUBJECTS}

    def produce(args: Mapping[str, Any], study: Study, stream: TextIO) -> Outcome:
        folder = output_folder(args)
        reports = {name: read_json(folder / f"constraint-{name}.json") for name in SUBJECTS}
        reports = {name: report for name, report in reports.items() if report}
        if not reports:
            names = ", ".join(experiment.name for experiment in parts.values())
            raise InputError(f"no reports in {folder}: first train {names}")
        try:
            date = max(report["date"] for report in reports.values())
            return Outcome(_written(folder, study, parts, _rows(parts, reports), date))
        except (KeyError, TypeError):
            names = ", ".join(f"constraint-{name}.json" for name in reports)
            raise InputError(
                f"{folder}: one of {names} is not a report of this program: write it again, or move it away"
            ) from None

    return Study("constraint", "What the constraint is worth, by task", "Not in a paper", (), produce)
