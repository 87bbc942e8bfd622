"""The training loop that every task shares."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from orthokern._files import write_atomically
from orthokern.diagnostics.drawing import draw_run
from orthokern.diagnostics.runs import load_run
from orthokern.errors import OutOfRange, integer
from orthokern.training.iteration import LoopSettings, step
from orthokern.training.metrics import HELD_OUT, plain
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.signals import StopRequest
from orthokern.training.state import RunState
from orthokern.training.task import Task

__all__ = ["EXIT_DIVERGED", "EXIT_OK", "LoopSettings", "Outcome", "train"]

EXIT_OK, EXIT_DIVERGED = 0, 3
EVALUATION_SHARE = 0.25  # of the time limit, for one evaluation or test


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        exit_code: 0: goal reached, all iterations done or time limit reached; 3: diverged; 129, 130 or 143:
        interrupted.
        reached: whether the goal was reached.
        iteration: number of iterations done, over all resumed parts.
        seconds: wall time, over all resumed parts.
        evaluation: the last evaluation, or None.
        message: a summary in one line.
    """

    exit_code: int
    reached: bool
    iteration: int
    seconds: float
    evaluation: dict[str, float] | None
    message: str


class Divergence(Exception):
    """The loss, the gradient or a parameter is not finite."""


def train(
    task: Task,
    run: RunFolder,
    settings: LoopSettings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    started: float | None = None,
) -> Outcome:
    """Trains until the goal is reached, all iterations are done, the time limit is reached, the loss, the gradient or a
    parameter is not finite, or SIGINT, SIGTERM or SIGHUP arrives.

    Args:
        task: the task. Its model and optimizer are modified.
        run: the run folder.
        settings: length of the run and intervals of checkpoints and records.
        resume: continue from the checkpoint in the folder. All later iterations are bitwise equal to those of an
            uninterrupted run (on the same machine, with the same versions and number of threads), and so is
            metrics.jsonl except for its timing fields.
        progress: display of the progress; by default on standard output.
        started: value of `time.perf_counter()` at the start of the wall time; by default now.

    Returns:
        The result; the caller prints its message.

    Raises:
        InputError: a setting that is not accepted.
        CheckpointError: the checkpoint to resume from is damaged, or from another run.
        OSError: a file cannot be written, for example on a full disk. The last checkpoint is unchanged.

    Example: `tests/toy_task.py` is trained by its command line; see `orthokern.training.Task`.
    """
    for name in ("iterations", "checkpoint_every", "accumulate"):
        integer(name, getattr(settings, name))
    progress = progress or Progress(settings.iterations)
    state = RunState(task, run, started if started is not None else time.perf_counter())
    if settings.minutes is not None:
        task.evaluation_seconds = EVALUATION_SHARE * 60.0 * settings.minutes
    with StopRequest() as stop:
        try:
            if resume:
                state.restore()
            run.log.start(state.iteration)
            if resume:  # with settings that may have changed
                run.write_config()
            stopped = _iterate(state, settings, stop, progress)
            return _end(state, settings, stopped, progress)
        except (Divergence, OutOfRange) as error:
            progress.close()
            _plot(run, settings, progress)
            what = str(error).partition("; accepted")[0]
            message = f"diverged: {what} at iteration {state.iteration}; {state.last_good()}; lower the learning rates "
            message += "or the margin, or clip the gradients to a smaller norm"
            return Outcome(EXIT_DIVERGED, False, state.iteration, state.seconds(), state.evaluation, message)
        finally:
            progress.close()
            run.close()


