"""What an experiment is: runs of our tasks, and the numbers that a paper publishes for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Experiment", "Measure", "Run"]


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
        labels: what the table and the plots' legends say of it, heading -> text.
        published: the paper's numbers, measure's title -> number; none for a row that is ours alone.
    """

    name: str
    task: str
    options: tuple[str, ...]
    quick: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: as on the command line.
        title: one line.
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
