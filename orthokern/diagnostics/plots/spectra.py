"""Singular values of the recurrent matrix, and magnitudes of its eigenvalues, over iterations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orthokern.diagnostics.plots._figures import (
    _BLUE,
    _GREEN,
    _GREY,
    _RED,
    CURVE_POINTS,
    Records,
    _Abscissa,
    _panels,
    _per_run,
    _stretches,
    save,
    thin_curve,
)
from orthokern.diagnostics.runs import RunRecord, number_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


_SINGULAR, _MODULUS = "singular value (no unit)", "|eigenvalue| (no unit)"


def _draw_spectrum(axis: "Axes", found: _Spectra, margin: float | None, x: _Abscissa, ylabel: str) -> None:
    at, mean, std = found.at / x.per, found.mean, found.std
    axis.fill_between(
        at, mean - std, mean + std, color=_GREEN, alpha=0.3, linewidth=0, label="mean ± standard deviation"
    )
    axis.plot(at, mean, color=_GREEN, linewidth=1.4, label="mean")
    axis.plot(at, found.high, color=_BLUE, linewidth=1.2, label="maximum")
    axis.plot(at, found.low, color=_RED, linewidth=1.2, label="minimum")
    # Bounds far away from the values would compress the curves into one line.
    if margin is not None and margin > 0 and max(1 - found.low.min(), found.high.max() - 1) > 0.25 * margin:
        for bound in (1 - margin, 1 + margin):
            axis.axhline(
                bound, color=_GREY, linestyle="--", linewidth=1.0, label=f"bounds 1 ± {margin:g}" if bound < 1 else None
            )
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_xlabel(x.label)
    axis.set_ylabel(ylabel)


def _plot(found: _Spectra | None, path: Path, title: str, margin: float | None, ylabel: str) -> Path | None:
    if found is None:
        return None
    figure, (axis,) = _panels([""], title)
    _draw_spectrum(axis, found, margin, _Abscissa("iteration"), ylabel)
    axis.legend(loc="best", fontsize=8)
    return save(figure, path)


def plot_spectrum(
    records: Records, path: Path, *, margin: float | None = None, title: str = "", key: str = "spectrum"
) -> Path | None:
    """Singular values of the recurrent matrix over iterations: mean, mean ± one standard deviation, and extremes, as
    in Figure 3 of Vorontsov et al. 2017.

    Args:
        records: those with "spectrum": {"mean", "std", "min", "max"} are drawn.
        margin: the bounds 1 ± margin are drawn if a value is at least a quarter of the margin away from 1; None: no
            bounds.
    """
    return _plot(_spectra(records, key), path, title, margin, _SINGULAR)


def plot_moduli(records: Records, path: Path, *, title: str = "", key: str = "eigenvalue_moduli") -> Path | None:
    """Magnitudes of the eigenvalues over iterations, drawn as in `plot_spectrum`. Those of an nnRNN stay near 1 even if
    its singular values do not.

    Args:
        records: those with "eigenvalue_moduli": {"mean", "std", "min", "max"} are drawn.
    """
    return _plot(_spectra(records, key), path, title, None, _MODULUS)


def compare_spectra(
    runs: Sequence[RunRecord],
    *,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    title: str = "",
    key: str = "spectrum",
) -> "Figure | None":
    """Singular values over iterations, one panel per run: Figure 3 of Vorontsov et al. 2017. Every panel has its own
    scale, because one figure has margins from 0.001 to none. The bounds are taken from the setting "margin".
    """
    return _compare(runs, legend, x, title, key, _SINGULAR)


def compare_moduli(
    runs: Sequence[RunRecord],
    *,
    legend: Sequence[str] | None = None,
    x: str | None = None,
    title: str = "",
    key: str = "eigenvalue_moduli",
) -> "Figure | None":
    """Magnitudes of the eigenvalues over iterations, one panel per run."""
    return _compare(runs, legend, x, title, key, _MODULUS)


def _compare(
    runs: Sequence[RunRecord], legend: Sequence[str] | None, x: str | None, title: str, key: str, ylabel: str
) -> "Figure | None":
    panels = _per_run(runs, legend, x, lambda run: _spectra(run.records, key))
    if not panels:
        return None
    figure, axes = _panels([panel.title for panel in panels], title)
    for axis, panel in zip(axes, panels, strict=True):
        _draw_spectrum(axis, panel.found, panel.margin if ylabel == _SINGULAR else None, panel.x, ylabel)
    axes[0].legend(loc="best", fontsize=7)
    return figure
