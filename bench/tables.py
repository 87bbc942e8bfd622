"""Tables from a results file: printed at the end of `pytest bench`, and written into README.md and docs/benchmarks.md.

python bench/tables.py bench/results/FILE.json            rewrite the sections of both pages
python bench/tables.py --check                            exit with 1 if a page differs from the file that it names

A section is between <!-- bench:NAME --> and <!-- /bench:NAME -->. `support` is generated from the SUPPORT tables of the
operators, all others from the file. Sections are not edited by hand, and rows in which orthokern is slower are not left
out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
LETTERS = "NKTBDC"  # in the order of a label

Row = Mapping[str, Any]
Results = Mapping[str, Any]

# Heading and quantity of the tables of the section "speed", in their order.
TITLES = {
    "scan": "Scans: rate as a share of torch's SGEMM rate in the same round",
    "loops": "Loops over time written in torch: their time divided by ours, forward and backward",
    "low rank": "Low rank: time of the loop in torch divided by ours, scans of rank K < N, forward and backward",
    "modules": "RNN modules: time of torch.nn.RNN divided by ours, with input projection, forward and backward",
    "gru": "GRU: time of torch.nn.GRU divided by ours, forward and backward",
    "lstm": "LSTM: time of torch.nn.LSTM divided by ours, forward and backward",
    "packed": "Packed sequences of 4 to T steps: time of torch's module divided by ours, forward and backward",
    "overhead": "One step of one sequence: time of torch's module divided by ours, forward and backward",
    "frozen": "One step of a frozen module: time of its `step`, one sequence, divided by that of torch's module",
    "one sequence": "One sequence: our time divided by that of torch's module",
    "precision": "Products with bfloat16 factors: time of exact products divided by theirs, forward and backward",
    "modal": "Linear recurrences: time of the sequential scan divided by the modal one, forward and backward",
    "rotation": "RotationRNN: time of another linear layer divided by its time, N = 64, forward and backward",
    "copy": "The copy task by its command line: one iteration, and the peak memory of the process",
    "cayley": "Cayley step: time of the other implementation divided by ours, two N x N bases",
    "projection": "Spectral projection: its time as a share of a training iteration",
    "readout": "Readout with cross-entropy: time of torch divided by ours, forward and backward",
}
# Rows of the README: its name, and table and case in the results.
SUMMARY = {
    "`RNN`": ("modules", "torch.nn.RNN over orthokern.nn.RNN"),
    "`FactorizedRNN`": ("modules", "torch.nn.RNN over orthokern.nn.FactorizedRNN"),
    '`FactorizedRNN(apply="composed")`': ("modules", "torch.nn.RNN over orthokern.nn.FactorizedRNN, composed"),
    "`GRU`": ("gru", "torch.nn.GRU over orthokern.nn.GRU, variant torch"),
}
SUMMARY_SIZES = ({"N": 128, "T": 1000, "B": 50}, {"N": 500, "T": 120, "B": 50}, {"N": 1000, "T": 120, "B": 50})


def wrapped(text: str) -> str:
    """Lines of at most 120 columns; links and file names are not broken."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


@dataclasses.dataclass
class Table:
    """A title, "heading: quantity" with or without a heading; the direction in which a number is better; a header;
    cells; and a sentence below."""

    title: str
    better: str
    header: list[str]
    cells: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        heading, _, quantity = self.title.partition(": ")
        text = " ".join(filter(None, [quantity[:1].upper() + quantity[1:] + "." if quantity else "", self.better]))
        lines = [f"### {heading}", ""] if heading else []
        lines += [wrapped(text), ""] if text else []
        lines.append("| " + " | ".join(self.header) + " |")
        lines.append("| " + " | ".join(["---"] + ["---:"] * (len(self.header) - 1)) + " |")
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join(lines + (["", wrapped(self.note)] if self.note else []))


def number(value: float) -> str:
    """Two or three digits."""
    if value != value or value == 0:
        return f"{value:g}"
    if abs(value) >= 10:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.1g}"


def times_of(row: Row) -> str:
    """Theirs / ours, in us per time step or in ms, of one of the `calls` in a measurement."""
    scale = (1e3 / row["size"]["T"] if "T" in row["size"] else 1.0) / row["details"].get("calls", 1)
    return " / ".join(number(scale * row["details"][side]["median"]) for side in ("peer_ms", "ms"))


