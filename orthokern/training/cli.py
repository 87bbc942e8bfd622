"""The common part of the command lines of all tasks: one-line errors, settings and presets, resuming, exit codes."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch

from orthokern.commandline import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    MAX_THREADS,
    Needs,
    Parser,
    Settings,
    command,
    device,
    integer,
    path,
    real,
    say,
)
from orthokern.dispatch import BACKENDS, ENVIRONMENT_VARIABLE, requested
from orthokern.errors import BackendUnavailable, CheckpointError, InputError
from orthokern.training import distributed
from orthokern.training.checkpoint import seed_all
from orthokern.training.distributed import Shard
from orthokern.training.loop import LoopSettings, train
from orthokern.training.options import Options, add_options, defaults, named, option, switch
from orthokern.training.rundir import RunFolder
from orthokern.training.startup import without_dynamo
from orthokern.training.state import FREE_SETTINGS
from orthokern.training.task import Task

__all__ = ["EXIT_BAD_INPUT", "RunOptions", "TaskCommand", "resolve"]

LARGEST_SEED = 2**63 - 1


@dataclass(kw_only=True)
class RunOptions(Options):
    """The settings of every task. Their names are the names of the options, with underscores.

    `iterations` and `backend` are None until the settings are complete; never in the settings of a task.
    """

    GROUP = "the run"
    preset: str | None = None
    processes: int = 1  # number of processes that train together; recorded
    iterations_per_epoch: int | None = None  # None if the task has no epochs; recorded
    iterations: int = option(None, integer(1), "stop after N iterations", "N", shown="by --epochs")
    minutes: float | None = option(
        None,
        real(0.0, exclusive=True, none=True),
        "stop in the iteration that ends after X minutes, with its evaluation and test; resumed parts count, and "
        "schedules still span all iterations",
        shown="none",
    )
    seed: int = option(0, integer(0, LARGEST_SEED), "seed of the model, the data and the held-out data", "N")
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu",
        device,
        "cpu, cuda, cuda:1, ...",
        "NAME",
        shown="cuda if available",
    )
    backend: str = named(
        None,
        ("auto", *BACKENDS),
        f"auto, {', '.join(BACKENDS)}",
        shown=f"the environment variable {ENVIRONMENT_VARIABLE}, else auto",
    )
    threads: int | None = option(None, integer(1, MAX_THREADS), "CPU threads", "N", shown="set by torch")
    checkpoint_every: int = option(50, integer(1), "iterations between checkpoints", "N")
    diagnose_every: int = option(10, integer(0), "iterations between records of spectrum and gradient, 0 for none", "N")
    last_step_gradient: bool = switch(
        False,
        "also record the gradient of the loss of the last time step, if the task has one (an extra pass per record)",
        needs=Needs("diagnose_every", nothing=0),
    )
    accumulate: int = option(
        1,
        integer(1),
        "average the gradients of K batches per iteration: like a batch K times as large, with less memory",
        "K",
    )
    profile: int | None = option(
        None,
        integer(1),
        "after 3 iterations, time the stages of N iterations (10) and the operators of 3; writes profile.json",
        "N",
        shown="",
        optional=10,
    )
    cuda_graph: bool = switch(
        False, "on a CUDA device, launch an iteration as one CUDA graph, where the task and the optimizer allow it"
    )
    process_timeout: int = option(
        600,
        integer(1, 365 * 86_400),
        "under torchrun, seconds that a process waits for the others; must exceed the time of an evaluation",
        "S",
    )
    plots: bool = switch(True, "do not draw plots at the end")


EXIT_CODES = """\
Exit code: 0 goal reached or all iterations done, 2 bad arguments or data, 3 diverged, 129, 130 or 143 interrupted
(saved; --resume continues).
"""


Chosen = TypeVar("Chosen", bound=RunOptions)


def resolve(given: Settings, defaults: Settings, presets: Mapping[str, Settings], stored: Settings | None) -> Settings:
    """All settings of a run. The sources, in order of precedence, are the command line, the run to resume, the preset
    and the defaults.

    Args:
        given: settings of the command line, by name.
        defaults: all settings.
        presets: presets by name; `given` or `stored` may select one with the key "preset".
        stored: settings of the run to resume, or None for a new run.

    Raises:
        CheckpointError: the command line changes a setting that cannot be changed when a run is resumed.
        InputError: both --epochs and --iterations were given, or ORTHOKERN_BACKEND is used and names no backend.
    """
    if "iterations" in given and "epochs" in defaults:
        if "epochs" in given:
            raise InputError(f"--epochs {given['epochs']} and --iterations {given['iterations']}: give one of the two")
        given = {"epochs": None, **given}
    if stored is not None:
        for key in sorted(given):
            if key not in FREE_SETTINGS and key in stored and given[key] != stored[key]:
                raise CheckpointError(
                    f"{_change(key, given[key], stored[key])}; leave the option out, or start a new run"
                )
        settings = {**defaults, **stored, **given}
    else:
        settings = {**defaults, **presets.get(given.get("preset") or "", {}), **given}
    if settings.get("backend") is None:  # a name from here on: it is recorded, and a resumed run uses the same one
        settings["backend"] = requested(None)
    return settings


def _change(key: str, given: Any, stored: Any) -> str:
    """The message for an option that differs from the run to resume, with option and values as they are typed."""
    dashed = key.replace("_", "-")
    if isinstance(given, bool):  # a switch, which is only given to change its default
        return f"{'--' if given else '--no-'}{dashed}: the run to resume was started without it"
    new, old = ("none" if value is None else value for value in (given, stored))
    return f"--{dashed} {new}: the run to resume has --{dashed} {old}"


# ---- running ---------------------------------------------------------------------------------------------------------


# settings that determine the memory of a run
_SIZES = ("T", "length", "bptt", "window", "hidden", "layers", "batch")
# messages of torch's allocators, of CUDA calls in the native module, and of torch for a size that overflows
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|not enough memory|MemoryAllocation|ALLOC_FAILED")
_NO_SIZE = re.compile(r"[Ss]torage size calculation overflowed|[Oo]verflow when unpacking")


@contextlib.contextmanager
def _enough_memory(settings: RunOptions) -> Iterator[None]:
    """Converts a failed allocation to an error of one line, with the size and the settings to lower.

    Raises:
        InputError: there is not enough memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(text) and not _NO_SIZE.search(text):
            raise
        asked = re.search(r"(?:ried|nable) to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", text)
        what = "a tensor"
        if asked is not None:
            amount = float(asked[1])
            what = f"{amount / 2**30:.4g} GiB" if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
        elif _NO_SIZE.search(text):
            what = "a tensor of more than 2^63 bytes"
        given = {name: getattr(settings, name, None) for name in _SIZES}
        sizes = [f"--{name.replace('_', '-')} ({size})" for name, size in given.items() if size is not None]
        advice = f"; lower {' or '.join(sizes)}" if sizes else ""
        raise InputError(f"out of memory on {settings.device}: {what} could not be allocated{advice}") from None


