"""Common parts of all pages of results: folders, Markdown, numbers, files."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from orthokern._files import write_atomically
from orthokern._version import __version__
from orthokern.commandline import one_line, say
from orthokern.diagnostics import plots
from orthokern.errors import InputError
from orthokern.reproduce.spec import Measure
from orthokern.training.rundir import processor


def paragraph(text: str) -> str:
    """The text, wrapped at 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def directions(measures: Sequence[Measure]) -> str:
    """Which numbers are better: "Higher is better for test accuracy (%). Lower is better for loss.\""""
    parts = []
    for word, higher in (("Higher", True), ("Lower", False)):
        titles = [measure.title for measure in measures if measure.higher_is_better == higher]
        parts += [f"{word} is better for {', '.join(titles)}."] if titles else []
    return " ".join(parts)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def commands(rows: Iterable[tuple[str, str]]) -> list[str]:
    """A table of (row, command as Markdown): how each row was trained."""
    return ["How each row was trained:", "", *table(("row", "command"), rows)]


def machines(names: Iterable[str | None]) -> str:
    return ", ".join(sorted({name for name in names if name})) or "nothing trained yet"


def dated() -> dict[str, str]:
    """The versions and the date, for a page."""
    versions = f"orthokern {__version__}, torch {torch.__version__}"
    return {"versions": versions, "date": time.strftime("%Y-%m-%d")}


def conditions() -> str:
    """One line with versions, machine and date."""
    threads = torch.get_num_threads()
    machine = f"{processor()}, {threads} thread{'' if threads == 1 else 's'}"
    return f"{dated()['versions']}; {machine}; {dated()['date']}."


def drawn(path: Path, draw: Callable[[Any], Any]) -> Path | None:
    """Writes the figure that `draw` makes with `orthokern.diagnostics.plots`; None if there is none. An error is
    reported as a warning on standard error, because the page and its numbers do not need the figure."""
    try:
        figure = draw(plots)
        return None if figure is None else plots.save(figure, path)
    except Exception as error:
        say(f"warning: {path.name} not drawn: {type(error).__name__}: {one_line(str(error))}", sys.stderr)
        return None


# ---- files -----------------------------------------------------------------------------------------------------------


def rounded(value: Any, digits: int = 6) -> Any:
    """The content of a JSON file with six significant digits. The numbers of a spectrum, whose axis may begin at
    0.999999, have nine."""
    if isinstance(value, dict):
        return {name: rounded(inner, 9 if name == "spectrum" else digits) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def written(folder: Path, name: str, text: str, summary: dict[str, Any], figure: Path | None = None) -> list[Path]:
    """Writes a page as NAME.md and its numbers as NAME.json; returns these files and the figure."""
    numbers = rounded(summary)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in numbers.pop("rows"))  # one line each
    content = json.dumps(numbers, indent=1, ensure_ascii=False).removesuffix("\n}") + f',\n "rows": [\n{rows}\n]}}\n'
    files = {folder / f"{name}.md": text, folder / f"{name}.json": content}
    for path, content in files.items():
        write_atomically(path, content.encode())
    return [*files, *([] if figure is None else [figure])]


def picture(title: str, figure: Path | None) -> list[str]:
    """The lines of a page that show its figure."""
    return [] if figure is None else [f"![{title}]({figure.name})", ""]


def publish(
    folder: Path,
    spec: Mapping[str, Any],
    quick: bool,
    text: Iterable[str],
    rows: Sequence[Mapping[str, Any]],
    figure: Path | None = None,
    **numbers: Any,
) -> list[Path]:
    """Writes the page of a study; returns the files."""
    scale = " Scaled down (`--quick`): compare the order of the rows, not the numbers." if quick else ""
    source = paragraph(f"{spec['source']}.{scale} {spec.get('directions', '')}")
    lines = [f"# {spec['name']}: {spec['title']}", "", source, "", *text]
    summary = {"experiment": spec["name"], "source": spec["source"], "quick": quick, **numbers, "rows": rows}
    return written(folder, spec["name"], "\n".join(lines) + "\n", summary, figure)


# ---- studies: reports that are not tables of training runs ----------------------------------------------------------


# the files that a command line wrote, a Markdown file first; name -> last line of output, for the runs that failed
Outcome = tuple[list[Path], Mapping[str, str]]


def output_folder(args: Mapping[str, Any]) -> Path:
    """The folder to which a command line writes runs and reports."""
    out: Path = args.get("out", Path("runs") / "reproduce")
    return out / ("quick" if args.get("quick") else "full")


def data_folder(args: Mapping[str, Any], name: str, *, read: bool = True) -> Path:
    """The folder `name` in the folder of --data, or else the folder of --data itself."""
    root: Path = args.get("data", Path("data"))
    folder = root / name if (root / name).is_dir() else root
    if read and not folder.is_dir():
        raise InputError(f"--data {root}: no such folder; it must hold {name}/ (see docs/experiments.md, Data)")
    return folder
