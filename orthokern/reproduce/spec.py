"""What an experiment is: runs of our tasks, and the numbers that a paper publishes for them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orthokern._files import count
from orthokern.commandline import Settings

__all__ = ["Experiment", "Measure", "Run", "each_once", "over_seeds", "planned", "trained_for"]


@dataclass(frozen=True)
class Measure:
    """A number to compare.

    Attributes:
        title: its column's heading, unit included.
        quantity: "test_<name>" or "best_<name>", of what the task's test or best evaluation reports, or a name of
            `report.QUANTITIES`.
        scale: what our number is multiplied by, to be in the published number's unit.
        digits: after the decimal point.
        higher_is_better: which of two numbers wins.
    """

    title: str
    quantity: str
    scale: float = 1.0
    digits: int = 2
    higher_is_better: bool = True


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: its folder's name; experiments that share a run give it the same name and options.
        task: a module of orthokern.tasks.
        options: its command line, but for --data, --out, --threads and what "how long" says.
        quick: options that come after those with --quick, and overrule them.
        labels: what the table says of it, heading -> text; "--NAME" for what that option was.
        published: the paper's numbers, measure's title -> number; none for a row that is ours alone.
        group: runs of the same group differ only in their seed and share a row of the table; "" for a row of its own.
    """

    name: str
    task: str
    options: tuple[str, ...]
    quick: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    group: str = ""


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
        source: where the published numbers stand.
        runs: what is trained.
        measures: the columns of numbers.
        figure: how the runs are drawn: "curves", "gradients", "spectrum", "stability", "dynamics" or None.
        quantity: for "curves": what is drawn.
        panel: for "curves": the setting that has a panel of its own for each of its values, or None.
        legend: the settings that legends and panels' titles tell; None for those in which the runs differ.
        data: the data set's folder under --data, or None.
        epochs: whether its tasks take --epochs (else --iterations).
        alone: whether the runs are timed, so that no two may run at once.
        note: what a reader must know, under the table.
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
    data: str | None = None
    epochs: bool = True
    alone: bool = False
    note: str = ""

    def titled(self, settings: Settings) -> str:
        """The title, given the settings of the first run."""
        return self.title.format_map(settings)


# ---- command lines ---------------------------------------------------------------------------------------------------


def each_once(options: Sequence[str]) -> tuple[str, ...]:
    """A command line without the options that later ones overrule."""
    given: dict[str, list[str]] = {}
    name = ""
    for text in options:
        if text.startswith("--"):
            name, given[text] = text, []
        else:
            given[name].append(text)
    return tuple(text for name, values in given.items() for text in (name, *values))


def planned(run: Run, quick: bool) -> Settings:
    """The settings that a run's command line stands for; what the task fills in from others may be None."""
    task = importlib.import_module(f"orthokern.tasks.{run.task}")
    given = task._parser().parse([*run.options, *(run.quick if quick else ())])
    return {**task.DEFAULTS, **task.PRESETS.get(given.get("preset"), {}), **given}


def trained_for(settings: Settings, done: int, plan: Settings) -> tuple[str, ...]:
    """The option that tells how long a run was to be, or () where that is what its command line stands for anyway.

    Args:
        settings: the run's own, of config.json, which keeps the length that it began with.
        done: iterations: more, where it went on further.
        plan: what `planned` says of it.
    """
    wanted = count(settings.get("epochs"))
    if wanted is not None:
        per_epoch = count(settings.get("iterations_per_epoch"), 1)
        epochs = max(wanted, math.ceil(done / per_epoch) if per_epoch else 0)
        return () if epochs == plan.get("epochs") else ("--epochs", str(epochs))
    iterations = max(count(settings.get("iterations")) or 0, done)
    return () if iterations == plan.get("iterations") else ("--iterations", str(iterations))
