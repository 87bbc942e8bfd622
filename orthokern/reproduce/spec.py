"""Experiments: runs of our tasks, with the numbers that a paper reports for them, read from specs/*.toml.

A file has measures by key, `[[experiment]]` tables with the fields of `Experiment`, and their `[[experiment.runs]]`.
The texts of a run are templates. An entry stands for one run for each of its `rows`, with the cells under the names in
`columns`, and for each combination of the values in `over`. A column with the key of a measure holds published numbers,
or the column that `published` names for it; `seeds` is the number of seeds; {index} counts the runs. An experiment with
`variants` stands for several: the cells under the names in its own `columns` are its fields, and are available in all
templates; the cells of `rows` are then templates, too. `from` and `matching` (a regular expression) reuse runs of an
earlier experiment. A note "= NAME" is the note of the experiment NAME.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from orthokern._files import read_toml
from orthokern.errors import InputError
from orthokern.training.state import FREE_SETTINGS


@dataclass(frozen=True)
class Measure:
    """A number to compare.

    Attributes:
        title: heading of its column, with the unit.
        quantity: "test_<name>" or "best_<name>" for a number of the test or of the best evaluation of the task, or a
            name in `report.QUANTITIES`.
        scale: factor that converts our number to the unit of the published one.
        digits: digits after the decimal point.
        higher_is_better: whether a higher number is better.
        rate: whether several seeds give one number, their mean; otherwise the median and the range.
    """

    title: str
    quantity: str
    scale: float = 1.0
    digits: int = 2
    higher_is_better: bool = True
    rate: bool = False


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: name of its folder; experiments that share a run use the same name and options for it.
        task: a module of orthokern.tasks.
        options: its command line, without --data, --out, --threads and the options in `Plan.longer`.
        quick: options that are appended with --quick, and override the others.
        labels: cells of its row, heading -> text; "--NAME" stands for the value of that option.
        published: the published numbers, title of the measure -> number; empty for a run that is not in the paper.
        group: runs of the same group differ only in their seed and share a row of the table; "" for a row of its own.
        seed: runs are trained in the order of their seeds: a command that ends early leaves a whole table.
    """

    name: str
    task: str
    options: tuple[str, ...]
    quick: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    group: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: as on the command line.
        title: one line; "{NAME}" for a setting of its first run.
        source: paper and table or figure of the published numbers.
        runs: the training runs.
        measures: the columns of numbers.
        figure: how the runs are drawn: a key of `report.FIGURES`, or None.
        quantity: for "curves": the quantity to draw.
        panel: for "curves": a setting; there is one panel for each of its values. None: one panel.
        legend: the settings in legends and titles of panels; None for those in which the runs differ.
        named_by: headings of `Run.labels`, whose cells name the runs in the figure as in the table, instead of
            `legend`; the runs of a group then have one name and one colour. (): `legend` is used.
        data: folder of the data set under --data, or None.
        epochs: whether its tasks take --epochs (else --iterations).
        alone: whether the runs are timed, and must not run in parallel.
        note: explanation under the table.
    """

    name: str
    title: str
    source: str
    runs: tuple[Run, ...]
    measures: tuple[Measure, ...]
    figure: str | None = None
    quantity: str = "held_out_accuracy"
    panel: str | None = None
    legend: Sequence[str] | None = None
    named_by: Sequence[str] = ()
    data: str | None = None
    epochs: bool = True
    alone: bool = False
    note: str = ""


def over_seeds(run: Run, seeds: int) -> Iterator[Run]:
    """The run once for each seed, as one row of the table: the median over the seeds, and the range."""
    for seed in range(seeds):
        options = (*run.options, "--seed", str(seed))
        yield replace(run, name=f"{run.name}-seed-{seed}", options=options, group=run.name, seed=seed)


# ---- the files -------------------------------------------------------------------------------------------------------


def read_specs() -> dict[str, dict[str, Any]]:
    """The content of specs/*.toml, by name of the file: the order of --help."""
    names = ("vorontsov", "oinit", "nnrnn", "kanai", "constraint")
    folder = Path(__file__).parent / "specs"
    return {name: read_toml(folder / f"{name}.toml") for name in names}


def read_experiments(specs: Mapping[str, dict[str, Any]]) -> dict[str, Experiment]:
    """The experiments of all files, by name."""
    experiments: dict[str, Experiment] = {}
    for spec in specs.values():
        measures = {key: Measure(**values) for key, values in spec["measures"].items()}
        for shared, row in ((table, row) for table in spec["experiment"] for row in table.get("variants", [()])):
            variant = dict(zip(shared.get("columns", ()), row, strict=True))
            table = {**shared, **{name: value for name, value in variant.items() if value != ""}}
            blocks = table["runs"]
            runs = tuple(run for block in blocks for run in _expanded(block, measures, experiments, variant))
            note = table.get("note", "")
            note = experiments[note[2:]].note if note.startswith("= ") else note
            columns = tuple(measures[key] for key in table["measures"])
            own = {each.name: table[each.name] for each in fields(Experiment) if each.name in table}
            experiments[table["name"]] = Experiment(**{**own, "runs": runs, "measures": columns, "note": note})
    return experiments


def _expanded(
    block: Mapping[str, Any],
    measures: Mapping[str, Measure],
    experiments: Mapping[str, Experiment],
    variant: Mapping[str, Any],
) -> Iterator[Run]:
    """The runs of an `[[experiment.runs]]` table."""
    if "from" in block:
        for run in experiments[block["from"]].runs:
            if re.search(block["matching"], run.name):
                yield replace(run, labels={**block.get("labels", {}), **run.labels})
        return
    over = block.get("over", {})
    combinations = itertools.product(block.get("rows", [()]), *over.values())
    for index, (row, *values) in enumerate(combinations):
        row = [cell.format(**variant) if isinstance(cell, str) else cell for cell in row]
        cells = dict(zip(block.get("columns", ()), row, strict=False)) | dict(zip(over, values, strict=True))
        texts = {**variant, **cells, "index": index}
        measured = {column.format(**variant): key for key, column in block.get("published", {}).items()}
        measured = {key: key for key in measures} | measured
        run = Run(
            name=block["name"].format(**texts),
            task=block["task"].format(**texts),
            options=tuple(block["options"].format(**texts).split()),
            quick=tuple(block["quick"].format(**texts).split()),
            labels={heading: text.format(**texts) for heading, text in block["labels"].items()},
            published={measures[measured[x]].title: cell for x, cell in cells.items() if x in measured and cell != ""},
        )
        seeds = cells.get("seeds", block.get("seeds"))
        yield from (run,) if seeds is None else over_seeds(run, seeds)


# ---- command lines ---------------------------------------------------------------------------------------------------


def each_once(options: Sequence[str]) -> tuple[str, ...]:
    """A command line without the options that later ones override."""
    parts = re.split(" (?=--)", " ".join(options))
    return tuple(" ".join({part.partition(" ")[0]: part for part in parts}.values()).split())


def named_settings(run: Run, quick: bool) -> dict[str, Any]:
    """The settings that the command line of a run names, itself or by a preset."""
    command = importlib.import_module(f"orthokern.tasks.{run.task}").COMMAND
    typed = command.parser().parse([*run.options, *(run.quick if quick else ())])
    settings = {**command.presets.get(typed.get("preset"), {}), **typed}
    if "iterations" in settings and "epochs" not in typed:  # instead of a number of epochs
        settings["epochs"] = None
    return settings


def planned(run: Run, quick: bool) -> dict[str, Any]:
    """The settings of a run according to its command line. Settings that the task derives from others may be None."""
    return {**importlib.import_module(f"orthokern.tasks.{run.task}").COMMAND.defaults, **named_settings(run, quick)}


def is_planned(settings: Mapping[str, Any], run: Run, quick: bool) -> bool:
    """Whether the settings of a run folder are those that the command line of a run names, except for its length."""
    named = named_settings(run, quick)
    command = importlib.import_module(f"orthokern.tasks.{run.task}").COMMAND
    try:
        completed = vars(command.complete({**settings, **named}))  # a preset may leave a value to the other settings
    except InputError:
        return False
    free = FREE_SETTINGS | {"backend", "device", "preset"}
    return all(settings.get(name) == completed[name] for name in named.keys() - free)
