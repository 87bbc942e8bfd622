"""Plots of a run, drawn from the records of its metrics.jsonl and written as PNG.

Figures are built without pyplot: no global state, no window, and a shorter import. Records that lack what a plot needs
are passed over; a function returns None, and writes nothing, when none has it.
"""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.gradients import profile_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[dict[str, Any]]

_BLUE, _ORANGE, _GREEN, _RED, _GREY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc3311",
    "#555555",
)  # told apart by colour-blind readers too


def _figure(rows: int, title: str, height: float) -> "tuple[Figure, list[Axes]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    if title:
        figure.suptitle(title, fontsize=11)
    for axis in axes:
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, list(axes)


def _save(figure: "Figure", path: Path) -> Path:
    """Writes under a temporary name and renames: a viewer, or a kill, never meets half a picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _series(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of the records that have a number under `key`."""
    found = [(record["iteration"], record[key]) for record in records if isinstance(record.get(key), (int, float))]
    if not found:
        return np.empty(0), np.empty(0)
    iterations, values = zip(*found, strict=True)
    return np.asarray(iterations, dtype=float), np.asarray(values, dtype=float)


def plot_learning(
    records: Records, path: Path, *, baseline: float | None = None, goal: float | None = None, title: str = ""
) -> Path | None:
    """Loss against its baseline, and accuracy, over iterations.

    Args:
        records: with "iteration" and "loss" (nats per step); "accuracy" and "held_out_accuracy" (fractions) where
            known.
        path: PNG to write.
        baseline: loss of the best guess without memory, in nats per step.
        goal: accuracy to reach, a fraction.
        title: the figure's title.

    Returns:
        `path`, or None if no record has a loss.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: `path` can't be written.
    """
    iterations, losses = _series(records, "loss")
    if not len(iterations):
        return None
    figure, (top, bottom) = _figure(2, title, 5.6)
    top.plot(iterations, losses, color=_BLUE, linewidth=1.2, label="training batch")
    if baseline is not None:
        top.axhline(
            baseline, color=_GREY, linestyle="--", linewidth=1.0, label=f"baseline without memory, {baseline:.4g}"
        )
    if losses.min() > 0 and losses.max() > 10 * losses.min():
        top.set_yscale("log")
    top.set_ylabel("cross-entropy (nats per time step)")
    top.legend(loc="best", fontsize=8)
    at, accuracy = _series(records, "accuracy")
    bottom.plot(at, 100 * accuracy, color=_BLUE, linewidth=1.2, label="training batch")
    at, accuracy = _series(records, "held_out_accuracy")
    if len(at):
        bottom.plot(at, 100 * accuracy, "o", color=_ORANGE, markersize=4, label="held-out sequences")
    if goal is not None:
        bottom.axhline(100 * goal, color=_GREY, linestyle="--", linewidth=1.0, label=f"goal, {100 * goal:g} %")
    bottom.set_ylim(-3, 103)
    bottom.set_ylabel("recall accuracy (%)")
    bottom.set_xlabel("iteration")
    bottom.legend(loc="best", fontsize=8)
    return _save(figure, path)


def plot_spectrum(records: Records, path: Path, *, margin: float | None = None, title: str = "") -> Path | None:
    """Singular values of the recurrent matrix over iterations, as the paper's Figure 3: mean, one standard deviation
    about it, extremes.

    Args:
        records: those with "spectrum": {"mean", "std", "min", "max"} are drawn.
        path: PNG to write.
        margin: the bounds 1 ± margin are drawn if a value goes at least a quarter of the way to them; None for no
            bounds.
        title: the figure's title.

    Returns, Raises:
        As `plot_learning`.
    """
    rows = [record for record in records if isinstance(record.get("spectrum"), dict)]
    if not rows:
        return None
    at = np.asarray([row["iteration"] for row in rows], dtype=float)
    mean, std, low, high = (
        np.asarray(
            [row["spectrum"][key] if row["spectrum"][key] is not None else math.nan for row in rows], dtype=float
        )
        for key in ("mean", "std", "min", "max")
    )
    figure, (axis,) = _figure(1, title, 3.8)
    axis.fill_between(
        at, mean - std, mean + std, color=_GREEN, alpha=0.3, linewidth=0, label="mean ± standard deviation"
    )
    axis.plot(at, mean, color=_GREEN, linewidth=1.4, label="mean")
    axis.plot(at, high, color=_BLUE, linewidth=1.2, label="maximum")
    axis.plot(at, low, color=_RED, linewidth=1.2, label="minimum")
    # Bounds that the values keep well away from would squeeze them into one line.
    if margin is not None and margin > 0 and max(1 - low.min(), high.max() - 1) > 0.25 * margin:
        for bound in (1 - margin, 1 + margin):
            axis.axhline(
                bound, color=_GREY, linestyle="--", linewidth=1.0, label=f"bounds 1 ± {margin:g}" if bound < 1 else None
            )
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_xlabel("iteration")
    axis.set_ylabel("singular value (no unit)")
    axis.legend(loc="best", fontsize=8)
    return _save(figure, path)


def plot_gradients(records: Records, path: Path, *, length: int, title: str = "") -> Path | None:
    """The gradient's norm through time over iterations, as the paper's Figure 2.

    Each iteration's norms are divided by their largest over time, so that a column shows how the gradient fares on its
    way back and not how large the loss is. Unlike Figure 2 the loss is the training loss, over all steps.

    Args:
        records: those with "grad_norm_through_time" (values at `profile_steps(length)`) are drawn.
        path: PNG to write.
        length: number of time steps.
        title: the figure's title.

    Returns, Raises:
        As `plot_learning`.
    """
    steps = np.asarray(profile_steps(length), dtype=float)
    rows = [
        r
        for r in records
        if isinstance(r.get("grad_norm_through_time"), list) and len(r["grad_norm_through_time"]) == len(steps)
    ]
    norms = np.asarray([[math.nan if x is None else x for x in r["grad_norm_through_time"]] for r in rows], dtype=float)
    largest = norms.max(axis=1) if len(rows) else np.empty(0)
    seen = np.isfinite(largest) & (
        largest > 0
    )  # a readout that starts at zero passes no gradient in the first iteration
    if not seen.any():
        return None
    at = np.asarray([r["iteration"] for r in rows], dtype=float)[seen]
    decades = np.log10(np.maximum(norms[seen] / largest[seen, None], 1e-12))
    figure, (axis,) = _figure(1, title, 4.2)
    axis.grid(False)
    lowest = min(-1.0, math.floor(decades.min()))
    image = axis.pcolormesh(
        _edges(at), _edges(steps), decades.T, cmap="viridis", vmin=lowest, vmax=0.0, rasterized=True
    )
    axis.set_xlabel("iteration")
    axis.set_ylabel("time step t")
    figure.colorbar(image, ax=axis, label="log₁₀ of ‖dL/dhₜ‖ / its maximum over t")
    return _save(figure, path)


def _edges(centres: np.ndarray) -> np.ndarray:
    """Cell boundaries halfway between the centres."""
    if len(centres) == 1:
        return np.asarray([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[:-1] + centres[1:]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])
