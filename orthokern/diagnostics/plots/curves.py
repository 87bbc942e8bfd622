"""Curves over iterations: loss and accuracy of one or several runs, and values per layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.comparison import caption, check_settings, labels, setting_text, telling_settings
from orthokern.diagnostics.plots._figures import (
    BLUE,
    ORANGE,
    draw_level,
    draw_line,
    new_figure,
    new_panels,
    style_of,
    thin_curve,
    use_log_scale,
    x_axis,
)
from orthokern.diagnostics.runs import RunRecord, number_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSSES = ("loss", "nll", "bpc", "perplexity")  # in the names of quantities that a divergence makes large


def _draw(axis: Axes, run: RunRecord, quantity: str, label: str, scale: float = 1.0, **style: Any) -> None:
    """Draws a quantity, if the records have it."""
    at, values = thin_curve(*run.series(quantity))
    if len(at):
        draw_line(axis, at, scale * values, label=label, **style)


def plot_learning(run: RunRecord, *, title: str = "") -> Figure | None:
    """Loss with its baseline, and accuracy (a fraction) with its goal if the records have it, over iterations. If the
    records have "nll", it is drawn instead of the loss, together with the loss on held-out data. The label of the loss,
    the baseline and the goal are those in the configuration. None if no record has a loss."""
    quantity = "nll" if "nll" in run.quantities else "loss"
    losses = run.series(quantity)[1]
    if not len(losses):
        return None
    baseline, goal = (number_at(run.config, name) for name in ("baseline", "goal"))
    rows = 2 if {"accuracy", "held_out_accuracy"} & set(run.quantities) else 1
    figure, axes = new_figure(rows, 1, (7.2, 1.5 + 2.2 * rows), title, sharex=True)
    top = axes[0, 0]
    _draw(top, run, quantity, "training batch", color=BLUE, linewidth=1.2)
    if quantity == "nll":
        _draw(top, run, "held_out_loss", "validation", color=ORANGE, linewidth=1.4, marker="o")
        for initial in run.series("held_out_initial_loss")[1][:1]:
            draw_level(top, initial, "validation, untrained")
    else:
        use_log_scale(top, losses)
    if baseline is not None:
        draw_level(top, baseline, f"baseline, {baseline:.4g}", ":")
    label = run.config.get("loss_label")
    top.set_ylabel(caption(label) if isinstance(label, str) else "loss")
    if rows == 2:
        bottom = axes[1, 0]
        _draw(bottom, run, "accuracy", "training batch", 100, color=BLUE, linewidth=1.2)
        points = {"color": ORANGE, "linestyle": "", "marker": "o", "markersize": 4}
        _draw(bottom, run, "held_out_accuracy", "held-out sequences", 100, **points)
        if goal is not None:
            draw_level(bottom, 100 * goal, f"goal, {100 * goal:g} %")
        bottom.set_ylabel("accuracy (%)")
    for axis in axes.flat:
        axis.legend(loc="best", fontsize=8)
    axes[-1, 0].set_xlabel("iteration")
    return figure


def plot_layers(run: RunRecord, *, title: str = "") -> Figure | None:
    """Orthogonality error ("orthogonality_by_layer") and gradient norm ("grad_norm_by_layer") of each weight matrix of
    a feedforward network, from the input layer to the readout, over iterations, one curve per layer."""
    panels = (
        ("orthogonality_by_layer", "‖W Wᵀ − I‖² of the smaller Gram matrix"),
        ("grad_norm_by_layer", "norm of the gradient for W"),
    )
    rows = [r for r in run.records if all(isinstance(r.get(key), list) for key, _ in panels)]
    if not rows:
        return None
    figure, axes = new_figure(2, 1, (7.2, 6.0), title, sharex=True)
    iterations = np.array([r["iteration"] for r in rows], dtype=float)
    last = len(rows[0][panels[0][0]]) - 1
    for axis, (key, label) in zip(axes[:, 0], panels, strict=True):
        curves = np.array([r[key] for r in rows], dtype=float)  # [P, layers], NaN for null
        curves = np.where(curves > 0, curves, math.nan)  # zero cannot be drawn on a logarithmic axis
        for index, curve in enumerate(curves.T):
            name = "input" if index == 0 else "readout" if index == last else None
            colour = {"input": BLUE, "readout": ORANGE}.get(name or "", str(0.15 + 0.7 * index / max(1, last)))
            draw_line(axis, *thin_curve(iterations, curve), color=colour, linewidth=1.2 if name else 0.8, label=name)
        if np.isfinite(curves).any():
            axis.set_yscale("log")
        axis.set_ylabel(label, fontsize=9)
    axes[0, 0].legend(loc="best", fontsize=8, title="hidden in grey, darker is nearer to the input", title_fontsize=7)
    axes[1, 0].set_xlabel("iteration")
    return figure


def compare_curves(
    runs: Sequence[RunRecord],
    quantity: str,
    *,
    panel: str | None = None,
    legend: Sequence[str] | None = None,
    legend_title: str = "",
    x: str | None = None,
    title: str = "",
) -> Figure | None:
    """One quantity of several runs, with one curve per run: accuracy as in the paper's Figures 1 and 4, mean squared
    error as in Figure 5, loss as in Figure 6. A loss is drawn with the baseline in the configuration of the runs, if
    they have the same one.

    Args:
        runs: those whose records have the quantity are drawn.
        quantity: a field of the records, or "field.part". Quantities with "accuracy" in their names are fractions, and
            are drawn in percent. The axis of a loss ("loss", "nll", "bpc", "perplexity") ends at ten times the first
            values if a run diverged.
        panel: a setting: one panel for each of its values, side by side (Figure 1 has one for each T).
        legend: settings to show in the legend; by default those in which the runs differ, see `labels`. Runs with the
            same label have the same colour. If the runs have labels of their own (`RunRecord.label`), one legend below
            the panels shows these.
        legend_title: heading of the legend below the panels, which explains the labels.
        x: "iteration" or "epoch" (see `RunRecord.iterations_per_epoch`); None: epochs if every run has them.
    """
    unit, per = x_axis(runs, x)
    if panel is not None:
        check_settings("panel", runs, [panel])
    lengths = {id(run): each for run, each in zip(runs, per, strict=True)}
    runs = [run for run in runs if len(run.series(quantity)[0])]
    if not runs:
        return None
    if panel is not None and legend is None:
        legend = telling_settings(runs, [panel])
    scale = 100.0 if "accuracy" in quantity else 1.0
    groups = _by_setting(runs, panel)
    texts = {id(run): text for run, text in zip(runs, labels(runs, legend), strict=True)}
    kinds = list(dict.fromkeys(texts.values()))
    figure, axes = new_panels(list(groups), title, sharey=True)
    for axis, members in zip(axes, groups.values(), strict=True):
        for index, run in enumerate(members):
            at, values = thin_curve(*run.series(quantity))
            text = texts[id(run)]
            label = text if text not in [texts[id(other)] for other in members[:index]] else None
            style = {**style_of(kinds.index(text)), "linewidth": 1.2, "label": label}
            draw_line(axis, at / lengths[id(run)], scale * values, **style)
        baselines = {number_at(run.config, "baseline") for run in members}
        baseline = baselines.pop() if len(baselines) == 1 else None
        if quantity in ("loss", "held_out_loss") and baseline is not None:
            draw_level(axis, baseline, f"baseline {baseline:.4g}")
        axis.set_xlabel(unit)
        axis.locator_params(axis="x", integer=axis.get_xlim()[1] > 4)  # few whole epochs would leave few ticks
    draw_legends(figure, runs, legend_title)
    if scale == 1.0:
        _limit(axes[0], [run.series(quantity)[1] for run in runs], any(name in quantity for name in _LOSSES))
    axes[0].set_ylabel(quantity.replace("_", " ") + (" (%)" if scale == 100.0 else ""))
    return figure


def _limit(axis: Axes, curves: Sequence[np.ndarray], is_loss: bool) -> None:
    """Sets the scale of the y axis. For a loss, the axis ends at ten times the median of the first values if a run has
    diverged to more than a thousand times the median, so that the other curves remain visible."""
    use_log_scale(axis, np.concatenate(curves))
    start = statistics.median_low([float(values[0]) for values in curves])
    if is_loss and max(float(values.max()) for values in curves) > 1000 * start > 0:
        axis.set_ylim(top=10 * start)


def _by_setting(runs: Sequence[RunRecord], panel: str | None) -> dict[str, list[RunRecord]]:
    """Groups the runs by "name value" of a setting: numbers first, in ascending order. Without a setting, one group
    ""."""
    if panel is None:
        return {"": list(runs)}

    def order(run: RunRecord) -> tuple[bool, float, str]:
        number = number_at(run.settings, panel)
        return number is None, number or 0.0, setting_text(run, panel)

    groups: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=order):
        groups.setdefault(f"{panel} {setting_text(run, panel)}", []).append(run)
    return groups


def draw_legends(figure: Figure, runs: Sequence[RunRecord], title: str) -> None:
    """A legend in each panel; for runs with labels of their own, one legend below all panels, where it covers no curve.
    The figure grows by its height."""
    if not all(run.label for run in runs):
        for axis in figure.axes:
            axis.legend(loc="best", fontsize=7)
        return
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    width, height = figure.get_size_inches()
    columns = min(len(handles), max(1, int(width / (0.5 + 0.075 * max(map(len, handles))))))  # of 8 point letters
    figure.set_size_inches(width, height + 0.1 + 0.18 * (-(-len(handles) // columns) + bool(title)))
    style = {"fontsize": 8, "title": title or None, "title_fontsize": 8}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, **style)
