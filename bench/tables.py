"""Tables from a results file: for the end of `pytest bench`, and for the README.

python bench/tables.py bench/results/FILE.json            write the README's sections anew
python bench/tables.py --check                            exit with 1 unless they agree with the file that they name
python bench/tables.py bench/results/FILE.json --print    print the tables and change nothing

A section of the README stands between <!-- bench:NAME --> and <!-- /bench:NAME -->; NAME is speed, table5, accuracy,
or support, which comes from the operators' SUPPORT tables and not from the file. Nothing in it is written by hand, and
no row is left out because it is a bad one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("speed", "table5", "accuracy", "support")
MARKS = {"goal": " ✓✓", "bar": " ✓", "no": " ✗", None: ""}
LEGEND = "✓✓ reaches the goal, ✓ the bar, ✗ misses the bar; a number without a mark has none."

Row = Mapping[str, Any]
Results = Mapping[str, Any]


@dataclasses.dataclass
class Table:
    """A title, a header, cells, and a sentence below."""

    title: str
    header: list[str]
    cells: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(self.header) + " |")
        lines.append("| " + " | ".join(["---"] + ["---:"] * (len(self.header) - 1)) + " |")
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join(lines + (["", self.note] if self.note else []))

    def text(self) -> str:
        """Columns padded to the width of their widest cell."""
        plain = [[cell.replace("`", "") for cell in row] for row in (self.header, *self.cells)]
        widths = [max(len(row[i]) for row in plain) for i in range(len(self.header))]
        lines = []
        for row in plain:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            padded[0] = row[0].ljust(widths[0])
            lines.append("  ".join(padded))
        return "\n".join(lines + textwrap.wrap(self.note.replace("`", ""), 110))


def load(path: Path) -> dict[str, Any]:
    """A results file. SystemExit with one line for one that cannot be read."""
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} is no results file: {error}") from None
    if results.get("schema") != 1:
        raise SystemExit(f"error: {path} has schema {results.get('schema')!r}, accepted is 1")
    return results


# ---- pieces ------------------------------------------------------------------------------------------------------


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


def size_label(size: Mapping[str, int], without: str = "B") -> str:
    return ", ".join(f"{letter}={size[letter]}" for letter in "NTBDC" if letter in size and letter not in without)


def sizes(rows: Sequence[Row]) -> list[dict[str, int]]:
    """All sizes, by N, then T, then B."""
    unique = {tuple(sorted(row["size"].items())): row["size"] for row in rows}
    return sorted(unique.values(), key=lambda size: (size.get("N", 0), size.get("T", 0), size.get("B", 0)))


def find(rows: Sequence[Row], case: str, size: Mapping[str, int]) -> Row | None:
    return next((row for row in rows if row["case"] == case and row["size"] == size), None)


def limits(rows: Sequence[Row], show: Callable[[float], str]) -> str:
    """ "bar (goal)", for each size, from left to right, that has others than the one before."""
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
    """A table of cases by sizes; `show_limit` adds a column of bars and goals."""
    columns = sizes(rows)
    header = [first, *(size_label(size, without) for size in columns)]
    if show_limit is not None:
        header.append("bar (goal)")
    cells = []
    for case in cases(rows):
        found = [find(rows, case, size) for size in columns]
        line = [f"{case}", *("–" if row is None else cell(row) + MARKS[row["reached"]] for row in found)]
        if show_limit is not None:
            line.append(limits([row for row in found if row is not None], show_limit))
        cells.append(line)
    return Table(title, header, cells, note)


def times(value: float) -> str:
    return f"{number(value)}x"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


# ---- tables ------------------------------------------------------------------------------------------------------


def scan(results: Results) -> list[Table]:
    rows = of(results, "scan")
    if not rows:
        return []

    def cell(row: Row) -> str:
        details = row["details"]
        return f"{percent(row['value'])} ({number(details['gflops'])}, {number(details['us_per_step'])} µs)"

    title = "Scans: share of torch's SGEMM rate, measured beside; in brackets GFLOP/s and time per step"
    return [by_size(rows, title, cell, percent)]


def loops(results: Results) -> list[Table]:
    found = []
    notes = "In brackets µs per time step, theirs and ours."
    for table, title in (
        ("loops", "Loops in torch: how many times as long as ours they take, forward and backward"),
        ("modal", "Linear scans by modes: how many times as long the sequential one takes, forward and backward"),
        ("modules", "Modules with their input projection: how many times as long as ours torch.nn.RNN takes"),
    ):
        rows = of(results, table)

        def cell(row: Row) -> str:
            details = row["details"]
            each = f"{number(details['peer_us_per_step'])} / {number(details['us_per_step'])}"
            most = f"; {times(details['at_sgemm_rate'])}" if "at_sgemm_rate" in details else ""
            return f"{times(row['value'])} ({each}{most})"

        if rows:
            note = notes
            if any("at_sgemm_rate" in row["details"] for row in rows):
                note += " Then what the ratio would be if ours ran at the rate of torch's matrix product throughout."
            found.append(by_size(rows, title, cell, lambda value: f"{value:g}x", note))
    return found


def copy_task(results: Results) -> list[Table]:
    rows = of(results, "copy")
    if not rows:
        return []
    cells = []
    for row in rows:
        details = row["details"]
        value = f"{number(row['value'])} {row['unit']}"
        if row["measure"].startswith("share") and "ms" in details:
            value += f" ({number(details['ms'])} ms)"
        bar = f"{number(row['bar'])} {row['unit']}" if row["bar"] is not None else "–"
        cells.append([row["case"], value + MARKS[row["reached"]], bar])
    title = f"One iteration of the copy task, {size_label(rows[0]['size'], 'DC')}"
    return [Table(title, ["", "", "at most"], cells)]


def memory(results: Results) -> list[Table]:
    rows = of(results, "memory")
    if not rows:
        return []
    cells = [
        [
            row["case"],
            size_label(row["size"], "DC"),
            f"{row['value']:.2f}{MARKS[row['reached']]}",
            f"{number(row['details']['extra_mb'])} MB",
            number(row["bar"]) if row["bar"] is not None else "–",
        ]
        for row in rows
    ]
    title = "Memory of forward and backward over that of states plus adjoints"
    return [Table(title, ["", "size", "ratio", "peak beyond inputs", "at most"], cells)]


def diagnosed(results: Results) -> list[Table]:
    rows = of(results, "diagnostics")
    if not rows:
        return []
    cells = [
        [
            row["case"],
            size_label(row["size"], ""),
            f"{row['details']['ratio']:.2f}x",
            f"{number(row['details']['ms']['median'])} / {number(row['details']['plain_ms']['median'])} ms",
            f"{row['value']:.2f} %",
        ]
        for row in rows
    ]
    title = "An iteration with diagnostics over one without, and what diagnosing every tenth one adds"
    return [Table(title, ["", "size", "ratio", "diagnosed / plain", "added"], cells)]


def small_ops(results: Results) -> list[Table]:
    found = []
    for table, title in (
        ("activations", "Activations: how many times as long as ours eager torch takes, forward and backward"),
        ("readout", "Readout with cross-entropy: how many times as long as ours torch takes, forward and backward"),
    ):
        rows = of(results, table)

        def cell(row: Row) -> str:
            ours, theirs = row["details"]["ms"]["median"], row["details"]["peer_ms"]["median"]
            return f"{times(row['value'])} ({number(theirs)} / {number(ours)} ms)"

        if rows:
            found.append(by_size(rows, title, cell, None, without="DC"))
    return found


KNOWN = (
    "scan", "loops", "modal", "modules", "copy", "memory", "activations", "readout", "diagnostics", "scaling",
    "accuracy", "table5",
)  # fmt: skip


def others(results: Results) -> list[Table]:
    """Tables that this file has no layout for: cases by sizes."""
    found = []
    for table in dict.fromkeys(row["table"] for row in results["rows"]):
        if table in KNOWN:
            continue
        rows = of(results, table)
        measures = list(dict.fromkeys((row["measure"], row["unit"]) for row in rows))
        for measure, unit in measures:
            some = [row for row in rows if row["measure"] == measure]

            def cell(row: Row, unit: str = unit) -> str:
                return number(row["value"]) + (f" {unit}" if unit else "")

            limit = number if any(row["bar"] is not None for row in some) else None
            found.append(by_size(some, f"{table}: {measure}", cell, limit, without=""))
    return found


def scaling(results: Results) -> list[Table]:
    rows = of(results, "scaling")
    found = []
    for letter, fixed in CURVES.items():
        points = [row for row in rows if all(row["size"][other] == value for other, value in fixed.items())]
        if len({row["size"][letter] for row in points}) < 2:
            continue
        cells = []
        for case in cases(points):
            line = [case]
            for size in sizes(points):
                row = find(points, case, size)
                line.append("–" if row is None else number(row["value"]))
            cells.append(line)
        header = ["", *(f"{letter}={size[letter]}" for size in sizes(points))]
        constant = ", ".join(f"{other}={value}" for other, value in fixed.items())
        found.append(Table(f"µs per time step as {letter} grows, {constant}, forward and backward", header, cells))
    return found


CURVES = {"T": {"N": 128, "B": 50}, "B": {"N": 128, "T": 100}, "N": {"T": 30, "B": 50}}


def accuracy(results: Results) -> list[Table]:
    rows = of(results, "accuracy")
    errors = [row for row in rows if row["measure"] == "relative error" and "eager" in row["details"]]
    beside = [row for row in rows if row["measure"] != "relative error"]
    if not errors:
        return []
    columns = sizes(errors)
    cells = []
    for case in cases(errors):
        line = [case]
        for size in columns:
            row, other = find(errors, case, size), find(beside, case, size)
            if row is None:
                line.append("–")
            else:
                mark = MARKS["no"] if other is not None and other["reached"] == "no" else ""
                line.append(f"{row['value']:.1e} / {row['details']['eager']:.1e}{mark}")
        cells.append(line)
    title = f"Error of the factored scan in float32 by T, ours / eager torch, {size_label(columns[0], 'T')}"
    note = (
        "RMS of the difference from float64 over RMS of the float64 result. "
        "✗: more than twice eager torch's; nothing is marked otherwise."
    )
    found = [Table(title, ["", *(f"T={size['T']}" for size in columns)], cells, note)]
    return found + modal_accuracy([row for row in rows if "sequential" in row["details"]])


def modal_accuracy(rows: list[Row]) -> list[Table]:
    if not rows:
        return []

    def cell(row: Row) -> str:
        return f"{row['value']:.1e} / {row['details']['sequential']:.1e}"

    title = "Error of a linear recurrence's loss and gradients in float32, by modes / step by step"
    return [by_size(rows, title, cell, lambda value: f"{value:.0e}")]


def table5(results: Results) -> list[Table]:
    rows = of(results, "table5")
    if not rows:
        return []
    cells = []
    for size in sizes(rows):
        here = [row for row in rows if row["size"] == size]
        seconds = {row["case"]: row for row in here if row["unit"] == "s"}
        ratios = {row["case"]: row for row in here if row["unit"] != "s"}
        theirs = next((row for case, row in seconds.items() if case.startswith("torch.nn.RNN")), None)
        for nonlinearity in ("identity", "tanh"):
            mine = {case: row for case, row in seconds.items() if case.endswith(f", {nonlinearity}")}
            names = ["RNN", "FactorizedRNN, factored", "FactorizedRNN, composed"]
            names = [f"{name}, {nonlinearity}" for name in names]
            if theirs is None or any(name not in mine for name in names):
                continue
            geodesic = mine[names[1]]
            paper_sgd, paper_geo = theirs["details"]["paper_seconds"], geodesic["details"]["paper_seconds"]
            line = [f"{size['N']}, {'none' if nonlinearity == 'identity' else nonlinearity}"]
            line += [number(value) if value else "–" for value in (paper_sgd, paper_geo)]
            line += [number(theirs["value"]), *(number(mine[name]["value"]) for name in names)]
            line.append(f"{paper_geo / paper_sgd:.2f}" if paper_sgd else "–")
            line += [f"{ratios[name]['value']:.2f}{MARKS[ratios[name]['reached']]}" for name in names]
            line.append(limits([ratios[names[1]]], lambda value: f"{value:g}"))
            most = ratios[names[1]]["details"].get("at_sgemm_rate")
            line.append("–" if most is None else number(most))
            cells.append(line)
    header = ["hidden, non-linearity", "paper SGD", "paper geoSGD", "torch.nn.RNN, SGD", "RNN, SGD"]
    header += ["factored, geodesic", "composed, geodesic", "paper geoSGD / SGD"]
    header += ["RNN / torch", "factored / torch", "composed / torch", "at most (goal)", "factored at SGEMM's rate"]
    counts = ", ".join(
        f"{row['details']['iterations_timed']} at N={row['size']['N']}"
        for row in rows
        if row["unit"] == "s" and row["case"].startswith("torch.nn.RNN")
    )
    note = (
        f"Timed iterations: {counts}; medians of rounds that take the variants in turns, scaled to 1000. "
        "torch.nn.RNN is with tanh in both rows of a size: it has no linear recurrence. "
        "The last column: if the factored scan ran at the rate of torch's matrix product and the rest took no time. "
        "Paper: Vorontsov et al. 2017, Table 5, on a GTX-770. RNN and FactorizedRNN are orthokern.nn's."
    )
    return [Table("Table 5: seconds for 1000 iterations of the copy task with T = 100", header, cells, note)]


def timings_of(results: Results) -> list[Table]:
    """pytest-benchmark's medians of files that add no rows of their own, by group."""
    known = [f"bench_{name}" for name in (*KNOWN, *{row["table"] for row in results["rows"]})]
    groups: dict[str, list[list[str]]] = {}
    for timing in results["timings"]:
        file, _, name = timing["name"].rpartition("::")
        if any(stem in file for stem in known):
            continue
        ms = timing["ms"]
        cells = [name, f"{number(ms['median'])} ms", f"{number(ms['min'])} ms", str(timing["rounds"])]
        groups.setdefault(timing["group"] or Path(file).stem, []).append(cells)
    return [Table(group, ["", "median", "min", "rounds"], cells) for group, cells in groups.items()]


