"""Plots of one run or of several, drawn from the records of their metrics.jsonl and written as PNG.

Functions named plot_... draw one run, from its records, to a file. Functions named compare_... draw several runs and
return the figure; `save` writes it. Figures are built without pyplot: no global state, no window, and a shorter import.
Records that lack what a plot needs are passed over; a function returns None, and draws nothing, when none has it.
Colours are told apart by colour-blind readers too.

Long runs are thinned before anything is drawn: a curve of more than 1000 points becomes means over as many stretches of
equal length, extremes become those of the stretch, and a heat map shows 600 of its columns.
"""

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from orthokern.diagnostics.comparison import check_settings, labels, setting_text, telling_settings
from orthokern.diagnostics.gradients import profile_steps
from orthokern.diagnostics.runs import RunRecord, number_at, numbers_at, series
from orthokern.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = [
    "AXES",
    "Profiles",
    "compare_angles",
    "compare_curves",
    "compare_dynamics",
    "compare_gradients",
    "compare_spectra",
    "compare_stability",
    "compare_states",
    "iterations_over_lengths",
    "memory",
    "plot_angles",
    "plot_gradients",
    "plot_layers",
    "plot_learning",
    "plot_losses",
    "plot_moduli",
    "plot_spectrum",
    "plot_stability",
    "plot_states",
    "profiles",
    "save",
    "thin_curve",
]

Records = Sequence[dict[str, Any]]

AXES = ("iteration", "epoch")  # what the x axis may count
CURVE_POINTS, HEAT_MAP_COLUMNS, FRACTIONS = 1000, 600, 64

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072b2", "#d55e00", "#009e73", "#cc3311", "#555555"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito's, without yellow
_LINES = ("-", "--", ":", "-.")


# ---- figures ---------------------------------------------------------------------------------------------------------