def _iterate(state: RunState, settings: LoopSettings, stop: StopRequest, progress: Progress) -> int | None:
    """Trains until the end of the run. Returns the signal that stopped it, or None."""
    task, run = state.task, state.run
    first, smoothed_ms = state.iteration, 0.0
    task.model.train()
    over = state.is_over(settings)
    if over and not state.reached and state.evaluated != state.iteration:  # stopped before; a new limit ends it
        _evaluate(state, False)
        state.save()
    if not over and not state.reached and stop.signal is None:
        run.result.unlink(missing_ok=True)  # of the part before
        task.begin()
    stopped = stop.signal
    while not over and not state.reached and stopped is None:
        begun = time.perf_counter()
        state.iteration += 1
        diagnose = settings.diagnose_every > 0 and (state.iteration - 1) % settings.diagnose_every == 0
        metrics, profiles = step(task, settings, diagnose)
        loss, norm = metrics["loss"], metrics["grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(norm)
        record: dict[str, Any] = {"iteration": state.iteration}
        if task.iterations_per_epoch is not None:
            record["epoch"] = round(state.iteration / task.iterations_per_epoch, 4)
        record |= metrics
        if finite:
            record["loss"] = metrics["loss"] = loss - metrics.get("penalty", 0.0)
            if task.average is not None:
                task.average.update()
            if diagnose:
                record |= task.diagnose() | profiles
            scheduled = task.wants_evaluation(state.iteration, metrics)
            over = state.is_over(settings)
            if scheduled or over:
                record |= _evaluate(state, scheduled)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        # The first iteration of a process is a warm-up. The time shown is a running mean over about ten iterations.
        smoothed_ms += (milliseconds - smoothed_ms) * (1.0 if state.iteration - first <= 2 else 0.1)
        time_steps = task.time_steps * settings.accumulate
        record["seconds"] = state.seconds()
        record["ms_per_iteration"] = milliseconds
        record["us_per_step"] = 1e3 * milliseconds / time_steps
        run.log.append(record)
        if not finite:
            what = f"the gradient's norm is {norm} (loss {loss:.4g})" if math.isfinite(loss) else f"the loss is {loss}"
            raise Divergence(what)
        epoch = f"epoch {record['epoch']:.2f}, " if "epoch" in record else ""
        times = f"{smoothed_ms:.0f} ms per iteration"
        if task.time_steps > 1:
            times += f", {1e3 * smoothed_ms / time_steps:.1f} µs per time step"
        text = f"{epoch}{task.progress_text(metrics)}, {times}"
        progress.update(state.iteration, text, force=over or state.reached)
        stopped = stop.signal
        due = state.iteration % settings.checkpoint_every == 0 or state.new_best is not None
        if due or over or state.reached or stopped is not None:
            _check_parameters(task, loss)
            state.save()
    return None if over or state.reached else stopped


def _end(state: RunState, settings: LoopSettings, stopped: int | None, progress: Progress) -> Outcome:
    """Draws the plots, and runs the test if the run has ended and was not stopped by a signal."""
    task = state.task
    if state.saved_at is None:  # stopped before the first iteration
        state.save()
    seconds = state.seconds()
    progress.close()
    _plot(state.run, settings, progress)
    if stopped is None:
        code = EXIT_OK
        message = task.summary(state.reached, state.iteration, seconds, state.evaluation) + _test(state, seconds)
        if state.reached_before:
            message += "; the run had ended before, and nothing was trained: another goal needs a new run"
    else:
        code = 128 + stopped
        message = f"stopped by {signal.Signals(stopped).name} after iteration {state.iteration}, saved"
        message = f"{message}; continue with --resume {state.run.path}"
    return Outcome(code, stopped is None and state.reached, state.iteration, seconds, state.evaluation, message)


@contextmanager
def _evaluating(task: Task, averaged: bool = True) -> Iterator[None]:
    """Eval mode, without gradients; with the averages of the parameters if the task has them."""
    task.model.eval()
    average = task.average.in_model() if averaged and task.average is not None else nullcontext()
    try:
        with torch.no_grad(), average:
            yield
    finally:
        task.model.train()


def _evaluate(state: RunState, scheduled: bool) -> dict[str, float]:
    """Evaluates, steps the plateau schedule, keeps the best parameters, and returns the numbers for the record. Their
    names begin with HELD_OUT."""
    task = state.task

    with _evaluating(task):
        evaluation = _numbers(task.evaluate(state.iteration))
        score = float(task.score(evaluation))
        state.keep_best(score)
    state.evaluation, state.evaluated = evaluation, state.iteration
    if scheduled and task.plateau is not None:
        task.plateau.step(score)
    state.reached = bool(task.goal_reached(evaluation))
    return {f"{HELD_OUT}{name}": value for name, value in evaluation.items()}


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers of NumPy and of tensors as those of Python, which checkpoints and JSON can hold."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def _test(state: RunState, seconds: float) -> str:
    """Tests with the best parameters and writes result.json. Returns a summary of the test."""
    task = state.task
    last, best = copy.deepcopy(task.model.state_dict()), state.best_model()
    if best is not None:
        task.model.load_state_dict(best)
    try:
        with _evaluating(task, averaged=best is None):  # best.pt has averages
            test = _numbers(task.test())
    finally:
        task.model.load_state_dict(last)
    result = {
        "task": task.name,
        "reached": state.reached,
        "iteration": state.iteration,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "last": state.evaluation,
        "best": state.best,
        "tested": state.iteration if best is None or state.best is None else state.best["iteration"],
        "test": test,
    }
    write_atomically(state.run.result, json.dumps(plain(result), indent=2, allow_nan=False).encode() + b"\n")
    if not test:
        return ""
    # An accuracy is shown in percent, as in evaluations.
    numbers = [f"{name} {100 * x:.2f} %" if name == "accuracy" else f"{name} {x:.4g}" for name, x in test.items()]
    return f"; on the test data with the parameters of iteration {result['tested']}: {', '.join(numbers)}"


def _check_parameters(task: Task, loss: float) -> None:
    """Raises Divergence if a parameter is not finite; no checkpoint is written then."""
    if not torch.stack([torch.isfinite(p).all() for p in task.model.parameters()]).all():
        raise Divergence(f"a parameter is no longer finite (loss {loss:.4g})")


def _plot(run: RunFolder, settings: LoopSettings, progress: Progress) -> None:
    """Draws the plots. An error here is reported as a warning and never ends the run."""
    if not settings.plots:
        return
    try:
        draw_run(load_run(run.path), run.path)
    except Exception as error:  # of matplotlib, of a full disk
        progress.line(f"warning: plots not drawn: {type(error).__name__}: {' '.join(str(error).split())}")
