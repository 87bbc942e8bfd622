"""Singular values of the recurrent matrix, magnitudes of its eigenvalues, and the stability of a GRU, over
iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.plots._figures import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    RED,
    Records,
    draw_level,
    draw_line,
    draw_panels,
    thin_curve,
    thinned,
)
from orthokern.diagnostics.runs import RunRecord, number_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _spectra(records: Records, key: str) -> np.ndarray | None:
    """[5, P] float64: iterations, mean, standard deviation, minimum and maximum."""
    names = ("mean", "std", "min", "max")
    rows = [[r["iteration"], *(number_at(r, f"{key}.{name}") for name in names)] for r in records if key in r]
    columns = np.asarray([row for row in rows if None not in row], dtype=float).T
    if not columns.size:
        return None
    summaries: list[Any] = [np.mean, np.mean, np.mean, np.min, np.max]
    return np.stack([thinned(values, of) for values, of in zip(columns, summaries, strict=True)])


def _spectrum_figure(
    runs: Sequence[RunRecord], key: str, ylabel: str, *, bounds: bool = False, **common: Any
) -> Figure | None:
    def draw(axis: Axes, run: RunRecord, data: np.ndarray, per: float) -> None:
        at, mean, std, low, high = data[0] / per, *data[1:]
        band: dict[str, Any] = {"color": GREEN, "alpha": 0.3, "linewidth": 0, "label": "mean ± standard deviation"}
        axis.fill_between(at, mean - std, mean + std, **band)
        draw_line(axis, at, mean, color=GREEN, linewidth=1.4, label="mean")
        draw_line(axis, at, high, color=BLUE, linewidth=1.2, label="maximum")
        draw_line(axis, at, low, color=RED, linewidth=1.2, label="minimum")
        margin = run.margin if bounds else None
        # Bounds far away from the values would compress the curves into one line.
        if margin and max(1 - low.min(), high.max() - 1) > 0.25 * margin:
            draw_level(axis, 1 - margin, f"bounds 1 ± {margin:g}")
            draw_level(axis, 1 + margin, None)
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.set_ylabel(ylabel)

    figure = draw_panels(runs, lambda run: _spectra(run.records, key), draw, **common)
    if figure is not None:
        figure.axes[0].legend(loc="best", fontsize=7)
    return figure


def compare_spectra(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """Singular values over iterations, one panel per run: mean, mean ± one standard deviation, and extremes, as in
    Figure 3 of Vorontsov et al. 2017. Every panel has its own scale, because one figure has margins from 0.001 to none.
    The bounds 1 ± margin are drawn if a value is at least a quarter of the margin away from 1."""
    return _spectrum_figure(runs, "spectrum", "singular value (no unit)", bounds=True, **common)


def compare_moduli(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """Magnitudes of the eigenvalues over iterations, one panel per run. Those of an nnRNN stay near 1 even if its
    singular values do not."""
    return _spectrum_figure(runs, "eigenvalue_moduli", "|eigenvalue| (no unit)", **common)


def _stability(run: RunRecord) -> Any:
    """The norms of the gradient, and by field the spectral radius of the Jacobian at h = 0: curves over iterations."""
    fields = dict.fromkeys(key for r in run.records for key in r if key.startswith("jacobian_radius"))
    radii = {field: thin_curve(*run.series(field)) for field in fields}
    norms = run.series("grad_norm")  # not thinned: an explosion is one iteration
    return (norms, radii) if len(norms[0]) and any(len(at) for at, _ in radii.values()) else None


def _draw_stability(axis: Axes, run: RunRecord, data: Any, per: float) -> None:
    (at, norms), radii = data
    axis.plot(at / per, norms / (norms.max() or 1.0), color=GREY, linewidth=0.8, label="‖gradient‖ / its maximum")
    for (field, (at, radius)), colour in zip(radii.items(), COLOURS, strict=False):
        layer = field.removeprefix("jacobian_radius").removeprefix("_l")
        name = "spectral radius of J" + (f", layer {layer or 0}" if len(radii) > 1 else "")
        axis.plot(at / per, radius, color=colour, linewidth=1.4, label=name)
    draw_level(axis, 1.0, None, colour=RED)
    axis.set_ylim(bottom=0.0)
    axis.set_ylabel("no unit")
    axis.legend(loc="best", fontsize=8)


def compare_stability(runs: Sequence[RunRecord], **common: Any) -> Figure | None:
    """The norm of the gradient and the spectral radius of the Jacobian of a GRU at h = 0, over iterations, one panel
    per run (Kanai et al. 2017, Figure 1)."""
    return draw_panels(runs, _stability, _draw_stability, sharey=True, **common)