def _check_device(recorded: Any) -> None:
    """Rejects a recorded device that is invalid, or that this machine does not have."""
    try:
        device(recorded if isinstance(recorded, str) else str(type(recorded).__name__))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"device: {error}") from None


def _may_be_none(parser: Parser, name: str, settings: Settings) -> bool:
    """Whether a recorded setting may be None although its default is not."""
    if name == "epochs":  # --iterations takes its place
        return settings.get("iterations") is not None
    convert = next((action.type for action in parser._actions if action.dest == name and action.nargs != 0), None)
    try:
        return callable(convert) and convert("none") is None
    except (argparse.ArgumentTypeError, ValueError):
        return False


@dataclass(frozen=True)
class PreparedRun:
    """A run before its first iteration: arguments of `train`, and the settings of the task."""

    task: Task
    folder: RunFolder
    settings: LoopSettings
    resume: bool
    options: Any

    def headline(self) -> str:
        """The first line of output."""
        return f"{'resuming in' if self.resume else 'run folder'} {self.folder.path}{self.task.headline()}"


@contextlib.contextmanager
def _rejected(run: PreparedRun) -> Iterator[None]:
    """Removes the folder of a run that is rejected before its first iteration, and names one that cannot be written."""
    try:
        yield
    except (InputError, BackendUnavailable):
        run.folder.discard()
        raise
    except OSError as error:
        run.folder.discard()
        told = InputError(f"cannot write in the run folder {run.folder.path}: {error.strerror or error}")
        raise distributed.same_scope(told, error) from None


def _run_one(run: PreparedRun, started: float, shard: Shard) -> int:
    with _rejected(run), _enough_memory(run.options):
        outcome = train(
            run.task, run.folder, run.settings, resume=run.resume, started=started, announce=lambda: say(run.headline())
        )
    if shard.first:
        say(outcome.message, sys.stderr if outcome.exit_code else sys.stdout)
    return outcome.exit_code