def text_tables(results: Results) -> list[tuple[str, str]]:
    """(title, text) of every table for the terminal; Table 5 is the last."""
    makers = (scaling, accuracy, memory, diagnosed, small_ops, others, copy_task, scan, loops, table5)
    found = timings_of(results)
    for maker in makers:
        found += maker(results)
    return [(table.title, table.text()) for table in found]


# ---- plot --------------------------------------------------------------------------------------------------------


def plot_scaling(results: Results, path: Path) -> Path | None:
    """Draw cost against T, B and N; returns the path, or None where nothing was measured."""
    rows = of(results, "scaling")
    panels = {
        letter: [row for row in rows if all(row["size"][other] == value for other, value in fixed.items())]
        for letter, fixed in CURVES.items()
    }
    if not any(panels.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
    for axis, (letter, points) in zip(axes, panels.items(), strict=True):
        for case in cases(points):
            line = sorted((row for row in points if row["case"] == case), key=lambda row: row["size"][letter])
            # per step everywhere but over B, where a step of more sequences is more work: there per sequence and step
            per = [row["value"] / (row["size"]["B"] if letter == "B" else 1) for row in line]
            label = case if case.startswith("torch") else f"orthokern.nn.{case}"
            axis.plot([row["size"][letter] for row in line], per, marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2 if letter != "T" else 10)
        axis.set_yscale("log")
        axis.set_xlabel({"T": "T, time steps", "B": "B, sequences", "N": "N, hidden units"}[letter])
        axis.set_ylabel("µs per step and sequence" if letter == "B" else "µs per time step")
        axis.set_title(", ".join(f"{other}={value}" for other, value in CURVES[letter].items()), fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    conditions = results["conditions"]
    threads = counted(conditions["threads"], "thread")
    figure.suptitle(f"forward and backward, float32, {conditions['machine']['cpu']}, {threads}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


# ---- README ------------------------------------------------------------------------------------------------------


def conditions_line(results: Results, shown: str) -> str:
    """What the numbers of a section depend on."""
    here = results["conditions"]
    machine, versions = here["machine"], here["versions"]
    commit = f"commit {here['commit'][:10]}" if here["commit"] else "no commit known"
    if here["changed_since_commit"]:
        commit += " and changes since"
    days = sorted({row["measured_at"][:10] for row in results["rows"]})
    parts = [
        f"{machine['cpu']}, {counted(machine['cores'], 'core')}, {machine['isa']} kernels",
        counted(here["threads"], "thread"),
        f"PyTorch {versions['torch']}, Python {versions['python']}, orthokern {versions['orthokern']}, {commit}",
        f"{here['dtype']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, `pytest bench --benchmark-only`",
    ]
    return f"{'; '.join(parts)}. All numbers: [{shown}]({shown})."


def support() -> str:
    """Which backend serves which operator, by the SUPPORT tables: what there are kernels for, built here or not."""
    from orthokern import dispatch, ops

    cells = []
    for op in ops.NAMES:
        row = [f"`{op}`"]
        for backend in dispatch.BACKENDS:
            served = getattr(ops, op).SUPPORT[backend]
            if served.missing is not None:
                row.append("–")
                continue
            parts = [
                ", ".join(map(dispatch.dtype_name, served.dtypes)) + f" on {' and '.join(served.devices or ('any',))}"
            ]
            parts += [f"{letter} up to {most}" for letter, most in served.limits.items()]
            parts += ["chunks of time"] if "chunked" in served.algorithms else []
            parts += [", ".join(served.features)] if served.features else []
            parts += ["compute capability {}.{} on".format(*served.capability)] if served.capability else []
            row.append("; ".join(parts))
        cells.append(row)
    return Table("Operators by backend: dtypes on device; limits", ["", *dispatch.BACKENDS], cells).markdown()


def sections(results: Results, shown: str) -> dict[str, str]:
    """The README's sections. `shown` is the results file's path as the README gives it."""
    makers: dict[str, tuple[Callable[[Results], list[Table]], ...]] = {
        "speed": (scan, loops, copy_task, memory, small_ops, diagnosed, others),
        "table5": (table5,),
        "accuracy": (accuracy,),
    }
    found = {}
    for name, section in makers.items():
        tables = [table for maker in section for table in maker(results)]
        if name == "speed":
            tables += timings_of(results)
        parts = [f"<!-- generated by: python bench/tables.py {shown} -->", conditions_line(results, shown)]
        parts += [LEGEND] if name != "accuracy" else []
        parts += [table.markdown() for table in tables] or ["Not measured."]
        if name == "speed" and of(results, "scaling"):
            plot = shown.removesuffix(".json") + "-scaling.png"
            parts.append(f"![cost as T, B and N grow, beside torch.nn.RNN]({plot})")
        found[name] = "\n\n".join(parts)
    found["support"] = support()
    return found


def replaced(readme: str, parts: Mapping[str, str]) -> str:
    """The README with its sections replaced; sections that it has no markers for are left out.

    Raises:
        SystemExit: an opening marker without its closing one, or no markers at all.
    """
    count = 0
    for name, content in parts.items():
        opening, closing = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        if opening not in readme:
            continue
        start = readme.index(opening) + len(opening)
        end = readme.find(closing, start)
        if end < 0:
            raise SystemExit(f"error: the README has {opening} without {closing}")
        readme = f"{readme[:start]}\n{content}\n{readme[end:]}"
        count += 1
    if not count:
        markers = ", ".join(f"<!-- bench:{name} -->" for name in SECTIONS)
        raise SystemExit(f"error: the README has none of the markers {markers}")
    return readme


def named_file(readme: str) -> str | None:
    """The results file that the README's sections were generated from."""
    found = re.search(r"<!-- generated by: python bench/tables\.py (\S+) -->", readme)
    return found[1] if found else None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a file of bench/results; for --check the README's own")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="default: README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if the README does not agree")
    parser.add_argument("--print", action="store_true", dest="show", help="print the tables, change nothing")
    given = parser.parse_args(arguments)
    if given.show:
        if given.results is None:
            parser.error("--print needs a results file")
        for title, text in text_tables(load(given.results)):
            print(f"{title}\n{text}\n")
        return 0
    try:
        readme = given.readme.read_text()
    except OSError as error:
        raise SystemExit(f"error: {given.readme}: {error.strerror}") from None
    path: Path | None = given.results
    if path is None:
        name = named_file(readme)
        if name is None:
            raise SystemExit(f"error: {given.readme.name} names no results file; give one")
        path = given.readme.parent / name
    base = given.readme.resolve().parent
    resolved = path.resolve()
    shown = resolved.relative_to(base).as_posix() if resolved.is_relative_to(base) else path.name
    wanted = replaced(readme, sections(load(path), shown))
    if given.check:
        if wanted == readme:
            return 0
        print(
            f"error: {given.readme.name} does not agree with {shown}: run python bench/tables.py {shown}",
            file=sys.stderr,
        )
        return 1
    given.readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
