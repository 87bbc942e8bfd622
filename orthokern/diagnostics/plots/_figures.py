"""Figures, panels and axes that all plots share."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern._files import write_atomically
from orthokern.diagnostics.comparison import labels
from orthokern.diagnostics.runs import RunRecord
from orthokern.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[dict[str, Any]]
AXES = ("iteration", "epoch")  # what the x axis may count
CURVE_POINTS = 1000
MARKED_POINTS = 50  # a curve of at most this number of points has markers; in a long one they would mislead
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc3311", "#555555"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito's, without yellow
LINES = ("-", "--", ":", "-.")


def new_figure(rows: int, columns: int, size: tuple[float, float], title: str, **share: Any) -> tuple[Figure, Any]:
    """A figure of `size` inches and its axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
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
    """Writes a figure as PNG, atomically. The folder is created if necessary."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
    return path


def thin_curve(at: np.ndarray, values: np.ndarray, points: int = CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """A curve [P] of at most `points` points: means of `at` and `values` over intervals of equal length."""
    return thinned(at, np.mean, points), thinned(values, np.mean, points)


def thinned(values: np.ndarray, summary: Callable[..., Any], points: int = CURVE_POINTS) -> np.ndarray:
    """A summary of [P] values for each of `points` intervals of equal length; the values themselves if there are at
    most `points`."""
    if len(values) <= points:
        return values
    return np.asarray([summary(part) for part in np.array_split(values, points)])


def draw_line(axis: Axes, at: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """Draws a curve, with markers if it has few points."""
    axis.plot(at, values, **{"marker": "o" if len(at) <= MARKED_POINTS else None, "markersize": 3, **style})


def draw_level(axis: Axes, value: float, label: str | None, linestyle: str = "--", colour: str = GREY) -> None:
    """Draws a horizontal line."""
    axis.axhline(value, color=colour, linestyle=linestyle, linewidth=1.0, label=label)


def style_of(index: int) -> dict[str, Any]:
    """Colour and stroke of the curve with an index."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}


def use_log_scale(axis: Axes, values: np.ndarray) -> None:
    """Makes the y axis logarithmic for positive values that span more than a factor of ten."""
    if values.min() > 0 and values.max() > 10 * values.min():
        axis.set_yscale("log")


def x_axis(runs: Sequence[RunRecord], x: str | None) -> tuple[str, list[float]]:
    """The unit of the x axis, and the iterations per unit for each run. x: one of AXES; None: epochs if the length of
    an epoch is known for every run, otherwise iterations."""
    lengths = [run.iterations_per_epoch for run in runs]
    if x not in (None, *AXES):
        raise InputError(f"x must be one of {', '.join(AXES)}, got {x!r}")
    if x == "iteration" or (x is None and None in lengths):
        return "iteration", [1.0] * len(runs)
    for run, length in zip(runs, lengths, strict=True):
        if length is None:
            raise InputError(f"{run.path}: the settings do not tell how many iterations make an epoch")
    return "epoch", [length for length in lengths if length is not None]


def draw_panels(
    runs: Sequence[RunRecord],
    find: Callable[[RunRecord], Any],
    draw: Callable[[Axes, RunRecord, Any, float], None],
    *,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    title: str = "",
    **share: Any,
) -> Figure | None:
    """A figure with one panel for every run in which `find` finds data; None if there is no such run. `draw` gets the
    axes, the run, its data and the number of iterations per unit of the x axis."""
    unit, per = x_axis(runs, x)
    drawn = [(run, data, each) for run, each in zip(runs, per, strict=True) if (data := find(run)) is not None]
    if not drawn:
        return None
    figure, axes = new_panels(labels([run for run, _, _ in drawn], legend), title, **share)
    for axis, content in zip(axes, drawn, strict=True):
        draw(axis, *content)
        axis.set_xlabel(unit)
    return figure
