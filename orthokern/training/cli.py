"""The common part of the command lines of all tasks: settings and presets, resuming, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from orthokern.commandline import (
    EXIT_INTERRUPTED,
    MAX_THREADS,
    Parser,
    Settings,
    command,
    device,
    say,
)
from orthokern.dispatch import BACKENDS, ENVIRONMENT_VARIABLE, requested
from orthokern.errors import CheckpointError, InputError
from orthokern.training.checkpoint import seed_all
from orthokern.training.loop import LoopSettings, train
from orthokern.training.options import (
    Options,
    add_options,
    check_effect,
    dashed,
    defaults,
    option,
)
from orthokern.training.rundir import RunFolder
from orthokern.training.state import FREE_SETTINGS
from orthokern.training.task import Task

__all__ = ["RunOptions", "TaskCommand", "resolve"]

LARGEST_SEED = 2**63 - 1


@dataclass(kw_only=True)
class RunOptions(Options):
    """The settings of every task. Their names are the names of the options, with underscores.

    `iterations` and `backend` are None until the settings are complete; never in the settings of a task.
    """

    GROUP = "the run"
    preset: str | None = None
    iterations_per_epoch: int | None = None  # None if the task has no epochs; recorded
    iterations: int = option(None, "stop after N iterations", shown="by --epochs", basic=True)
    minutes: float | None = option(
        None,
        "stop after X minutes of wall time, over all resumed parts; then evaluate and test, each for at most a "
        "quarter of that time; schedules still span all iterations",
        above=0.0,
    )
    seed: int = option(0, "seed of the model, the data and the held-out data", low=0, high=LARGEST_SEED, basic=True)
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu",
        "cpu, cuda, cuda:1, ...",
        convert=device,
        metavar="NAME",
        shown="cuda if available",
        basic=True,
    )
    backend: str = option(
        None,
        f"auto, {', '.join(BACKENDS)}",
        choices=("auto", *BACKENDS),
        shown=f"the environment variable {ENVIRONMENT_VARIABLE}, else auto",
    )
    threads: int | None = option(None, "CPU threads", high=MAX_THREADS, shown="set by torch", basic=True)
    checkpoint_every: int = option(50, "iterations between checkpoints")
    diagnose_every: int = option(10, "iterations between records of spectrum and gradient, 0 for none", low=0)
    last_step_gradient: bool = option(
        False, "also record the gradient of the loss of the last time step, if the task has one (an extra pass)"
    )
    accumulate: int = option(
        1,
        "average the gradients of K batches per iteration: like a batch K times as large, with less memory",
        metavar="K",
    )
    plots: bool = option(True, "do not draw plots at the end")


EXIT_CODES = """\
Exit code: 0 goal reached, all iterations done or time limit reached, 2 bad arguments or data, or a file cannot be
written, 3 diverged, 129, 130 or 143 interrupted (saved; --resume continues).
"""


Chosen = TypeVar("Chosen", bound=RunOptions)


def resolve(passed: Settings, defaults: Settings, presets: Mapping[str, Settings], stored: Settings | None) -> Settings:
    """All settings of a run. The sources, in order of precedence, are the command line, the run to resume, the preset
    and the defaults."""
    if "iterations" in passed and "epochs" in defaults:
        if "epochs" in passed:
            lengths = f"--epochs {passed['epochs']} and --iterations {passed['iterations']}"
            raise InputError(f"{lengths}: give one of the two")
        passed = {"epochs": None, **passed}
    if stored is None:
        settings = {**defaults, **presets.get(passed.get("preset") or "", {}), **passed}
    else:
        for key in sorted(passed):
            if key not in FREE_SETTINGS and key in stored and passed[key] != stored[key]:
                raise CheckpointError(
                    f"{_change(key, passed[key], stored[key])}; leave the option out, or start a new run"
                )
        settings = {**defaults, **stored, **passed}
    if settings.get("backend") is None:  # a name from here on: it is recorded, and a resumed run uses the same one
        settings["backend"] = requested(None)
    return settings


def _change(key: str, passed: Any, stored: Any) -> str:
    """The message for an option that differs from the run to resume, with option and values as they are typed."""
    typed = dashed(key)
    if isinstance(passed, bool):
        return f"{typed if passed else dashed('no_' + key)}: the run to resume was started without it"
    new, old = ("none" if value is None else value for value in (passed, stored))
    return f"{typed} {new}: the run to resume has {typed} {old}"


# messages of torch's allocators, of CUDA calls in the native module, and of torch for a size that overflows
_NO_MEMORY = re.compile(
    r"out of memory|can.t allocate memory|not enough memory|MemoryAllocation|ALLOC_FAILED|"
    r"Storage size calculation overflowed|Overflow when unpacking long"
)
_SIZES = ("T", "length", "bptt", "window", "hidden", "layers", "batch")


@contextlib.contextmanager
def _memory_errors(settings: RunOptions) -> Iterator[None]:
    """Converts a failed allocation to an error of one line."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        text = (str(error).splitlines() or [""])[0]
        if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
            sizes = {name: getattr(settings, name, None) for name in _SIZES}
            lower = " or ".join(f"--{name} ({size})" for name, size in sizes.items() if size is not None)
            raise InputError(f"out of memory on {settings.device}: {text or 'no memory'}; lower {lower}") from None
        raise


