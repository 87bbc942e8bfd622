"""Singular values of the recurrent matrix, magnitudes of its eigenvalues, and the stability of a GRU, over
iterations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.plots._figures import (
    BLUE,
    COLOURS,
    CURVE_POINTS,
    GREEN,
    GREY,
    RED,
    Panel,
    Records,
    draw_panels,
    interval_starts,
    level,
    panels_of,
    thin_curve,
)
from orthokern.diagnostics.runs import RunRecord, number_at, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SINGULAR, _MODULUS = "singular value (no unit)", "|eigenvalue| (no unit)"


def _spectra(records: Records, key: str) -> np.ndarray | None:
    """[5, P] float64: iterations, mean, standard deviation, minimum and maximum."""
    rows = [
        [record["iteration"], *(number_at(record, f"{key}.{name}") for name in ("mean", "std", "min", "max"))]
        for record in records
        if key in record
    ]
    rows = [row for row in rows if None not in row]
    if not rows:
        return None
    at, mean, std, low, high = np.asarray(rows, dtype=float).T
    begin = interval_starts(len(at), CURVE_POINTS)
    means = [thin_curve(at, values)[1] for values in (at, mean, std)]
    return np.stack([*means, np.minimum.reduceat(low, begin), np.maximum.reduceat(high, begin)])


def _draw_spectrum(axis: Axes, panel: Panel, ylabel: str) -> None:
    at, mean, std, low, high = panel.data
    at = at / panel.per
    axis.fill_between(
        at, mean - std, mean + std, color=GREEN, alpha=0.3, linewidth=0, label="mean ± standard deviation"
    )
    axis.plot(at, mean, color=GREEN, linewidth=1.4, label="mean")
    axis.plot(at, high, color=BLUE, linewidth=1.2, label="maximum")
    axis.plot(at, low, color=RED, linewidth=1.2, label="minimum")
    margin = panel.margin if ylabel == _SINGULAR else None
    # Bounds far away from the values would compress the curves into one line.
    if margin is not None and margin > 0 and max(1 - low.min(), high.max() - 1) > 0.25 * margin:
        level(axis, 1 - margin, f"bounds 1 ± {margin:g}")
        level(axis, 1 + margin, None)
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_ylabel(ylabel)


def _spectrum_figure(runs: Sequence[RunRecord], key: str, ylabel: str, title: str = "", **common: Any) -> Figure | None:
    panels = panels_of(runs, lambda run: _spectra(run.records, key), **common)
    figure = draw_panels(panels, title, partial(_draw_spectrum, ylabel=ylabel))
    if figure is not None:
        figure.axes[0].legend(loc="best", fontsize=8 if len(panels) == 1 else 7)
    return figure


def compare_spectra(runs: Sequence[RunRecord], *, key: str = "spectrum", **common: Any) -> Figure | None:
    """Singular values over iterations, one panel per run: mean, mean ± one standard deviation, and extremes, as in
    Figure 3 of Vorontsov et al. 2017. Every panel has its own scale, because one figure has margins from 0.001 to none.
    The bounds 1 ± margin are drawn if a value is at least a quarter of the margin away from 1."""
    return _spectrum_figure(runs, key, _SINGULAR, **common)


def compare_moduli(runs: Sequence[RunRecord], *, key: str = "eigenvalue_moduli", **common: Any) -> Figure | None:
    """Magnitudes of the eigenvalues over iterations, one panel per run. Those of an nnRNN stay near 1 even if its
    singular values do not."""
    return _spectrum_figure(runs, key, _MODULUS, **common)


Curve = tuple[np.ndarray, np.ndarray]  # iterations [P], values [P]


def _stability(records: Records) -> tuple[Curve, dict[str, Curve]] | None:
    """Norms of the gradient, divided by the largest, and by field the spectral radius of the Jacobian at h = 0."""
    fields = list(dict.fromkeys(key for r in records for key in r if key.startswith("jacobian_radius")))
    radii = {field: thin_curve(*series(records, field)) for field in fields}
    radii = {field: curve for field, curve in radii.items() if len(curve[0])}
    at, norms = series(records, "grad_norm")
    if not radii or not len(at):
        return None
    # Not thinned: an explosion is one iteration.
    return (at, norms / norms.max() if norms.max() > 0 else norms), radii


def _draw_stability(axis: Axes, panel: Panel) -> None:
    (at, norms), radii = panel.data
    axis.plot(at / panel.per, norms, color=GREY, linewidth=0.8, label="‖gradient‖ / its maximum")
    for (field, (at, radius)), colour in zip(radii.items(), COLOURS, strict=False):
        layer = field.removeprefix("jacobian_radius").removeprefix("_l")
        name = "spectral radius of J" + (f", layer {layer or 0}" if len(radii) > 1 else "")
        axis.plot(at / panel.per, radius, color=colour, linewidth=1.4, label=name)
    level(axis, 1.0, None, colour=RED)
    axis.set_ylim(bottom=0.0)
    axis.set_ylabel("no unit")
    axis.legend(loc="best", fontsize=8)


def compare_stability(runs: Sequence[RunRecord], *, title: str = "", **common: Any) -> Figure | None:
    """The norm of the gradient and the spectral radius of the Jacobian of a GRU at h = 0, over iterations, one panel
    per run (Kanai et al. 2017, Figure 1)."""
    panels = panels_of(runs, lambda run: _stability(run.records), **common)
    return draw_panels(panels, title, _draw_stability, sharey=True)
