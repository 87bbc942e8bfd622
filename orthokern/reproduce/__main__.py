"""The command line `python -m orthokern.reproduce table1 --data DIR`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orthokern.commandline import EXIT_INTERRUPTED, MAX_THREADS, Parser, command, device, integer, say
from orthokern.errors import InputError, unknown_name
from orthokern.reproduce import constraint, cost, fisher, orthogonality, search
from orthokern.reproduce.page import Outcome, data_folder, output_folder
from orthokern.reproduce.report import report
from orthokern.reproduce.runner import Plan, chosen, train_all
from orthokern.reproduce.spec import Experiment, planned, read_experiments, read_specs

EXIT_FAILED = 3

SPECS = read_specs()
EXPERIMENTS = read_experiments(SPECS)
STUDIES = {study["name"]: study for spec in SPECS.values() for study in spec.get("study", ())}
PRODUCE: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Outcome]] = {  # options, `[[study]]` -> files
    "oinit-steps": orthogonality.produce,
    "oinit-table1": search.produce,
    "nnrnn-fisher": fisher.produce,
    "gru-table3": cost.produce,
    "constraint": constraint.produce,
}

DESCRIPTION = """\
Train the runs of a table or figure of a paper, and compare the results with the published numbers.

Finished runs are not trained again, and interrupted runs are resumed: to continue an experiment, repeat
the command. Runs that two experiments share are trained once. Without arguments, the names are listed.
"""


def _names() -> str:
    """The names of the command line, and what each reproduces."""
    lines = [
        f"  {name:<21} {each.source}: {each.title.format_map(planned(each.runs[0], False))} ({len(each.runs)} runs)"
        for name, each in EXPERIMENTS.items()
    ]
    lines += [f"  {name:<21} {study['source']}: {study['title']}" for name, study in STUDIES.items()]
    return "\n".join(lines)


def _epilog() -> str:
    names = "\n".join(textwrap.fill(line, 100, subsequent_indent=24 * " ") for line in _names().splitlines())
    return f"""\
experiments:
{names}

examples:
  python -m orthokern.reproduce table1 --data data --quick         scaled down, takes minutes
  python -m orthokern.reproduce table1 --data data --epochs 20     20 epochs instead of the paper's 120
  python -m orthokern.reproduce table2 --data data --only margin-0.1 --jobs 1
  python -m orthokern.reproduce figure1 --report                   only update the table and the figure
  timeout 2h python -m orthokern.reproduce table1 --data data      train for two hours; repeat the command for more
  python -m orthokern.reproduce oinit-table1 --jobs 2 --only temporal-order    a search for the longest T

Files in --out: one folder per run, EXPERIMENT.md, EXPERIMENT.json and EXPERIMENT.png. A report has the runs
whose folders are there; to continue an experiment on another machine, copy the run folders.
Exit code: 0 all runs done, 2 bad arguments or data, 3 a run diverged or failed, 130, 143 or 129 ended by SIGINT,
SIGTERM or SIGHUP: the runs are then saved; repeat the command to continue.
"""


# option -> type (None: a flag), name of its value, help
OPTIONS: dict[str, tuple[Any, str, str]] = {
    "quick": (None, "", "scaled down: takes minutes on two cores, shows the same trend"),
    "data": (Path, "DIR", "folder that contains the folders mnist, ptb and music (default data)"),
    "out": (Path, "DIR", "folder for runs and tables (default runs/reproduce)"),
    "only": (str, "TEXT", "train only the runs with TEXT in their names"),
    "epochs": (integer(1), "N", "train for N epochs, instead of the number in the paper"),
    "iterations": (integer(1), "N", "train for N iterations, for tasks without a data set"),
    "jobs": (integer(1), "N", "number of runs in parallel (default 1)"),
    "threads": (
        integer(1, MAX_THREADS),
        "N",
        "CPU threads of a run (default: the number of threads of torch, divided by --jobs)",
    ),
    "device": (device, "NAME", "cpu, cuda, cuda:1, ... (default: that of the task)"),
    "report": (None, "", "train nothing; write the table and the figure of the existing runs"),
}


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.reproduce", description=DESCRIPTION, epilog=_epilog())
    parser.add_argument("experiment", metavar="EXPERIMENT", help="see below")
    for name, (kind, metavar, text) in OPTIONS.items():
        more: dict[str, Any] = {"type": kind, "metavar": metavar} if kind else {"action": "store_true"}
        parser.add_argument(f"--{name}", help=text, **more)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def body() -> int:
        if not (sys.argv[1:] if arguments is None else arguments):
            say(_names())
            return 0
        args = _parser().parse(arguments)
        try:
            return _finish(*_run(args))
        except KeyboardInterrupt as interrupt:  # with the signal: `train_all`
            say("interrupted; the runs are saved: repeat the command to continue", sys.stderr)
            return 128 + interrupt.args[0] if interrupt.args else EXIT_INTERRUPTED

    return command(body)


def _run(args: Mapping[str, Any]) -> Outcome:
    name = args["experiment"]
    if name not in EXPERIMENTS and name not in STUDIES:
        raise unknown_name("experiment", textwrap.shorten(name, 80), (*EXPERIMENTS, *STUDIES))
    if args.get("report"):  # a report has all runs, and the requested lengths
        for option in ("only", "jobs", "threads", "device"):
            if option in args:
                raise InputError(f"--{option}: has no effect with --report")
    if name in STUDIES:
        for option in args.keys() - {"experiment", "quick", "out", *STUDIES[name]["options"]}:
            raise InputError(f"--{option}: {name} does not accept it")
        output_folder(args).mkdir(parents=True, exist_ok=True)
        return PRODUCE[name](args, STUDIES[name])
    experiment = EXPERIMENTS[name]
    plan = _plan(experiment, args)
    runs = chosen(experiment.runs, args.get("only", ""), name)
    failed: dict[str, str] = {}
    try:
        if not args.get("report"):
            failed = train_all(plan, [[run] for run in sorted(runs, key=lambda run: run.seed)])
    finally:
        files = report(experiment, plan)
    return files, failed


def _plan(experiment: Experiment, args: Mapping[str, Any]) -> Plan:
    jobs = args.get("jobs", 1)
    if experiment.alone and jobs > 1:
        raise InputError(f"--jobs {jobs}: the runs of {experiment.name} are timed and run one at a time; leave it out")
    unit, other = ("epochs", "iterations") if experiment.epochs else ("iterations", "epochs")
    if other in args:
        raise InputError(f"--{other}: the length of the runs of {experiment.name} is in {unit}; use --{unit}")
    data = None
    if experiment.data is not None:
        data = data_folder(args, experiment.data, read=not args.get("report"))
    elif "data" in args:
        raise InputError(f"--data: the runs of {experiment.name} generate their data; leave it out")
    return Plan.of(args, data)


def _finish(files: Sequence[Path], failed: Mapping[str, str]) -> int:
    """Prints the table, the names of all files, and the last lines of the runs that failed; returns the exit code."""
    say(files[0].read_text(encoding="utf-8"))
    say("written: " + ", ".join(str(file) for file in files))
    for run, line in failed.items():
        say(f"{run}: {line}", sys.stderr)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
