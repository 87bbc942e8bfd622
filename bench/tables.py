"""Tables from a results file: printed at the end of `pytest bench`, and written into README.md and docs/benchmarks.md.

python bench/tables.py bench/results/FILE.json            rewrite the sections of both pages
python bench/tables.py --check                            exit with 1 if a page differs from the file that it names
python bench/tables.py bench/results/FILE.json --print    print the tables and change nothing

A section is between <!-- bench:NAME --> and <!-- /bench:NAME -->; a page may have any of SECTIONS. `support` is
generated from the SUPPORT tables of the operators, all others from the file. Sections are not edited by hand, and rows
in which orthokern is slower are not left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from curves import CURVES
from layout import (
    MARKS,
    Results,
    Row,
    Table,
    by_size,
    cases,
    counted,
    direction,
    find,
    limits,
    number,
    of,
    percent,
    size_label,
    sizes,
    times,
    wrapped,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
SECTIONS = ("speed-summary", "error-summary", "speed", "table5", "accuracy", "support")


def load(path: Path) -> dict[str, Any]:
    """A results file. SystemExit with one line for one that cannot be read."""
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} is not a results file: {error}") from None
    if results.get("schema") != 1:
        raise SystemExit(f"error: {path} has schema {results.get('schema')!r}, accepted is 1")
    return results


# ---- tables ------------------------------------------------------------------------------------------------------


def scan(results: Results) -> list[Table]:
    rows = of(results, "scan")
    if not rows:
        return []

    def cell(row: Row) -> str:
        details = row["details"]
        return f"{percent(row['value'])} ({number(details['gflops'])}, {number(details['us_per_step'])} µs)"

    title = "Scans: rate as a share of torch's SGEMM rate in the same round"
    return [by_size(rows, title, cell, percent, "In parentheses: GFLOP/s, and µs per time step.")]


def loops(results: Results) -> list[Table]:
    found = []
    notes = "In parentheses: µs per time step, theirs / ours."
    for table, title in (
        ("loops", "Loops over time written in torch: their time divided by ours, forward and backward"),
        ("modal", "Linear recurrences: time of the sequential scan divided by the modal one, forward and backward"),
        ("modal_forward", "A linear recurrence of one sequence, forward: time of torch.nn.RNN (tanh) divided by ours"),
        ("modules", "Modules with input projection: time of torch.nn.RNN divided by ours, forward and backward"),
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
                note += " After the semicolon: the ratio if all of our operations ran at torch's SGEMM rate."
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
    better = (
        "Lower is better for the time of an iteration, the share outside the scan, and the memory. "
        "The other rows say how the time is divided."
    )
    return [Table(title, better, ["", "measured", "target, at most"], cells)]


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
    title = "Peak memory of forward and backward, divided by the size of states plus adjoints"
    return [Table(title, direction(rows), ["", "size", "ratio", "peak beyond inputs", "target, at most"], cells)]


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
    title = "Diagnostics: time of an iteration with them divided by one without"
    note = "The last column: the time that diagnosing every tenth iteration adds to a run."
    header = ["", "size", "ratio", "with / without", "added by every tenth"]
    return [Table(title, direction(rows), header, cells, note)]


def small_ops(results: Results) -> list[Table]:
    found = []
    for table, title in (
        ("activations", "Activations: time of eager torch divided by ours, forward and backward"),
        ("readout", "Readout with cross-entropy: time of torch divided by ours, forward and backward"),
    ):
        rows = of(results, table)

        def cell(row: Row) -> str:
            ours, theirs = row["details"]["ms"]["median"], row["details"]["peer_ms"]["median"]
            return f"{times(row['value'])} ({number(theirs)} / {number(ours)} ms)"

        if rows:
            found.append(by_size(rows, title, cell, None, "In parentheses: theirs / ours.", without="DC"))
    return found


KNOWN = (
    "scan", "loops", "modal", "modal_forward", "modules", "copy", "memory", "activations", "readout", "diagnostics",
    "scaling", "accuracy", "table5",
)  # fmt: skip
# Titles of the tables without a special layout, and texts of their measures. tests/test_bench_smoke.py requires both.
SUBJECTS = {
    "cayley": "Cayley step of two N x N bases",
    "gru": "GRU and its spectral projection",
    "lengths": "Sequences of different lengths",
    "lstm": "LSTM with peepholes",
    "oinit": "Learned orthogonality of B matrices",
    "overhead": "One step of one sequence, which is mostly overhead",
    "parametrize": "Constrained weights of torch layers",
    "precision": "bfloat16 factors in the scans, forward and backward",
    "replicas": "Several models at once",
    "resets": "Sequences that reset, forward and backward",
    "second": "Second derivatives and forward mode",
    "small": "One sequence: one step, and many",
    "skew_exp": "Exponential of a skew matrix, with its gradient",
    "gpu scan": "GPU, scans",
    "gpu steps": "GPU, scans by single steps",
    "gpu cudnn": "GPU, modules beside cuDNN",
    "gpu flashrnn": "GPU, scans beside FlashRNN",
    "gpu accuracy": "GPU, errors by precision",
    "gpu eager": "GPU, eager loops",
    "gpu cayley": "GPU, Cayley step",
    "gpu table5": "GPU, Table 5",
    "gpu copy": "GPU, copy task",
}
MEASURES = {
    "times as long": "time of the other implementation divided by ours",
    "share of an iteration": "share of a training iteration",
    "time over that of one pass": "time of the first pass named divided by that of the second",
    "time ratio": "ratio of times",
    "time of exact products over that of bfloat16 factors": "time of exact products divided by that of rounded factors",
    "time with resets over that without": "time with `resets` divided by the time without",
    "time over that of torch's module": "our time divided by that of torch's module",
    "time of the packed batch over that of the rectangle": "time of the packed batch divided by that of the padded one",
    "time of the rectangle over that with lengths": "time of the padded batch divided by the time with `lengths`",
}


def others(results: Results) -> list[Table]:
    """Tables of cases by sizes, for all that has no layout of its own."""
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
            title = f"{SUBJECTS[table]}: {MEASURES.get(measure, measure)}"
            found.append(by_size(some, title, cell, limit, without=""))
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
        title = f"µs per time step by {letter}, {constant}, forward and backward"
        found.append(Table(title, direction(points), header, cells))
    return found


RELATIVE_ERROR = "Relative error: RMS of the difference from the float64 result, divided by the RMS of that result."


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
    title = f"Error of the factored scan in float32, ours / eager torch, {size_label(columns[0], 'T')}"
    note = f"{RELATIVE_ERROR} ✗ marks an error of ours above twice that of eager torch; other cells have no mark."
    found = [Table(title, direction(errors), ["", *(f"T={size['T']}" for size in columns)], cells, note)]
    return found + modal_accuracy([row for row in rows if "sequential" in row["details"]])


def modal_accuracy(rows: list[Row]) -> list[Table]:
    if not rows:
        return []

    def cell(row: Row) -> str:
        return f"{row['value']:.1e} / {row['details']['sequential']:.1e}"

    title = "Error of a linear recurrence's loss and gradients in float32, modal / sequential"
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
    header += ["RNN / torch", "factored / torch", "composed / torch", "target (stretch), at most"]
    header += ["factored at SGEMM's rate"]
    counts = ", ".join(
        f"{row['details']['iterations_timed']} at N={row['size']['N']}"
        for row in rows
        if row["unit"] == "s" and row["case"].startswith("torch.nn.RNN")
    )
    note = (
        f"Timed iterations: {counts}; medians of interleaved rounds, scaled to 1000. "
        "torch.nn.RNN uses tanh in both rows of a size, since it has no linear recurrence. "
        "The last column: factored / torch if the factored scan ran at torch's SGEMM rate and the rest took no time. "
        "Paper: Vorontsov et al. 2017, Table 5, on a GTX-770. RNN and FactorizedRNN are those of orthokern.nn."
    )
    better = "Lower is better, for the seconds and for the ratios."
    title = "Table 5: seconds for 1000 iterations of the copy task with T = 100"
    return [Table(title, better, header, cells, note)]


SHOWN_N = (128, 500, 1000)  # the README's


def speed_summary(results: Results) -> list[Table]:
    """Our modules beside those of torch: one T for each N, and one step of one sequence."""
    found: dict[str, dict[tuple[int, ...], Row]] = {}
    for row in (row for table in ("modules", "gru", "lstm", "overhead") for row in of(results, table)):
        theirs, _, ours = row["case"].partition(" over orthokern.nn.")
        if ours and "kanai" not in ours:
            options = (
                '(variant="torch")' if ours.startswith("GRU") else '(apply="composed")' if "composed" in ours else ""
            )
            name = f"`{ours.split(', ')[0]}{options}` and `{theirs}`"
            found.setdefault(name, {})[tuple(row["size"][letter] for letter in "NTB")] = row
    sized = sorted({size for rows in found.values() for size in rows})
    columns = [size for size in sized if size[1] == 1]
    columns += [min(some) for N in SHOWN_N if (some := [size for size in sized if size[:1] == (N,) and size[1] > 1])]
    cells = []
    for name, rows in found.items():
        line = [name]
        for size in columns:
            row = rows.get(size)
            if row is None:
                line.append("–")
                continue
            theirs, ours = (number(1e3 * row["details"][side]["median"] / size[1]) for side in ("peer_ms", "ms"))
            line.append(f"{times(row['value'])} ({theirs} / {ours})")
        cells.append(line)
    if not cells:
        return []
    header = ["of orthokern.nn, and its peer", *("N={}, T={}, B={}".format(*size) for size in columns)]
    title = "Speed-up of forward and backward: time of torch's module divided by ours"
    better = "Higher is better; below 1x, ours is slower. In parentheses: µs per step, theirs / ours. –: not measured."
    return [Table(title, better, header, cells)]


def error_summary(results: Results) -> list[Table]:
    """Errors of the states, and the largest of all gradients."""
    rows = of(results, "accuracy")
    rows = [row for row in rows if row["measure"] == "relative error" and "eager" in row["details"]]
    if not rows:
        return []
    columns, cells = sizes(rows), []
    for activation in dict.fromkeys(case.split(": ")[0] for case in cases(rows)):
        for label, states in (("states", True), ("gradients, the largest", False)):
            line = [f"{activation}: {label}"]
            for size in columns:
                some = [row for row in rows if row["size"] == size and row["case"].startswith(f"{activation}: ")]
                some = [row for row in some if row["case"].endswith(": states") == states]
                ours, eager = (max(get(row) for row in some) for get in (_error, _error_of_torch))
                line.append(f"{ours:.1e} / {eager:.1e}")
            cells.append(line)
    title = f"Relative error of `factored_scan` in float32, ours / eager torch, {size_label(columns[0], 'T')}"
    header = ["", *(f"T={size['T']}" for size in columns)]
    return [Table(title, direction(rows), header, cells, f"{RELATIVE_ERROR} Same run as above.")]


def _error(row: Row) -> float:
    return float(row["value"])


def _error_of_torch(row: Row) -> float:
    return float(row["details"]["eager"])


def files_with_rows(results: Results) -> set[str]:
    """Names of the files whose cases recorded rows."""
    return {row["file"] for row in results["rows"]}


def timings_of(results: Results) -> list[Table]:
    """pytest-benchmark's medians of files that add no rows of their own, by group."""
    known = files_with_rows(results)
    groups: dict[str, list[list[str]]] = {}
    for timing in results["timings"]:
        file, _, name = timing["name"].rpartition("::")
        if Path(file).name in known:
            continue
        ms = timing["ms"]
        cells = [name, f"{number(ms['median'])} ms", f"{number(ms['min'])} ms", str(timing["rounds"])]
        groups.setdefault(timing["group"] or Path(file).stem, []).append(cells)
    header = ["", "median", "min", "rounds"]
    return [Table(group, "Lower is better.", header, cells) for group, cells in groups.items()]


