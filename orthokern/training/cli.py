"""What the command lines of all tasks share: one-line errors, settings and presets, resuming, exit codes."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

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
    one_of,
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

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "RunOptions",
    "Parser",
    "Settings",
    "device",
    "integer",
    "make_parser",
    "one_of",
    "real",
    "resolve",
    "run",
]


@dataclass(kw_only=True)
class RunOptions(Options):
    """The settings that every task has. Their names are those of the options, with underscores.

    Attributes:
        preset: name of the preset; None for none.
        processes: number of processes that train together; recorded.
        iterations_per_epoch: of the task, None where it has no epochs; recorded.
        iterations, backend: None until the settings are complete, and not in those that a task is built from.
    """

    GROUP = "the run"
    preset: str | None = None
    processes: int = 1
    iterations_per_epoch: int | None = None
    iterations: int = option(None, integer(1), "stop after N iterations, solved or not", "N", shown="by --epochs")
    seed: int = option(0, integer(0, 2**63 - 1), "seed of the model, the data and the held-out data", "N")
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu",
        device,
        "cpu, cuda, cuda:1, ...",
        "NAME",
        shown="cuda if there is one",
    )
    backend: str = named(
        None,
        "backend",
        ("auto", *BACKENDS),
        f"auto, {', '.join(BACKENDS)}",
        shown=f"the environment variable {ENVIRONMENT_VARIABLE}, else auto",
    )
    threads: int | None = option(None, integer(1, MAX_THREADS), "CPU threads", "N", shown="as many as torch chooses")
    checkpoint_every: int = option(50, integer(1), "iterations between checkpoints", "N")
    diagnose_every: int = option(10, integer(0), "iterations between records of spectrum and gradient, 0 for none", "N")
    last_step_gradient: bool = switch(
        False,
        "also record the gradient of the last time step's loss, where a task has one (one more pass per record)",
        needs=(Needs("diagnose_every", nothing=0),),
    )
    accumulate: int = option(
        1,
        integer(1),
        "batches per iteration, their gradients averaged: as a batch K times as large, in less memory",
        "K",
    )
    profile: int | None = option(
        None,
        integer(1),
        "after three iterations, time the stages of N more (10) and the operators of three; writes profile.json",
        "N",
        shown="",
        optional=10,
    )
    cuda_graph: bool = switch(
        False,
        "on a CUDA device, launch an iteration as one CUDA graph, where the task and the optimizer allow it",
    )
    process_timeout: int = option(
        600,
        integer(1, 365 * 86_400),
        "under torchrun, seconds that a process waits for another: more than an evaluation takes",
        "S",
    )
    plots: bool = switch(True, "draw no plots at the end")


def make_parser(
    name: str,
    description: str,
    epilog: str,
    options: type[RunOptions],
    presets: Mapping[str, Settings] | None = None,
    preset_help: Mapping[str, str] | None = None,
) -> Parser:
    """The parser of a task's command line.

    Args:
        name: the task's module in orthokern.tasks; description, epilog: of the help.
        options, presets, preset_help: as `add_options`.
    """
    parser = Parser(prog=f"python -m orthokern.tasks.{name}", description=description, epilog=epilog)
    add_options(parser, options, presets, preset_help)
    group = parser.add_argument_group("the run folder")
    group.add_argument("--out", type=path, metavar="DIR", help="run folder, new or empty (default runs/<task>-<time>)")
    group.add_argument(
        "--resume",
        type=path,
        nargs="?",
        const=None,
        metavar="DIR",
        help="resume the run in DIR (or in --out) with its settings, exactly as if it had never stopped",
    )
    return parser


Chosen = TypeVar("Chosen", bound=RunOptions)


def resolve(given: Settings, defaults: Settings, presets: Mapping[str, Settings], stored: Settings | None) -> Settings:
    """All settings of a run, from the strongest source to the weakest: the command line, the run to resume, the preset,
    the defaults.

    Args:
        given: what the command line says; keys as in `defaults`.
        defaults: every setting.
        presets: by name; `given` or `stored` may choose one under the key "preset".
        stored: settings of the run to resume, or None for a new run.

    Raises:
        CheckpointError: the command line differs from the run to resume in a setting that a resumed run can't change.
        InputError: both --epochs and --iterations were given, or ORTHOKERN_BACKEND, where it counts, names no backend.
    """
    if "iterations" in given and "epochs" in defaults:
        if "epochs" in given:
            raise InputError(f"--epochs {given['epochs']} and --iterations {given['iterations']}: give one of the two")
        given = {"epochs": None, **given}
    if stored is not None:
        for key in sorted(given):
            if key not in FREE_SETTINGS and key in stored and given[key] != stored[key]:
                option = "--" + key.replace("_", "-")
                raise CheckpointError(
                    f"{option} {given[key]}: the run to resume has {option} {stored[key]}; "
                    "leave the option out, or start a new run"
                )
        settings = {**defaults, **stored, **given}
    else:
        settings = {**defaults, **presets.get(given.get("preset") or "", {}), **given}
    if (
        settings.get("backend") is None
    ):  # from here on a name: the record says what was used, and a resumed run keeps it
        settings["backend"] = requested(None)
    return settings


# ---- running ---------------------------------------------------------------------------------------------------------


def run(
    name: str,
    parser: Parser,
    options: type[Chosen],
    presets: Mapping[str, Settings],
    complete: Callable[[Settings], Chosen],
    build: Callable[[Chosen], Task],
    arguments: list[str] | None = None,
) -> int:
    """The main function of a task's command line.

    Args:
        name: the task's name.
        parser: of `make_parser`.
        options: the class of the task's settings.
        presets: settings by preset name.
        complete: makes the object of settings given by name: fills in those that depend on others, and checks those
            that only make sense together.
        build: makes the task from complete settings; the global random generators are seeded by then.
        arguments: the command line; by default the process's.

    Returns:
        The exit code: 0 goal reached or all iterations done, 2 bad arguments or data, 3 diverged, 130 or 143
            interrupted.
    """
    started = time.perf_counter()

    def body() -> int:
        try:
            given = parser.parse(arguments)
            timeout: float = given.get("process_timeout") or options.process_timeout
            with without_dynamo(), distributed.processes(timeout) as shard:
                return _run(name, parser, given, options, presets, complete, build, started, shard)
        except (InputError, BackendUnavailable) as error:
            if distributed.speaks(error):
                raise
            return EXIT_BAD_INPUT
        except distributed.EndedElsewhere:
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:  # before the loop took over the signals, or the second one within it
            say("stopped at once, nothing saved since the last checkpoint", sys.stderr)
            return EXIT_INTERRUPTED

    return command(body, arguments)


# what a run's memory grows with
_SIZES = ("T", "length", "bptt", "window", "hidden", "layers", "batch")
# what torch's allocators say, the native module's CUDA calls, and torch of a size beyond all numbers
_NO_MEMORY = re.compile(r"out of memory|can.t allocate memory|not enough memory|MemoryAllocation|ALLOC_FAILED")
_NO_SIZE = re.compile(r"[Ss]torage size calculation overflowed|[Oo]verflow when unpacking")


@contextlib.contextmanager
def _enough_memory(settings: RunOptions) -> Iterator[None]:
    """Turns an allocation that failed into one line: what could not be had, and what to lower.

    Raises:
        InputError: the memory is not enough.
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
    """Refuses a recorded device that is none, or that this machine lacks."""
    try:
        device(recorded if isinstance(recorded, str) else str(type(recorded).__name__))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"device: {error}") from None


