"""Layout of tables: cells, numbers, sizes and limits. bench/tables.py fills tables from a results file."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH = 120
MARKS = {"goal": " ✓✓", "bar": " ✓", "no": " ✗", None: ""}

Row = Mapping[str, Any]
Results = Mapping[str, Any]


def wrapped(text: str, width: int = WIDTH) -> str:
    """Lines of at most `width` columns; links and file names are not broken."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


@dataclasses.dataclass
class Table:
    """A title, the direction in which a number is better, a header, cells, and a sentence below."""

    title: str
    better: str
    header: list[str]
    cells: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", *([wrapped(self.better), ""] if self.better else [])]
        lines.append("| " + " | ".join(self.header) + " |")
        lines.append("| " + " | ".join(["---"] + ["---:"] * (len(self.header) - 1)) + " |")
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join(lines + (["", wrapped(self.note)] if self.note else []))

    def text(self) -> str:
        """Columns padded to the width of their widest cell."""
        plain = [[cell.replace("`", "") for cell in row] for row in (self.header, *self.cells)]
        widths = [max(len(row[i]) for row in plain) for i in range(len(self.header))]
        lines = []
        for row in plain:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            padded[0] = row[0].ljust(widths[0])
            lines.append("  ".join(padded))
        below = " ".join(filter(None, [self.better, self.note])).replace("`", "")
        return "\n".join(lines + textwrap.wrap(below, 110))


def number(value: float) -> str:
    """Two or three digits."""
    if value != value or value == 0:
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.1g}"


def counted(count: int, thing: str) -> str:
    """ "1 core", "2 cores"."""
    return f"{count} {thing}" + ("" if count == 1 else "s")


def of(results: Results, table: str) -> list[Row]:
    return [row for row in results["rows"] if row["table"] == table]


def cases(rows: Sequence[Row]) -> list[str]:
    """Their names, in the order of their first appearance, which is that of the source."""
    return list(dict.fromkeys(row["case"] for row in rows))


LETTERS = "NKTBDCR"  # in the order of a label


def size_label(size: Mapping[str, int], without: str) -> str:
    return ", ".join(f"{letter}={size[letter]}" for letter in LETTERS if letter in size and letter not in without)


def sizes(rows: Sequence[Row]) -> list[dict[str, int]]:
    """All sizes, by N, then T, then B."""
    unique = {tuple(sorted(row["size"].items())): row["size"] for row in rows}
    return sorted(unique.values(), key=lambda size: (size.get("N", 0), size.get("T", 0), size.get("B", 0)))


def constant(rows: Sequence[Row], letters: str) -> str:
    """Those of the letters that have one value in all rows, or none."""
    return "".join(letter for letter in letters if len({row["size"].get(letter) for row in rows}) == 1)


def find(rows: Sequence[Row], case: str, size: Mapping[str, int]) -> Row | None:
    return next((row for row in rows if row["case"] == case and row["size"] == size), None)


def direction(rows: Sequence[Row]) -> str:
    """ "Higher is better." or "Lower is better.", as the rows say."""
    (better,) = {row["better"] for row in rows}
    return f"{better.capitalize()} is better."


def limits(rows: Sequence[Row], show: Callable[[float], str]) -> str:
    """Target and stretch target, "0.5 (0.35)": for each size, from left to right, whose targets differ from the one
    before."""
    texts: list[str] = []
    for row in rows:
        text = "–"
        if row["bar"] is not None:
            text = show(row["bar"]) + (f" ({show(row['goal'])})" if row["goal"] is not None else "")
        if texts[-1:] != [text]:
            texts.append(text)
    return ", ".join(texts)


def by_size(
    rows: Sequence[Row],
    title: str,
    cell: Callable[[Row], str],
    show_limit: Callable[[float], str] | None,
    note: str = "",
    first: str = "",
    without: str = "BDC",
) -> Table:
    """A table of cases by sizes; `show_limit` adds a column of targets.

    The header leaves out the letters of `without` that are the same in all rows.
    """
    columns, hidden = sizes(rows), constant(rows, without)
    header = [first, *(size_label(size, hidden) for size in columns)]
    if show_limit is not None:
        header.append("target (stretch)")
    cells = []
    for case in cases(rows):
        found = [find(rows, case, size) for size in columns]
        line = [f"{case}", *("–" if row is None else cell(row) + MARKS[row["reached"]] for row in found)]
        if show_limit is not None:
            line.append(limits([row for row in found if row is not None], show_limit))
        cells.append(line)
    return Table(title, direction(rows), header, cells, note)


def times(value: float) -> str:
    return f"{number(value)}x"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