@dataclass(frozen=True)
class TaskCommand(Generic[Chosen]):
    """The command line of a task.

    Attributes:
        name: name of the task and of its module.
        description: text above the options in --help.
        examples: command lines below them.
        options: the settings, a dataclass that extends `RunOptions`.
        build: a function that makes the task from complete settings; called after the global random generators have
            been seeded.
        presets, preset_help: settings of every preset by its name, and the help of --preset, as in `add_options`.
    """

    name: str
    description: str
    examples: str
    options: type[Chosen]
    build: Callable[[Chosen], Task]
    presets: Mapping[str, Settings] = field(default_factory=dict)
    preset_help: Mapping[str, str] | None = None

    @property
    def defaults(self) -> Settings:
        """The defaults of the options, by name."""
        return defaults(self.options)

    def complete(self, settings: Settings) -> Chosen:
        """The settings object for settings by name, with the defaults of all others, including those that depend on
        settings. Names that the task does not have (from other versions) are left out."""
        known = {each.name for each in fields(self.options)}
        result = self.options(**{name: value for name, value in settings.items() if name in known})
        result.complete()
        return result

    def parser(self) -> Parser:
        parser = Parser(
            prog=f"python -m orthokern.tasks.{self.name}",
            description=self.description,
            epilog=f"{self.examples}\n{EXIT_CODES}",
        )
        add_options(parser, self.options, self.presets, self.preset_help)
        group = parser.add_argument_group("the run folder")
        text = "run folder, new or empty (default runs/<task>-<time>)"
        group.add_argument("--out", type=Path, metavar="DIR", help=text)
        text = "resume the run in DIR with its settings; the result is that of an uninterrupted run"
        group.add_argument("--resume", type=Path, metavar="DIR", help=text)
        parser.basic |= {"out", "resume"}
        return parser

    def main(self, arguments: list[str] | None = None) -> int:
        """Runs the command line."""
        started = time.perf_counter()

        def body() -> int:
            try:
                return self._run(self.parser().parse(arguments), started)
            except KeyboardInterrupt:  # a signal before the loop handles signals, or the second one within the loop
                say("stopped at once, nothing saved since the last checkpoint", sys.stderr)
                return EXIT_INTERRUPTED

        return command(body)

    def _run(self, passed: Settings, started: float) -> int:
        resumed, out = passed.pop("resume", None), passed.pop("out", None)
        if resumed is not None and out not in (None, resumed):
            raise InputError(
                f"--resume {resumed} and --out {out}: a run is resumed in its own folder; give one of the two"
            )
        run = None if resumed is None else RunFolder.open(resumed, self.name)
        try:
            settings = self.settings(passed, run)
            with _memory_errors(settings):
                task = self._task(passed, settings)
                settings.iterations_per_epoch = task.iterations_per_epoch
                if run is None:
                    run = RunFolder.create(out, self.name, asdict(settings), task.facts())
                else:
                    stored = run.config["settings"]
                    run.config["settings"] = {**stored, **asdict(settings), "plots": stored.get("plots", True)}
                    run.config |= task.facts()
                say(f"{'run folder' if resumed is None else 'resuming in'} {run.path}{task.headline()}")
                loop = LoopSettings(**{each.name: getattr(settings, each.name) for each in fields(LoopSettings)})
                outcome = train(task, run, loop, resume=resumed is not None, started=started)
        finally:
            if run is not None:
                run.close()
        say(outcome.message, sys.stderr if outcome.exit_code else sys.stdout)
        return outcome.exit_code

    def settings(self, passed: Settings, run: RunFolder | None = None) -> Chosen:
        """The complete, checked settings of a command line; `run`: the folder of the run that it resumes."""
        stored = None if run is None else run.config["settings"]
        settings = self.complete(resolve(passed, self.defaults, self.presets, stored))
        if run is not None:
            try:
                device(settings.device)  # the run may be from another machine
            except ArgumentTypeError as error:
                raise CheckpointError(f"{run.path / 'config.json'}: device: {error}") from None
        check_effect(settings, passed)
        return settings

    def _task(self, passed: Settings, settings: Chosen) -> Task:
        """Prepares the process, and builds the task."""
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        settings.threads = torch.get_num_threads()
        # Denormal numbers (below 1e-38) do not matter here and cost about a hundred cycles each on a CPU. In long runs
        # the probabilities of a softmax, and the gradients computed from them, would contain many.
        torch.set_flush_denormal(True)
        seed_all(settings.seed)
        task = self.build(settings)
        if passed.get("last_step_gradient") and type(task).last_step_loss is Task.last_step_loss:
            raise InputError(f"--last-step-gradient: the task {self.name} has no separate loss of its last time step")
        return task