def mark(value: float, target: float | None, better: str) -> str:
    if target is None:
        return ""
    return " ✓" if (value >= target if better == "higher" else value <= target) else " ✗"


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    details, value = row["details"], row["value"]
    if "gflops" in details:
        text = f"{100 * value:.0f} % ({number(details['gflops'])}, {number(details['us_per_step'])} µs)"
    elif "peer_ms" in details:
        text = f"{number(value)}x ({times_of(row)})"
    else:
        text = f"{number(value)} {row['unit']}".strip()
    return text + mark(value, row["target"], row["better"])


def note_of(rows: Sequence[Row]) -> str:
    if any("gflops" in row["details"] for row in rows):
        return "In parentheses: GFLOP/s, and µs per time step."
    timed = any("peer_ms" in row["details"] for row in rows)
    return "" if not timed or all("T" in row["size"] for row in rows) else "In parentheses: ms, theirs / ours."


def of(results: Results, table: str) -> list[Row]:
    return [row for row in results["rows"] if row["table"] == table]


def sizes(rows: Sequence[Row]) -> list[dict[str, int]]:
    """All sizes, by N, then T, then B."""
    unique = {tuple(sorted(row["size"].items())): row["size"] for row in rows}
    return sorted(unique.values(), key=lambda size: [size.get(letter, 0) for letter in "NTB"])


def size_label(size: Mapping[str, int], without: str = "") -> str:
    return ", ".join(f"{letter}={size[letter]}" for letter in LETTERS if letter in size and letter not in without)


def by_size(rows: Sequence[Row], title: str) -> Table:
    """A table of cases by sizes. The letters that are the same in all sizes are left out, except N, K and T."""
    columns, (better,) = sizes(rows), {row["better"] for row in rows}
    constant = "".join(letter for letter in "BDC" if len({size.get(letter) for size in columns}) == 1)
    header = ["", *(size_label(size, constant) for size in columns)]
    targets = any(row["target"] is not None for row in rows)
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):  # in the order of the source
        here = [row for row in rows if row["case"] == case]
        some = [next((row for row in here if row["size"] == size), None) for size in columns]
        limits = [row["target"] for row in some if row is not None]
        shown = dict.fromkeys("–" if limit is None else f"{limit:g}" for limit in limits)
        lines.append([case, *map(cell, some), *([", ".join(shown)] if targets else [])])
    header += ["target"] if targets else []
    return Table(title, f"{better.capitalize()} is better.", header, lines, note_of(rows))


def speed(results: Results) -> list[Table]:
    return [by_size(rows, title) for name, title in TITLES.items() if (rows := of(results, name))]


def table5(results: Results) -> list[Table]:
    rows = of(results, "table5")
    lines = []
    for size in sizes(rows):
        here = {row["case"]: row for row in rows if row["size"] == size}
        theirs = here["torch.nn.RNN, tanh"]
        for nonlinearity in ("identity", "tanh"):
            names = ("RNN", "FactorizedRNN, factored", "FactorizedRNN, composed")
            ours = [here[f"{name}, {nonlinearity}"] for name in names]
            sgd, geodesic = (row["details"]["paper_seconds"] for row in (theirs, ours[1]))
            line = [f"{size['N']}, {'none' if nonlinearity == 'identity' else nonlinearity}"]
            line += [number(value) if value else "–" for value in (sgd, geodesic)]
            line += [number(row["value"]) for row in (theirs, *ours)]
            line.append(f"{geodesic / sgd:.2f}" if sgd else "–")
            lines.append([*line, *(f"{row['details']['over_torch']:.2f}" for row in ours)])
    if not lines:
        return []
    header = ["hidden, non-linearity", "paper SGD", "paper geoSGD", "torch.nn.RNN, SGD", "RNN, SGD"]
    header += ["factored, geodesic", "composed, geodesic", "paper geoSGD / SGD"]
    header += ["RNN / torch", "factored / torch", "composed / torch"]
    note = (
        "Medians of interleaved rounds, scaled to 1000 iterations. torch.nn.RNN has no linear recurrence: it uses tanh "
        "in both rows of a size. Paper: Vorontsov et al. 2017, Table 5, on a GTX-770. RNN and FactorizedRNN are "
        "those of orthokern.nn."
    )
    title = "Table 5 of Vorontsov et al. 2017: seconds for 1000 iterations of the copy task with T = 100"
    return [Table(title, "Lower is better, for the seconds and for the ratios.", header, lines, note)]


