"""Plots for a GRU: the norm of the gradient and the spectral radius of the Jacobian at h = 0, over iterations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orthokern.diagnostics.plots._figures import (
    _COLOURS,
    _GREY,
    _RED,
    Records,
    _Abscissa,
    _figure,
    _panels,
    _per_run,
    save,
    thin_curve,
)
from orthokern.diagnostics.runs import RunRecord, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Stability:
    """Norms of the gradient, divided by the largest, and the spectral radius of the Jacobian at h = 0 per layer."""

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


def plot_stability(records: Records, path: Path, *, title: str = "") -> Path | None:
    """The norm of the gradient and the spectral radius of the Jacobian of a GRU at h = 0, over iterations (Kanai et
    al. 2017, Figure 1).

    Args:
        records: with "grad_norm", and with "jacobian_radius" ("jacobian_radius_l1", ... for upper layers) in some.

    Returns:
        `path`, or None if no record has a spectral radius.
    """
    found = _stability(records)
    if found is None:
        return None
    figure, axes = _figure(1, 1, (7.2, 3.8), title)
    _draw_stability(axes[0, 0], found, _Abscissa("iteration"))
    return save(figure, path)


def compare_stability(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, x: str | None = None, title: str = ""
) -> "Figure | None":
    """Like `plot_stability`, with one panel per run."""
    panels = _per_run(runs, legend, x, lambda run: _stability(run.records))
    if not panels:
        return None
    figure, axes = _panels([panel.title for panel in panels], title, sharey=True)
    for axis, panel in zip(axes, panels, strict=True):
        _draw_stability(axis, panel.found, panel.x)
    return figure
