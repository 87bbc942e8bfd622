"""Trains the unfinished runs of an experiment, several in parallel. Interrupted runs are resumed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from orthokern._files import RECORDS_LIMIT, count, number, open_regular, parse_json, read_object
from orthokern.commandline import Settings, say, write
from orthokern.errors import InputError
from orthokern.reproduce.spec import Run, each_once, planned
from orthokern.training.cli import EXIT_BAD_INPUT
from orthokern.training.loop import EXIT_DIVERGED

POLL = 0.2  # seconds between two polls of the child processes


class BudgetSpent(Exception):
    """The end of `Plan.budget`, before all runs were done.

    Attributes:
        failed: as returned by `train_all`.
    """

    def __init__(self, failed: dict[str, str]) -> None:
        super().__init__()
        self.failed = failed


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP has arrived.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


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
        budget: seconds after which no run trains on, or None.
    """

    folder: Path
    data: Path | None
    quick: bool
    jobs: int
    threads: int
    longer: tuple[str, ...] = ()
    device: str | None = None
    budget: float | None = None

    @classmethod
    def of(cls, given: Settings, folder: Path, data: Path | None, longer: tuple[str, ...]) -> Plan:
        """The plan of a command line."""
        jobs = given.get("jobs", 1)
        threads = given.get("threads", max(1, torch.get_num_threads() // jobs))
        return cls(
            folder, data, given.get("quick", False), jobs, threads, longer, given.get("device"), given.get("budget")
        )

    def run_folder(self, run: Run) -> Path:
        return self.folder / run.name

    def length(self, run: Run) -> tuple[str, ...]:
        """The option with the length of a run: the requested one, else the planned one. () if its task derives it."""
        if self.longer:
            return self.longer
        settings = planned(run, self.quick)
        for name in ("epochs", "iterations"):
            if settings.get(name) is not None:
                return f"--{name}", str(settings[name])
        return ()

    def is_done(self, run: Run) -> bool:
        return is_done(self.run_folder(run), self.length(run))

    def command(self, run: Run) -> list[str]:
        """The command line that trains or continues the run."""
        folder = self.run_folder(run)
        begun = (folder / "config.json").exists()
        # a run that was started with another length goes on to this one
        length = self.length(run) if begun else self.longer
        options = [*each_once((*run.options, *(run.quick if self.quick else ()), *length))]
        options += ["--threads", str(self.threads)]
        if self.data is not None:
            options += ["--data", str(self.data)]
        if self.device is not None:
            options += ["--device", self.device]
        where = "--resume" if begun else "--out"
        return [sys.executable, "-m", f"orthokern.tasks.{run.task}", *options, where, str(folder)]


def result_of(folder: Path) -> dict[str, Any]:
    """The content of the result.json in a run folder; {} if it is missing or unreadable."""
    try:
        return read_object(folder / "result.json")
    except (OSError, InputError):
        return {}


def is_done(folder: Path, longer: Sequence[str] = ()) -> bool:
    """Whether the run in a folder is finished: its result.json says so, for at least the requested number of epochs or
    iterations.

    Args:
        folder: a run folder, which need not exist yet.
        longer: an option with a length, as in Plan; without one, the length in its config.json counts.
    """
    result = result_of(folder)
    try:
        settings = read_object(folder / "config.json").get("settings")
    except (OSError, InputError):
        return False
    return bool(result) and isinstance(settings, dict) and is_finished(settings, result, longer)


def is_finished(settings: Mapping[str, Any], result: Mapping[str, Any], longer: Sequence[str] = ()) -> bool:
    """Whether a run has ended, and is at least as long as requested.

    Args:
        settings: those in its config.json.
        result: the content of its result.json.
        longer: as for `is_done`.
    """
    if result.get("diverged") or result.get("reached"):
        return True
    minutes, seconds = number(settings.get("minutes")), number(result.get("seconds"))
    if minutes is not None and seconds is not None and seconds >= 60.0 * minutes:
        return True
    target = count(settings.get("iterations")) or 0
    for option, value in zip(longer[::2], longer[1::2], strict=True):
        per_unit = 1 if option == "--iterations" else count(settings.get("iterations_per_epoch")) or 0
        target = int(value) * per_unit or target
    return (count(result.get("iteration")) or 0) >= target


def _last_record(path: Path) -> dict[str, Any] | None:
    """The last complete record of a metrics.jsonl that may be being written, or None."""
    try:
        file, size = open_regular(path, RECORDS_LIMIT)
        with file:
            file.seek(max(0, size - 65536))
            lines = file.read(65536).split(b"\n")[:-1]
        record = parse_json(lines[-1])
    except (OSError, ValueError, IndexError):
        return None
    return record if isinstance(record, dict) else None


class _Board:
    """Prints the progress of the runs: one line that is overwritten on a terminal, one line per minute elsewhere."""

    def __init__(self, total: int, stream: TextIO, what: str) -> None:
        self.total = total
        self.what = what
        self.stream = stream
        self.terminal = stream.isatty()
        self.shown = False
        self.next = 0.0

    def say(self, text: str) -> None:
        self.clear()
        say(text, self.stream)

    def clear(self) -> None:
        if self.shown:
            write("\r\033[K", self.stream)
            self.shown = False

    def status(self, done: int, children: dict[str, _Child]) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (1.0 if self.terminal else 60.0)
        parts = [f"{name}: {child.progress()}" for name, child in children.items()]
        line = f"{done} of {self.total} {self.what} done; " + "; ".join(parts)
        if self.terminal:
            columns = os.get_terminal_size(self.stream.fileno()).columns
            write("\r\033[K" + line[: columns - 1], self.stream)
            self.shown = True
        else:
            say(line, self.stream)


class _Child:
    """A run in progress."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run = run
        self.folder = plan.run_folder(run)
        self.log = plan.folder / f"{run.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.begin = log.tell()  # earlier processes have written before this
            self.process = subprocess.Popen(plan.command(run), stdout=log, stderr=subprocess.STDOUT)

    def progress(self) -> str:
        record = _last_record(self.folder / "metrics.jsonl")
        if record is None:
            return "starting"
        epoch, loss = number(record.get("epoch")), number(record.get("loss"))
        at = f"epoch {epoch:.2f}" if epoch is not None else f"iteration {count(record.get('iteration'))}"
        return at + (f", loss {loss:.4g}" if loss is not None else "")

    def last_line(self, code: int) -> str:
        """The last line of this process in the log; behind the signal that ended it, if one did."""
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        line = lines[-1] if lines else "no output"
        if code >= 0:
            return line
        names = {number.value: number.name for number in signal.Signals}
        why = ", perhaps by the system for lack of memory" if -code == signal.SIGKILL else ""
        return f"ended by {names.get(-code, f'signal {-code}')}{why}; the last line was: {line}"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Interrupted, as SIGINT raises KeyboardInterrupt: else this process would end, and the
    runs would go on without it. A signal that is ignored, as under nohup, stays ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        ended_by = (number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL)
        previous = {number: signal.signal(number, interrupt) for number in ended_by}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@_interruptible()
def train_all(
    plan: Plan, runs: Sequence[Run], stream: TextIO, successor: Callable[[Run], Run | None] | None = None
) -> dict[str, str]:
    """Trains the runs that are not done. At the end of the budget it saves the running ones and starts no others.

    Args:
        plan: how the runs are trained.
        runs: the runs.
        stream: where progress is printed.
        successor: maps a finished run to the run that follows it, or to None. Each of `runs` is then the first run of a
            chain, and is done when the last run of the chain is done.

    Returns:
        Name -> last line of output, for the runs that failed or diverged.

    Raises:
        InputError: the command line or the data of a run was rejected. The other runs would be rejected as well.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP has arrived, and the child processes have saved their runs.
        BudgetSpent: at the end of the budget some runs are not done.
    """
    board = _Board(len(runs), stream, "runs" if successor is None else "searches")
    waiting = [open_run for run in runs if (open_run := _open(run, plan, successor)) is not None]
    done = len(runs) - len(waiting)
    if done:
        board.say(f"{done} of {len(runs)} {board.what} are done already")
    children: dict[str, _Child] = {}
    failed: dict[str, str] = {}
    deadline = math.inf if plan.budget is None else time.monotonic() + plan.budget
    try:
        while waiting or children:
            if time.monotonic() >= deadline:
                left = f"{len(runs) - done} {board.what} are not done"
                board.say(f"the budget is spent: {left}; the same command goes on")
                raise BudgetSpent(failed)
            while waiting and len(children) < plan.jobs:
                run = waiting.pop(0)
                children[run.name] = _Child(run, plan)
            time.sleep(POLL)
            for name, child in list(children.items()):
                code = child.process.poll()
                if code is None:
                    continue
                del children[name]
                line = child.last_line(code)
                board.say(f"{name}: {line}")
                if code == EXIT_BAD_INPUT:
                    raise InputError(f"{name}: {line.removeprefix('error: ')}")
                if code == EXIT_DIVERGED:
                    _mark_diverged(child.folder, line)
                if code != 0:
                    failed[name] = line
                following = _open(child.run, plan, successor)
                if following is None or following.name == name:  # the end of the chain, or an unfinished run
                    done += 1
                else:
                    waiting.insert(0, following)
            if children:
                board.status(done, children)
    except BaseException:
        board.clear()
        _stop(children)  # a second signal to them, after that of the terminal, is ignored: StopRequest
        raise
    board.clear()
    return failed


def _stop(children: dict[str, _Child]) -> None:
    """Interrupts the runs under way, which save themselves, and waits for them."""
    for child in children.values():
        child.process.send_signal(signal.SIGTERM)  # a shell lets background processes ignore SIGINT
    for child in children.values():
        child.process.wait()


def _open(run: Run, plan: Plan, successor: Callable[[Run], Run | None] | None) -> Run | None:
    """The first run of a chain that is not done, or None."""
    following: Run | None = run
    while following is not None and plan.is_done(following):
        following = None if successor is None else successor(following)
    return following


def _mark_diverged(folder: Path, line: str) -> None:
    """Records in result.json that the run has diverged, so that it is not repeated."""
    result: dict[str, Any] = {"diverged": True, "message": line}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
