"""A search for the longest sequences that a network solves: T grows until a training run does not reach its goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthokern._files import read_object
from orthokern.diagnostics.runs import number_at, read_metrics
from orthokern.reproduce.page import (
    Outcome,
    commands,
    dated,
    drawn,
    machines,
    paragraph,
    picture,
    publish,
    rounded,
    table,
)
from orthokern.reproduce.report import Row, machine_of, trained_for
from orthokern.reproduce.runner import Plan, chosen, is_done, train_all
from orthokern.reproduce.spec import Run, planned

STEP, LONGEST, QUICK_LONGEST = 10, 500, 30  # increment of T, and the largest T that is tried
PUBLISHED = "longest T"


def read_searches(spec: Mapping[str, Any]) -> tuple[Run, ...]:
    """The searches of a `[[study]]` table of specs/*.toml: runs without --T, which end when they reach their goal. A
    row, for one problem or for all, has name, network, parameters, options and the published T."""
    return tuple(
        Run(
            name=f"{problem['name']}-{name}",
            task=problem["task"],
            options=tuple(f"{options} {spec['run_options']}".format_map(problem).split()),
            quick=tuple(spec["quick"].split()),
            labels={"problem": problem["problem"], "network": network, "parameters": parameters},
            published={PUBLISHED: published[0]} if published else {},
        )
        for problem in spec["problems"]
        for name, network, parameters, options, *published in (*problem["rows"], *spec["rows"])
    )


def runs(search: Run, quick: bool) -> dict[int, Run]:
    """The runs of a search by T = 10, 20, ..., which are trained until one fails."""
    lengths = range(STEP, (QUICK_LONGEST if quick else LONGEST) + 1, STEP)
    return {T: replace(search, name=f"{search.name}-T{T}", options=(*search.options, "--T", str(T))) for T in lengths}


def produce(args: Mapping[str, Any], spec: Mapping[str, Any]) -> Outcome:
    """Trains the runs of the searches, several in parallel, and writes the report. Interrupted runs are resumed."""
    searches = read_searches(spec)
    selected = chosen(searches, args.get("only", ""), spec["name"])
    plan = Plan.of(args)
    failed: dict[str, str] = {}
    try:
        if not args.get("report"):
            failed = train_all(plan, [list(runs(search, plan.quick).values()) for search in selected], "searches")
    finally:
        files = report_searches(spec, searches, plan)
    # a search ends with a run that does not reach its goal
    failed = {name: line for name, line in failed.items() if not is_done(plan.folder / name)}
    return files, failed


def look(search: Run, plan: Plan) -> Row:
    """The state of a search, read from its run folders.

    iterations: T -> number of iterations until solved. failed: the T that was not solved, or None. outcome: how the run
    with that T ended. complete: whether the search is finished. seconds_by_length: T -> training time. machine: the
    machine of the last run. length: the option with the planned length of the last run.
    """
    state: Row = {"iterations": {}, "failed": None, "outcome": "", "complete": False, "seconds_by_length": {}}
    state |= {"machine": None, "length": None}
    for T, run in runs(search, plan.quick).items():
        if not plan.begun(run):
            return state
        folder = plan.run_folder(run)
        result, config = read_object(folder / "result.json"), read_object(folder / "config.json")
        state["length"] = trained_for(config.get("settings", {}), result.get("iteration", 0), planned(run, plan.quick))
        state["machine"] = machine_of(config)
        if result.get("reached"):
            state["iterations"][str(T)] = result["iteration"]
            state["seconds_by_length"][str(T)] = rounded(float(result.get("seconds") or 0.0))
            continue
        records = read_metrics(folder / "metrics.jsonl")
        last = records[-1] if records else {"iteration": 0}
        accuracies = [x for r in records if (x := number_at(r, "held_out_accuracy")) is not None]
        best = f", {100 * max(accuracies):.1f} % right at best" if accuracies else ""
        state["failed"], state["complete"] = T, is_done(folder, plan.longer)
        verb = "diverged at" if result.get("diverged") else "not in" if state["complete"] else "still at"
        state["outcome"] = f"{verb} {last['iteration']} iterations{best}"
        state["seconds_by_length"][str(T)] = rounded(number_at(last, "seconds") or 0.0)
        return state
    return state | {"complete": True}


def _cells(search: Run, state: Row) -> list[str]:
    """One row of the table."""
    solved, published = state["iterations"], search.published.get(PUBLISHED)
    longest, begun = state["longest"], state["longest"] is not None
    reached = f"≥ {longest}" if not state["complete"] or state["failed"] is None else str(longest)
    difference = "–" if published is None or not state["complete"] else f"{longest - published:+d}"
    return [
        *search.labels.values(),
        "–" if published is None else str(published),
        reached if begun else "–",
        difference,
        str(solved[str(longest)]) if longest else "–",
        "–" if state["failed"] is None else f"{state['failed']}: {state['outcome']}",
        f"{state['seconds'] / 3600:.2f}" if begun else "–",
        state["state"],
    ]


def report_searches(spec: Mapping[str, Any], searches: Sequence[Run], plan: Plan) -> list[Path]:
    """Writes the table (Markdown and JSON) and the figure (PNG) of the existing runs; returns the files."""
    name, title = spec["name"], spec["title"]
    rows: list[Row] = []
    panels: dict[str, dict[str, dict[int, int]]] = {}
    trained = []
    for search in searches:
        state = look(search, plan)
        begun = bool(state["iterations"]) or state["failed"] is not None
        state["longest"] = max(map(int, state["iterations"]), default=0) if begun else None
        state["seconds"] = sum(state["seconds_by_length"].values())
        state["state"] = "not run" if not begun else "done" if state["complete"] else "unfinished"
        problem, network, _ = search.labels.values()
        rows.append({"name": search.name, **search.labels, "published": search.published.get(PUBLISHED)} | state)
        lengths = {int(T): count for T, count in state["iterations"].items()}
        panels.setdefault(problem, {})[network] = lengths
        length = plan.longer if state["length"] is None else state["length"]
        options = plan.options(search, length)
        command = f"python -m orthokern.tasks.{search.task} {' '.join(options)} --T N"
        trained.append((f"{problem}, {network}", f"`{command}`"))
    plan.folder.mkdir(parents=True, exist_ok=True)
    figure = drawn(plan.folder / f"{name}.png", lambda plots: plots.iterations_over_lengths(panels, title))
    headings = ["problem", "network", "parameters", "published longest T", "ours", "difference", "iterations at it"]
    headings += ["the next T", "hours", "state"]
    cells = (_cells(search, row) for search, row in zip(searches, rows, strict=True))
    text = ["Longer sequences are better.", "", *table(headings, cells), "", *picture(title, figure)]
    text += [paragraph(spec["note"]), "", *commands(trained)]
    moment = dated()
    text += ["", f"{moment['versions']}; {machines(row['machine'] for row in rows)}; {moment['date']}."]
    return publish(plan.folder, spec, plan.quick, text, rows, figure, **moment)
