"""Experiments: runs of our tasks, with the numbers that a paper reports for them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from orthokern._files import count
from orthokern.commandline import Settings
from orthokern.training.options import first_defaults
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
    """

    name: str
    task: str
    options: tuple[str, ...]
    quick: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    group: str = ""


def words(options: str) -> tuple[str, ...]:
    """A command line as `Run` takes it."""
    return tuple(options.split())


def over_seeds(run: Run, seeds: Iterable[int]) -> tuple[Run, ...]:
    """The run once for each seed, as one row of the table: the median over the seeds, and the range.

    Example:
        >>> run = Run("copy-200", "copy", ("--T", "200"))
        >>> [(each.name, each.options) for each in over_seeds(run, (0, 1))]
        [('copy-200-seed-0', ('--T', '200', '--seed', '0')), ('copy-200-seed-1', ('--T', '200', '--seed', '1'))]
    """
    return tuple(
        replace(run, name=f"{run.name}-seed-{seed}", options=(*run.options, "--seed", str(seed)), group=run.name)
        for seed in seeds
    )


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: as on the command line.
        title: one line; "{NAME}" for a setting of its first run.
        source: paper and table or figure of the published numbers.
        runs: the training runs.
        measures: the columns of numbers.
        figure: how the runs are drawn: "curves", "gradients", "spectrum", "stability", "dynamics" or None.
        quantity: for "curves": the quantity to draw.
        panel: for "curves": a setting; there is one panel for each of its values. None: one panel.
        legend: the settings in legends and titles of panels; None for those in which the runs differ.
        named_by: for "curves" and "dynamics": headings of `Run.labels`, whose cells name the runs in the figure as in
            the table, in place of `legend`; the runs of a group then have one name and one colour. (): `legend` is
            used.
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
    legend: tuple[str, ...] | None = None
    named_by: tuple[str, ...] = ()
    data: str | None = None
    epochs: bool = True
    alone: bool = False
    note: str = ""

    def titled(self, settings: Settings) -> str:
        """The title, given the settings of the first run."""
        return self.title.format_map(settings)


# ---- command lines ---------------------------------------------------------------------------------------------------


def each_once(options: Sequence[str]) -> tuple[str, ...]:
    """A command line without the options that later ones override."""
    given: dict[str, list[str]] = {}
    name = ""
    for text in options:
        if text.startswith("--"):
            name, given[text] = text, []
        else:
            given[name].append(text)
    return tuple(text for name, values in given.items() for text in (name, *values))


def _task(run: Run) -> Any:
    return importlib.import_module(f"orthokern.tasks.{run.task}")


def _given(run: Run, quick: bool) -> Settings:
    """The settings that the command line of a run names, itself or by a preset."""
    command = _task(run).COMMAND
    given = command.parser().parse([*run.options, *(run.quick if quick else ())])
    return {**command.presets.get(given.get("preset"), {}), **given}


def planned(run: Run, quick: bool) -> Settings:
    """The settings of a run according to its command line. Settings that the task derives from others may be None."""
    given = _given(run, quick)
    if "iterations" in given:  # in place of the default number of epochs
        given = {"epochs": None, **given}
    return {**_task(run).DEFAULTS, **given}


def is_planned(settings: Settings, run: Run, quick: bool) -> bool:
    """Whether these settings are those of the command line of a run, but for its length. The command lines of an
    experiment may have changed since, and a row must not show one beside the numbers of another. {}, the settings of a
    row that was not run, are those of every command line.
    """
    task, given = _task(run), _given(run, quick)
    plan, parser, earlier = {**task.DEFAULTS, **given}, task.COMMAND.parser(), first_defaults(task.COMMAND.options)
    derived = {name for name, value in plan.items() if value == "auto" or (value is None and name not in given)}
    compared = plan.keys() - FREE_SETTINGS - derived - {"device", "preset", "backend"}
    compared = {name for name in compared if parser.in_effect(name, SimpleNamespace(**plan))}
    # `earlier`: the JSON files of docs/results hold runs that are older than some options
    return not settings or all(settings.get(name, earlier.get(name)) == plan[name] for name in compared)


def trained_for(settings: Settings, done: int, plan: Settings) -> tuple[str, ...]:
    """The option for the length of a run, or () if the run has the length of its command line.

    Args:
        settings: the settings in config.json.
        done: iterations done, which may be more: some runs in the JSON files of docs/results were continued before
            config.json took the new length.
        plan: the settings returned by `planned`.
    """
    wanted = count(settings.get("epochs"))
    if wanted is not None:
        per_epoch = count(settings.get("iterations_per_epoch"), 1)
        epochs = max(wanted, math.ceil(done / per_epoch) if per_epoch else 0)
        return () if epochs == plan.get("epochs") else ("--epochs", str(epochs))
    iterations = max(count(settings.get("iterations")) or 0, done)
    return () if iterations == plan.get("iterations") else ("--iterations", str(iterations))