def _may_be_none(parser: Parser, name: str, settings: Settings) -> bool:
    """Whether a recorded setting whose default is something may be None."""
    if name == "epochs":  # --iterations takes its place
        return settings.get("iterations") is not None
    convert = next((action.type for action in parser._actions if action.dest == name and action.nargs != 0), None)
    try:
        return callable(convert) and convert("none") is None
    except (argparse.ArgumentTypeError, ValueError):
        return False


def _run(
    name: str,
    parser: Parser,
    given: Settings,
    options: type[Chosen],
    presets: Mapping[str, Settings],
    complete: Callable[[Settings], Chosen],
    build: Callable[[Chosen], Task],
    started: float,
    shard: Shard,
) -> int:
    usual_settings = defaults(options)
    resume = "resume" in given
    out, folder = given.pop("out", None), given.pop("resume", None)
    if folder is not None and out is not None and out != folder:
        raise InputError(f"--resume {folder} and --out {out}: a run goes on in its own folder; give one of the two")
    folder = folder or out
    stored = None
    run_folder = None
    if resume:
        if folder is None:
            raise InputError("--resume needs the folder of the run: --resume DIR, or --resume with --out DIR")
        run_folder = distributed.on_first(lambda: RunFolder.open(folder, name))
        stored = dict(run_folder.config["settings"])
        stored.pop("profile", None)  # asked for once

    def settle() -> Chosen:
        if stored is not None:
            try:
                recorded = {name: value for name, value in stored.items() if name not in given}
                parser.check_recorded(recorded)
                if "device" in recorded:
                    _check_device(recorded["device"])
                for name, value in recorded.items():
                    usual = [usual_settings.get(name), *(preset[name] for preset in presets.values() if name in preset)]
                    if value is None and None not in usual and not _may_be_none(parser, name, {**stored, **given}):
                        raise InputError(f"{name} is null, which --{name.replace('_', '-')} does not take")
            except InputError as error:
                raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
        settings = complete(resolve(given, usual_settings, presets, stored))
        parser.check_all_play(given, settings)
        return settings

    settings = distributed.together(settle)
    settings.processes = shard.world
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    settings.threads = torch.get_num_threads()
    # Numbers below 1e-38 mean nothing here and cost a CPU a hundred cycles each: in long runs the softmax's vanishing
    # probabilities and the gradients they make would be full of them.
    torch.set_flush_denormal(True)
    distributed.together(lambda: distributed.use_device(settings.device))
    seed_all(settings.seed)

    def make() -> Task:
        task = build(settings)
        if given.get("last_step_gradient") and not task.has_last_step_loss:
            raise InputError(f"--last-step-gradient: the task {name} has no loss of its last time step beside its own")
        return task

    with _enough_memory(settings):
        task = distributed.together(make)
    settings.iterations_per_epoch = task.iterations_per_epoch
    if shard.world > 1:  # the models are the same; from here on dropout differs
        seed_all(settings.seed + shard.rank)
    facts = {"baseline": task.baseline, "time_steps": task.time_steps}
    if run_folder is None:
        run_folder = distributed.on_first(lambda: RunFolder.create(folder, name, asdict(settings), facts))
    else:
        run_folder.config["settings"] = {**(stored or {}), **asdict(settings)}
    loop = LoopSettings(
        settings.iterations,
        settings.checkpoint_every,
        settings.diagnose_every,
        settings.plots,
        accumulate=settings.accumulate,
        last_step_gradient=settings.last_step_gradient,
        profile=settings.profile,
        cuda_graph=settings.cuda_graph,
    )
    where = f"{'resuming in' if resume else 'run folder'} {run_folder.path}{task.headline()}"
    try:
        with _enough_memory(settings):
            outcome = train(task, run_folder, loop, resume=resume, started=started, announce=lambda: say(where))
    except (InputError, BackendUnavailable):
        run_folder.discard()
        raise
    except OSError as error:
        run_folder.discard()
        told = InputError(f"cannot write in the run folder {run_folder.path}: {error.strerror or error}")
        raise distributed.same_scope(told, error) from None
    if shard.first:
        say(outcome.message, sys.stderr if outcome.exit_code else sys.stdout)
    return outcome.exit_code