def _figure(rows: int, columns: int, size: tuple[float, float], title: str, **share: Any) -> "tuple[Figure, Any]":
    """A figure of `size` inches and its axes [rows, columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    if title:
        figure.suptitle(title, fontsize=11)
    for axis in axes.flat:
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _panels(titles: Sequence[str], title: str, height: float = 3.8, **share: Any) -> "tuple[Figure, list[Axes]]":
    """A figure with one panel per title, three in a row at most; a single one takes the whole figure."""
    count = len(titles)
    columns = count if count < 4 else 2 if count == 4 else 3
    rows = -(-count // columns)
    size = (7.2, height) if count == 1 else (1.2 + 3.6 * columns, 0.6 + 2.7 * rows)
    figure, axes = _figure(rows, columns, size, title, **share)
    for axis in axes.flat[count:]:
        axis.remove()
    used = list(axes.flat[:count])
    if count > 1:
        for axis, text in zip(used, titles, strict=True):
            axis.set_title(text, fontsize=9, wrap=True)
    return figure, used


def save(figure: "Figure", path: Path) -> Path:
    """Writes a figure as PNG, under a temporary name and renamed: a viewer, or a kill, never meets half a picture.

    Raises:
        OSError: `path` can't be written.
    """
    for axis in figure.axes:
        for line in axis.get_lines():
            if len(np.asarray(line.get_xdata())) == 1 and line.get_marker() in ("None", "none", "", " "):
                line.set_marker("o")  # a line of one point, as a short run has them, shows nothing
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


# ---- numbers to draw -------------------------------------------------------------------------------------------------


def _stretches(count: int, points: int) -> np.ndarray:
    """Where the stretches begin into which `count` points are divided: `points` of them, or one for each point."""
    return np.unique(np.linspace(0, count, min(points, count), endpoint=False).astype(int))


def thin_curve(at: np.ndarray, values: np.ndarray, points: int = CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """A curve of at most `points` points: means of `at` and `values` over stretches of equal length.

    Args:
        at, values: [P] float.
        points: at least 1.

    Returns:
        Both unchanged if P is no more than `points`; else both [points].
    """
    if len(at) <= points:
        return at, values
    begin = _stretches(len(at), points)
    lengths = np.diff(np.append(begin, len(at)))
    return np.add.reduceat(at, begin) / lengths, np.add.reduceat(values, begin) / lengths


@dataclass(frozen=True)
class Profiles:
    """One quantity through time, at several iterations: what a heat map shows.

    Attributes:
        iterations: [P] float64, increasing.
        steps: [S] float64, time steps, or fractions of the sequence if they aren't known.
        values: [P, S] float64; NaN where the record has null.
        in_steps: whether `steps` are time steps.
    """

    iterations: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    in_steps: bool


def profiles(records: Records, key: str, length: int | None, columns: int = HEAT_MAP_COLUMNS) -> Profiles | None:
    """The lists that records hold under `key`, at most `columns` of them.

    Args:
        records: those with a list of numbers under `key` count.
        key: "grad_norm_through_time", say; the values of one record are those at `profile_steps(T)`.
        length: number of time steps T. None if it isn't known, or not the same for all records: values are then
            interpolated to 64 fractions of the sequence.
        columns: how many records to keep, evenly chosen, first and last among them.

    Returns:
        None if no record has such a list (of the length that T asks for, if it is given).
    """
    points = min(64, length) if length is not None else 0
    found = [(r["iteration"], norms) for r in records if (norms := numbers_at(r, key)) is not None]
    rows = [row for row in found if not points or len(row[1]) == points]
    if not rows:
        return None
    rows = [rows[i] for i in profile_steps(len(rows), max(2, columns))]
    lists = [np.asarray([math.nan if x is None else x for x in norms], dtype=float) for _, norms in rows]
    if length is not None:
        steps = np.asarray(profile_steps(length), dtype=float)
    else:
        steps = np.linspace(0.0, 1.0, FRACTIONS)
        lists = [np.interp(steps, np.linspace(0.0, 1.0, len(values)), values) for values in lists]
    at = np.asarray([iteration for iteration, _ in rows], dtype=float)
    return Profiles(at, steps, np.stack(lists), length is not None)


def _normalized(found: Profiles | None) -> Profiles | None:
    """log10 of norms divided by the largest over time. Iterations without a gradient are left out: a readout that
    starts at zero passes none in the first."""
    if found is None:
        return None
    largest = found.values.max(axis=1)  # NaN if any is
    seen = np.isfinite(largest) & (largest > 0)
    if not seen.any():
        return None
    decades = np.log10(np.maximum(found.values[seen] / largest[seen, None], 1e-12))
    return Profiles(found.iterations[seen], found.steps, decades, found.in_steps)


def _decades(found: Profiles | None) -> Profiles | None:
    """log10 of norms; a norm of zero, as of a state at rest, is shown as the smallest other one."""
    if found is None:
        return None
    finite = np.isfinite(found.values).all(axis=1)
    values = found.values[finite]
    positive = values[values > 0]
    if not len(positive):
        return None
    return Profiles(found.iterations[finite], found.steps, np.log10(np.maximum(values, positive.min())), found.in_steps)


def _edges(centres: np.ndarray) -> np.ndarray:
    """Cell boundaries halfway between the centres."""
    if len(centres) == 1:
        return np.asarray([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[:-1] + centres[1:]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


# ---- panels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Abscissa:
    """What the x axis counts, and in how many iterations it counts one."""

    label: str
    per: float = 1.0

    @classmethod
    def of(cls, run: RunRecord, x: str) -> "_Abscissa":
        if x == "iteration":
            return cls(x)
        per = run.iterations_per_epoch
        if per is None:
            raise InputError(f"{run.path}: neither records nor settings tell how many iterations make an epoch")
        return cls(x, per)


Found = TypeVar("Found")


@dataclass(frozen=True)
class _Panel(Generic[Found]):
    """What one panel shows: of one run."""

    title: str
    found: Found
    x: _Abscissa
    margin: float | None = None


def _common_abscissa(runs: Sequence[RunRecord], x: str | None) -> str:
    """`x`, or if None: epochs where every run knows how long they are, else iterations."""
    if x is None:
        return "epoch" if runs and all(run.iterations_per_epoch is not None for run in runs) else "iteration"
    if x not in AXES:
        raise InputError(f"x is {x!r}; accepted: {', '.join(AXES)}")
    return x


@dataclass(frozen=True)
class _Spectra:
    """Singular values over iterations: [P] float64 each."""

    at: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _spectra(records: Records, key: str) -> _Spectra | None:
    found = []
    for record in records:
        if key not in record:
            continue
        parts = [number_at(record, f"{key}.{name}") for name in ("mean", "std", "min", "max")]
        if None not in parts:
            found.append([record["iteration"], *parts])
    if not found:
        return None
    at, mean, std, low, high = np.asarray(found, dtype=float).T
    begin = _stretches(len(at), CURVE_POINTS)
    return _Spectra(
        thin_curve(at, at)[0],
        thin_curve(at, mean)[1],
        thin_curve(at, std)[1],
        np.minimum.reduceat(low, begin),
        np.maximum.reduceat(high, begin),
    )


def _draw_spectrum(axis: "Axes", found: _Spectra, margin: float | None, x: _Abscissa) -> None:
    at, mean, std = found.at / x.per, found.mean, found.std
    axis.fill_between(
        at, mean - std, mean + std, color=_GREEN, alpha=0.3, linewidth=0, label="mean ± standard deviation"
    )
    axis.plot(at, mean, color=_GREEN, linewidth=1.4, label="mean")
    axis.plot(at, found.high, color=_BLUE, linewidth=1.2, label="maximum")
    axis.plot(at, found.low, color=_RED, linewidth=1.2, label="minimum")
    # Bounds that the values keep well away from would squeeze them into one line.
    if margin is not None and margin > 0 and max(1 - found.low.min(), found.high.max() - 1) > 0.25 * margin:
        for bound in (1 - margin, 1 + margin):
            axis.axhline(
                bound, color=_GREY, linestyle="--", linewidth=1.0, label=f"bounds 1 ± {margin:g}" if bound < 1 else None
            )
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_xlabel(x.label)
    axis.set_ylabel("singular value (no unit)")


@dataclass(frozen=True)
class _Stability:
    """Norms of the gradient, divided by the largest, and by layer the spectral radius of the Jacobian at rest."""

    norms: tuple[np.ndarray, np.ndarray]  # iterations [P], values [P]
    radii: dict[str, tuple[np.ndarray, np.ndarray]]  # field -> the same


def _stability(records: Records) -> _Stability | None:
    records = list(records)
    fields = list(dict.fromkeys(key for r in records for key in r if key.startswith("jacobian_radius")))
    radii = {field: thin_curve(*series(records, field)) for field in fields}
    radii = {field: curve for field, curve in radii.items() if len(curve[0])}
    at, norms = series(records, "grad_norm")
    if not radii or not len(at):
        return None
    # Not thinned: an explosion is one iteration.
    return _Stability((at, norms / norms.max() if norms.max() > 0 else norms), radii)


def _draw_stability(axis: "Axes", found: _Stability, x: _Abscissa) -> None:
    at, norms = found.norms
    axis.plot(at / x.per, norms, color=_GREY, linewidth=0.8, label="‖gradient‖ / its maximum")
    for (field, (at, radius)), colour in zip(found.radii.items(), _COLOURS, strict=False):
        layer = field.removeprefix("jacobian_radius").removeprefix("_l")
        name = "spectral radius of J" + (f", layer {layer or 0}" if len(found.radii) > 1 else "")
        axis.plot(at / x.per, radius, color=colour, linewidth=1.4, label=name)
    axis.axhline(1.0, color=_RED, linestyle="--", linewidth=1.0)
    axis.set_ylim(bottom=0.0)
    axis.set_xlabel(x.label)
    axis.set_ylabel("no unit")
    axis.legend(loc="best", fontsize=8)


def _draw_heat_map(axis: "Axes", found: Profiles, x: _Abscissa, low: float, high: float, ylabel: str = "") -> Any:
    """The picture, for a colour bar."""
    axis.grid(False)
    image = axis.pcolormesh(
        _edges(found.iterations / x.per),
        _edges(found.steps),
        found.values.T,
        cmap="viridis",  # as readable in grey, and to a colour-blind reader
        vmin=low,
        vmax=high,
        rasterized=True,
    )
    axis.set_xlabel(x.label)
    axis.set_ylabel(ylabel or ("time step t" if found.in_steps else "t as a fraction of the sequence"))
    return image


_GRADIENT_FIELDS = ("grad_norm_through_time", "last_grad_norm_through_time")
_GRADIENT_BAR = "log₁₀ of ‖dL/dhₜ‖ / its maximum over t"
_STATE_BAR = "log₁₀ of ‖hₜ‖"
_ANGLE_BAR = "eigenvalues (%)"


def _heat_maps(
    panels: "Sequence[_Panel[Profiles]]",
    title: str,
    bar: str,
    limits: Callable[[float, float], tuple[float, float]],
    ylabel: str = "",
) -> "Figure | None":
    """Panels with one colour scale for all: `limits` of the smallest and largest value."""
    if not panels:
        return None
    smallest = min(float(panel.found.values.min()) for panel in panels)
    low, high = limits(smallest, max(float(panel.found.values.max()) for panel in panels))
    figure, axes = _panels([panel.title for panel in panels], title, 4.2)
    for axis, panel in zip(axes, panels, strict=True):
        image = _draw_heat_map(axis, panel.found, panel.x, low, high, ylabel)
    figure.colorbar(image, ax=axes, label=bar, extend="min" if smallest < low else "neither")
    return figure


def _below_one(low: float, high: float) -> tuple[float, float]:
    """At most six decades: one run whose gradient vanishes would leave no colours for the others."""
    return min(-1.0, max(-6.0, math.floor(low))), 0.0


def _whole_decades(low: float, high: float) -> tuple[float, float]:
    low, high = math.floor(low), math.ceil(high)
    return float(low), float(high if high > low else low + 1)


def _from_zero(low: float, high: float) -> tuple[float, float]:
    return 0.0, high


def _angle_profiles(records: Records, key: str) -> Profiles | None:
    """Shares of the eigenvalues, in percent, by angle in radians."""
    found = [(record["iteration"], shares) for record in records if (shares := numbers_at(record, key)) is not None]
    bins = len(found[-1][1]) if found else 0
    rows = [
        (iteration, shares)
        for iteration, shares in found
        if len(shares) == bins and all(share is not None and share >= 0 for share in shares) and any(shares)
    ]
    if not rows:
        return None
    rows = [rows[i] for i in profile_steps(len(rows), HEAT_MAP_COLUMNS)]
    counts = np.asarray([shares for _, shares in rows], dtype=float)
    at = np.asarray([iteration for iteration, _ in rows], dtype=float)
    centres = (np.arange(bins) + 0.5) * (2 * math.pi / bins) - math.pi
    return Profiles(at, centres, 100 * counts / counts.sum(axis=1, keepdims=True), False)


# ---- one run ---------------------------------------------------------------------------------------------------------


def plot_learning(
    records: Records,
    path: Path,
    *,
    baseline: float | None = None,
    goal: float | None = None,
    title: str = "",
    loss_label: str = "cross-entropy (nats per time step)",
) -> Path | None:
    """Loss against its baseline, and accuracy where records have it, over iterations.

    Args:
        records: with "iteration" and "loss"; "held_out_loss", "accuracy" and "held_out_accuracy" (fractions) where
            known.
        path: PNG to write.
        baseline: loss of the best guess without memory, in the loss's unit.
        goal: accuracy to reach, a fraction.
        title: the figure's title.
        loss_label: what the loss is, and its unit.

    Returns:
        `path`, or None if no record has a loss.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: `path` can't be written.
    """
    records = list(records)
    iterations, losses = thin_curve(*series(records, "loss"))
    if not len(iterations):
        return None
    accuracy, held_out = series(records, "accuracy"), series(records, "held_out_accuracy")
    rows = 2 if len(accuracy[0]) or len(held_out[0]) else 1
    figure, axes = _figure(rows, 1, (7.2, 1.0 + 2.3 * rows), title, sharex=True)
    top = axes[0, 0]
    top.plot(iterations, losses, color=_BLUE, linewidth=1.2, label="training batch")
    if baseline is not None:
        top.axhline(
            baseline, color=_GREY, linestyle="--", linewidth=1.0, label=f"baseline without memory, {baseline:.4g}"
        )
    if losses.min() > 0 and losses.max() > 10 * losses.min():
        top.set_yscale("log")
    top.set_ylabel(loss_label)
    top.legend(loc="best", fontsize=8)
    if rows == 2:
        bottom = axes[1, 0]
        at, values = thin_curve(*accuracy)
        bottom.plot(at, 100 * values, color=_BLUE, linewidth=1.2, label="training batch")
        at, values = thin_curve(*held_out)
        if len(at):
            bottom.plot(at, 100 * values, "o", color=_ORANGE, markersize=4, label="held-out sequences")
        if goal is not None:
            bottom.axhline(100 * goal, color=_GREY, linestyle="--", linewidth=1.0, label=f"goal, {100 * goal:g} %")
        bottom.set_ylim(-3, 103)
        bottom.set_ylabel("accuracy (%)")
        bottom.legend(loc="best", fontsize=8)
    axes[-1, 0].set_xlabel("iteration")
    return save(figure, path)


def plot_losses(records: Records, path: Path, *, label: str, title: str = "") -> Path | None:
    """The mean loss of the training batches and that on held-out data, over iterations.

    Args:
        records: with "iteration" and "nll"; "held_out_loss" and "held_out_initial_loss" in the same unit where known.
        path: PNG to write.
        label: the unit.
        title: the figure's title.

    Returns, Raises:
        As `plot_learning`.
    """
    records = list(records)
    at, values = thin_curve(*series(records, "nll"))
    if not len(at):
        return None
    figure, axes = _figure(1, 1, (7.2, 3.8), title)
    axis = axes[0, 0]
    axis.plot(at, values, color=_BLUE, linewidth=1.0, label="training batch")
    at, values = thin_curve(*series(records, "held_out_loss"))
    if len(at):
        axis.plot(at, values, color=_ORANGE, linewidth=1.4, marker="o", markersize=3, label="validation")
    initial = series(records, "held_out_initial_loss")[1]
    if len(initial):
        axis.axhline(initial[0], color=_GREY, linestyle="--", linewidth=1.0, label="validation, untrained")
    axis.set_xlabel("iteration")
    axis.set_ylabel(label)
    axis.legend(loc="best", fontsize=8)
    return save(figure, path)


def plot_stability(records: Records, path: Path, *, title: str = "") -> Path | None:
    """The gradient's norm and the spectral radius of a GRU's Jacobian at rest over iterations (Kanai et al. 2017,
    Figure 1).

    Args:
        records: with "grad_norm", and "jacobian_radius" ("jacobian_radius_l1", ... for upper layers) where taken.
        path: PNG to write.
        title: the figure's title.

    Returns:
        `path`, or None if no record has a spectral radius.

    Raises:
        As `plot_learning`.
    """
    found = _stability(records)
    if found is None:
        return None
    figure, axes = _figure(1, 1, (7.2, 3.8), title)
    _draw_stability(axes[0, 0], found, _Abscissa("iteration"))
    return save(figure, path)


def plot_spectrum(
    records: Records, path: Path, *, margin: float | None = None, title: str = "", key: str = "spectrum"
) -> Path | None:
    """Singular values of the recurrent matrix over iterations, as the paper's Figure 3: mean, one standard deviation
    about it, extremes.

    Args:
        records: those with "spectrum": {"mean", "std", "min", "max"} are drawn.
        path: PNG to write.
        margin: the bounds 1 ± margin are drawn if a value goes at least a quarter of the way to them; None for no
            bounds.
        title: the figure's title.
        key: the field of the records, for another recurrence than the first.

    Returns, Raises:
        As `plot_learning`.
    """
    found = _spectra(records, key)
    if found is None:
        return None
    figure, (axis,) = _panels([""], title)
    _draw_spectrum(axis, found, margin, _Abscissa("iteration"))
    axis.legend(loc="best", fontsize=8)
    return save(figure, path)


def plot_moduli(records: Records, path: Path, *, title: str = "", key: str = "eigenvalue_moduli") -> Path | None:
    """Magnitudes of the eigenvalues over iterations, drawn as `plot_spectrum` draws singular values: those of an nnRNN
    stay near the circle whatever its singular values do.

    Args:
        records: those with "eigenvalue_moduli": {"mean", "std", "min", "max"} are drawn.
        path, title: as in `plot_learning`.
        key: the field of the records, for another recurrence than the first.

    Returns, Raises:
        As `plot_learning`.
    """
    found = _spectra(records, key)
    if found is None:
        return None
    figure, (axis,) = _panels([""], title)
    _draw_spectrum(axis, found, None, _Abscissa("iteration"))
    axis.set_ylabel("|eigenvalue| (no unit)")
    axis.legend(loc="best", fontsize=8)
    return save(figure, path)


def plot_gradients(
    records: Records, path: Path, *, length: int | None, title: str = "", key: str = "grad_norm_through_time"
) -> Path | None:
    """The gradient's norm through time over iterations, as the paper's Figure 2.

    Each iteration's norms are divided by their largest over time, so that a column shows how the gradient fares on its
    way back and not how large the loss is. Unlike Figure 2 the loss is the training loss, over all steps.

    Args:
        records: those with "grad_norm_through_time" (values at `profile_steps(length)`) are drawn.
        path: PNG to write.
        length: number of time steps; None if it isn't known or varies.
        title: the figure's title.
        key: the field of the records; "last_grad_norm_through_time" holds Figure 2's own quantity.

    Returns, Raises:
        As `plot_learning`.
    """
    return _plot_heat_map(_normalized(profiles(records, key, length)), path, title, _GRADIENT_BAR, _below_one)


def plot_states(records: Records, path: Path, *, length: int | None, title: str = "") -> Path | None:
    """The norm of the states through time over iterations.

    Args:
        records: those with "state_norm_through_time" (values at `profile_steps(length)`) are drawn.
        path, length, title: as in `plot_gradients`.

    Returns, Raises:
        As `plot_learning`.
    """
    found = _decades(profiles(records, "state_norm_through_time", length))
    return _plot_heat_map(found, path, title, _STATE_BAR, _whole_decades)


def plot_angles(records: Records, path: Path, *, title: str = "", key: str = "eigenvalue_angles") -> Path | None:
    """How the eigenvalues' angles are distributed, over iterations.

    Args:
        records: those with "eigenvalue_angles", as `angle_histogram` returns them, are drawn.
        path, title: as in `plot_learning`.
        key: the field of the records, for another recurrence than the first.

    Returns, Raises:
        As `plot_learning`.
    """
    return _plot_heat_map(_angle_profiles(records, key), path, title, _ANGLE_BAR, _from_zero, "angle (radians)")


def plot_layers(records: Records, path: Path, *, title: str = "") -> Path | None:
    """What happens in the layers of a feedforward network: how far each weight matrix is from orthogonal, and the norm
    of the gradient for it, a curve for each layer, over iterations.

    Args:
        records: with "orthogonality_by_layer" and "grad_norm_by_layer", from the input's layer to the readout's.
        path, title: as `plot_learning`.

    Returns, Raises:
        As `plot_learning`; None if no record has them.
    """
    panels = (
        ("orthogonality_by_layer", "‖W Wᵀ − I‖² of the smaller Gram matrix"),
        ("grad_norm_by_layer", "norm of the gradient for W"),
    )
    told = [(r["iteration"], [numbers_at(r, key) for key, _ in panels]) for r in records]
    lengths = [len(lists[0]) for _, lists in told if lists[0] is not None]
    layers = [lengths[-1]] * len(panels) if lengths else []
    taken = [(at, lists) for at, lists in told if [len(values or []) for values in lists] == layers]
    if not taken:
        return None
    figure, axes = _figure(2, 1, (7.2, 6.0), title, sharex=True)
    iterations = np.array([at for at, _ in taken], dtype=float)
    for panel, (axis, (_, label)) in enumerate(zip(axes[:, 0], panels, strict=True)):
        curves = np.array([lists[panel] for _, lists in taken], dtype=float)  # [P, layers], NaN for null
        curves = np.where(curves > 0, curves, math.nan)  # zero has no place on a logarithmic axis
        count = curves.shape[1]
        for index in range(count):
            at, values = thin_curve(iterations, curves[:, index])
            name = "input" if index == 0 else "readout" if index == count - 1 else None
            shade = 0.15 + 0.7 * index / max(1, count - 1)
            colour = _BLUE if index == 0 else _ORANGE if index == count - 1 else str(shade)
            axis.plot(at, values, color=colour, linewidth=1.2 if name else 0.8, label=name)
        if np.isfinite(curves).any():
            axis.set_yscale("log")
        axis.set_ylabel(label, fontsize=9)
    axes[0, 0].legend(loc="best", fontsize=8, title="hidden in grey, darker is nearer to the input", title_fontsize=7)
    axes[1, 0].set_xlabel("iteration")
    return save(figure, path)


def _plot_heat_map(
    found: Profiles | None,
    path: Path,
    title: str,
    bar: str,
    limits: Callable[[float, float], tuple[float, float]],
    ylabel: str = "",
) -> Path | None:
    panels = [] if found is None else [_Panel("", found, _Abscissa("iteration"))]
    figure = _heat_maps(panels, title, bar, limits, ylabel)
    return None if figure is None else save(figure, path)


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare_curves(
    runs: Sequence[RunRecord],
    quantity: str,
    *,
    panel: str | None = None,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    baseline: float | None = None,
    title: str = "",
) -> "Figure | None":
    """One quantity of several runs, a curve each: accuracy as the paper's Figures 1 and 4, mean squared error as
    Figure 5, loss as Figure 6.

    Args:
        runs: those whose records have the quantity are drawn.
        quantity: a field of the records, or "field.part"; names that contain "accuracy" are fractions, drawn in
            percent.
        panel: a setting: one panel for each of its values, side by side (Figure 1 has one for each T).
        legend: settings that the legend tells; by default those in which the runs differ, see `labels`. Runs with the
            same text have the same colour.
        x: "iteration" or "epoch" (see `RunRecord.iterations_per_epoch`); None: epochs where every run has them.
        baseline: draw a line at this value, of `quantity`'s unit; None: at that of the runs' configurations for a loss.
        title: the figure's title.

    Returns:
        The figure, with an axis for each panel; None if no run has the quantity.

    Raises:
        ImportError: matplotlib is not installed.
        InputError: no run has such a setting; x is "epoch" and a run doesn't know how long that is.
    """
    x = _common_abscissa(runs, x)
    if panel is not None:
        check_settings("panel", runs, [panel])
    found = {id(run): thin_curve(*run.series(quantity)) for run in runs}
    drawn = [run for run in runs if len(found[id(run)][0])]
    if not drawn:
        return None
    groups = _by_setting(drawn, panel)
    texts = _legend(drawn, groups, panel, legend)
    kinds = list(dict.fromkeys(texts[id(run)] for run in drawn))
    percent = "accuracy" in quantity
    figure, axes = _panels(list(groups), title, sharey=True)
    for axis, members in zip(axes, groups.values(), strict=True):
        told: set[str] = set()
        for run in members:
            at, values = found[id(run)]
            text = texts[id(run)]
            kind = kinds.index(text)
            axis.plot(
                at / _Abscissa.of(run, x).per,
                100 * values if percent else values,
                color=_COLOURS[kind % len(_COLOURS)],
                linestyle=_LINES[kind // len(_COLOURS) % len(_LINES)],
                linewidth=1.2,
                marker="o" if len(at) <= 50 else None,  # evaluations are few; a run may have only one
                markersize=3,
                label=None if text in told else text,
            )
            told.add(text)
        for level in _baselines(members, quantity, baseline):
            axis.axhline(level, color=_GREY, linestyle="--", linewidth=1.0, label=f"baseline {level:.4g}")
        axis.set_xlabel(x)
        axis.legend(loc="best", fontsize=7)
    if percent:
        axes[0].set_ylim(-3, 103)
    else:
        smallest, largest = (f(f(found[id(run)][1]) for run in drawn) for f in (min, max))
        if smallest > 0 and largest > 10 * smallest:
            axes[0].set_yscale("log")
    axes[0].set_ylabel(quantity.replace("_", " ") + (" (%)" if percent else ""))
    return figure


def _by_setting(runs: Sequence[RunRecord], panel: str | None) -> dict[str, list[RunRecord]]:
    """Runs by "name value" of a setting, numbers in order, before everything else; all under "" without one."""
    if panel is None:
        return {"": list(runs)}

    def order(run: RunRecord) -> tuple[bool, float, str]:
        number = number_at(run.settings, panel)
        return number is None, number or 0.0, setting_text(run, panel)

    groups: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=order):
        groups.setdefault(f"{panel} {setting_text(run, panel)}", []).append(run)
    return groups


def _legend(
    runs: Sequence[RunRecord], groups: dict[str, list[RunRecord]], panel: str | None, legend: Sequence[str] | None
) -> dict[int, str]:
    """The text of each run, by id. What a panel's title says needs no saying in its legend."""
    if legend is not None or panel is None:
        return {id(run): text for run, text in zip(runs, labels(runs, legend), strict=True)}
    names = dict.fromkeys(name for members in groups.values() for name in telling_settings(members))
    return {id(run): text for run, text in zip(runs, labels(runs, list(names)), strict=True)}