def text_tables(results: Results) -> list[tuple[str, str]]:
    """(title, text) of every table for the terminal; Table 5 is the last."""
    makers = (scaling, accuracy, memory, diagnosed, small_ops, others, copy_task, scan, loops, table5)
    found = timings_of(results)
    for maker in makers:
        found += maker(results)
    return [(table.title, table.text()) for table in found]


# ---- pages -------------------------------------------------------------------------------------------------------


def conditions_line(results: Results, link: str) -> str:
    """What the numbers of a section depend on."""
    here = results["conditions"]
    machine, versions = here["machine"], here["versions"]
    commit = f"commit {here['commit'][:10]}" if here["commit"] else "commit unknown"
    if here["changed_since_commit"]:
        commit += " with uncommitted changes"
    days = sorted({row["measured_at"][:10] for row in results["rows"]})
    parts = [
        f"{machine['cpu']}, {counted(machine['cores'], 'core')}, {machine['isa']} kernels",
        counted(here["threads"], "thread"),
        f"PyTorch {versions['torch']}, Python {versions['python']}, orthokern {versions['orthokern']}, {commit}",
        f"{here['dtype']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, `pytest bench --benchmark-only`",
    ]
    return wrapped(f"{'; '.join(parts)}. All numbers: [{Path(link).name}]({link}).")


