"""Several runs side by side: the settings in which they differ, names for a legend, and a table."""

from collections.abc import Iterable, Sequence

import numpy as np

from orthokern.commandline import printable
from orthokern.diagnostics.runs import RunRecord
from orthokern.errors import one_of

# These come first in a label: many defaults, such as learning rates, depend on them.
_FIRST = ("model", "T")
# Settings that change how a run is executed, not what it learns. They come last in a label, and only if the other
# settings of two runs are equal.
_TECHNICAL: tuple[str, ...] = ("seed", "iterations", "device", "backend", "threads", "preset", "plots")
_TECHNICAL += ("checkpoint_every", "diagnose_every", "eval_every")
# counters of the evaluations, and constants
_NO_RESULTS = ("held_out_sequences", "held_out_reached", "held_out_success", "held_out_initial_loss")
_ABSENT = "–"


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Names of the settings that don't have the same value in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    others = [name for name in names if name not in (*_FIRST, *_TECHNICAL)]
    ordered = [name for name in (*_FIRST, *others, *_TECHNICAL) if name in names]
    values = {name: {setting_text(run, name) for run in runs} for name in ordered}
    return [name for name in ordered if len(values[name]) > 1]


def caption(text: str) -> str:
    """Text from a file, safe for a picture: unprintable characters are escaped, a dollar sign does not start a formula,
    and an underscore does not hide a label from the legend."""
    return " " * text.startswith("_") + printable(text).replace("$", "\\$")


def labels(runs: Sequence[RunRecord], names: Sequence[str] | None = None) -> list[str]:
    """A short name for each run, for example "T 200, margin 0.1": the settings `names`, by default the task, if the
    runs have several, and `telling_settings`. Runs with equal settings have the same label, followed by the name of the
    folder if `names` is None; a single run is labelled with the name of its folder. If every run has a
    `RunRecord.label`, these are returned, whatever `names` is."""
    if names is not None:
        check_settings("legend", runs, names)
    if all(run.label for run in runs):
        return [caption(run.label) for run in runs]
    several_tasks = names is None and len({run.task for run in runs}) > 1
    shown = telling_settings(runs) if names is None else names
    parts = [[run.task] * several_tasks + [f"{name} {setting_text(run, name)}" for name in shown] for run in runs]
    texts = [", ".join(part) for part in parts]
    places = [run.name if [other.name for other in runs].count(run.name) == 1 else str(run.path) for run in runs]
    return [
        caption(text if text and (names is not None or texts.count(text) == 1) else f"{text} {place}".strip())
        for text, place in zip(texts, places, strict=True)
    ]


def telling_settings(runs: Sequence[RunRecord], shown: Sequence[str] = ()) -> list[str]:
    """The differing settings that are needed, besides those that are `shown`, to distinguish the runs, in order. A
    setting that is determined by earlier ones (for example a learning rate that depends on T) is left out."""
    names: list[str] = []
    apart = [(run.task, *(setting_text(run, name) for name in shown)) for run in runs]
    for name in differing_settings(runs):
        further = [(*values, setting_text(run, name)) for values, run in zip(apart, runs, strict=True)]
        if len(set(further)) > len(set(apart)):
            names, apart = [*names, name], further
    return names


def check_settings(argument: str, runs: Sequence[RunRecord], names: Iterable[str]) -> None:
    """Raises InputError for a name that is a setting of no run."""
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    for name in names:
        one_of(argument, name, settings)


def setting_text(run: RunRecord, name: str) -> str:
    """The value of a setting as text; "–" if the run has no such setting."""
    if name not in run.settings:
        return _ABSENT
    value = run.settings[name]
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def best_held_out(run: RunRecord) -> dict[str, tuple[float, int]]:
    """The best value of each held-out number, by field: (value, iteration at which it first occurred).

    The best accuracy is the largest; the best of everything else (losses, errors, bits per character) the smallest.
    """
    best = {}
    for quantity in run.quantities:
        if quantity.startswith("held_out_") and quantity not in _NO_RESULTS:
            iterations, values = run.series(quantity)
            index = int(np.argmax(values) if "accuracy" in quantity else np.argmin(values))
            best[quantity] = (float(values[index]), int(iterations[index]))
    return best


def table(runs: Sequence[RunRecord]) -> str:
    """A Markdown table with one row per run: task, settings in which the runs differ, iterations, wall time, the best
    held-out numbers, the numbers on the test data, and the last recorded spectrum, spectral radius and orthogonality
    error. Columns without any value are left out; "–" marks a missing value."""
    columns: dict[str, list[str]] = {"run": [str(run.path) for run in runs], "task": [run.task for run in runs]}
    for name in differing_settings(runs):
        if name not in _TECHNICAL or name == "seed":
            columns[name] = [setting_text(run, name) for run in runs]
    columns["iterations"] = [str(run.records[-1]["iteration"]) if run.records else "0" for run in runs]
    columns["seconds"] = [_last(run, "seconds", "{:.1f}") for run in runs]
    best = [best_held_out(run) for run in runs]
    for name in dict.fromkeys(name for numbers in best for name in numbers):
        scale, form, unit = _unit(name)
        heading = f"best held-out {name.removeprefix('held_out_').replace('_', ' ')}{unit}, at"
        columns[heading] = [
            f"{form.format(scale * numbers[name][0])}, {numbers[name][1]}" if name in numbers else _ABSENT
            for numbers in best
        ]
    tests = [run.tested for run in runs]
    for name in dict.fromkeys(name for test in tests for name in test):
        scale, form, unit = _unit(name)
        columns[f"test {name}{unit}"] = [form.format(scale * test[name]) if name in test else _ABSENT for test in tests]
    for part in ("mean", "std", "min", "max"):
        columns[f"s {part}"] = [_last(run, f"spectrum.{part}", "{:.5g}") for run in runs]
    columns["spectral radius"] = [_last(run, "spectral_radius", "{:.5g}") for run in runs]
    columns["orthogonality error"] = [_last(run, "orthogonality_error", "{:.2g}") for run in runs]
    return _markdown({name: cells for name, cells in columns.items() if any(cell != _ABSENT for cell in cells)})


def _unit(name: str) -> tuple[int, str, str]:
    """Scale, format and unit of a number in the table: accuracies are in percent."""
    return (100, "{:.2f}", " (%)") if "accuracy" in name else (1, "{:.4g}", "")


def _last(run: RunRecord, quantity: str, form: str) -> str:
    value = run.last(quantity)
    return _ABSENT if value is None else form.format(value)


def _markdown(columns: dict[str, list[str]]) -> str:
    """Pads the cells of each column to equal width."""
    padded = []
    for name, cells in columns.items():
        texts = [printable(cell).replace("|", "\\|") for cell in (name, *cells)]
        width = max(3, *map(len, texts))
        head, *rest = (text.ljust(width) for text in texts)
        padded.append([head, "-" * width, *rest])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*padded, strict=True))