def _baselines(runs: Sequence[RunRecord], quantity: str, baseline: float | None) -> list[float]:
    if baseline is not None:
        return [baseline]
    if quantity not in ("loss", "held_out_loss"):
        return []
    told = {number_at(run.config, "baseline") for run in runs}
    return sorted(level for level in told if level is not None) if len(told) == 1 else []


def compare_gradients(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, x: str | None = None, title: str = ""
) -> "Figure | None":
    """The gradient's norm through time over iterations, a panel for each run: the paper's Figure 2.

    Norms are divided by their largest over time, as in `plot_gradients`. The loss is that of the last time step, as in
    the paper, if every run that has norms recorded those; else the training loss.

    Args, Returns, Raises:
        As `compare_curves`, with one panel per run.
    """
    having = [{field for field in _GRADIENT_FIELDS if any(field in r for r in run.records)} for run in runs]
    last = all(_GRADIENT_FIELDS[1] in found for found in having if found)
    key = _GRADIENT_FIELDS[last]
    found = _per_run(runs, legend, x, lambda run: _normalized(profiles(run.records, key, run.profile_length(key))))
    return _heat_maps(found, title, _GRADIENT_BAR + (", L of the last step" if last else ""), _below_one)


def compare_stability(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, x: str | None = None, title: str = ""
) -> "Figure | None":
    """As `plot_stability`, a panel for each run.

    Args, Returns, Raises:
        As `compare_curves`, with one panel per run.
    """
    panels = _per_run(runs, legend, x, lambda run: _stability(run.records))
    if not panels:
        return None
    figure, axes = _panels([panel.title for panel in panels], title, sharey=True)
    for axis, panel in zip(axes, panels, strict=True):
        _draw_stability(axis, panel.found, panel.x)
    return figure


