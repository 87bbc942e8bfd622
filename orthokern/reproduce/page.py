"""Parts that all pages of results share."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from orthokern.commandline import one_line, say
from orthokern.diagnostics import plots
from orthokern.reproduce.spec import Measure
from orthokern.training.checkpoint import write_atomically

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
    return ["How each row was trained:", "", *table(("row", "command"), rows)]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def drawn(path: Path, draw: Callable[[Any], Any]) -> Path | None:
    """Writes the figure that `draw` makes with `orthokern.diagnostics.plots`; None without one. An error is reported as
    a warning on standard error, because the page and its numbers do not need the figure."""
    try:
        figure = draw(plots)
        return None if figure is None else plots.save(figure, path)
    except Exception as error:
        reason = " ".join(str(error).split())
        say(f"warning: {path.name} not drawn: {type(error).__name__}: {one_line(reason)}", sys.stderr)
        return None


def _as_json(summary: dict[str, Any]) -> str:
    """Indented JSON with a list of numbers on one line."""
    value = r"(?:[-+.\deE]+|null)"
    numbers = rf"\[\s+{value}(?:,\s+{value})*\s+\]"
    return re.sub(numbers, lambda found: " ".join(found[0].split()), json.dumps(summary, indent=1))


def written(folder: Path, name: str, text: str, summary: dict[str, Any], figure: Path | None = None) -> list[Path]:
    """Writes a page as NAME.md and its numbers as NAME.json; returns these files and the figure."""
    page, numbers = folder / f"{name}.md", folder / f"{name}.json"
    write_atomically(page, text.encode())
    write_atomically(numbers, _as_json(summary).encode() + b"\n")
    return [page, numbers] if figure is None else [page, numbers, figure]
