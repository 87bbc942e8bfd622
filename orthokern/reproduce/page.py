"""Parts that all pages of results share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from orthokern.reproduce.spec import Measure

__all__ = ["commands", "directions", "paragraph"]

WIDTH = 120


def paragraph(text: str) -> str:
    """The text, wrapped at 120 columns."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def directions(measures: Sequence[Measure]) -> str:
    """Which numbers are better: "Higher is better for test accuracy (%). Lower is better for loss.\""""
    parts = []
    for word, higher in (("Higher", True), ("Lower", False)):
        titles = [measure.title for measure in measures if measure.higher_is_better == higher]
        parts += [f"{word} is better for {', '.join(titles)}."] if titles else []
    return paragraph(" ".join(parts))


def commands(rows: Iterable[tuple[str, str]]) -> list[str]:
    """A table of (row, command as Markdown): how each row was trained."""
    lines = ["How each row was trained:", "", "| row | command |", "| --- | --- |"]
    return lines + [f"| {name} | {command} |" for name, command in rows]
