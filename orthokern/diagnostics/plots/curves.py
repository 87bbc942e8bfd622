"""Curves over iterations: loss and accuracy of one or several runs, values per layer, and iterations until solved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthokern.diagnostics.comparison import are_named, check_settings, labels, setting_text, telling_settings
from orthokern.diagnostics.plots._figures import (
    BLUE,
    COLOURS,
    LINES,
    ORANGE,
    Records,
    common_unit,
    iterations_per,
    level,
    new_figure,
    new_panels,
    percent_limits,
    save,
    thin_curve,
)
from orthokern.diagnostics.runs import RunRecord, number_at, numbers_at, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSSES = ("loss", "nll", "bpc", "perplexity")  # in the names of quantities that a divergence makes large


def _draw(axis: Axes, records: Records, quantity: str, label: str, scale: float = 1.0, **style: Any) -> np.ndarray:
    """Draws a quantity, if the records have it; returns the values that are drawn."""
    at, values = thin_curve(*series(records, quantity))
    if len(at):
        axis.plot(at, scale * values, label=label, **style)
    return scale * values


def plot_learning(
    records: Records,
    path: Path,
    *,
    baseline: float | None = None,
    goal: float | None = None,
    title: str = "",
    loss_label: str = "cross-entropy (nats per time step)",
) -> Path | None:
    """Loss with its baseline, and accuracy (a fraction) with its goal if the records have it, over iterations. None if
    no record has a loss."""
    rows = 2 if any(len(series(records, name)[0]) for name in ("accuracy", "held_out_accuracy")) else 1
    if not len(series(records, "loss")[0]):
        return None
    figure, axes = new_figure(rows, 1, (7.2, 1.0 + 2.3 * rows), title, sharex=True)
    top = axes[0, 0]
    losses = _draw(top, records, "loss", "training batch", color=BLUE, linewidth=1.2)
    if baseline is not None:
        level(top, baseline, f"baseline without memory, {baseline:.4g}")
    if losses.min() > 0 and losses.max() > 10 * losses.min():
        top.set_yscale("log")
    top.set_ylabel(loss_label)
    top.legend(loc="best", fontsize=8)
    if rows == 2:
        bottom = axes[1, 0]
        points = {"color": ORANGE, "linestyle": "", "marker": "o", "markersize": 4}
        shown = [*_draw(bottom, records, "accuracy", "training batch", 100, color=BLUE, linewidth=1.2)]
        shown += [*_draw(bottom, records, "held_out_accuracy", "held-out sequences", 100, **points)]
        if goal is not None:
            level(bottom, 100 * goal, f"goal, {100 * goal:g} %")
            shown.append(100 * goal)
        bottom.set_ylim(percent_limits(shown))
        bottom.set_ylabel("accuracy (%)")
        bottom.legend(loc="best", fontsize=8)
    axes[-1, 0].set_xlabel("iteration")
    return save(figure, path)


def plot_losses(
    records: Records, path: Path, *, label: str, baseline: float | None = None, title: str = ""
) -> Path | None:
    """The mean loss "nll" of the training batches, and that on held-out data, over iterations; `label` is the unit."""
    if not len(series(records, "nll")[0]):
        return None
    figure, axes = new_figure(1, 1, (7.2, 3.8), title)
    axis = axes[0, 0]
    _draw(axis, records, "nll", "training batch", color=BLUE, linewidth=1.0)
    _draw(axis, records, "held_out_loss", "validation", color=ORANGE, linewidth=1.4, marker="o", markersize=3)
    initial = series(records, "held_out_initial_loss")[1]
    if len(initial):
        level(axis, initial[0], "validation, untrained")
    if baseline is not None:
        level(axis, baseline, f"baseline, {baseline:.4g}", ":")
    axis.set_xlabel("iteration")
    axis.set_ylabel(label)
    axis.legend(loc="best", fontsize=8)
    return save(figure, path)


def plot_layers(records: Records, path: Path, *, title: str = "") -> Path | None:
    """Orthogonality error ("orthogonality_by_layer") and gradient norm ("grad_norm_by_layer") of each weight matrix of
    a feedforward network, from the input layer to the readout, over iterations, one curve per layer."""
    panels = (
        ("orthogonality_by_layer", "‖W Wᵀ − I‖² of the smaller Gram matrix"),
        ("grad_norm_by_layer", "norm of the gradient for W"),
    )
    rows = [(r["iteration"], [numbers_at(r, key) for key, _ in panels]) for r in records]
    layers = [len(lists[0]) for _, lists in rows if lists[0] is not None][-1:]  # the last record tells how many
    rows = [(at, lists) for at, lists in rows if [len(values or []) for values in lists] == layers * len(panels)]
    if not layers or not rows:
        return None
    figure, axes = new_figure(2, 1, (7.2, 6.0), title, sharex=True)
    iterations = np.array([at for at, _ in rows], dtype=float)
    last = layers[0] - 1
    for panel, (axis, (_, label)) in enumerate(zip(axes[:, 0], panels, strict=True)):
        curves = np.array([lists[panel] for _, lists in rows], dtype=float)  # [P, layers], NaN for null
        curves = np.where(curves > 0, curves, math.nan)  # zero cannot be drawn on a logarithmic axis
        for index, curve in enumerate(curves.T):
            name = "input" if index == 0 else "readout" if index == last else None
            colour = {"input": BLUE, "readout": ORANGE}.get(name or "", str(0.15 + 0.7 * index / max(1, last)))
            axis.plot(*thin_curve(iterations, curve), color=colour, linewidth=1.2 if name else 0.8, label=name)
        if np.isfinite(curves).any():
            axis.set_yscale("log")
        axis.set_ylabel(label, fontsize=9)
    axes[0, 0].legend(loc="best", fontsize=8, title="hidden in grey, darker is nearer to the input", title_fontsize=7)
    axes[1, 0].set_xlabel("iteration")
    return save(figure, path)


def compare_curves(
    runs: Sequence[RunRecord],
    quantity: str,
    *,
    panel: str | None = None,
    legend: Sequence[str] | None = None,
    legend_title: str = "",
    x: str | None = None,
    baseline: float | None = None,
    title: str = "",
) -> Figure | None:
    """One quantity of several runs, a curve each: accuracy as the paper's Figures 1 and 4, mean squared error as
    Figure 5, loss as Figure 6.

    Args:
        runs: those whose records have the quantity are drawn.
        quantity: a field of the records, or "field.part". Quantities with "accuracy" in their names are fractions, and
            are drawn in percent. Of a loss ("loss", "nll", "bpc", "perplexity"), a run that diverged has triangles at
            the upper end of the axis.
        panel: a setting: one panel for each of its values, side by side (Figure 1 has one for each T).
        legend: settings to show in the legend, with `panel` those of them that differ within a panel; by default those
            in which the runs differ, see `labels`. Runs with the same label have the same colour. If the runs have
            labels of their own (`RunRecord.label`), one legend below the panels shows these.
        legend_title: a line above the legend below the panels, which says what the labels are.
        x: "iteration" or "epoch" (see `RunRecord.iterations_per_epoch`); None: epochs where every run has them.
        baseline: draw a line at this value, in the unit of `quantity`; None: for a loss, the baseline in the
            configuration of the runs.
    """
    unit = common_unit(runs, x)
    if panel is not None:
        check_settings("panel", runs, [panel])
    curves = {id(run): thin_curve(*run.series(quantity)) for run in runs}
    drawn = [run for run in runs if len(curves[id(run)][0])]
    if not drawn:
        return None
    groups = _by_setting(drawn, panel)
    texts = _labels(drawn, groups, panel, legend)
    kinds = list(dict.fromkeys(texts.values()))
    scale = 100.0 if "accuracy" in quantity else 1.0
    ends = [scale * float(end(curves[id(run)][1])) for run in drawn for end in (min, max)]
    top = _top([curves[id(run)][1] for run in drawn]) if any(name in quantity for name in _LOSSES) else math.inf
    named = are_named(drawn)
    figure, axes = new_panels(list(groups), title, sharey=True)
    for axis, members in zip(axes, groups.values(), strict=True):
        shown = texts if panel is None or named else _differing_labels(members, texts, legend)
        few = all(len(curves[id(run)][0]) <= 50 for run in members)  # evaluations; markers on some curves would mislead
        used: set[str] = set()
        for run in members:
            at, values = curves[id(run)]
            kind, text = kinds.index(texts[id(run)]), shown[id(run)]
            label = None if text in used else text
            _curve(axis, at / iterations_per(run, unit), scale * values, kind, label, "o" if few else None, top)
            used.add(text)
        for value in _baselines(members, quantity, baseline):
            level(axis, scale * value, f"baseline {value:.4g}")
            ends += [scale * value] if scale == 100.0 else []
        axis.set_xlabel(unit)
        axis.locator_params(axis="x", integer=axis.get_xlim()[1] > 4)  # few whole epochs would leave few ticks
        if not named:
            axis.legend(loc="best", fontsize=7)
    if named:
        _legend_below(figure, legend_title)
    _limit(axes[0], ends, scale == 100.0, top)
    axes[0].set_ylabel(quantity.replace("_", " ") + (" (%)" if scale == 100.0 else ""))
    return figure


def _curve(
    axis: Axes, at: np.ndarray, values: np.ndarray, kind: int, label: str | None, marker: str | None, top: float
) -> None:
    """Draws the curve of a run with the colour and stroke of its kind. Values beyond `top` are triangles there."""
    colour, line = COLOURS[kind % len(COLOURS)], LINES[kind // len(COLOURS) % len(LINES)]
    axis.plot(at, values, color=colour, linestyle=line, linewidth=1.2, marker=marker, markersize=3, label=label)
    if values.max() > top:
        axis.plot(at[values > top], np.full((values > top).sum(), top), "^", color=colour, clip_on=False)


def _limit(axis: Axes, ends: Sequence[float], percent: bool, top: float) -> None:
    """Sets the limits and the scale of the y axis for values that lie between `ends`."""
    if percent:
        axis.set_ylim(percent_limits(ends))
    elif min(ends) > 0 and max(ends) > 10 * min(ends):
        axis.set_yscale("log")
    if max(ends) > top:
        axis.set_ylim(top=top)


def _top(curves: Sequence[np.ndarray]) -> float:
    """The end of the axis. It is finite where a run has diverged, so that its values leave the others a part of the
    panel: ten times the median of the first values, if one is above a thousand times that."""
    start = statistics.median_low([float(values[0]) for values in curves])
    return 10 * start if max(float(values.max()) for values in curves) > 1000 * start > 0 else math.inf


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


def _labels(
    runs: Sequence[RunRecord], groups: dict[str, list[RunRecord]], panel: str | None, legend: Sequence[str] | None
) -> dict[int, str]:
    """The label of each run, by id. The setting in the panel's title is left out of the label."""
    if legend is not None or panel is None:
        return {id(run): text for run, text in zip(runs, labels(runs, legend), strict=True)}
    names = dict.fromkeys(name for members in groups.values() for name in telling_settings(members))
    return {id(run): text for run, text in zip(runs, labels(runs, list(names)), strict=True)}