@dataclass(frozen=True)
class TaskCommand(Generic[Chosen]):
    """The command line of a task.

    Attributes:
        name: of the task and of its module.
        description: text above the options in --help.
        examples: command lines below them.
        options: the settings, a dataclass that extends `RunOptions`.
        complete: a function of the settings by name that sets defaults which depend on other settings, checks
            combinations, and returns `options`.
        build: a function that makes the task from the result of `complete`; called after the global random generators
            have been seeded.
        presets, preset_help: settings of every preset by its name, and the help of --preset, as in `add_options`.

    Example: tests/toy_task.py.
    """

    name: str
    description: str
    examples: str
    options: type[Chosen]
    complete: Callable[[Settings], Chosen]
    build: Callable[[Chosen], Task]
    presets: Mapping[str, Settings] = field(default_factory=dict)
    preset_help: Mapping[str, str] | None = None

    def parser(self) -> Parser:
        parser = Parser(
            prog=f"python -m orthokern.tasks.{self.name}",
            description=self.description,
            epilog=f"{self.examples}\n{EXIT_CODES}",
        )
        add_options(parser, self.options, self.presets, self.preset_help)
        group = parser.add_argument_group("the run folder")
        text = "run folder, new or empty (default runs/<task>-<time>)"
        group.add_argument("--out", type=path, metavar="DIR", help=text)
        text = "resume the run in DIR (or in --out) with its settings; the result is that of an uninterrupted run"
        group.add_argument("--resume", type=path, nargs="?", const=None, metavar="DIR", help=text)
        return parser

    def main(self, arguments: list[str] | None = None) -> int:
        """Runs the command line.

        Args:
            arguments: the command line; by default that of the process.

        Returns:
            The exit code: 0 goal reached or all iterations done, 2 bad arguments or data, 3 diverged, 129, 130 or 143
            interrupted.
        """
        started = time.perf_counter()

        def body() -> int:
            try:
                given = self.parser().parse(arguments)
                timeout: float = given.get("process_timeout") or self.options.process_timeout
                with without_dynamo(), distributed.processes(timeout) as shard:
                    return _run_one(self._prepare(given, shard), started, shard)
            except (InputError, BackendUnavailable) as error:
                if distributed.speaks(error):
                    raise
                return EXIT_BAD_INPUT
            except distributed.EndedElsewhere:
                return EXIT_BAD_INPUT
            except KeyboardInterrupt:  # a signal before the loop handles signals, or the second one within the loop
                say("stopped at once, nothing saved since the last checkpoint", sys.stderr)
                return EXIT_INTERRUPTED

        return command(body, arguments)

    def _prepare(self, given: Settings, shard: Shard) -> PreparedRun:
        usual_settings, parser = defaults(self.options), self.parser()
        resume = "resume" in given
        out, folder = given.pop("out", None), given.pop("resume", None)
        if folder is not None and out is not None and out != folder:
            raise InputError(
                f"--resume {folder} and --out {out}: a run is resumed in its own folder; give one of the two"
            )
        folder = folder or out
        stored = None
        run_folder = None
        if resume:
            if folder is None:
                raise InputError("--resume needs the folder of the run: --resume DIR, or --resume with --out DIR")
            run_folder = distributed.on_first(lambda: RunFolder.open(folder, self.name))
            stored = dict(run_folder.config["settings"])
            stored.pop("profile", None)  # --profile applies to one call

        def settle() -> Chosen:
            if stored is not None:
                try:
                    recorded = {name: value for name, value in stored.items() if name not in given}
                    parser.check_recorded(recorded)
                    if "device" in recorded:
                        _check_device(recorded["device"])
                    for name, value in recorded.items():
                        usual = [
                            usual_settings.get(name),
                            *(preset[name] for preset in self.presets.values() if name in preset),
                        ]
                        if value is None and None not in usual and not _may_be_none(parser, name, {**stored, **given}):
                            raise InputError(f"{name} is null, which --{name.replace('_', '-')} does not take")
                except InputError as error:
                    raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
            settings = self.complete(resolve(given, usual_settings, self.presets, stored))
            parser.check_all_play(given, settings)
            if settings.minutes is not None and shard.world > 1:  # the clocks of the ranks differ
                raise InputError(
                    f"--minutes {settings.minutes:g}: for one process, not under torchrun; give --iterations"
                )
            return settings

        settings = distributed.together(settle)
        settings.processes = shard.world
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        settings.threads = torch.get_num_threads()
        # Denormal numbers (below 1e-38) do not matter here and cost about a hundred cycles each on a CPU. In long runs
        # the probabilities of a softmax, and the gradients computed from them, would contain many.
        torch.set_flush_denormal(True)
        distributed.together(lambda: distributed.use_device(settings.device))
        seed_all(settings.seed)

        def make() -> Task:
            task = self.build(settings)
            if given.get("last_step_gradient") and not task.has_last_step_loss:
                raise InputError(
                    f"--last-step-gradient: the task {self.name} has no separate loss of its last time step"
                )
            return task

        with _enough_memory(settings):
            task = distributed.together(make)
        settings.iterations_per_epoch = task.iterations_per_epoch
        if shard.world > 1:  # all ranks have built the same model; from here on dropout differs
            seed_all(settings.seed + shard.rank)
        if run_folder is None:
            facts = task.facts()
            run_folder = distributed.on_first(lambda: RunFolder.create(folder, self.name, asdict(settings), facts))
        else:
            stored = stored or {}
            of_the_run = {name: stored[name] for name in ("plots",) if name in stored}  # --no-plots applies to one call
            run_folder.config["settings"] = {**stored, **asdict(settings), **of_the_run}
            run_folder.config |= task.facts()
        loop = LoopSettings(**{each.name: getattr(settings, each.name) for each in fields(LoopSettings)})
        return PreparedRun(task, run_folder, loop, resume, settings)