def support() -> str:
    """Which backend has a kernel for which operator, by the SUPPORT tables, whether or not this build includes it."""
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
            parts += ["compute capability {}.{} or higher".format(*served.capability)] if served.capability else []
            row.append("; ".join(parts))
        cells.append(row)
    return Table(
        "Operators by backend: dtypes, devices, limits, features", "", ["", *dispatch.BACKENDS], cells
    ).markdown()


def sections(results: Results, link: str) -> dict[str, str]:
    """The text of every section. `link` is the path of the results file relative to the page."""
    makers: dict[str, tuple[Callable[[Results], list[Table]], ...]] = {
        "speed-summary": (speed_summary,),
        "error-summary": (error_summary,),
        "speed": (scan, loops, copy_task, memory, small_ops, diagnosed, others, timings_of),
        "table5": (table5,),
        "accuracy": (accuracy,),
    }
    found = {}
    for name, section in makers.items():
        tables = [table for maker in section for table in maker(results)]
        parts = [f"<!-- generated by bench/tables.py from {link} -->"]
        parts += [conditions_line(results, link)] if name != "error-summary" else []  # those of the table of speed
        parts += [table.markdown() for table in tables] or ["Not measured."]
        if name == "speed" and of(results, "scaling"):
            plot = link.removesuffix(".json") + "-scaling.png"
            parts.append(f"![time per step by T, B and N, beside torch.nn.RNN]({plot})")
        found[name] = "\n\n".join(parts)
    found["support"] = support()
    return found


