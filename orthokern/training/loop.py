"""The training loop that every task shares, in one process or several."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from orthokern.commandline import EXIT_BAD_INPUT
from orthokern.diagnostics.drawing import draw_run
from orthokern.diagnostics.runs import load_run
from orthokern.errors import OutOfRange
from orthokern.training import distributed
from orthokern.training.checkpoint import write_atomically
from orthokern.training.iteration import LoopSettings, diagnosis, step
from orthokern.training.metrics import HELD_OUT, plain
from orthokern.training.profiling import Profiler
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.signals import StopRequest
from orthokern.training.state import RunState
from orthokern.training.task import Task

__all__ = ["EXIT_DIVERGED", "EXIT_OK", "LoopSettings", "Outcome", "train"]

EXIT_OK, EXIT_DIVERGED = 0, 3


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        exit_code: 0 goal reached or all iterations done, 2 the last checkpoint could not be written, 3 diverged, 129,
            130 or 143 interrupted.
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


def train(
    task: Task,
    run: RunFolder,
    settings: LoopSettings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    started: float | None = None,
    announce: Callable[[], None] | None = None,
) -> Outcome:
    """Trains until the goal is reached, all iterations are done, the time limit is reached, the loss is not finite, or
    SIGINT, SIGTERM or SIGHUP arrives.

    Files in the run folder: metrics.jsonl gets a record per iteration; checkpoint.pt is written every
    `settings.checkpoint_every` iterations and at the end, best.pt with the first one after a new best evaluation, and
    plots at the end. A full disk causes warnings: the old checkpoint is kept, records are buffered in memory, and
    training continues. If the last checkpoint cannot be written either, the exit code is not 0.

    With several processes, joined by `distributed.processes`, all ranks call this function with the same arguments.
    `run` is the folder on rank 0; only rank 0 writes and evaluates.

    Args:
        task: the task. Its model and optimizer are modified.
        run: the run folder.
        settings: length of the run and intervals of checkpoints and records.
        resume: continue from the checkpoint in the folder. All later iterations are bitwise equal to those of an
            uninterrupted run (on the same machine, with the same versions and number of threads), and so is
            metrics.jsonl except for its timing fields.
        progress: display of the progress; by default on standard output.
        started: value of `time.perf_counter()` at the start of the wall time; by default now.
        announce: called on rank 0 after the first iteration, if there is one, so that no error for bad input or missing
            memory can follow.

    Returns:
        The result; the caller prints its message.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged, or of another run; or the parameters of the ranks
            differ.
        EndedElsewhere: rank 0 raised one of these errors.

    Example: `tests/toy_task.py` is trained by its command line; see `orthokern.training.Task`.
    """
    shard = distributed.current_shard()
    progress = progress or Progress(settings.iterations, shown=shard.first)
    state = RunState(task, run, progress, started if started is not None else time.perf_counter(), shard)
    with StopRequest() as stop:
        if resume:
            state.restore()
        distributed.on_first(lambda: _open_files(state, resume))
        profiler = Profiler(settings.profile if shard.first else None, task.device, progress.line, run.profile)
        try:
            task.module = distributed.wrap(task.model)
            return _iterate(state, settings, stop, profiler, announce if shard.first else None)
        except OutOfRange as error:
            return _diverged(state, settings, {}, str(error).partition("; accepted")[0])
        finally:
            task.module = task.model
            progress.close()
            if run.log is not None:
                run.log.close()


def _open_files(state: RunState, resume: bool) -> None:
    """Prepares metrics.jsonl, and writes the settings of a resumed run to config.json."""
    assert state.run.log is not None
    state.run.log.start(state.iteration)
    if resume:
        try:
            state.run.write_config()
        except OSError as error:
            state.progress.line(f"warning: config.json not written: {error.strerror or error}")


def _iterate(
    state: RunState,
    settings: LoopSettings,
    stop: StopRequest,
    profiler: Profiler,
    announce: Callable[[], None] | None,
) -> Outcome:
    task, progress = state.task, state.progress
    several = state.shard.world > 1
    first = state.iteration
    smoothed_ms = None
    task.model.train()
    stopped = None if several else stop.signal  # with several processes, only after all have received the signal
    over = _is_over_at_once(state, settings)
    while not over and not state.reached and stopped is None:
        begun = time.perf_counter()
        state.iteration += 1
        profiler.begin(state.iteration)
        diagnose = settings.diagnose_every > 0 and (state.iteration - 1) % settings.diagnose_every == 0
        result = step(task, settings, diagnose, stop, profiler)
        if announce is not None:
            announce()
            announce = None
        record: dict[str, Any] = {"iteration": state.iteration}
        if task.iterations_per_epoch is not None:
            record["epoch"] = round(state.iteration / task.iterations_per_epoch, 4)
        record |= result.metrics
        if not result.finite:
            state.record({**record, "seconds": state.seconds()})
            return _diverged(state, settings, result.metrics)
        if task.average is not None:
            task.average.update()
        if diagnose:
            with profiler.stage("diagnose"):
                record |= diagnosis(task, state.shard, result.profiles)
        requested = task.wants_evaluation(state.iteration, result.metrics)
        over = state.is_over(settings)
        if requested or over:
            with profiler.stage("evaluate"):
                record |= _evaluate(state, requested)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        # The first iteration of a process is a warm-up. The time shown is a running mean over about ten iterations.
        if smoothed_ms is None or state.iteration - first <= 2:
            smoothed_ms = milliseconds
        smoothed_ms += 0.1 * (milliseconds - smoothed_ms)
        time_steps = task.time_steps * settings.accumulate
        record["seconds"] = state.seconds()
        record["ms_per_iteration"] = milliseconds
        record["us_per_step"] = 1e3 * milliseconds / time_steps
        with profiler.stage("record and checkpoint"):
            state.record(record)
            epoch = f"epoch {record['epoch']:.2f}, " if "epoch" in record else ""
            times = f"{smoothed_ms:.0f} ms per iteration, {1e3 * smoothed_ms / time_steps:.1f} µs per time step"
            text = f"{epoch}{task.progress_text(result.metrics)}, {times}"
            progress.update(state.iteration, text, force=over or state.reached)
            if state.iteration % settings.checkpoint_every == 0 and not state.reached:
                if not _parameters_are_finite(task):
                    return _diverged(state, settings, result.metrics)
                _save_or_warn(state)
        profiler.end()
        stopped = result.stop if several else stop.signal
    if announce is not None:
        announce()
    profiler.close()
    return _end(state, settings, first, None if over or state.reached else stopped)


def _end(state: RunState, settings: LoopSettings, first: int, stopped: int | None) -> Outcome:
    """Saves, draws the plots, and tests if the run has ended and was not stopped by a signal."""
    task = state.task
    if not _parameters_are_finite(task):
        return _diverged(state, settings, {"loss": math.nan})
    failure = state.save() if state.iteration > first or state.saved_at is None else None
    seconds = state.seconds()
    state.progress.close()
    _plot(state, settings)
    not_saved = f"NOT saved ({failure}; {state.last_good()})"
    if stopped is None:
        code = EXIT_OK if failure is None else EXIT_BAD_INPUT
        message = task.summary(state.reached, state.iteration, seconds, state.evaluation) + _finish(state, seconds)
        message = message if failure is None else f"{message}; {not_saved}"
    else:
        code = 128 + stopped
        saved = "saved" if failure is None else not_saved
        message = f"stopped by {signal.Signals(stopped).name} after iteration {state.iteration}, {saved}"
        message = f"{message}; continue with --resume {state.run.path}"
    return Outcome(code, stopped is None and state.reached, state.iteration, seconds, state.evaluation, message)


def _save_or_warn(state: RunState) -> None:
    failure = state.save()
    if failure is not None:
        text = f"warning: checkpoint at iteration {state.iteration} not written: {failure}; {state.last_good()}"
        state.progress.line(f"{text}; training continues")


def _is_over_at_once(state: RunState, settings: LoopSettings) -> bool:
    """Whether a run ends before its first iteration. A resumed run may end earlier than planned before, at an iteration
    that was not evaluated: it is evaluated now."""
    over = state.is_over(settings)
    if over and not state.reached and 0 < state.iteration != state.evaluated_at:
        _evaluate(state, False)
        _save_or_warn(state)
    return over


def _averaged(task: Task) -> AbstractContextManager[None]:
    return nullcontext() if task.average is None else task.average.in_model()


@contextmanager
def _evaluating(task: Task) -> Iterator[None]:
    """Eval mode, without gradients and without the DDP wrapper, whose forward would wait for the other ranks."""
    module, task.module = task.module, task.model
    task.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        task.model.train()
        task.module = module


def _evaluate(state: RunState, requested: bool) -> dict[str, float]:
    """Evaluates, steps the plateau schedule, updates best.pt, and returns the numbers for the record. Their names begin
    with HELD_OUT."""
    task = state.task

    def evaluate() -> dict[str, float]:
        with _evaluating(task):
            return task.evaluate(state.iteration)

    with _averaged(task):
        evaluation = distributed.on_first(evaluate)
        state.evaluation, state.evaluated_at = evaluation, state.iteration
        score = task.score(evaluation)
        if math.isfinite(score) and (state.best is None or score > state.best["score"]):
            state.best = {"score": score, "iteration": state.iteration}
            state.keep_best()
    if requested and task.plateau is not None:
        task.plateau.step(score)
    state.reached = task.goal_reached(evaluation)
    return {f"{HELD_OUT}{name}": value for name, value in evaluation.items()}


def _finish(state: RunState, seconds: float) -> str:
    """Tests with the best parameters and writes result.json, on rank 0. Returns a summary of the test."""
    task = state.task

    def finish() -> str:
        last = copy.deepcopy(task.model.state_dict())
        tested, averaged = state.iteration, _averaged(task)
        best = state.read_best()
        if best is not None:
            parameters, tested = best
            task.model.load_state_dict(parameters)
            averaged = nullcontext()  # best.pt has averages already
        try:
            with averaged, _evaluating(task):
                test = task.test()
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
            "tested": tested,
            "test": test,
        }
        try:
            write_atomically(state.run.result, json.dumps(plain(result), indent=2, allow_nan=False).encode() + b"\n")
        except OSError as error:
            state.progress.line(f"warning: {state.run.result} not written: {error.strerror or error}")
        if not test:
            return ""
        # An accuracy is shown in percent, as in evaluations.
        numbers = [f"{name} {100 * x:.2f} %" if name == "accuracy" else f"{name} {x:.4g}" for name, x in test.items()]
        return f"; on the test data with the parameters of iteration {tested}: {', '.join(numbers)}"

    return distributed.on_first(finish)


def _parameters_are_finite(task: Task) -> bool:
    """Whether all parameters are finite. Otherwise no checkpoint is written."""
    return bool(torch.stack([torch.isfinite(p).all() for p in task.model.parameters()]).all())


def _diverged(state: RunState, settings: LoopSettings, metrics: dict[str, float], what: str | None = None) -> Outcome:
    """The result of a divergence: `what`, or the cause according to the numbers of the iteration."""
    if what is None and not math.isfinite(metrics["loss"]):
        what = f"the loss is {metrics['loss']}"
    elif what is None and not math.isfinite(metrics.get("grad_norm", 0.0)):
        what = f"the gradient's norm is {metrics['grad_norm']} (loss {metrics['loss']:.4g})"
    elif what is None:
        what = f"a parameter is no longer finite (loss {metrics['loss']:.4g})"
    seconds = state.seconds()
    state.progress.close()
    if state.shard.first:
        with suppress(OSError):  # a full disk
            state.write_best()
    _plot(state, settings)
    message = f"diverged: {what} at iteration {state.iteration}; {state.last_good()}"
    message = f"{message}; lower the learning rates or clip the gradients"
    return Outcome(EXIT_DIVERGED, False, state.iteration, seconds, state.evaluation, message)


def _plot(state: RunState, settings: LoopSettings) -> None:
    """Draws the plots. An error here is reported as a warning and never ends the run."""
    if not settings.plots or not state.shard.first:
        return
    try:
        draw_run(load_run(state.run.path), state.run.path)
    except Exception as error:  # of matplotlib, of a full disk
        reason = " ".join(str(error).split())
        state.progress.line(f"warning: plots not drawn: {type(error).__name__}: {reason}")
