"""Our numbers next to the published ones: tables as Markdown and JSON, figures as PNG.

A row of the JSON file holds everything that the table and the figure show of a run, with thinned curves.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orthokern.diagnostics.runs import RunRecord, load_run, number_at
from orthokern.errors import InputError
from orthokern.reproduce import page
from orthokern.reproduce.runner import Plan
from orthokern.reproduce.spec import Experiment, Measure, Run, is_planned, named_settings, planned

Row = dict[str, Any]

# ---- numbers of a run ------------------------------------------------------------------------------------------------


def _seconds_per_1000(record: RunRecord) -> float | None:
    """Computed from the median iteration, which excludes the warm-up and the time of checkpoints."""
    times = [ms for r in record.records if (ms := number_at(r, "ms_per_iteration")) is not None]
    return statistics.median(times) if len(times) > 5 else None  # ms per iteration are seconds per 1000


def _epochs_to_99(record: RunRecord) -> float | None:
    """Epochs of 100 batches until the accuracy of ten consecutive training batches, which are new data, was 99 %."""
    streak = 0
    for r in record.records:
        streak = streak + 1 if (number_at(r, "accuracy") or 0.0) >= 0.99 else 0
        if streak == 10:
            return float(r["iteration"]) / 100.0
    held_out = [r for r in record.records if (number_at(r, "held_out_accuracy") or 0.0) >= 0.99]
    return float(held_out[0]["iteration"]) / 100.0 if held_out else None


def _success(record: RunRecord) -> float | None:
    """Whether a run is a success so far, as defined by its task; a run that diverged is not."""
    return 0.0 if record.result.get("diverged") else record.last("held_out_success")


def _iterations_to_goal(record: RunRecord) -> float | None:
    """Training iterations until the run's goal was reached on held-out data."""
    if not record.result.get("reached") or record.settings.get("goal") is None:
        return None
    return number_at(record.result, "iteration")


QUANTITIES: dict[str, Callable[[RunRecord], float | None]] = {
    "seconds_per_1000": _seconds_per_1000,
    "epochs_to_99": _epochs_to_99,
    "iterations_to_goal": _iterations_to_goal,
    "success": _success,
}


def _measured(measure: Measure, record: RunRecord) -> float | None:
    if measure.quantity in QUANTITIES:
        value = QUANTITIES[measure.quantity](record)
    elif measure.quantity.startswith("test_"):
        value = record.tested.get(measure.quantity.removeprefix("test_"))
    else:
        name = measure.quantity.removeprefix("best_")
        values = [x for r in record.records if (x := number_at(r, f"held_out_{name}")) is not None]
        value = (max if measure.higher_is_better else min)(values) if values else None
    return None if value is None else float(value) * measure.scale


# ---- figures ---------------------------------------------------------------------------------------------------------

# kind -> function of orthokern.diagnostics.plots, and a regular expression: the fields of the records that it shows
FIGURES = {
    "curves": ("compare_curves", ""),
    "gradients": ("compare_gradients", r"(last_)?grad_norm_through_time"),
    "dynamics": ("compare_dynamics", "spectral_radius|orthogonality_error_of_w|recurrent_grad_norm|held_out_accuracy"),
    "spectrum": ("compare_spectra", "spectrum"),
    "stability": ("compare_stability", r"grad_norm|jacobian_radius(_l\d+)?"),
}
POINTS, LISTS = 300, 100  # of a curve in a JSON file, at most; LISTS if its values are lists or distributions
# settings that figures and reports read, besides those that the command line names
_KEPT = {"accumulate", "batch", "epochs", "iterations", "iterations_per_epoch", "minutes", "model", "seed", "T"}


def _shown(experiment: Experiment, record: RunRecord) -> Row:
    """The data of a run in the figure of an experiment: field -> thinned curve, pairs of iteration and value."""
    if experiment.figure is None:
        return {}
    curves: dict[str, list[list[Any]]] = {}
    if experiment.figure == "curves":
        at, values = record.series(experiment.quantity)
        parts = np.array_split(np.arange(len(at)), min(POINTS, max(1, len(at))))
        means = [[float(at[part].mean()), float(values[part].mean())] for part in parts if len(part)]
        curves = {experiment.quantity: means}
    pattern = FIGURES[experiment.figure][1]
    for field in dict.fromkeys(key for r in record.records for key in r if re.fullmatch(pattern, key)):
        having = [r for r in record.records if field in r]
        points = LISTS if isinstance(having[0][field], list | dict) else POINTS
        parts = [part.tolist() for part in np.array_split(np.arange(len(having)), min(points, len(having)))]
        if "norm" in field or "radius" in field:  # a peak of these may last one iteration
            chosen = [max((having[i] for i in part), key=lambda r: number_at(r, field) or 0.0) for part in parts]
        else:
            chosen = [having[part[-1]] for part in parts]
        curves[field] = [[r["iteration"], r[field]] for r in chosen]
    if "last_grad_norm_through_time" in curves:  # drawn instead of the gradient of the whole loss
        curves.pop("grad_norm_through_time", None)
    facts = {"task": record.task, "baseline": record.config.get("baseline"), "time_steps": record.time_steps}
    return {**facts, "curves": curves}