def replaced(page: str, name: str, parts: Mapping[str, str]) -> str:
    """The page with its sections replaced; a section without markers in it is left out.

    Raises:
        SystemExit: an opening marker without its closing one, or no markers at all.
    """
    count = 0
    for section, content in parts.items():
        opening, closing = f"<!-- bench:{section} -->", f"<!-- /bench:{section} -->"
        if opening not in page:
            continue
        start = page.index(opening) + len(opening)
        end = page.find(closing, start)
        if end < 0:
            raise SystemExit(f"error: {name} has {opening} without {closing}")
        page = f"{page[:start]}\n{content}\n{page[end:]}"
        count += 1
    if not count:
        markers = ", ".join(f"<!-- bench:{section} -->" for section in SECTIONS)
        raise SystemExit(f"error: {name} has none of the markers {markers}")
    return page


def named_file(page: str) -> str | None:
    """The results file that the sections of a page were generated from, relative to the page."""
    found = re.search(r"<!-- generated by bench/tables\.py from (\S+) -->", page)
    return found[1] if found else None


def fill(page: Path, results: Path | None, check: bool) -> bool:
    """Rewrites the sections of a page, or with `check` only compares them; whether they agreed before."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: {page}: {error.strerror}") from None
    if results is None:
        name = named_file(text)
        if name is None:
            raise SystemExit(f"error: {page.name} names no results file; give one")
        results = page.parent / name
    link = Path(os.path.relpath(results.resolve(), page.resolve().parent)).as_posix()
    wanted = replaced(text, page.name, sections(load(results), link))
    if not check:
        page.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        print(f"error: {page.name} differs from {link}: run python bench/tables.py FILE on that file", file=sys.stderr)
    return wanted == text


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="?", type=Path, help="a file of bench/results; default: the one that each page names"
    )
    parser.add_argument(
        "--page", type=Path, action="append", help="a page to fill; repeatable; default: README.md, docs/benchmarks.md"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    parser.add_argument("--print", action="store_true", dest="show", help="print the tables, change nothing")
    given = parser.parse_args(arguments)
    if given.show:
        if given.results is None:
            parser.error("--print needs a results file")
        for title, text in text_tables(load(given.results)):
            print(f"{title}\n{text}\n")
        return 0
    agreed = [fill(page, given.results, given.check) for page in given.page or PAGES]
    return 1 if given.check and not all(agreed) else 0


if __name__ == "__main__":
    sys.exit(main())