_DYNAMICS = (
    ("spectral_radius", "spectral radius of W", False),
    ("orthogonality_error_of_w", "‖W Wᵀ − I‖", True),
    ("recurrent_grad_norm", "norm of the gradient for W", True),
    ("held_out_accuracy", "held-out accuracy (%)", False),
)


def compare_dynamics(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, title: str = ""
) -> "Figure | None":
    """How plain recurrent matrices become orthogonal, and what that does to gradient and accuracy, over the sequences
    seen: Figure 3b of Manchev and Spratling.

    Args:
        runs: those are drawn whose records have "spectral_radius", "orthogonality_error_of_w" and
            "recurrent_grad_norm", as those of a plain network have.
        legend, title: as `compare_curves`.

    Returns, Raises:
        As `compare_curves`, with four panels.
    """
    drawn = [run for run in runs if all(len(run.series(key)[0]) for key, _, _ in _DYNAMICS[:3])]
    if not drawn:
        return None
    texts = _legend(drawn, {"": drawn}, None, legend)
    figure, axes = _panels([label for _, label, _ in _DYNAMICS], title)
    for axis, (key, _, logarithmic) in zip(axes, _DYNAMICS, strict=True):
        for index, run in enumerate(drawn):
            at, values = thin_curve(*run.series(key))
            per_iteration = (number_at(run.settings, "batch") or 1.0) * (number_at(run.settings, "accumulate") or 1.0)
            axis.plot(
                at * per_iteration,
                100 * values if "accuracy" in key else values,
                color=_COLOURS[index % len(_COLOURS)],
                linewidth=1.2,
                marker="o" if len(at) <= 50 else None,
                markersize=3,
                label=texts[id(run)],
            )
        if logarithmic:
            axis.set_yscale("log")
        axis.set_xlabel("sequences seen")
        axis.locator_params(axis="x", nbins=4)  # numbers of six digits, side by side
    axes[0].legend(loc="best", fontsize=8)
    return figure


