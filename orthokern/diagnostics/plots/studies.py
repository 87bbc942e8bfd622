"""Figures of `orthokern.reproduce`: dynamics of recurrent matrices, variants of a method, iterations until solved, and
the response of a linear network to its inputs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orthokern.diagnostics.comparison import labels
from orthokern.diagnostics.plots._figures import (
    COLOURS,
    GREY,
    draw_line,
    new_figure,
    new_panels,
    style_of,
    thin_curve,
)
from orthokern.diagnostics.plots.curves import draw_legends
from orthokern.diagnostics.runs import RunRecord, number_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Variant = tuple[str, str]  # the part that is varied, and its value

_DYNAMICS = (
    ("spectral_radius", "spectral radius of W"),
    ("orthogonality_error_of_w", "‖W Wᵀ − I‖"),
    ("recurrent_grad_norm", "norm of the gradient for W"),
    ("held_out_accuracy", "held-out accuracy (%)"),
)


def compare_dynamics(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, legend_title: str = "", title: str = ""
) -> Figure | None:
    """Spectral radius, orthogonality error and gradient norm of plain recurrent matrices, and the accuracy, over the
    number of training sequences: Figure 3b of Manchev and Spratling. Runs without these fields are left out."""
    runs = [run for run in runs if all(len(run.series(key)[0]) for key, _ in _DYNAMICS[:3])]
    if not runs:
        return None
    figure, axes = new_panels([label for _, label in _DYNAMICS], title)
    for axis, (key, _) in zip(axes, _DYNAMICS, strict=True):
        scale = 100.0 if "accuracy" in key else 1.0
        for index, (run, text) in enumerate(zip(runs, labels(runs, legend), strict=True)):
            at, values = thin_curve(*run.series(key))
            per_iteration = (number_at(run.settings, "batch") or 1.0) * (number_at(run.settings, "accumulate") or 1.0)
            draw_line(axis, at * per_iteration, scale * values, linewidth=1.2, label=text, **style_of(index))
        axis.set_xlabel("sequences seen")
        axis.locator_params(axis="x", nbins=4)  # numbers of six digits, side by side
    for axis in axes[1:3]:
        axis.set_yscale("log")
    draw_legends(figure, runs, legend_title)
    return figure


def compare_parts(panels: Mapping[str, Mapping[Variant, Sequence[float]]], title: str = "") -> Figure | None:
    """One point for each variant, from top to bottom, grouped by part of the method.

    Args:
        panels: title of a panel -> variant -> numbers of its seeds, drawn as a line from the smallest to the largest
            with a point at the median; a variant that is missing or has no number is a grey cross. A panel whose
            numbers are positive and span more than a factor of 30 has a logarithmic axis.

    Returns:
        The figure, or None if there is no number.

    Example::

        >>> errors = {("margin", "0"): [0.2], ("margin", "0.1"): [0.001, 0.003, 0.002], ("cell", "LSTM"): [0.16]}
        >>> figure = compare_parts({"adding: squared error": errors}, "parts")
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['margin: 0', 'margin: 0.1', 'cell: LSTM']
    """
    variants = list(dict.fromkeys(variant for values in panels.values() for variant in values))
    if not any(numbers for values in panels.values() for numbers in values.values()):
        return None
    parts = list(dict.fromkeys(part for part, _ in variants))
    size = (2.4 + 2.5 * len(panels), 1.2 + 0.24 * len(variants))
    figure, axes = new_figure(1, len(panels), size, title, sharey=True)
    for axis, (heading, values) in zip(axes[0], panels.items(), strict=True):
        known = [number for numbers in values.values() for number in numbers]
        for row, variant in enumerate(variants):
            numbers = values.get(variant, ())
            colour = COLOURS[parts.index(variant[0]) % len(COLOURS)]
            if not numbers:
                axis.plot([0.5], [row], "x", color=GREY, markersize=4, transform=axis.get_yaxis_transform())
            else:
                axis.plot([min(numbers), max(numbers)], [row, row], color=colour, linewidth=2.5, alpha=0.5)
                axis.plot([statistics.median(numbers)], [row], "o", color=colour, markersize=6)
        for row, (above, below) in enumerate(zip(variants, variants[1:], strict=False)):
            if above[0] != below[0]:
                axis.axhline(row + 0.5, color=GREY, linewidth=0.8)
        if known and min(known) > 0 and max(known) > 30 * min(known):
            axis.set_xscale("log")
        axis.set_title(heading, fontsize=9, wrap=True)
    axes[0, 0].set_yticks(range(len(variants)), [f"{part}: {value}" for part, value in variants], fontsize=8)
    axes[0, 0].invert_yaxis()
    return figure


def iterations_over_lengths(panels: Mapping[str, Mapping[str, Mapping[int, int]]], title: str = "") -> Figure | None:
    """The number of iterations until a problem is solved, over the length of its sequences: problem -> network -> T ->
    iterations, with one panel for each problem. A network has the same colour in all panels. None if nothing was
    solved."""
    drawn = {problem: networks for problem, networks in panels.items() if any(networks.values())}
    if not drawn:
        return None
    names = list(dict.fromkeys(name for networks in panels.values() for name in networks))
    only_panel = next(iter(drawn)) if len(drawn) == 1 else ""  # a single panel has no title of its own
    figure, axes = new_panels(list(drawn), ": ".join(filter(None, (title, only_panel))))
    for axis, networks in zip(axes, drawn.values(), strict=True):
        for name, solved in networks.items():
            if solved:
                at, iterations = zip(*sorted(solved.items()), strict=True)
                axis.plot(at, iterations, lw=1.2, marker="o", markersize=3, label=name, **style_of(names.index(name)))
        axis.set_yscale("log")
        axis.set_xlabel("T")
        axis.legend(loc="best", fontsize=8)
    axes[0].set_ylabel("iterations until solved")
    return figure


def memory(matrix: Tensor, transients: Mapping[str, Tensor], curves: Mapping[str, Tensor], title: str = "") -> Figure:
    """The response of non-normal matrices: Figure 1 of the nnRNN report (Jahagirdar et al. 2019).

    Args:
        matrix: [N, N], drawn as an image.
        transients: name -> [T, M], the norms of M states over time (`transient_norms`): mean and standard deviation are
            drawn.
        curves: name -> [T], Fisher memory curves (`fisher_memory`).
    """
    figure, axes = new_panels(["(a) the matrix", "(b) norm of the state", "(c) Fisher memory J(k)"], title)
    picture = axes[0].imshow(matrix.numpy(), cmap="viridis")
    axes[0].grid(False)
    figure.colorbar(picture, ax=axes[0], shrink=0.8)
    for index, (name, norms) in enumerate(transients.items()):
        mean, spread = norms.mean(1).numpy(), norms.std(1).numpy()
        at = np.flatnonzero(mean > 0)  # the powers of a nilpotent matrix become exactly zero
        axes[1].plot(at, mean[at], linewidth=1.2, label=name, **style_of(index))
        low = np.maximum(mean - spread, 0.1 * mean)[at]
        axes[1].fill_between(at, low, (mean + spread)[at], color=style_of(index)["color"], alpha=0.15, linewidth=0)
    for index, (name, curve) in enumerate(curves.items()):
        values = curve.numpy()
        at = np.flatnonzero(values > 1e-8 * values.max())
        axes[2].plot(at, values[at], linewidth=1.2, label=name, **style_of(index))
    for axis in axes[1:]:
        axis.set_yscale("log")
        axis.set_xlabel("steps after the input")
        axis.legend(loc="best", fontsize=6)
    return figure