def speed_summary(results: Results) -> list[Table]:
    """Modules next to those of torch, for the README."""
    cells = []
    for name, (table, case) in SUMMARY.items():
        rows = [row for row in of(results, table) if row["case"] == case]
        some = [next((row for row in rows if size.items() <= row["size"].items()), None) for size in SUMMARY_SIZES]
        cells.append([name, *map(cell, some)])
    here = results["conditions"]
    text = (
        f"{here['machine']['cpu']}, {here['threads']} threads, PyTorch {here['versions']['torch']}, {results['date']}"
    )
    better = f"Higher is better; µs per time step in parentheses. {text}."
    header = ["module", *map(size_label, SUMMARY_SIZES)]
    return [Table(": time of torch.nn.RNN or GRU divided by ours, forward and backward", better, header, cells)]


def all_tables(results: Results) -> list[Table]:
    return [*speed(results), *table5(results)]


def conditions_line(results: Results, link: str) -> str:
    """The conditions on which the numbers of a section depend."""
    here = results["conditions"]
    machine, versions = here["machine"], here["versions"]
    commit = f"commit {here['commit'][:10]}" if here["commit"] else "commit unknown"
    if here["changed_since_commit"]:
        commit += " with uncommitted changes"
    counts = ((machine["cores"], "core"), (here["threads"], "thread"))
    cores, threads = (f"{count} {thing}{'s' if count > 1 else ''}" for count, thing in counts)
    parts = [
        f"{machine['cpu']}, {cores}, {machine['isa']} kernels; {threads}",
        f"PyTorch {versions['torch']}, Python {versions['python']}, orthokern {versions['orthokern']}, {commit}",
        f"{here['dtype']}, {results['date']}, `pytest bench --benchmark-only`",
    ]
    return wrapped(f"{'; '.join(parts)}. All numbers: [{Path(link).name}]({link}).")


def support() -> str:
    """Which backend has a kernel for which operator, by the SUPPORT tables, whether or not this build includes it."""
    from orthokern import dispatch, ops

    def described(served: dispatch.Support) -> str:
        if served.missing is not None:
            return "–"
        dtypes = ", ".join(map(dispatch.dtype_name, served.dtypes))
        parts = [f"{dtypes} on {' and '.join(served.devices or ('any',))}"]
        parts += [f"{letter} up to {most}" for letter, most in served.limits.items()]
        parts += ["chunks of time"] if "chunked" in served.algorithms else []
        parts += [", ".join(served.features)] if served.features else []
        return "; ".join(parts)

    backends = dispatch.BACKENDS
    cells = [[f"`{op}`", *(described(getattr(ops, op).SUPPORT[name]) for name in backends)] for op in ops.NAMES]
    return Table(": dtypes, devices, limits, features", "", ["", *backends], cells).markdown()


def sections(results: Results, link: str) -> dict[str, str]:
    """The text of every section, without targets, which are for developers. `link` is the path of the results file
    relative to the page."""
    results = {**results, "rows": [{**row, "target": None} for row in results["rows"]]}
    contents = {
        "speed-summary": speed_summary(results),
        "speed": speed(results),
        "table5": table5(results),
    }
    texts = {"support": support()}
    for name, tables in contents.items():
        parts = [f"<!-- generated by bench/tables.py from {link} -->"]
        parts += [conditions_line(results, link)] if name == "speed" else []  # once on a page
        texts[name] = "\n\n".join(parts + ([table.markdown() for table in tables] or ["Not measured."]))
    return texts


def filled(page: Path, results: Path | None) -> tuple[str, str]:
    """The text of a page with its sections generated from a results file, or from the one that the page names; and the
    path of that file relative to the page."""
    text = page.read_text(encoding="utf-8")
    if results is None:
        named = re.search(r"<!-- generated by bench/tables\.py from (\S+) -->", text)
        if named is None:
            raise SystemExit(f"error: {page.name} names no results file: pass one")
        results = page.parent / named[1]
    link = Path(os.path.relpath(results.resolve(), page.resolve().parent)).as_posix()
    try:
        texts = sections(json.loads(results.read_text(encoding="utf-8")), link)
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {results} is not a results file: {error!r}") from None
    marked = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{texts[match[2]]}\n{match[3]}", text), link


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a results file; default: the one that each page names")
    parser.add_argument("--page", type=Path, action="append", help="a page to fill; repeatable; default: both pages")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    args = parser.parse_args()
    agreed = True
    for page in args.page or PAGES:
        text, link = filled(page, args.results)
        if not args.check:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            print(f"error: {page.name} differs from {link}: run python bench/tables.py FILE", file=sys.stderr)
            agreed = False
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