def iterations_over_lengths(panels: Mapping[str, Mapping[str, Mapping[int, int]]], title: str = "") -> "Figure | None":
    """How many iterations networks took to solve a problem, over the length of its sequences.

    Args:
        panels: problem -> network -> T -> iterations; one panel for each problem. Networks have the same colour in all.
        title: the figure's title.

    Returns:
        The figure; None if nothing was solved.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = {problem: networks for problem, networks in panels.items() if any(networks.values())}
    if not drawn:
        return None
    names = list(dict.fromkeys(name for networks in panels.values() for name in networks))
    alone = next(iter(drawn)) if len(drawn) == 1 else ""  # a single panel has no title of its own
    figure, axes = _panels(list(drawn), ": ".join(filter(None, (title, alone))))
    for axis, networks in zip(axes, drawn.values(), strict=True):
        for name, solved in networks.items():
            if not solved:
                continue
            lengths = sorted(solved)
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            counts = [solved[T] for T in lengths]
            axis.plot(lengths, counts, color=colour, linewidth=1.2, marker="o", markersize=3, label=name)
        axis.set_yscale("log")
        axis.set_xlabel("T")
        axis.legend(loc="best", fontsize=8)
    axes[0].set_ylabel("iterations until solved")
    return figure


def compare_states(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, x: str | None = None, title: str = ""
) -> "Figure | None":
    """The norm of the states through time over iterations, a panel for each run.

    Args, Returns, Raises:
        As `compare_curves`, with one panel per run.
    """
    key = "state_norm_through_time"
    found = _per_run(runs, legend, x, lambda run: _decades(profiles(run.records, key, run.profile_length(key))))
    return _heat_maps(found, title, _STATE_BAR, _whole_decades)


def compare_angles(
    runs: Sequence[RunRecord],
    *,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    title: str = "",
    key: str = "eigenvalue_angles",
) -> "Figure | None":
    """How the eigenvalues' angles are distributed, over iterations, a panel for each run.

    Args, Returns, Raises:
        As `compare_curves`, with one panel per run; key as in `plot_angles`.
    """
    found = _per_run(runs, legend, x, lambda run: _angle_profiles(run.records, key))
    return _heat_maps(found, title, _ANGLE_BAR, _from_zero, "angle (radians)")


def compare_spectra(
    runs: Sequence[RunRecord],
    *,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    title: str = "",
    key: str = "spectrum",
) -> "Figure | None":
    """Singular values over iterations, a panel for each run: the paper's Figure 3. Every panel has its own scale, as
    margins from 0.001 to none go into one figure. The bounds are those of a setting "margin".

    Args, Returns, Raises:
        As `compare_curves`, with one panel per run; key as in `plot_spectrum`.
    """
    panels = _per_run(runs, legend, x, lambda run: _spectra(run.records, key))
    if not panels:
        return None
    figure, axes = _panels([panel.title for panel in panels], title)
    for axis, panel in zip(axes, panels, strict=True):
        _draw_spectrum(axis, panel.found, panel.margin, panel.x)
    axes[0].legend(loc="best", fontsize=7)
    return figure


def _per_run(
    runs: Sequence[RunRecord], legend: Sequence[str] | None, x: str | None, find: Callable[[RunRecord], Found | None]
) -> list[_Panel[Found]]:
    """A panel for every run in which `find` finds something to draw."""
    x = _common_abscissa(runs, x)
    pairs = [(run, found) for run in runs if (found := find(run)) is not None]
    texts = labels([run for run, _ in pairs], legend) if pairs else []
    return [
        _Panel(text, found, _Abscissa.of(run, x), number_at(run.settings, "margin"))
        for text, (run, found) in zip(texts, pairs, strict=True)
    ]


# ---- linear networks -------------------------------------------------------------------------------------------------


def memory(
    matrix: "Tensor", transients: Mapping[str, "Tensor"], curves: Mapping[str, "Tensor"], title: str = ""
) -> "Figure":
    """What a non-normal matrix does to its inputs: the nnRNN report's Figure 1 (Jahagirdar et al. 2019).

    Args:
        matrix: [N, N], drawn as it stands.
        transients: name -> [T, M], the norms of M states over time (`transient_norms`): mean and standard deviation are
            drawn.
        curves: name -> [T], Fisher memory curves (`fisher_memory`).
        title: the figure's title.

    Returns:
        The figure, three axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _panels(["(a) the matrix", "(b) norm of the state", "(c) Fisher memory J(k)"], title)
    picture = axes[0].imshow(matrix.numpy(), cmap="viridis")
    axes[0].grid(False)
    figure.colorbar(picture, ax=axes[0], shrink=0.8)
    for index, (name, norms) in enumerate(transients.items()):
        colour, line = _COLOURS[index % len(_COLOURS)], _LINES[index // 3 % len(_LINES)]
        mean, spread = norms.mean(1).numpy(), norms.std(1).numpy()
        alive = mean > 0  # a nilpotent matrix ends in exact zeros
        at = np.arange(len(mean))[alive]
        axes[1].plot(at, mean[alive], color=colour, linestyle=line, linewidth=1.2, label=name)
        low = np.maximum(mean - spread, 0.1 * mean)[alive]
        axes[1].fill_between(at, low, (mean + spread)[alive], color=colour, alpha=0.15, linewidth=0)
    for index, (name, curve) in enumerate(curves.items()):
        values = curve.numpy()
        at = np.flatnonzero(values > 1e-8 * values.max())
        colour, line = _COLOURS[index % len(_COLOURS)], _LINES[index // len(_COLOURS) % len(_LINES)]
        axes[2].plot(at, values[at], color=colour, linestyle=line, linewidth=1.2, label=name)
    for axis in axes[1:]:
        axis.set_yscale("log")
        axis.set_xlabel("steps after the input")
        axis.legend(loc="best", fontsize=6)
    return figure
