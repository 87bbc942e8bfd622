"""Heat maps over iterations: norms through time, and histograms of the angles of eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.gradients import profile_steps
from orthokern.diagnostics.plots._figures import Panel, Records, new_panels, panels_of
from orthokern.diagnostics.runs import RunRecord, numbers_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAT_MAP_COLUMNS, FRACTIONS = 600, 64
_GRADIENT_FIELDS = ("grad_norm_through_time", "last_grad_norm_through_time")
_GRADIENT_BAR, _ANGLE_BAR = "log₁₀ of ‖dL/dhₜ‖ / its maximum over t", "eigenvalues (%)"


@dataclass(frozen=True)
class Profiles:
    """The data of a heat map: one quantity through time, at several iterations.

    Attributes:
        iterations: [P] float64, increasing.
        steps: [S] float64, time steps, or fractions of the sequence if the number of time steps is unknown.
        values: [P, S] float64; NaN where the record has null.
        in_steps: whether `steps` are time steps.
    """

    iterations: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    in_steps: bool


def profiles(records: Records, key: str, length: int | None, columns: int = HEAT_MAP_COLUMNS) -> Profiles | None:
    """The lists of numbers that records hold under `key`, at most `columns` of them, evenly spaced, with the first and
    the last. A record has the values at `profile_steps(T)`. If the number of time steps T, `length`, is None, because
    it is unknown or not the same for all records, the values are interpolated to 64 fractions of the sequence."""
    points = min(64, length) if length is not None else 0
    rows = _rows(records, key, lambda norms: not points or len(norms) == points, columns)
    if not rows:
        return None
    at = np.asarray([iteration for iteration, _ in rows], dtype=float)
    lists = [np.asarray(norms, dtype=float) for _, norms in rows]  # NaN for null
    if length is not None:
        return Profiles(at, np.asarray(profile_steps(length), dtype=float), np.stack(lists), True)
    steps = np.linspace(0.0, 1.0, FRACTIONS)
    lists = [np.interp(steps, np.linspace(0.0, 1.0, len(values)), values) for values in lists]
    return Profiles(at, steps, np.stack(lists), False)


def _rows(records: Records, key: str, fits: Callable[[list[Any]], bool], columns: int) -> list[tuple[int, list[Any]]]:
    """At most `columns` evenly spaced pairs of an iteration and a list that fits."""
    rows = [(r["iteration"], values) for r in records if (values := numbers_at(r, key)) is not None and fits(values)]
    return [rows[i] for i in profile_steps(len(rows), max(2, columns))] if rows else []


def _normalized(norms: Profiles | None) -> Profiles | None:
    """log10 of norms divided by the largest over time. Iterations with a zero gradient are left out, for example the
    first one if the readout is initialised to zero."""
    if norms is None:
        return None
    largest = norms.values.max(axis=1)  # NaN if any is
    seen = np.isfinite(largest) & (largest > 0)
    decades = np.log10(np.maximum(norms.values[seen] / largest[seen, None], 1e-12))
    return replace(norms, iterations=norms.iterations[seen], values=decades) if seen.any() else None


def _decades(norms: Profiles | None) -> Profiles | None:
    """log10 of norms; a norm of zero is replaced by the smallest norm above zero."""
    if norms is None:
        return None
    finite = np.isfinite(norms.values).all(axis=1)
    values = norms.values[finite]
    if not (values > 0).any():
        return None
    decades = np.log10(np.maximum(values, values[values > 0].min()))
    return replace(norms, iterations=norms.iterations[finite], values=decades)


def _angle_profiles(records: Records, key: str) -> Profiles | None:
    """Shares of the eigenvalues, in percent, by angle in radians."""
    bins = next((len(shares) for r in reversed(records) if (shares := numbers_at(r, key)) is not None), 0)

    def fits(shares: list[Any]) -> bool:
        return len(shares) == bins and None not in shares and min(shares) >= 0 and any(shares)

    rows = _rows(records, key, fits, HEAT_MAP_COLUMNS)
    if not rows:
        return None
    counts = np.asarray([shares for _, shares in rows], dtype=float)
    at = np.asarray([iteration for iteration, _ in rows], dtype=float)
    centres = (np.arange(bins) + 0.5) * (2 * math.pi / bins) - math.pi
    return Profiles(at, centres, 100 * counts / counts.sum(axis=1, keepdims=True), False)


def _edges(centres: np.ndarray) -> np.ndarray:
    """Cell boundaries halfway between the centres."""
    if len(centres) == 1:
        return np.asarray([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[:-1] + centres[1:]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _below_one(low: float, high: float) -> tuple[float, float]:
    """Limits of at most six decades: with a wider range, one run with a vanishing gradient would use up all colours."""
    return min(-1.0, max(-6.0, math.floor(low))), 0.0


def _whole_decades(low: float, high: float) -> tuple[float, float]:
    low, high = math.floor(low), math.ceil(high)
    return float(low), float(high if high > low else low + 1)


def _heat_maps(
    panels: Sequence[Panel], title: str, bar: str, limits: Callable[[float, float], tuple[float, float]]
) -> Figure | None:
    """Panels that share one colour scale, with `limits` (smallest and largest value)."""
    if not panels:
        return None
    smallest = min(float(panel.data.values.min()) for panel in panels)
    low, high = limits(smallest, max(float(panel.data.values.max()) for panel in panels))
    # viridis is readable in greyscale and by colour-blind readers
    style: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high, "rasterized": True}
    figure, axes = new_panels([panel.title for panel in panels], title, 4.2)
    for axis, panel in zip(axes, panels, strict=True):
        axis.grid(False)
        data = panel.data
        image = axis.pcolormesh(_edges(data.iterations / panel.per), _edges(data.steps), data.values.T, **style)
        axis.set_xlabel(panel.unit)
        fraction = "time step t" if data.in_steps else "t as a fraction of the sequence"
        axis.set_ylabel("angle (radians)" if bar == _ANGLE_BAR else fraction)
    figure.colorbar(image, ax=axes, label=bar, extend="min" if smallest < low else "neither")
    return figure


def compare_gradients(runs: Sequence[RunRecord], *, title: str = "", **common: Any) -> Figure | None:
    """The norm of the gradient through time over iterations, one panel per run: Figure 2 of Vorontsov et al. 2017.

    The norms of each iteration are divided by the largest one, so that a column shows the relative change of the
    gradient through time, whatever the loss is. The loss is that of the last time step, as in the paper, if all runs
    with norms recorded it; else it is the training loss, over all steps.
    """
    having = [{field for field in _GRADIENT_FIELDS if any(field in r for r in run.records)} for run in runs]
    last = all(_GRADIENT_FIELDS[1] in fields for fields in having if fields)
    key = _GRADIENT_FIELDS[last]
    panels = panels_of(runs, lambda run: _normalized(profiles(run.records, key, run.profile_length(key))), **common)
    return _heat_maps(panels, title, _GRADIENT_BAR + (", L of the last step" if last else ""), _below_one)


def compare_states(runs: Sequence[RunRecord], *, title: str = "", **common: Any) -> Figure | None:
    """The norm of the states through time over iterations, a panel for each run."""
    key = "state_norm_through_time"
    panels = panels_of(runs, lambda run: _decades(profiles(run.records, key, run.profile_length(key))), **common)
    return _heat_maps(panels, title, "log₁₀ of ‖hₜ‖", _whole_decades)


def compare_angles(
    runs: Sequence[RunRecord], *, title: str = "", key: str = "eigenvalue_angles", **common: Any
) -> Figure | None:
    """Histograms of the angles of the eigenvalues over iterations, a panel for each run."""
    panels = panels_of(runs, lambda run: _angle_profiles(run.records, key), **common)
    return _heat_maps(panels, title, _ANGLE_BAR, lambda low, high: (0.0, high))
