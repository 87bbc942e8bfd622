"""The command line `python -m orthokern.reproduce table1 --data DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from orthokern.commandline import (
    EXIT_INTERRUPTED,
    MAX_THREADS,
    Needs,
    Parser,
    Settings,
    command,
    device,
    duration,
    integer,
    path,
    say,
)
from orthokern.errors import InputError, unknown_name
from orthokern.reproduce import constraint, kanai, nnrnn, oinit, vorontsov
from orthokern.reproduce.report import finished_elsewhere, report
from orthokern.reproduce.runner import BudgetSpent, Interrupted, Plan, train_all
from orthokern.reproduce.spec import Experiment, Run, planned
from orthokern.reproduce.study import data_folder, output_folder

EXIT_FAILED, EXIT_BUDGET = 3, 4

PAPERS = (vorontsov, oinit, nnrnn, kanai, constraint)
EXPERIMENTS = {experiment.name: experiment for paper in PAPERS for experiment in paper.EXPERIMENTS}
STUDIES = {study.name: study for study in (*oinit.STUDIES, *nnrnn.STUDIES, *kanai.STUDIES, *constraint.STUDIES)}

DESCRIPTION = """\
Train the runs of a table or figure of a paper, and compare the results with the published numbers.

Finished runs are not trained again, and interrupted runs are resumed: to continue an experiment, repeat
the command. Runs that two experiments share are trained once.
"""


def _names() -> str:
    """The names of the command line, and what each reproduces."""
    listed = "\n".join(
        f"  {name:<15} {experiment.source}: {experiment.titled(planned(experiment.runs[0], False))} "
        f"({len(experiment.runs)} runs)"
        for name, experiment in EXPERIMENTS.items()
    )
    return listed + "".join(f"\n  {name:<15} {study.source}: {study.title}" for name, study in STUDIES.items())


def _epilog() -> str:
    return f"""\
experiments:
{_names()}

examples:
  python -m orthokern.reproduce table1 --data data --quick         scaled down, takes minutes
  python -m orthokern.reproduce table1 --data data --epochs 20     20 epochs instead of the paper's 120
  python -m orthokern.reproduce table2 --data data --only margin-0.1 --jobs 1
  python -m orthokern.reproduce figure1 --report                   only update the table and the figure
  python -m orthokern.reproduce table1 --data data --budget 2h     train for two hours; repeat the command for more
  python -m orthokern.reproduce oinit-table1 --jobs 2 --only temporal-order    a search for the longest T

