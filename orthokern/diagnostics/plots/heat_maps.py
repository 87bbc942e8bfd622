"""Heat maps over iterations: norms through time, and histograms of the angles of eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern._files import number
from orthokern.diagnostics.gradients import profile_steps
from orthokern.diagnostics.plots._figures import Records, draw_panels
from orthokern.diagnostics.runs import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAT_MAP_COLUMNS, FRACTIONS = 600, 64
_GRADIENT_FIELDS = ("grad_norm_through_time", "last_grad_norm_through_time")
_GRADIENT_BAR = "log₁₀ of ‖dL/dhₜ‖ / its maximum over t"


# Iterations [P], rows [S], values [P, S], and the name and unit of the rows: time steps, fractions of the sequence or
# angles. All float64; the values are NaN where the record has null.
Profiles = tuple[np.ndarray, np.ndarray, np.ndarray, str]


def _profiles(run: RunRecord, key: str) -> Profiles | None:
    """The lists of numbers that the records hold under `key`. A record has the values at `profile_steps(T)`. If the
    number of time steps T is unknown or not the same for all records, the values are interpolated to 64 fractions of
    the sequence."""
    at, lists = _lists(run.records, key)
    length = run.time_steps
    if not lists:
        return None
    if length is not None and {len(values) for values in lists} == {min(64, length)}:
        return at, np.asarray(profile_steps(length), dtype=float), np.stack(lists), "time step t"
    steps = np.linspace(0.0, 1.0, FRACTIONS)
    lists = [np.interp(steps, np.linspace(0.0, 1.0, len(values)), values) for values in lists]
    return at, steps, np.stack(lists), "t as a fraction of the sequence"


def _lists(records: Records, key: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """At most HEAT_MAP_COLUMNS evenly spaced iterations with the first and the last, and their lists of numbers."""
    rows = [(r["iteration"], values) for r in records if isinstance(values := r.get(key), list) and values]
    rows = [rows[i] for i in profile_steps(len(rows), HEAT_MAP_COLUMNS)] if rows else []
    lists = [np.array([number(value) for value in values], dtype=float) for _, values in rows]  # None becomes NaN
    return np.asarray([at for at, _ in rows], dtype=float), lists


def _decades(run: RunRecord, key: str, relative: bool = False) -> Profiles | None:
    """log10 of norms, or of norms relative to the largest over time. Zero is replaced by the smallest norm above zero.
    Iterations whose norms are not finite or all zero are left out, for example the first one if the readout is
    initialised to zero."""
    data = _profiles(run, key)
    if data is None:
        return None
    at, steps, norms, label = data
    largest = norms.max(axis=1)  # NaN if any is
    finite = np.isfinite(largest) & (largest > 0)
    if not finite.any():
        return None
    norms = norms[finite] / (largest[finite, None] if relative else 1.0)
    return at[finite], steps, np.log10(np.maximum(norms, norms[norms > 0].min())), label


def _angle_shares(run: RunRecord) -> Profiles | None:
    """Shares of the eigenvalues, in percent, by angle in radians."""
    at, lists = _lists(run.records, "eigenvalue_angles")
    bins = len(lists[-1]) if lists else 0
    fits = np.asarray([len(counts) == bins and counts.min() >= 0 and counts.any() for counts in lists], dtype=bool)
    if not fits.any():
        return None
    counts = np.stack([values for values, fit in zip(lists, fits, strict=True) if fit])
    centres = (np.arange(bins) + 0.5) * (2 * math.pi / bins) - math.pi
    return at[fits], centres, 100 * counts / counts.sum(axis=1, keepdims=True), "angle (radians)"


def _edges(centres: np.ndarray) -> np.ndarray:
    """Cell boundaries halfway between the centres."""
    if len(centres) == 1:
        return np.asarray([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[:-1] + centres[1:]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _heat_maps(
    runs: Sequence[RunRecord],
    find: Callable[[RunRecord], Profiles | None],
    bar: str,
    limits: Callable[[float, float], tuple[float, float]],
    **common: Any,
) -> Figure | None:
    """Panels that share one colour scale, whose ends are `limits` of the smallest and the largest value."""
    images: list[Any] = []

    def draw(axis: Axes, run: RunRecord, data: Profiles, per: float) -> None:
        at, rows, values, label = data
        axis.grid(False)
        cells = _edges(at / per), _edges(rows), values.T
        images.append(axis.pcolormesh(*cells, cmap="viridis", rasterized=True))  # readable in greyscale
        axis.set_ylabel(label)

    figure = draw_panels(runs, find, draw, height=4.2, **common)
    if figure is not None:
        values = np.concatenate([np.ravel(image.get_array()) for image in images])
        smallest, largest = float(values.min()), float(values.max())
        low, high = limits(smallest, largest)
        for image in images:
            image.set_clim(low, high)
        figure.colorbar(images[0], ax=figure.axes, label=bar, extend="min" if smallest < low else "neither")
    return figure


def compare_gradients(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """The norm of the gradient through time over iterations, one panel per run: Figure 2 of Vorontsov et al. 2017.

    The norms of each iteration are divided by the largest one, so that a column shows the relative change of the
    gradient through time, whatever the loss is. The loss is that of the last time step, as in the paper, if all runs
    with norms recorded it; otherwise it is the training loss, over all steps.
    """
    recorded = [{field for field in _GRADIENT_FIELDS if any(field in r for r in run.records)} for run in runs]
    last = all(_GRADIENT_FIELDS[1] in fields for fields in recorded if fields)
    key, bar = _GRADIENT_FIELDS[last], _GRADIENT_BAR + (", L of the last step" if last else "")

    def limits(low: float, high: float) -> tuple[float, float]:
        # At most six decades: with a wider range, one run with a vanishing gradient would use up all colours.
        return min(-1.0, max(-6.0, math.floor(low))), 0.0

    return _heat_maps(runs, lambda run: _decades(run, key, relative=True), bar, limits, **common)


def compare_states(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """The norm of the states through time over iterations, a panel for each run."""

    def limits(low: float, high: float) -> tuple[float, float]:
        return math.floor(low), max(math.ceil(high), math.floor(low) + 1)

    return _heat_maps(runs, lambda run: _decades(run, "state_norm_through_time"), "log₁₀ of ‖hₜ‖", limits, **common)


def compare_angles(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """Histograms of the angles of the eigenvalues over iterations, a panel for each run."""
    return _heat_maps(runs, _angle_shares, "eigenvalues (%)", lambda low, high: (0.0, high), **common)
