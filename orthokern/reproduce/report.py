"""Our numbers beside the published ones: tables as Markdown and JSON, figures as PNG."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orthokern._files import count, read_object
from orthokern._version import __version__
from orthokern.diagnostics.runs import RunRecord, load_run, number_at
from orthokern.errors import InputError
from orthokern.reproduce.page import commands, directions, drawn, paragraph, table, written
from orthokern.reproduce.runner import Plan, is_finished
from orthokern.reproduce.spec import Experiment, Measure, Run, each_once, is_planned, planned, trained_for

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
CURVE_POINTS = 100  # of a run's curve in the JSON file, at most; also of its lists and distributions
RECORD_POINTS = 1000  # of a number that is not thinned where it may have peaks of one iteration
_WITHOUT_NUMBERS = ("not run", "damaged", "other settings")


def _measured(measure: Measure, record: RunRecord, result: dict[str, Any]) -> float | None:
    if measure.quantity in QUANTITIES:
        value = QUANTITIES[measure.quantity](record)
    elif measure.quantity.startswith("test_"):
        tests = result.get("test")
        value = number_at(tests, measure.quantity.removeprefix("test_")) if isinstance(tests, dict) else None
    else:
        name = measure.quantity.removeprefix("best_")
        values = [x for r in record.records if (x := number_at(r, f"held_out_{name}")) is not None]
        value = (max if measure.higher_is_better else min)(values) if values else None
    return None if value is None else float(value) * measure.scale


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    """How the runs of an experiment are drawn."""

    draw: str  # a function of orthokern.diagnostics.plots
    fields: str  # a regular expression: the fields of the records that it shows, beside those of `quantity`


FIGURES = {
    "curves": _Figure("compare_curves", ""),
    "gradients": _Figure("compare_gradients", r"(last_)?grad_norm_through_time"),
    "dynamics": _Figure(
        "compare_dynamics", "spectral_radius|orthogonality_error_of_w|recurrent_grad_norm|held_out_accuracy"
    ),
    "spectrum": _Figure("compare_spectra", "spectrum"),
    "stability": _Figure("compare_stability", r"grad_norm|jacobian_radius(_l\d+)?"),
}


def _rounded(value: Any, digits: int = 6) -> Any:
    """The numbers of a record's field with six digits; of a spectrum with nine, as its axis may begin at 0.999999."""
    if isinstance(value, dict):
        return {name: _rounded(inner, 9) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner, digits) for inner in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _shown(experiment: Experiment, record: RunRecord) -> dict[str, Any]:
    """What the figure of an experiment shows of a run, so that its row alone can be drawn; see `_drawn_again`."""
    if experiment.figure is None:
        return {}
    shown: dict[str, Any] = {"task": record.task, "baseline": record.config.get("baseline")}
    if experiment.figure == "curves":
        at, values = record.series(experiment.quantity)
        stride = len(at) // CURVE_POINTS + 1
        points = zip(at[::stride], values[::stride], strict=True)
        return shown | {"curve": [[int(t), _rounded(float(v))] for t, v in points]}
    pattern = re.compile(FIGURES[experiment.figure].fields)
    kept: dict[int, dict[str, Any]] = {}
    for field in dict.fromkeys(key for r in record.records for key in r if pattern.fullmatch(key)):
        having = [r for r in record.records if field in r]
        most = CURVE_POINTS if isinstance(having[0][field], (list, dict)) else RECORD_POINTS
        for r in having[:: len(having) // most + 1]:
            kept.setdefault(r["iteration"], {"iteration": r["iteration"]})[field] = _rounded(r[field])
    return shown | {"time_steps": record.time_steps, "records": [kept[t] for t in sorted(kept)]}


def _drawn_again(experiment: Experiment, row: dict[str, Any], plan: Plan) -> RunRecord | None:
    """The run of a row that an earlier report wrote, with what `_shown` kept of it; None if it has nothing."""
    records = row.get("records") or [{"iteration": t, experiment.quantity: value} for t, value in row.get("curve", ())]
    if not records:
        return None
    config = {name: row.get(name) for name in ("task", "baseline", "settings", "time_steps")}
    return RunRecord(plan.folder / row["name"], config, row["settings"], row["task"], records)


def _earlier(name: str, plan: Plan) -> dict[str, Any]:
    """The JSON file of an earlier report of the experiment `name` at this scale; {} without one."""
    path = plan.folder / f"{name}.json"
    summary = read_object(path) if path.exists() else {}
    return summary if summary.get("experiment") == name and summary.get("quick") == plan.quick else {}


def earlier_rows(name: str, plan: Plan) -> dict[str, dict[str, Any]]:
    """The rows of trained runs in the JSON file of an earlier report, by name: a run folder may be on another machine.

    {} if there is no such file of the experiment `name` at this scale.

    Raises:
        InputError: the file is damaged.
    """
    summary = _earlier(name, plan)
    if not summary:
        return {}
    try:
        return {row["name"]: row for row in summary["rows"] if row["state"] not in _WITHOUT_NUMBERS}
    except (KeyError, TypeError):
        path = plan.folder / f"{name}.json"
        raise InputError(f"{path} is not a report of this program: move it away, or repair it") from None


def finished_elsewhere(experiment: Experiment, plan: Plan) -> dict[str, bool]:
    """The runs that the JSON file of an earlier report has as finished, and whose folders are not here: name -> whether
    the run is as long as planned.

    Raises:
        InputError: the file is damaged.
    """
    rows = earlier_rows(experiment.name, plan)
    return {
        run.name: _row_is_finished(row, plan.length(run))
        for run in experiment.runs
        if (row := rows.get(run.name)) is not None
        and not (plan.run_folder(run) / "config.json").exists()
        and is_planned(row.get("settings", {}), run, plan.quick)
        and _row_is_finished(row, plan.longer)
    }


def _row_is_finished(row: dict[str, Any], longer: Sequence[str]) -> bool:
    state = row["state"]
    result = {"iteration": row.get("iterations"), "seconds": row.get("seconds"), "diverged": state == "diverged"}
    return state != "unfinished" and is_finished(
        row.get("settings", {}), {**result, "reached": state == "solved"}, longer
    )


def _row(
    experiment: Experiment, run: Run, plan: Plan, earlier: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], RunRecord | None]:
    """One row: labels, published and measured numbers, progress of the run, and its command; and the records."""
    folder = plan.run_folder(run)
    intended = planned(run, plan.quick)
    row: dict[str, Any] = {
        "name": run.name, "group": run.group, "published": dict(run.published), "ours": {},
        "labels": _labels(run, intended), "command": _command(run, plan, plan.longer),
    }  # fmt: skip
    try:
        record = load_run(folder)
    except InputError:
        if (folder / "config.json").exists():
            return {**row, "state": "damaged"}, None
        known = earlier.get(run.name)
        if known is None or not is_planned(known.get("settings", {}), run, plan.quick):
            return {**row, "state": "not run"}, None
        length = trained_for(known.get("settings", {}), count(known.get("iterations")) or 0, intended)
        known = {**known, "group": run.group, "command": _command(run, plan, length)}
        return known, _drawn_again(experiment, known, plan)
    if not is_planned(record.settings, run, plan.quick):
        return {**row, "state": "other settings"}, None
    row["labels"] = _labels(run, {**intended, **record.settings})
    done = record.records[-1]["iteration"] if record.records else 0
    row["command"] = _command(run, plan, trained_for(record.settings, done, intended))
    result = record.result
    for measure in experiment.measures:
        row["ours"][measure.title] = _measured(measure, record, result)
    last = record.records[-1] if record.records else {}
    row["iterations"] = last.get("iteration", 0)
    per_epoch = count(record.settings.get("iterations_per_epoch"), 1)
    epoch = number_at(last, "epoch")
    row["epochs"] = row["iterations"] / per_epoch if epoch is None and per_epoch else epoch
    row["seconds"] = number_at(last, "seconds")
    row["settings"] = {name: value for name, value in record.settings.items() if name != "data"}  # a folder here
    machine = record.config.get("machine")
    processor = machine.get("processor", "unknown") if isinstance(machine, dict) else "unknown"
    threads = record.config.get("threads")
    cpu = f"{processor}, {threads} thread{'' if threads == 1 else 's'}"
    row["machine"] = cpu if record.settings.get("device") == "cpu" else f"a GPU beside {processor}"
    if result.get("diverged"):
        row["state"] = "diverged"
    elif result:
        # in a task without a goal, "reached" means that the learning-rate schedule has ended
        row["state"] = "solved" if result.get("reached") and record.settings.get("goal") is not None else "done"
    else:
        row["state"] = "unfinished"
    return row | _shown(experiment, record), record


