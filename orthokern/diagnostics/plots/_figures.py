"""Figures, panels and axes that all plots share."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.comparison import labels
from orthokern.diagnostics.runs import RunRecord
from orthokern.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[dict[str, Any]]
AXES = ("iteration", "epoch")  # what the x axis may count
CURVE_POINTS = 1000
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc3311", "#555555"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito's, without yellow
LINES = ("-", "--", ":", "-.")


def new_figure(rows: int, columns: int, size: tuple[float, float], title: str, **share: Any) -> tuple[Figure, Any]:
    """A figure of `size` inches and its axes [rows, columns]. InputError if matplotlib rejects its own settings."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ValueError as error:  # MPLBACKEND or a matplotlibrc
        raise InputError(f"matplotlib cannot be used: {error}") from None
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    if title:
        figure.suptitle(title, fontsize=11)
    for axis in axes.flat:
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def new_panels(titles: Sequence[str], title: str, height: float = 3.8, **share: Any) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, at most three in a row; a single panel fills the figure and has no title."""
    count = len(titles)
    columns = count if count < 4 else 2 if count == 4 else 3
    rows = -(-count // columns)
    size = (7.2, height) if count == 1 else (1.2 + 3.6 * columns, 0.6 + 2.7 * rows)
    figure, axes = new_figure(rows, columns, size, title, **share)
    for axis in axes.flat[count:]:
        axis.remove()
    used = list(axes.flat[:count])
    if count > 1:
        for axis, text in zip(used, titles, strict=True):
            axis.set_title(text, fontsize=9, wrap=True)
    return figure, used


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, under a temporary name that is then renamed: a partial file is never visible under
    `path`. The folder is created if necessary."""
    for axis in figure.axes:
        for line in axis.get_lines():
            if len(np.asarray(line.get_xdata())) == 1 and line.get_marker() in ("None", "none", "", " "):
                line.set_marker("o")  # a line with a single point, as in a short run, would be invisible
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def percent_limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis for percentages: all of 0 to 100 where the values take up half of it or more, else the values
    with a margin, and no more than a little below 0 or above 100."""
    low, high = min(values), max(values)
    if high - low >= 50.0:
        return -3.0, 103.0
    pad = max(0.1 * (high - low), 2.5 - 0.5 * (high - low))  # at least 5 percent points in all
    beyond = 0.03 * (high - low + 2.0 * pad)
    return max(low - pad, -beyond), min(high + pad, 100.0 + beyond)


def interval_starts(count: int, points: int) -> np.ndarray:
    """The first index of each interval when `count` points are divided into min(`points`, `count`) intervals."""
    return np.unique(np.linspace(0, count, min(points, count), endpoint=False).astype(int))


def thin_curve(at: np.ndarray, values: np.ndarray, points: int = CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """A curve [P] of at most `points` points: means of `at` and `values` over intervals of equal length."""
    if len(at) <= points:
        return at, values
    begin = interval_starts(len(at), points)
    lengths = np.diff(np.append(begin, len(at)))
    return np.add.reduceat(at, begin) / lengths, np.add.reduceat(values, begin) / lengths


def level(axis: Axes, value: float, label: str | None, linestyle: str = "--", colour: str = GREY) -> None:
    """Draws a horizontal line."""
    axis.axhline(value, color=colour, linestyle=linestyle, linewidth=1.0, label=label)


@dataclass(frozen=True)
class Panel:
    """The content of a panel: data of one run, and the unit of its x axis with the number of iterations per unit."""

    title: str
    data: Any
    unit: str = "iteration"
    per: float = 1.0
    margin: float | None = None


def common_unit(runs: Sequence[RunRecord], x: str | None) -> str:
    """`x`; if None: epochs if the length of an epoch is known for every run, else iterations."""
    if x is None:
        return "epoch" if runs and all(run.iterations_per_epoch is not None for run in runs) else "iteration"
    if x not in AXES:
        raise InputError(f"x must be one of {', '.join(AXES)}, got {x!r}")
    return x


def iterations_per(run: RunRecord, unit: str) -> float:
    """Iterations per unit of the x axis."""
    if unit == "iteration":
        return 1.0
    if run.iterations_per_epoch is None:
        raise InputError(f"{run.path}: neither records nor settings tell how many iterations make an epoch")
    return run.iterations_per_epoch


def panels_of(
    runs: Sequence[RunRecord],
    find: Callable[[RunRecord], Any],
    legend: Sequence[str] | None = None,
    x: str | None = None,
) -> list[Panel]:
    """One panel for every run in which `find` finds data to draw."""
    unit = common_unit(runs, x)
    pairs = [(run, data) for run in runs if (data := find(run)) is not None]
    texts = labels([run for run, _ in pairs], legend) if pairs else []
    return [
        Panel(text, data, unit, iterations_per(run, unit), run.margin)
        for text, (run, data) in zip(texts, pairs, strict=True)
    ]


def draw_panels(
    panels: Sequence[Panel], title: str, draw: Callable[[Axes, Panel], None], **share: Any
) -> Figure | None:
    """A figure with the panels; None if there are none."""
    if not panels:
        return None
    figure, axes = new_panels([panel.title for panel in panels], title, **share)
    for axis, panel in zip(axes, panels, strict=True):
        draw(axis, panel)
        axis.set_xlabel(panel.unit)
    return figure
