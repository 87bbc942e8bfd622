"""A search for the longest sequences that a network solves: T grows until a training run does not reach its goal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from orthokern._files import count, number, read_object
from orthokern._version import __version__
from orthokern.commandline import say
from orthokern.diagnostics.runs import number_at, read_metrics
from orthokern.errors import InputError
from orthokern.reproduce.page import commands, drawn, table, written
from orthokern.reproduce.report import earlier_rows
from orthokern.reproduce.runner import BudgetSpent, Plan, is_done, result_of, train_all
from orthokern.reproduce.spec import Run, each_once, planned, trained_for


@dataclass(frozen=True)
class Search:
    """One row: a problem and a network, trained at T = step, 2 step, ... until it fails.

    Attributes:
        name: prefix of the names of its run folders.
        problem, network: texts of the row in the table.
        parameters: the learning rates, as a text of the row.
        task: a module of orthokern.tasks with --T. Its runs end when they reach their goal.
        options: its command line, without --T.
        quick: options that are appended with --quick, and override the others.
        published: the longest T in the paper, or None.
        step: the first T, and the increment of T.
        longest, quick_longest: the largest T that is tried.
    """

    name: str
    problem: str
    network: str
    parameters: str
    task: str
    options: tuple[str, ...]
    quick: tuple[str, ...] = ()
    published: int | None = None
    step: int = 10
    longest: int = 500
    quick_longest: int = 30

    def run(self, T: int) -> Run:
        return Run(f"{self.name}-T{T}", self.task, (*self.options, "--T", str(T)), self.quick)

    def last(self, quick: bool) -> int:
        return self.quick_longest if quick else self.longest


@dataclass
class Found:
    """The state of a search.

    Attributes:
        solved: T -> number of iterations until solved.
        failed: the T that was not solved, or None.
        outcome: how the run with that T ended.
        complete: whether the search is finished.
        seconds: T -> training time of its run; of several runs of an earlier report together, at the last solved T.
        machine: the machine of the last run.
        length: the option with the planned length of the last run, see `trained_for`; None without a run.
    """

    solved: dict[int, int] = field(default_factory=dict)
    failed: int | None = None
    outcome: str = ""
    complete: bool = False
    seconds: dict[int, float] = field(default_factory=dict)
    machine: str | None = None
    length: tuple[str, ...] | None = None


def find(name: str, searches: Sequence[Search], plan: Plan, stream: TextIO) -> dict[str, str]:
    """Trains the runs of the searches, several in parallel. Interrupted runs are resumed, and a search that an earlier
    report tells of goes on after the last T that it solved.

    Args, Raises:
        name: as in `report_searches`.
        As `orthokern.reproduce.runner.train_all`, with searches instead of runs.

    Returns:
        Name -> last line of output, for the runs that failed for another reason than not reaching their goal.
    """
    earlier = _earlier(name, searches, plan)
    firsts: list[Run] = []
    following: dict[str, Run] = {}  # name of a run -> the run with the next T
    for search in searches:
        runs = [search.run(T) for T in _open_lengths(search, plan, earlier.get(search.name))]
        firsts += runs[:1]
        following |= {run.name: after for run, after in pairwise(runs)}

    def successor(run: Run) -> Run | None:
        return following.get(run.name) if result_of(plan.run_folder(run)).get("reached") else None

    if len(firsts) < len(searches):
        finished = f"{len(searches) - len(firsts)} of {len(searches)} searches are finished"
        say(f"{finished} according to {plan.folder / name}.json; to repeat them, move it away", stream)

    def ended_otherwise(failed: dict[str, str]) -> dict[str, str]:
        return {name: line for name, line in failed.items() if not is_done(plan.folder / name)}

    try:
        return ended_otherwise(train_all(plan, firsts, stream, successor))
    except BudgetSpent as end:
        raise BudgetSpent(ended_otherwise(end.failed)) from None


def _open_lengths(search: Search, plan: Plan, known: Found | None) -> list[int]:
    """The lengths of a search, without those that an earlier report has as solved and whose folders are not here. Empty
    if it has the search as finished, with as many iterations as are planned now."""
    if known is None:
        return [*_lengths(search, plan.quick)]
    lengths = [T for T in _lengths(search, plan.quick) if T not in known.solved or _here(search, T, plan)]
    if lengths and known.complete and known.failed == lengths[0] and not _here(search, lengths[0], plan):
        given, wanted = (_iterations(search.run(lengths[0]), plan, each) for each in (known.length, plan.longer))
        return lengths if given < wanted else []
    return lengths


def _iterations(run: Run, plan: Plan, length: Sequence[str] | None) -> int:
    """The iterations of a run with an option for its length; without one, those of its command line."""
    return int(length[1]) if length else count(planned(run, plan.quick).get("iterations")) or 0


def _here(search: Search, T: int, plan: Plan) -> bool:
    return (plan.run_folder(search.run(T)) / "config.json").exists()


def _lengths(search: Search, quick: bool) -> range:
    return range(search.step, search.last(quick) + 1, search.step)


def look(search: Search, plan: Plan, known: Found | None = None) -> Found:
    """The state of a search, read from its run folders.

    Args:
        search: which.
        plan: holds the folder of the runs.
        known: what an earlier report tells of it. It stands for the runs whose folders are missing.
    """
    found = Found()
    for T in _lengths(search, plan.quick):
        if _here(search, T, plan):
            _add(found, search.run(T), T, plan)
            if found.failed is not None:
                return found
        elif known is not None and T in known.solved:
            found.solved[T], found.seconds[T] = known.solved[T], known.seconds.get(T, 0.0)
            found.machine, found.length = found.machine or known.machine, found.length or known.length
        elif known is not None and known.failed == T:
            found.failed, found.outcome, found.complete = T, known.outcome, known.complete
            found.seconds[T] = known.seconds.get(T, 0.0)
            found.machine, found.length = known.machine, known.length
            return found
        else:
            return found
    found.complete = True
    return found


def _add(found: Found, run: Run, T: int, plan: Plan) -> None:
    """Adds what the folder of a run tells."""
    folder = plan.run_folder(run)
    result, config = result_of(folder), read_object(folder / "config.json")
    done = count(result.get("iteration")) or 0
    settings, machine = config.get("settings"), config.get("machine")
    found.length = trained_for(settings if isinstance(settings, dict) else {}, done, planned(run, plan.quick))
    processor = machine.get("processor", "unknown") if isinstance(machine, dict) else "unknown"
    found.machine = f"{processor}, {config.get('threads')} thread(s)"
    if result.get("reached"):
        found.solved[T], found.seconds[T] = done, number(result.get("seconds")) or 0.0
        return
    records = read_metrics(folder / "metrics.jsonl")
    accuracies = [x for r in records if (x := number_at(r, "held_out_accuracy")) is not None]
    iterations = records[-1]["iteration"] if records else 0
    found.seconds[T] = (number_at(records[-1], "seconds") or 0.0) if records else 0.0
    best = f", {100 * max(accuracies):.1f} % right at best" if accuracies else ""
    found.complete = is_done(folder, plan.longer)
    found.failed = T
    verb = "diverged at" if result.get("diverged") else "not in" if found.complete else "still at"
    found.outcome = f"{verb} {iterations} iterations{best}"


def _earlier(name: str, searches: Sequence[Search], plan: Plan) -> dict[str, Found]:
    """What an earlier report tells of the searches, by name."""
    rows = earlier_rows(name, plan)
    return {search.name: _of_row(rows[search.name]) for search in searches if search.name in rows}


def _of_row(row: dict[str, Any]) -> Found:
    """The state of a search as a report of it has stored it."""
    try:
        solved = {int(T): int(count) for T, count in row["iterations"].items()}
        if "seconds_by_length" in row:
            seconds = {int(T): float(each) for T, each in row["seconds_by_length"].items()}
        else:  # an older report has the sum alone
            seconds = {max(solved, default=row["failed"] or 0): float(row["seconds"])}
        state = (solved, row["failed"], row["outcome"], row["complete"], seconds)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"row {row['name']!r} of an earlier report is damaged: move the report away") from None
    length = row.get("length")
    return Found(*state, row.get("machine"), None if length is None else tuple(length))


def report_searches(
    name: str, title: str, source: str, note: str, searches: Sequence[Search], plan: Plan
) -> list[Path]:
    """Writes the table (Markdown and JSON) and the figure (PNG) of the existing runs.

    Args:
        name, title, source: as in Experiment.
        note: text under the table.
        searches: the rows.
        plan: holds the folder of the runs.

    Returns:
        The files written; with nothing solved, no figure. One that cannot be drawn is left out, with a warning on
        standard error.

    Raises:
        OSError: a file cannot be written.
    """
    earlier = _earlier(name, searches, plan)
    found = {search.name: look(search, plan, earlier.get(search.name)) for search in searches}
    headings = ["problem", "network", "parameters", "published longest T", "ours", "difference", "iterations at it"]
    headings += ["the next T", "hours", "state"]
    lines, rows = [], []
    for search in searches:
        state = found[search.name]
        longest = max(state.solved, default=0)
        known = bool(state.solved) or state.failed is not None
        capped = state.complete and state.failed is None
        difference = None if search.published is None or not state.complete else longest - search.published
        cells = [search.problem, search.network, search.parameters]
        cells += ["–" if search.published is None else str(search.published)]
        cells += ["–" if not known else f"≥ {longest}" if capped or not state.complete else str(longest)]
        cells += ["–" if difference is None else f"{difference:+d}"]
        cells += [str(state.solved[longest]) if longest else "–"]
        cells += [f"{state.failed}: {state.outcome}" if state.failed is not None else "–"]
        cells += [f"{sum(state.seconds.values()) / 3600:.2f}" if known else "–"]
        cells += ["not run" if not known else "done" if state.complete else "unfinished"]
        lines.append(cells)
        rows.append({
            "name": search.name, "problem": search.problem, "network": search.network, "parameters": search.parameters,
            "published": search.published, "longest": longest if known else None,
            "iterations": {str(T): count for T, count in state.solved.items()}, "failed": state.failed,
            "outcome": state.outcome, "complete": state.complete,
            "seconds": sum(state.seconds.values()), "seconds_by_length": state.seconds,
            "machine": state.machine, "length": state.length, "state": cells[-1],
        })  # fmt: skip
    scale = " Scaled down (`--quick`): compare the order of the rows, not the numbers." if plan.quick else ""
    text = [f"# {name}: {title}", "", f"{source}.{scale}", "", "Longer sequences are better.", ""]
    text += [*table(headings, lines), ""]
    plan.folder.mkdir(parents=True, exist_ok=True)
    panels: dict[str, dict[str, dict[int, int]]] = {}
    for search in searches:
        panels.setdefault(search.problem, {})[search.network] = found[search.name].solved
    figure = drawn(plan.folder / f"{name}.png", lambda plots: plots.iterations_over_lengths(panels, title))
    text += [*([] if figure is None else [f"![{title}]({figure.name})", ""]), note, ""]
    trained = []
    for search in searches:
        length = found[search.name].length
        options = each_once(
            (*search.options, *(search.quick if plan.quick else ()), *(plan.longer if length is None else length))
        )
        command = f"python -m orthokern.tasks.{search.task} {' '.join(options)} --T N"
        trained.append((f"{search.problem}, {search.network}", f"`{command}`"))
    text += commands(trained)
    machines = ", ".join(sorted({state.machine for state in found.values() if state.machine})) or "nothing trained yet"
    text += ["", f"orthokern {__version__}, torch {torch.__version__}; {machines}; {time.strftime('%Y-%m-%d')}."]
    summary = {"experiment": name, "source": source, "quick": plan.quick, "rows": rows}
    return written(plan.folder, name, "\n".join(text) + "\n", summary, figure)