def _labels(run: Run, settings: dict[str, Any]) -> dict[str, str]:
    """The text of a label for a run with these settings."""

    def text(label: str) -> str:
        return str(settings[label.removeprefix("--").replace("-", "_")]) if label.startswith("--") else label

    return {heading: text(label) for heading, label in run.labels.items()}


def _command(run: Run, plan: Plan, length: tuple[str, ...]) -> str:
    options = each_once((*run.options, *(run.quick if plan.quick else ()), *length))
    return f"python -m orthokern.tasks.{run.task} {' '.join(options)}"


def _number(value: float | None, digits: int, plus: bool = False) -> str:
    if value is None:
        return "–"
    form = f".{digits}f" if abs(value) < 1e6 else ".1e"  # that of a run that diverged
    return format(value, f"+{form}" if plus else form)


def _middle(measure: Measure, values: Sequence[float | None]) -> float | None:
    """The number of several seeds that is compared with the published one."""
    known = [value for value in values if value is not None]
    return (statistics.fmean if measure.rate else statistics.median)(known) if known else None


def spread(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """One number as it is; of several the median and the range."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle, low, high = (form(function(known)) for function in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows that stand in one row of the table: those of a group, which differ in their seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group") or row["name"], []).append(row)
    return list(groups.values())


def _state(group: Sequence[dict[str, Any]]) -> str:
    states = [row["state"] for row in group]
    counts = [f"{states.count(state)} of {len(states)} {state}" for state in dict.fromkeys(states)]
    return states[0] if len(states) == 1 else ", ".join(counts)


def _cells(
    experiment: Experiment, group: Sequence[dict[str, Any]], labels: Sequence[str], published: set[str]
) -> list[str]:
    """One row of the table."""
    cells = [group[0]["labels"].get(heading, "") for heading in labels]
    for measure in experiment.measures:
        theirs, ours = group[0]["published"].get(measure.title), [row["ours"].get(measure.title) for row in group]
        middle = _middle(measure, ours)
        form = partial(_number, digits=measure.digits)
        text = form(middle) if measure.rate else spread(ours, form)
        if measure.title in published:
            difference = None if theirs is None or middle is None else middle - theirs
            cells += [_number(theirs, measure.digits), text, _number(difference, measure.digits, plus=True)]
        else:
            cells.append(text)
    if any(row.get("epochs") is not None for row in group):
        cells.append(spread([row.get("epochs") for row in group], "{:.4g}".format))
    else:
        cells.append(spread([row.get("iterations") for row in group], "{:.0f}".format))
    return [*cells, spread([row.get("seconds") for row in group], "{:.0f}".format), _state(group)]


def _one_seed(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence for a table whose rows are one run each; "" if their seeds differ or nothing was trained."""
    seeds = {row["settings"].get("seed") for row in rows if "settings" in row}
    return f" Each row is one run, with seed {seeds.pop()}." if len(seeds) == 1 else ""


def _command_of(group: Sequence[dict[str, Any]]) -> str:
    """The command of a row; of several seeds the first one's, with the others named behind it."""
    last = group[-1]["command"].split("--seed ")
    others = "" if len(group) == 1 else f", and so to `--seed {last[-1].split()[0]}`"
    return f"`{group[0]['command']}`{others}"


def markdown(experiment: Experiment, summary: dict[str, Any]) -> str:
    """The page of an experiment: table, note, commands and conditions.

    Args:
        experiment: which.
        summary: what its JSON file holds.
    """
    rows: list[dict[str, Any]] = summary["rows"]
    labels = list(dict.fromkeys(heading for row in rows for heading in row["labels"]))
    published = {title for row in rows for title in row["published"]}  # a measure that no paper has is one column
    headings = list(labels)
    for measure in experiment.measures:
        compared = [f"published {measure.title}", "ours", "difference"]
        headings += compared if measure.title in published else [measure.title]
    headings += ["epochs" if any(row.get("epochs") for row in rows) else "iterations", "seconds", "state"]
    groups = _groups(rows)
    lines = table(headings, (_cells(experiment, group, labels, published) for group in groups))
    scale = " Scaled down (`--quick`): compare the order of the rows, not the numbers." if summary["quick"] else ""
    rates = "".join(f"; of {measure.title} the mean" for measure in experiment.measures if measure.rate)
    spread = f" Several seeds: median, and the range in parentheses{rates}." if len(groups) < len(rows) else ""
    text = [f"# {experiment.name}: {summary['title']}", "", paragraph(f"{experiment.source}.{scale}"), ""]
    text += [paragraph(directions(experiment.measures) + (spread or _one_seed(rows))), "", *lines, ""]
    if summary["figure"]:
        text += [f"![{summary['title']}]({summary['figure']})", ""]
    if experiment.note:
        text += [paragraph(experiment.note), ""]
    text += commands((", ".join(group[0]["labels"].values()), _command_of(group)) for group in groups)
    machines = ", ".join(sorted({row["machine"] for row in rows if "machine" in row})) or "nothing trained yet"
    text += ["", f"{summary['versions']}; {machines}; {summary['date']}."]
    return "\n".join(text) + "\n"


# ---- everything ------------------------------------------------------------------------------------------------------


def report(experiment: Experiment, plan: Plan) -> list[Path]:
    """Writes the table (Markdown and JSON) and the figure (PNG) of an experiment next to the run folders.

    Rows of runs whose folders are not there are taken from the JSON file of an earlier report, with their curves.

    Args:
        experiment: the experiment.
        plan: holds the folder of the runs.

    Returns:
        The files written. A figure that cannot be drawn is left out, with a warning on standard error.

    Raises:
        InputError: the JSON file of an earlier report is damaged.
        OSError: a file cannot be written.
    """
    earlier = earlier_rows(experiment.name, plan)
    found = [_row(experiment, run, plan, earlier) for run in experiment.runs]
    rows = [row for row, _ in found]
    plan.folder.mkdir(parents=True, exist_ok=True)
    title = experiment.titled(rows[0].get("settings") or planned(experiment.runs[0], plan.quick))
    records = [replace(record, label=_name(experiment, row["labels"])) for row, record in found if record is not None]
    figure = None
    if experiment.figure is not None and records:
        figure = drawn(plan.folder / f"{experiment.name}.png", partial(_draw, experiment, title, records))
    # A page that is only written again keeps the date of its numbers.
    again = bool(earlier) and [row for row in rows if row["state"] not in _WITHOUT_NUMBERS] == list(earlier.values())
    now = {"versions": f"orthokern {__version__}, torch {torch.__version__}", "date": time.strftime("%Y-%m-%d")}
    when = _earlier(experiment.name, plan) if again else now
    summary = {
        "experiment": experiment.name, "title": title, "source": experiment.source, "quick": plan.quick,
        **{name: when.get(name, text) for name, text in now.items()},
        "figure": None if figure is None else figure.name, "rows": rows,
    }  # fmt: skip
    return written(plan.folder, experiment.name, markdown(experiment, summary), summary, figure)


def _name(experiment: Experiment, labels: dict[str, str]) -> str:
    """The name of a run in the figure, from the cells of its row: "0.1, orthogonal"; "" if the figure shows
    settings."""
    return ", ".join(text for heading in experiment.named_by if (text := labels.get(heading)))


def _draw(experiment: Experiment, title: str, records: Sequence[RunRecord], plots: Any) -> Any:
    """The figure of an experiment, by the functions of `plots`."""
    draw = getattr(plots, FIGURES[str(experiment.figure)].draw)
    options: dict[str, Any] = {"legend": experiment.legend, "title": title}
    if experiment.named_by:
        options["legend_title"] = ", ".join(experiment.named_by)
    if experiment.figure == "stability":
        return draw(records, x="iteration", **options)
    if experiment.figure == "curves":
        return draw(records, experiment.quantity, panel=experiment.panel, **options)
    return draw(records, **options)
