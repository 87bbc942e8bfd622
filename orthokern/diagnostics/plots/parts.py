"""Numbers of many variants of a network side by side, one panel per task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orthokern.diagnostics.plots._figures import COLOURS, GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Variant = tuple[str, str]  # the part that is varied, and its value


def compare_parts(panels: Mapping[str, Mapping[Variant, Sequence[float]]], title: str = "") -> Figure | None:
    """A point for each variant: from top to bottom the values of one part of a method after the other.

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
