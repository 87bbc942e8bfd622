"""The benefit of the constraint: the results of the four experiments of specs/constraint.toml in one table and one
figure. This module reads their JSON files and trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orthokern._files import read_object
from orthokern.errors import InputError
from orthokern.reproduce.page import (
    Outcome,
    drawn,
    machines,
    output_folder,
    paragraph,
    picture,
    publish,
    table,
)
from orthokern.reproduce.report import Row, spread
from orthokern.reproduce.spec import Experiment, read_experiments, read_specs

Variant = tuple[str, str]  # part, value
TRAINED, NONLINEARITY = "margin, U and V trained", "non-linearity"


def _rows(experiment: Experiment, nonlinearity: str, report: Mapping[str, Any]) -> dict[Variant, list[Row]]:
    """The rows of a report, by variant: one per seed."""
    reported = {row["name"]: row for row in report.get("rows", ())}
    rows: dict[Variant, list[Row]] = {}
    for run in experiment.runs:
        of_seeds = rows.setdefault((run.labels["part"], run.labels["value"]), [])
        of_seeds += [reported[run.name]] if run.name in reported else []
    rows[NONLINEARITY, nonlinearity] = rows[TRAINED, "0.1"]
    return rows


def _values(experiment: Experiment, rows: Sequence[Row]) -> list[float]:
    """The numbers of the seeds that have one."""
    values = (row["ours"].get(experiment.measures[0].title) for row in rows)
    return [value for value in values if value is not None]


def _cell(experiment: Experiment, rows: Sequence[Row], seeds: int) -> str:
    """The numbers of the seeds that were run, and their count if it is below `seeds`; if all of them solved the task,
    also the time in seconds."""
    values, solved = _values(experiment, rows), [row for row in rows if row["state"] == "solved"]
    if not values:
        return ", ".join(dict.fromkeys(row["state"] for row in rows)) or "not run"
    if len(solved) == len(values):
        text = f"solved in {spread([row['seconds'] for row in solved], '{:.0f}'.format)} s"
    else:
        form = f"{{:.{experiment.measures[0].digits}f}}".format
        text = spread(values, form) + (f", {len(solved)} of {len(values)} solved" if solved else "")
    return text if len(values) == seeds else f"{text}, {len(values)} of {seeds} seeds run"


def produce(args: Mapping[str, Any], spec: Mapping[str, Any]) -> Outcome:
    """Writes the joint page of the experiments constraint-NAME, its numbers and its figure."""
    folder, names = output_folder(args), [f"constraint-{subject['name']}" for subject in spec["subjects"]]
    reports = [read_object(folder / f"{name}.json") for name in names]
    if not any(reports):
        raise InputError(f"no reports in {folder}: first train {', '.join(names)}")
    experiments = read_experiments(read_specs())
    columns: dict[str, tuple[Experiment, dict[Variant, list[Row]]]] = {}
    headings, seeds = ["part", "value"], []
    for subject, name, report in zip(spec["subjects"], names, reports, strict=True):
        experiment = experiments[name]
        rows = _rows(experiment, subject["nonlinearity"], report)
        columns[subject["title"]] = experiment, rows
        # the largest number of seeds that were run for a variant
        seeds.append(max(len(_values(experiment, of_seeds)) for of_seeds in rows.values()))
        fewer = f", {seeds[-1]} of {spec['seeds']} seeds" if seeds[-1] not in (0, spec["seeds"]) else ""
        headings.append(subject["title"] + fewer)
    variants = [*columns[spec["subjects"][-1]["title"]][1]][:-1]  # all but its own non-linearity
    first = next(i for i, variant in enumerate(variants) if variant[0] == NONLINEARITY)
    variants.insert(first + 3, (NONLINEARITY, "modrelu"))
    cells, numbers, shown = [], [], []
    for variant in variants:
        of_tasks = [(experiment, rows[variant]) for experiment, rows in columns.values()]
        cells.append([*variant, *(_cell(*each, seeds=count) for each, count in zip(of_tasks, seeds, strict=True))])
        ours = ([row["ours"] for row in rows] for _, rows in of_tasks)
        titles = (subject["name"] for subject in spec["subjects"])
        numbers.append({"part": variant[0], "value": variant[1], **dict(zip(titles, ours, strict=True))})
        shown += [row.get("machine") for _, rows in of_tasks for row in rows]
    values = {
        title: {variant: _values(experiment, rows[variant]) for variant in variants}
        for title, (experiment, rows) in columns.items()
    }
    figure = drawn(folder / f"{spec['name']}.png", lambda plots: plots.compare_parts(values, spec["title"]))
    pages = ", ".join(f"[{name}]({name}.md)" for name in names)
    text = [*picture(spec["title"], figure), *table(headings, cells), "", paragraph(experiments[names[0]].note), ""]
    text += [paragraph(f"Commands and progress of every run: {pages}."), ""]
    text += [f"{machines(shown)}; {max(report['date'] for report in reports if report)}."]
    return publish(folder, spec, args.get("quick", False), text, numbers, figure), {}