def figure_name(experiment: Experiment, labels: Mapping[str, str]) -> str:
    """The name of a run in the figure, from the cells of its row: "0.1, orthogonal"; "" if the figure shows
    settings."""
    return ", ".join(text for heading in experiment.named_by if (text := labels.get(heading)))


def _draw(experiment: Experiment, title: str, records: Sequence[RunRecord], plots: Any) -> Any:
    """The figure of an experiment, by the functions of `plots`."""
    draw = getattr(plots, FIGURES[str(experiment.figure)][0])
    options: dict[str, Any] = {"legend": experiment.legend, "title": title}
    if experiment.named_by:
        options["legend_title"] = ", ".join(experiment.named_by)
    if experiment.figure == "stability":
        return draw(records, x="iteration", **options)
    if experiment.figure == "curves":
        return draw(records, experiment.quantity, panel=experiment.panel, **options)
    return draw(records, **options)


# ---- rows ------------------------------------------------------------------------------------------------------------


def trained_for(settings: Mapping[str, Any], done: int, plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The option for the length of a run, or () if the run has the length of its command line."""
    if settings.get("epochs"):
        per_epoch = settings.get("iterations_per_epoch")
        epochs = max(settings["epochs"], math.ceil(done / per_epoch) if per_epoch else 0)
        return () if epochs == plan.get("epochs") else ("--epochs", str(epochs))
    iterations = max(settings.get("iterations") or 0, done)
    return () if iterations == plan.get("iterations") else ("--iterations", str(iterations))


def machine_of(config: Mapping[str, Any]) -> str:
    """The machine of a run, from its config.json."""
    machine, settings = config.get("machine"), config.get("settings", {})
    processor = machine.get("processor", "unknown") if isinstance(machine, dict) else "unknown"
    if settings.get("device") != "cpu":
        return f"a GPU beside {processor}"
    return f"{processor}, {settings.get('threads')} thread{'' if settings.get('threads') == 1 else 's'}"


def _row(experiment: Experiment, run: Run, plan: Plan) -> tuple[Row, RunRecord | None]:
    """One row: labels, published and measured numbers, progress of the run, its command, and what the figure shows; and
    the run, if there is one."""
    settings = planned(run, plan.quick)
    row: Row = {"name": run.name, "group": run.group, "published": dict(run.published), "labels": labels(run, settings)}

    def command(length: Sequence[str]) -> str:
        return f"python -m orthokern.tasks.{run.task} {' '.join(plan.options(run, length))}"

    try:
        record = load_run(plan.run_folder(run))
    except InputError:
        state = "damaged" if plan.begun(run) else "not run"
        return row | {"ours": {}, "command": command(plan.longer), "state": state}, None
    if not is_planned(record.settings, run, plan.quick):
        return row | {"ours": {}, "command": command(plan.longer), "state": "other settings"}, None
    last = record.records[-1] if record.records else {}
    done = last.get("iteration", 0)
    per_epoch, epoch = record.settings.get("iterations_per_epoch"), number_at(last, "epoch")
    kept = _KEPT | named_settings(run, plan.quick).keys() | {*(experiment.legend or ()), experiment.panel}
    row |= {
        "ours": {measure.title: _measured(measure, record) for measure in experiment.measures},
        "command": command(trained_for(record.settings, done, settings)),
        "iterations": done,
        "epochs": done / per_epoch if epoch is None and per_epoch else epoch,
        "seconds": number_at(last, "seconds"),
        "settings": {name: value for name, value in record.settings.items() if name in kept},
        "machine": machine_of(record.config),
    }
    if record.result.get("diverged"):
        row["state"] = "diverged"
    elif record.result:
        # in a task without a goal, "reached" means that the learning-rate schedule has ended
        solved = record.result.get("reached") and record.settings.get("goal") is not None
        row["state"] = "solved" if solved else "done"
    else:
        row["state"] = "unfinished"
    named = replace(record, label=figure_name(experiment, row["labels"]))
    return page.rounded(row | _shown(experiment, record)), named


def labels(run: Run, settings: Mapping[str, Any]) -> dict[str, str]:
    """The labels of a run with these settings."""

    def text(label: str) -> str:
        return str(settings[label.removeprefix("--").replace("-", "_")]) if label.startswith("--") else label

    return {heading: text(label) for heading, label in run.labels.items()}


# ---- the table -------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int, plus: bool = False) -> str:
    if value is None:
        return "–"
    form = f".{digits}f" if abs(value) < 1e6 else ".1e"  # the latter for a run that diverged
    return format(value, f"+{form}" if plus else form)


def spread(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """A single number as it is; for several numbers, the median and the range."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle, low, high = (form(function(known)) for function in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _cells(experiment: Experiment, group: Sequence[Row], headings: Sequence[str], published: set[str]) -> list[str]:
    """One row of the table: the runs of a group, which differ in their seed."""
    cells = [group[0]["labels"].get(heading, "") for heading in headings]
    for measure in experiment.measures:
        theirs, ours = group[0]["published"].get(measure.title), [row["ours"].get(measure.title) for row in group]
        numbers = [value for value in ours if value is not None]
        middle = (statistics.fmean if measure.rate else statistics.median)(numbers) if numbers else None
        form = partial(_number, digits=measure.digits)
        text = form(middle) if measure.rate else spread(ours, form)
        if measure.title in published:
            difference = None if theirs is None or middle is None else middle - theirs
            cells += [_number(theirs, measure.digits), text, _number(difference, measure.digits, plus=True)]
        else:
            cells.append(text)
    epochs = any(row.get("epochs") is not None for row in group)
    counted, exact = ("epochs", "{:.4g}") if epochs else ("iterations", "{:.0f}")
    cells.append(spread([row.get(counted) for row in group], exact.format))
    cells.append(spread([row.get("seconds") for row in group], "{:.0f}".format))
    states = [row["state"] for row in group]
    counts = [f"{states.count(state)} of {len(states)} {state}" for state in dict.fromkeys(states)]
    return [*cells, states[0] if len(states) == 1 else ", ".join(counts)]


def markdown(experiment: Experiment, summary: Row) -> str:
    """The page of an experiment: table, note, commands and conditions."""
    rows: list[Row] = summary["rows"]
    headings = list(dict.fromkeys(heading for row in rows for heading in row["labels"]))
    published = {title for row in rows for title in row["published"]}  # unpublished measures have one column
    columns = list(headings)
    for measure in experiment.measures:
        compared = [f"published {measure.title}", "ours", "difference"]
        columns += compared if measure.title in published else [measure.title]
    columns += ["epochs" if any(row.get("epochs") for row in rows) else "iterations", "seconds", "state"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("group") or row["name"], []).append(row)
    scale = " Scaled down (`--quick`): compare the order of the rows, not the numbers." if summary["quick"] else ""
    rates = "".join(f"; of {measure.title} the mean" for measure in experiment.measures if measure.rate)
    seeds = {row["settings"].get("seed") for row in rows if "settings" in row}
    several = f" Several seeds: median, and the range in parentheses{rates}." if len(groups) < len(rows) else ""
    single = f" Each row is one run, with seed {seeds.pop()}." if len(seeds) == 1 else ""
    text = [f"# {experiment.name}: {summary['title']}", "", page.paragraph(f"{experiment.source}.{scale}"), ""]
    text += [page.paragraph(page.directions(experiment.measures) + (several or single)), ""]
    text += [*page.table(columns, (_cells(experiment, group, headings, published) for group in groups.values())), ""]
    text += [f"![{summary['title']}]({summary['figure']})", ""] if summary["figure"] else []
    text += [page.paragraph(experiment.note), ""] if experiment.note else []
    trained = []
    for group in groups.values():  # for several seeds, the command of the first and then the last seed
        last = group[-1]["command"].split("--seed ")[-1].split()[0]
        others = "" if len(group) == 1 else f", and so to `--seed {last}`"
        trained.append((", ".join(group[0]["labels"].values()), f"`{group[0]['command']}`{others}"))
    text += page.commands(trained)
    text += ["", f"{summary['versions']}; {page.machines(row.get('machine') for row in rows)}; {summary['date']}."]
    return "\n".join(text) + "\n"


def report(experiment: Experiment, plan: Plan) -> list[Path]:
    """Writes the table (Markdown and JSON) and the figure (PNG) of an experiment next to the run folders."""
    rows, runs = zip(*(_row(experiment, run, plan) for run in experiment.runs), strict=True)
    plan.folder.mkdir(parents=True, exist_ok=True)
    title = experiment.title.format_map(planned(experiment.runs[0], plan.quick))
    figure = None
    records = [record for record in runs if record is not None and record.records]
    if experiment.figure is not None and records:
        figure = page.drawn(plan.folder / f"{experiment.name}.png", partial(_draw, experiment, title, records))
    summary = {
        "experiment": experiment.name,
        "title": title,
        "source": experiment.source,
        "quick": plan.quick,
        **page.dated(),
        "figure": None if figure is None else figure.name,
        "rows": rows,
    }
    return page.written(plan.folder, experiment.name, markdown(experiment, summary), summary, figure)