def _differing_labels(
    members: Sequence[RunRecord], texts: dict[int, str], legend: Sequence[str] | None
) -> dict[int, str]:
    """The labels of the runs of one panel, without those settings of a legend that are the same in the whole panel."""
    differing = [name for name in legend or () if len({setting_text(run, name) for run in members}) > 1]
    if not differing:
        return texts
    return {id(run): text for run, text in zip(members, labels(members, differing), strict=True)}


def _baselines(runs: Sequence[RunRecord], quantity: str, baseline: float | None) -> list[float]:
    if baseline is not None:
        return [baseline]
    if quantity not in ("loss", "held_out_loss"):
        return []
    baselines = {number_at(run.config, "baseline") for run in runs}
    return sorted(level for level in baselines if level is not None) if len(baselines) == 1 else []


def _legend_below(figure: Figure, title: str) -> None:
    """One legend for all panels, below them, where it covers no curve. The figure grows by its height."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    width, height = figure.get_size_inches()
    fitting = int(width / (0.5 + 0.075 * max(map(len, handles))))  # inches, of 8 point letters
    columns = max(1, min(len(handles), fitting))
    lines = -(-len(handles) // columns) + bool(title)
    figure.set_size_inches(width, height + 0.1 + 0.18 * lines)
    style = {"fontsize": 8, "title": title or None, "title_fontsize": 8}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, **style)


_DYNAMICS = (
    ("spectral_radius", "spectral radius of W", False),
    ("orthogonality_error_of_w", "‖W Wᵀ − I‖", True),
    ("recurrent_grad_norm", "norm of the gradient for W", True),
    ("held_out_accuracy", "held-out accuracy (%)", False),
)


def compare_dynamics(
    runs: Sequence[RunRecord], *, legend: Sequence[str] | None = None, legend_title: str = "", title: str = ""
) -> Figure | None:
    """Spectral radius, orthogonality error and gradient norm of plain recurrent matrices, and the accuracy, over the
    number of training sequences: Figure 3b of Manchev and Spratling. Runs without these fields are left out."""
    drawn = [run for run in runs if all(len(run.series(key)[0]) for key, _, _ in _DYNAMICS[:3])]
    if not drawn:
        return None
    texts = labels(drawn, legend)
    figure, axes = new_panels([label for _, label, _ in _DYNAMICS], title)
    for axis, (key, _, logarithmic) in zip(axes, _DYNAMICS, strict=True):
        scale = 100.0 if "accuracy" in key else 1.0
        for index, (run, text) in enumerate(zip(drawn, texts, strict=True)):
            at, values = thin_curve(*run.series(key))
            per_iteration = (number_at(run.settings, "batch") or 1.0) * (number_at(run.settings, "accumulate") or 1.0)
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": "o" if len(at) <= 50 else None}
            axis.plot(at * per_iteration, scale * values, linewidth=1.2, markersize=3, label=text, **style)
        if logarithmic:
            axis.set_yscale("log")
        axis.set_xlabel("sequences seen")
        axis.locator_params(axis="x", nbins=4)  # numbers of six digits, side by side
    if are_named(drawn):
        _legend_below(figure, legend_title)
    else:
        axes[0].legend(loc="best", fontsize=8)
    return figure


def iterations_over_lengths(panels: Mapping[str, Mapping[str, Mapping[int, int]]], title: str = "") -> Figure | None:
    """The number of iterations until a problem is solved, over the length of its sequences: problem -> network -> T ->
    iterations, with one panel for each problem. A network has the same colour in all panels. None if nothing was
    solved."""
    drawn = {problem: networks for problem, networks in panels.items() if any(networks.values())}
    if not drawn:
        return None
    names = list(dict.fromkeys(name for networks in panels.values() for name in networks))
    alone = next(iter(drawn)) if len(drawn) == 1 else ""  # a single panel has no title of its own
    figure, axes = new_panels(list(drawn), ": ".join(filter(None, (title, alone))))
    for axis, networks in zip(axes, drawn.values(), strict=True):
        for name, solved in networks.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            if solved:
                axis.plot(*zip(*sorted(solved.items()), strict=True), "o-", c=colour, lw=1.2, markersize=3, label=name)
        axis.set_yscale("log")
        axis.set_xlabel("T")
        axis.legend(loc="best", fontsize=8)
    axes[0].set_ylabel("iterations until solved")
    return figure
