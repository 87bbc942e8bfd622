"""Trains the unfinished runs of an experiment, several in parallel. Interrupted runs are resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orthokern._files import read_object, write_atomically
from orthokern.commandline import EXIT_BAD_INPUT, say
from orthokern.errors import InputError
from orthokern.reproduce.page import output_folder
from orthokern.reproduce.spec import Run, each_once, planned
from orthokern.training.loop import EXIT_DIVERGED
from orthokern.training.signals import StopRequest

POLL = 0.2  # seconds between two polls of the child processes


@dataclass(frozen=True)
class Plan:
    """How the runs of an experiment are trained.

    Attributes:
        folder: holds one run folder per run.
        data: the folder for --data, or None.
        quick: whether the runs are scaled down.
        jobs: number of runs in parallel.
        threads: CPU threads of a run.
        longer: options that replace the length of a run, for example ("--epochs", "20").
        device: for --device, or None.
    """

    folder: Path
    data: Path | None = None
    quick: bool = False
    jobs: int = 1
    threads: int = 1
    longer: tuple[str, ...] = ()
    device: str | None = None

    @classmethod
    def of(cls, args: Mapping[str, Any], data: Path | None = None) -> Plan:
        """The plan of a command line."""
        jobs = args.get("jobs", 1)
        threads = args.get("threads", max(1, torch.get_num_threads() // jobs))
        longer = next(((f"--{unit}", str(args[unit])) for unit in ("epochs", "iterations") if unit in args), ())
        return cls(output_folder(args), data, args.get("quick", False), jobs, threads, longer, args.get("device"))

    def run_folder(self, run: Run) -> Path:
        return self.folder / run.name

    def begun(self, run: Run) -> bool:
        return (self.run_folder(run) / "config.json").exists()

    def length(self, run: Run) -> tuple[str, ...]:
        """The option with the length of a run: the requested one, else the planned one. () if its task derives it."""
        settings = {} if self.longer else planned(run, self.quick)
        lengths = [(f"--{name}", str(settings[name])) for name in ("epochs", "iterations") if settings.get(name)]
        return self.longer or (lengths[0] if lengths else ())

    def options(self, run: Run, length: Sequence[str]) -> tuple[str, ...]:
        """The options of a run, with another length."""
        return each_once((*run.options, *(run.quick if self.quick else ()), *length))

    def command(self, run: Run) -> list[str]:
        """The command line that trains or continues the run. A run that was started with another length continues to
        the length of the plan."""
        begun = self.begun(run)
        options = [*self.options(run, self.length(run) if begun else self.longer), "--threads", str(self.threads)]
        options += [] if self.data is None else ["--data", str(self.data)]
        options += [] if self.device is None else ["--device", self.device]
        where = "--resume" if begun else "--out"
        return [sys.executable, "-m", f"orthokern.tasks.{run.task}", *options, where, str(self.run_folder(run))]


def chosen(runs: Sequence[Run], only: str, experiment: str) -> list[Run]:
    """The runs with a text in their names."""
    result = [run for run in runs if only in run.name]
    if not result:
        names = ", ".join(run.name for run in runs)
        raise InputError(f"--only {only}: no run of {experiment} has this text in its name; the runs are {names}")
    return result


def is_done(folder: Path, length: Sequence[str] = ()) -> bool:
    """Whether the run in a folder is finished: its result.json says so, for at least the requested number of epochs or
    iterations."""
    result, settings = read_object(folder / "result.json"), read_object(folder / "config.json").get("settings")
    if not result or settings is None:
        return False
    minutes = settings.get("minutes")
    if result.get("diverged") or result.get("reached") or (minutes and result.get("seconds", 0.0) >= 60.0 * minutes):
        return True
    target = settings.get("iterations") or 0
    if length:
        per_unit = 1 if length[0] == "--iterations" else settings.get("iterations_per_epoch") or 0
        target = int(length[1]) * per_unit or target
    return (result.get("iteration") or 0) >= target


class _Child:
    """A run in progress."""

    def __init__(self, run: Run, chain: Sequence[Run], plan: Plan) -> None:
        self.run, self.chain, self.folder = run, chain, plan.run_folder(run)
        self.log = plan.folder / f"{run.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.begin = log.tell()  # earlier processes have written before this
            self.process = subprocess.Popen(plan.command(run), stdout=log, stderr=subprocess.STDOUT)
        say(f"{run.name}: started, output in {self.log}")

    def finish(self) -> str | None:
        """Prints the end of the run, and returns its last line if it failed."""
        code, name = self.process.wait(), self.run.name
        line = self.last_line(code)
        say(f"{name}: {line}")
        if code == EXIT_BAD_INPUT:
            raise InputError(f"{name}: {line.removeprefix('error: ')}")
        if code == EXIT_DIVERGED:  # not to be repeated
            content = json.dumps({"diverged": True, "message": line}, indent=2)
            write_atomically(self.folder / "result.json", content.encode() + b"\n")
        return line if code else None

    def last_line(self, code: int) -> str:
        """The last line of this process in the log, after the signal that ended it, if any."""
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        line = lines[-1] if lines else "no output"
        if code >= 0:
            return line
        why = ", perhaps by the system for lack of memory" if -code == signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{why}; the last line was: {line}"


def train_all(plan: Plan, chains: Sequence[Sequence[Run]], what: str = "runs") -> dict[str, str]:
    """Trains the runs that are not done, those of a chain in order until one does not reach its goal. Returns the last
    lines of the runs that failed, by name. After SIGINT, SIGTERM or SIGHUP the runs are saved, and
    KeyboardInterrupt(signal) is raised."""
    waiting = [chain for chain in chains if _next(chain, plan) is not None]
    if len(waiting) < len(chains):
        say(f"{len(chains) - len(waiting)} of {len(chains)} {what} are done already")
    children: list[_Child] = []
    failed: dict[str, str] = {}
    with StopRequest() as stop:
        try:
            while waiting or children:
                while waiting and len(children) < plan.jobs:
                    chain = waiting.pop(0)
                    run = _next(chain, plan)
                    assert run is not None
                    children.append(_Child(run, chain, plan))
                time.sleep(POLL)
                if stop.signal is not None:
                    raise KeyboardInterrupt(stop.signal)
                for child in [each for each in children if each.process.poll() is not None]:
                    children.remove(child)
                    if (line := child.finish()) is not None:
                        failed[child.run.name] = line
                    if _next(child.chain, plan) not in (None, child.run):  # neither the end nor an unfinished run
                        waiting.insert(0, child.chain)
        except BaseException:
            for child in children:  # they save themselves
                child.process.send_signal(signal.SIGTERM)  # a shell lets background processes ignore SIGINT
            for child in children:
                child.process.wait()
            raise
    return failed


def _next(chain: Sequence[Run], plan: Plan) -> Run | None:
    """The first run of a chain that is not done; None at the end of the chain and after a run that missed its goal."""
    for run in chain:
        if not is_done(plan.run_folder(run), plan.length(run)):
            return run
        if not read_object(plan.run_folder(run) / "result.json").get("reached"):
            return None
    return None
