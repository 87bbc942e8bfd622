"""What the command lines of all tasks share: one-line errors, settings and presets, resuming, exit codes."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from orthokern.training.rundir import RunFolder
from orthokern.training.startup import without_dynamo
from orthokern.training.state import FREE_SETTINGS
from orthokern.training.task import Task

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "RUN_DEFAULTS",
    "Parser",
    "Settings",
    "add_run_options",
    "device",
    "integer",
    "one_of",
    "real",
    "resolve",
    "run",
]


def add_run_options(parser: Parser, defaults: Mapping[str, Any], *, backend: bool = True) -> None:
    """Adds the options that every task has. Their names in the settings are those of the options with underscores.

    Args:
        parser: a task's.
        defaults: the task's own, shown by the help.
        backend: whether the task calls any operator of ours, whose backend can be chosen.
    """
    iterations = "as --epochs says" if defaults["iterations"] is None else defaults["iterations"]
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--iterations",
        type=integer(1),
        metavar="N",
        help=f"stop after N iterations, solved or not (default {iterations})",
    )
    group.add_argument(
        "--seed",
        type=integer(0, 2**63 - 1),
        metavar="N",
        help="seed of the model, the data and the held-out data (default 0)",
    )
    group.add_argument(
        "--device", type=device, metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)"
    )
    if backend:
        group.add_argument(
            "--backend",
            type=one_of("backend", ("auto", *BACKENDS)),
            metavar="NAME",
            help=f"auto, {', '.join(BACKENDS)} (default: the environment variable {ENVIRONMENT_VARIABLE}, else auto)",
        )
    group.add_argument(
        "--threads", type=integer(1, MAX_THREADS), metavar="N", help="CPU threads (default: as many as torch chooses)"
    )
    group.add_argument("--out", type=path, metavar="DIR", help="run folder, new or empty (default runs/<task>-<time>)")
    group.add_argument(
        "--resume", type=path, nargs="?", const=None, metavar="DIR",
        help="go on with the run in DIR (or in --out), with its settings, exactly as if it had never stopped",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-every",
        type=integer(1),
        metavar="N",
        help=f"iterations between checkpoints (default {defaults['checkpoint_every']})",
    )
    group.add_argument(
        "--diagnose-every", type=integer(0), metavar="N",
        help=f"iterations between looks at spectrum and gradient, 0 for none (default {defaults['diagnose_every']})",
    )  # fmt: skip
    group.add_argument(
        "--last-step-gradient", action="store_true",
        help="look at the gradient of the last time step's loss too, where a task has one (one more pass per look)",
    )  # fmt: skip
    group.add_argument(
        "--accumulate", type=integer(1), metavar="K",
        help="batches per iteration, their gradients averaged: as a batch K times as large, in less memory (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--profile", type=integer(1), nargs="?", const=10, metavar="N",
        help="after three iterations, time the stages of N more (10) and the operators of three; writes profile.json",
    )  # fmt: skip
    group.add_argument(
        "--process-timeout", type=integer(1, 365 * 86_400), metavar="S",
        help="under torchrun, seconds that a process waits for another: more than an evaluation takes (default 600)",
    )  # fmt: skip
    group.add_argument("--no-plots", dest="plots", action="store_false", help="draw no plots at the end")
    parser.needs["last_step_gradient"] = ((Needs("diagnose_every", nothing=0),),)


RUN_DEFAULTS: Settings = {
    "seed": 0,
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "backend": None,
    "threads": None,
    "checkpoint_every": 50,
    "diagnose_every": 10,
    "plots": True,
    "last_step_gradient": False,
    "accumulate": 1,
    "profile": None,
    "process_timeout": 600,
}


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
    if settings["backend"] is None:  # from here on a name: the record says what was used, and a resumed run keeps it
        settings["backend"] = requested(None)
    return settings


# ---- running ---------------------------------------------------------------------------------------------------------


def run(
    name: str,
    parser: Parser,
    defaults: Settings,
    presets: Mapping[str, Settings],
    complete: Callable[[Settings], Settings],
    build: Callable[[Settings], Task],
    arguments: list[str] | None = None,
) -> int:
    """The main function of a task's command line.

    Args:
        name: the task's name.
        parser: with the task's options and those of `add_run_options`.
        defaults: every setting of the task, RUN_DEFAULTS included.
        presets: settings by preset name.
        complete: fills in the settings that depend on others, and checks those that only make sense together.
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
            timeout: float = given.get("process_timeout") or defaults["process_timeout"]
            with without_dynamo(), distributed.processes(timeout) as shard:
                return _run(name, parser, given, defaults, presets, complete, build, started, shard)
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
def _enough_memory(settings: Settings) -> Iterator[None]:
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
        sizes = [f"--{name.replace('_', '-')} ({settings[name]})" for name in _SIZES if settings.get(name) is not None]
        advice = f"; lower {' or '.join(sizes)}" if sizes else ""
        raise InputError(f"out of memory on {settings['device']}: {what} could not be allocated{advice}") from None


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
    defaults: Settings,
    presets: Mapping[str, Settings],
    complete: Callable[[Settings], Settings],
    build: Callable[[Settings], Task],
    started: float,
    shard: Shard,
) -> int:
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

    def settle() -> Settings:
        if stored is not None:
            try:
                recorded = {name: value for name, value in stored.items() if name not in given}
                parser.check_recorded(recorded)
                if "device" in recorded:
                    _check_device(recorded["device"])
                for name, value in recorded.items():
                    usual = [defaults.get(name), *(preset[name] for preset in presets.values() if name in preset)]
                    if value is None and None not in usual and not _may_be_none(parser, name, {**stored, **given}):
                        raise InputError(f"{name} is null, which --{name.replace('_', '-')} does not take")
            except InputError as error:
                raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
        settings = complete(resolve(given, defaults, presets, stored))
        parser.check_all_play(given, settings)
        return settings

    settings = distributed.together(settle)
    settings["processes"] = shard.world
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    settings["threads"] = torch.get_num_threads()
    # Numbers below 1e-38 mean nothing here and cost a CPU a hundred cycles each: in long runs the softmax's vanishing
    # probabilities and the gradients they make would be full of them.
    torch.set_flush_denormal(True)
    distributed.together(lambda: distributed.use_device(settings["device"]))
    seed_all(settings["seed"])

    def make() -> Task:
        task = build(settings)
        if given.get("last_step_gradient") and not task.has_last_step_loss:
            raise InputError(f"--last-step-gradient: the task {name} has no loss of its last time step beside its own")
        return task

    with _enough_memory(settings):
        task = distributed.together(make)
    settings["iterations_per_epoch"] = task.iterations_per_epoch
    if shard.world > 1:  # the models are the same; from here on dropout differs
        seed_all(settings["seed"] + shard.rank)
    facts = {"baseline": task.baseline, "time_steps": task.time_steps}
    if run_folder is None:
        run_folder = distributed.on_first(lambda: RunFolder.create(folder, name, settings, facts))
    else:
        run_folder.config["settings"] = settings
    loop = LoopSettings(
        settings["iterations"],
        settings["checkpoint_every"],
        settings["diagnose_every"],
        settings["plots"],
        accumulate=settings["accumulate"],
        last_step_gradient=settings["last_step_gradient"],
        profile=settings["profile"],
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
