"""Trains the runs of an experiment that are not trained yet, several at once; continues interrupted runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from orthokern._files import RECORDS_LIMIT, count, number, open_regular, parse_json, read_object
from orthokern.commandline import say, write
from orthokern.errors import InputError
from orthokern.reproduce.spec import Run, each_once
from orthokern.training.cli import EXIT_BAD_INPUT
from orthokern.training.loop import EXIT_DIVERGED

__all__ = ["Plan", "is_done", "result_of", "train_all"]

POLL = 0.2  # seconds between two looks at the children


@dataclass(frozen=True)
class Plan:
    """How the runs of an experiment are trained.

    Attributes:
        folder: holds one run folder per run.
        data: the folder for --data, or None.
        quick: scaled down.
        jobs: runs at once.
        threads: CPU threads of a run.
        longer: options that replace how long a run is, for example ("--epochs", "20").
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

    def run_folder(self, run: Run) -> Path:
        return self.folder / run.name

    def command(self, run: Run) -> list[str]:
        """The command line that trains or continues the run."""
        folder = self.run_folder(run)
        options = [*each_once((*run.options, *(run.quick if self.quick else ()), *self.longer))]
        options += ["--threads", str(self.threads)]
        if self.data is not None:
            options += ["--data", str(self.data)]
        if self.device is not None:
            options += ["--device", self.device]
        where = "--resume" if (folder / "config.json").exists() else "--out"
        return [sys.executable, "-m", f"orthokern.tasks.{run.task}", *options, where, str(folder)]


def result_of(folder: Path) -> dict[str, Any]:
    """What a run folder's result.json holds; {} if there is none, or none that can be read."""
    try:
        return read_object(folder / "result.json")
    except (OSError, InputError):
        return {}


def is_done(folder: Path, longer: Sequence[str] = ()) -> bool:
    """Whether the run in a folder came to its end: its result.json says so, for at least as many epochs or iterations
    as are asked for.

    Args:
        folder: a run folder, or none yet.
        longer: as in Plan.
    """
    result = result_of(folder)
    try:
        settings = read_object(folder / "config.json").get("settings")
    except (OSError, InputError):
        return False
    if not result or not isinstance(settings, dict):
        return False
    if result.get("diverged") or result.get("reached"):
        return True
    # config.json keeps the length that a run began with; result.json tells how far it has come since.
    target = count(settings.get("iterations")) or 0
    for option, value in zip(longer[::2], longer[1::2], strict=True):
        per_unit = 1 if option == "--iterations" else count(settings.get("iterations_per_epoch")) or 0
        target = int(value) * per_unit or target
    return (count(result.get("iteration")) or 0) >= target


def _last_record(path: Path) -> dict[str, Any] | None:
    """The last whole record of a metrics.jsonl that somebody is writing, or None."""
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
    """Says how the runs stand: one line that is written over on a terminal, a line a minute elsewhere."""

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
    """A run that is being trained."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run = run
        self.folder = plan.run_folder(run)
        self.log = plan.folder / f"{run.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(plan.command(run), stdout=log, stderr=subprocess.STDOUT)

    def progress(self) -> str:
        record = _last_record(self.folder / "metrics.jsonl")
        if record is None:
            return "starting"
        epoch, loss = number(record.get("epoch")), number(record.get("loss"))
        at = f"epoch {epoch:.2f}" if epoch is not None else f"iteration {count(record.get('iteration'))}"
        return at + (f", loss {loss:.4g}" if loss is not None else "")

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"


def train_all(
    plan: Plan, runs: Sequence[Run], stream: TextIO, successor: Callable[[Run], Run | None] | None = None
) -> dict[str, str]:
    """Trains what is not done. When the plan's budget ends, it saves the runs under way and trains no others.

    Args:
        plan: how.
        runs: which.
        stream: where to say how it stands.
        successor: a run that is done -> the one that comes after it, or None: each of `runs` is then the first of a
            chain, and counts as done when the chain is.

    Returns:
        Name -> last line of output of the runs that failed or diverged.

    Raises:
        InputError: a run's command line or data was refused: all others would be, too.
        KeyboardInterrupt: after the children saved their runs.
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
                _stop(children)
                break
            while waiting and len(children) < plan.jobs:
                run = waiting.pop(0)
                children[run.name] = _Child(run, plan)
            time.sleep(POLL)
            for name, child in list(children.items()):
                code = child.process.poll()
                if code is None:
                    continue
                del children[name]
                line = child.last_line()
                board.say(f"{name}: {line}")
                if code == EXIT_BAD_INPUT:
                    raise InputError(f"{name}: {line.removeprefix('error: ')}")
                if code == EXIT_DIVERGED:
                    _mark_diverged(child.folder, line)
                if code != 0:
                    failed[name] = line
                following = _open(child.run, plan, successor)
                if (
                    following is None or following.name == name
                ):  # the chain's end, or a run that did not come to its own
                    done += 1
                else:
                    waiting.insert(0, following)
            if children:
                board.status(done, children)
    except BaseException:
        board.clear()
        _stop(children)  # an interrupt from a terminal has reached them already; this one is harmless
        raise
    board.clear()
    return failed


def _stop(children: dict[str, _Child]) -> None:
    """Interrupts the runs under way, which save themselves, and waits for them."""
    for child in children.values():
        child.process.send_signal(signal.SIGINT)
    for child in children.values():
        child.process.wait()


def _open(run: Run, plan: Plan, successor: Callable[[Run], Run | None] | None) -> Run | None:
    """The first run of a chain that is not done, or None."""
    following: Run | None = run
    while following is not None and is_done(plan.run_folder(following), plan.longer):
        following = None if successor is None else successor(following)
    return following


def _mark_diverged(folder: Path, line: str) -> None:
    """So that a run that can only diverge again is not tried again."""
    result: dict[str, Any] = {"diverged": True, "message": line}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def default_threads(jobs: int) -> int:
    """CPU threads per run when `jobs` run at once."""
    return max(1, torch.get_num_threads() // jobs)