Files in --out: one folder per run, EXPERIMENT.md, EXPERIMENT.json and EXPERIMENT.png. Runs whose folders are
missing keep their rows of an earlier EXPERIMENT.json, and are not trained again if they are finished there:
copy this file to continue an experiment on another machine.
Exit code: 0 all runs done, 2 bad arguments or data, 3 a run diverged or failed, 4 the budget is spent before all
runs are done, 130, 143 or 129 ended by SIGINT, SIGTERM or SIGHUP. After 4 and a signal the runs are saved: repeat
the command to continue.
"""


# options without effect on a report: it has all runs, and the lengths that are asked for
_OF_TRAINING = ("only", "jobs", "threads", "budget", "device")


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.reproduce", description=DESCRIPTION, epilog=_epilog())
    parser.add_argument("experiment", metavar="EXPERIMENT", help="see below")
    parser.add_argument(
        "--quick", action="store_true", help="scaled down: takes minutes on two cores, shows the same trend"
    )
    parser.add_argument(
        "--data", type=path, metavar="DIR", help="folder that contains the folders mnist, ptb and music (default data)"
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="folder for runs and tables (default runs/reproduce)")
    parser.add_argument("--only", type=str, metavar="TEXT", help="train only the runs with TEXT in their names")
    parser.add_argument(
        "--epochs", type=integer(1), metavar="N", help="train for N epochs, instead of the number in the paper"
    )
    parser.add_argument(
        "--iterations", type=integer(1), metavar="N", help="train for N iterations, for tasks without a data set"
    )
    parser.add_argument("--jobs", type=integer(1), metavar="N", help="number of runs in parallel (default 1)")
    text = "CPU threads of a run (default: the number of threads of torch, divided by --jobs)"
    parser.add_argument("--threads", type=integer(1, MAX_THREADS), metavar="N", help=text)
    text = "train what fits into this time, for example 2h or 30m; runs under way are saved"
    parser.add_argument("--budget", type=duration, metavar="TIME", help=text)
    parser.add_argument(
        "--device", type=device, metavar="NAME", help="cpu, cuda, cuda:1, ... (default: that of the task)"
    )
    parser.add_argument(
        "--report", action="store_true", help="train nothing; write the table and the figure of the existing runs"
    )
    parser.needs = {name: ((Needs("report", (None,)),),) for name in _OF_TRAINING}
    return parser


def _plan(experiment: Experiment, given: Settings) -> Plan:
    jobs = given.get("jobs", 1)
    if experiment.alone and jobs > 1:
        raise InputError(f"--jobs {jobs}: the runs of {experiment.name} are timed and run one at a time; leave it out")
    longer: tuple[str, ...] = ()
    for option, wanted in (("epochs", experiment.epochs), ("iterations", not experiment.epochs)):
        if option in given:
            if not wanted:
                other = "iterations" if option == "epochs" else "epochs"
                raise InputError(
                    f"--{option}: the length of the runs of {experiment.name} is in {other}; give --{other}"
                )
            longer = (f"--{option}", str(given[option]))
    data = None
    if experiment.data is None and "data" in given:
        raise InputError(f"--data: the runs of {experiment.name} generate their data; leave it out")
    if experiment.data is not None:
        data = data_folder(given, experiment.data, read=not given.get("report"))
    return Plan.of(given, output_folder(given), data, longer)


def _chosen(experiment: Experiment, only: str | None) -> list[Run]:
    runs = [run for run in experiment.runs if only is None or only in run.name]
    if not runs:
        names = ", ".join(run.name for run in experiment.runs)
        raise InputError(f"--only {only}: no run of {experiment.name} has this text in its name; the runs are {names}")
    return runs


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def body() -> int:
        try:
            parser = _parser()
            if not (sys.argv[1:] if arguments is None else arguments):
                say(_names())
                return 0
            given = parser.parse(arguments)
            parser.check_all_play(given, SimpleNamespace(report=given.get("report")))
            return _run(given)
        except KeyboardInterrupt as interrupt:
            say("interrupted; the runs are saved: repeat the command to continue", sys.stderr)
            return 128 + interrupt.number if isinstance(interrupt, Interrupted) else EXIT_INTERRUPTED

    return command(body, arguments)


def _run(given: Settings) -> int:
    name = given["experiment"]
    if name not in EXPERIMENTS and name not in STUDIES:
        raise unknown_name("experiment", name, (*EXPERIMENTS, *STUDIES))
    if name in STUDIES:
        try:
            _show(STUDIES[name].make(given, sys.stdout))
        except BudgetSpent as end:
            _show([output_folder(given) / f"{name}.md"])
            return _exit_code(end.failed, spent=True)
        return 0
    experiment = EXPERIMENTS[name]
    plan = _plan(experiment, given)
    runs = _chosen(experiment, given.get("only"))
    failed: dict[str, str] = {}
    spent = False
    elsewhere = finished_elsewhere(experiment, plan)  # a damaged file is found before hours of training, not after them
    try:
        if not given.get("report"):
            open_runs = [run for run in runs if run.name not in elsewhere]
            if len(open_runs) < len(runs):
                short = sum(not elsewhere.get(run.name, True) for run in runs)
                say(
                    f"{len(runs) - len(open_runs)} of {len(runs)} runs are finished according to "
                    f"{plan.folder / experiment.name}.json{f', {short} of them shorter than planned' if short else ''}"
                    "; to train them again, move it away"
                )
            failed = train_all(plan, open_runs, sys.stdout)
    except BudgetSpent as end:
        failed, spent = end.failed, True
    finally:
        files = report(experiment, plan)
    _show(files)
    return _exit_code(failed, spent)


def _exit_code(failed: dict[str, str], spent: bool) -> int:
    """Prints the last lines of the runs that failed. Returns the exit code."""
    for run, line in failed.items():
        say(f"{run}: {line}", sys.stderr)
    return EXIT_FAILED if failed else EXIT_BUDGET if spent else 0


def _show(files: Sequence[Path]) -> None:
    """Prints the table, which is the first file of a report, and the names of all files."""
    say(files[0].read_text(encoding="utf-8"))
    say("written: " + ", ".join(str(file) for file in files))


if __name__ == "__main__":
    sys.exit(main())
