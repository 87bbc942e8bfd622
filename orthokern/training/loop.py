"""The training loop that every task shares."""

import math
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthokern.diagnostics import tap, thin_profile
from orthokern.errors import CheckpointError
from orthokern.training.checkpoint import (
    checkpoint_bytes,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
    write_atomically,
)
from orthokern.training.metrics import MetricsLog, read_metrics
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.signals import StopRequest
from orthokern.training.task import Task

# Settings that a resumed run may change: none of them changes what an iteration computes. (Another number of threads
# may change rounding.)
FREE_SETTINGS = frozenset({"iterations", "checkpoint_every", "threads", "plots"})

EXIT_OK, EXIT_DIVERGED = 0, 3


@dataclass(frozen=True)
class LoopSettings:
    """How long and how often.

    Attributes:
        iterations: number of the last iteration (1 is the first).
        checkpoint_every: iterations between checkpoints; one is also written at the end and at an interrupt.
        diagnose_every: iterations between records of the spectrum and of the gradient through time; 0 for never.
        plots: draw the task's plots at the end and at an interrupt.
    """

    iterations: int
    checkpoint_every: int = 50
    diagnose_every: int = 10
    plots: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: 0 goal reached or all iterations done, 3 diverged, 130 or 143 interrupted.
        reached: whether the goal was reached.
        iteration: number of iterations done, over all resumed parts.
        seconds: wall time, over all resumed parts.
        evaluation: the last evaluation, or None.
        message: one line that says all this.
    """

    exit_code: int
    reached: bool
    iteration: int
    seconds: float
    evaluation: dict[str, float] | None
    message: str


class _Run:
    """State of one call of `train`."""

    def __init__(self, task: Task, run: RunFolder, progress: Progress, started: float) -> None:
        self.task = task
        self.run = run
        self.progress = progress
        self.started = started
        self.iteration = 0
        self.saved_at: int | None = None
        self.best: dict[str, Any] | None = None
        self.evaluation: dict[str, float] | None = None
        self.reached = False
        self.earlier_seconds = 0.0
        self._disk_warned = False
        self._best_bytes: bytes | None = None  # a best.pt that is not on the disk yet

    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def restore(self) -> None:
        """Continues from the folder's checkpoint; without one (killed before the first) the run begins again at its
        beginning.

        Raises:
            CheckpointError: see `load_checkpoint`, or the checkpoint is of another task, of other settings or sizes.
        """
        path = self.run.checkpoint
        if not path.exists():
            return
        payload = load_checkpoint(path)
        lacking = self.payload().keys() - payload.keys()
        if lacking:
            raise CheckpointError(f"checkpoint {path} lacks {', '.join(sorted(lacking))}")
        if payload["task"] != self.task.name:
            raise CheckpointError(f"checkpoint {path} is of the task {payload['task']!r}, not of {self.task.name!r}")
        settings = self.run.config["settings"]
        for key in sorted(settings.keys() | payload["settings"].keys()):
            theirs, ours = payload["settings"].get(key), settings.get(key)
            if key not in FREE_SETTINGS and theirs != ours:
                raise CheckpointError(f"checkpoint {path} was made with {key}={theirs}, this run has {key}={ours}")
        try:
            self.task.model.load_state_dict(payload["model"])
            self.task.optimizer.load_state_dict(payload["optimizer"])
            if self.task.scheduler is not None:
                self.task.scheduler.load_state_dict(payload["scheduler"])
            self.task.load_state_dict(payload["task_state"])
            set_rng_state(payload["rng"])
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {path} does not fit this run: {reason}") from None
        self.iteration = self.saved_at = payload["iteration"]
        self.best, self.evaluation, self.reached = payload["best"], payload["evaluation"], payload["reached"]
        self.earlier_seconds = payload["seconds"]

    def payload(self) -> dict[str, Any]:
        scheduler = self.task.scheduler
        return {
            "task": self.task.name,
            "settings": self.run.config["settings"],
            "iteration": self.iteration,
            "seconds": self.seconds(),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "task_state": self.task.state_dict(),
            "rng": rng_state(),
            "best": self.best,
            "evaluation": self.evaluation,
            "reached": self.reached,
        }

    def last_good(self) -> str:
        if self.saved_at is None:
            return "no checkpoint was written yet"
        return f"last good checkpoint: iteration {self.saved_at}, {self.run.checkpoint}"

    def save(self, log: MetricsLog) -> str | None:
        """Writes checkpoint.pt; returns None, or why it could not."""
        try:
            log.sync()
            self.write_best()  # so that no checkpoint knows of a best.pt that isn't there
            save_checkpoint(self.run.checkpoint, self.payload())
        except OSError as error:
            return f"{error.strerror or error}"
        self.saved_at = self.iteration
        return None

    def save_best(self) -> None:
        self._best_bytes = checkpoint_bytes(self.payload())
        try:
            self.write_best()
        except OSError as error:
            self.progress.line(f"warning: {self.run.best} not written: {error.strerror or error}; training goes on")

    def write_best(self) -> None:
        """Writes best.pt, if the last attempt failed or there was none yet."""
        if self._best_bytes is not None:
            write_atomically(self.run.best, self._best_bytes)
            self._best_bytes = None

    def record(self, log: MetricsLog, record: dict[str, Any]) -> None:
        try:
            log.append(record)
            self._disk_warned = False
        except OSError as error:
            if not self._disk_warned:  # once, not at every iteration
                self.progress.line(
                    f"warning: {log.path} cannot be written: {error.strerror or error}; training goes on, records wait"
                )
            self._disk_warned = True


def train(
    task: Task,
    run: RunFolder,
    settings: LoopSettings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    started: float | None = None,
) -> Outcome:
    """Trains until the goal is reached, all iterations are done, the loss is no number, or SIGINT or SIGTERM comes.

    Files are written to the run's folder: a record per iteration to metrics.jsonl, checkpoint.pt every
    `settings.checkpoint_every` iterations and at the end, best.pt at every evaluation better than all before, the
    task's plots at the end. A full disk costs warnings and no more: the old checkpoint stays whole, records wait in
    memory, training goes on.

    Args:
        task: the experiment. Its model and optimizer are changed.
        run: its folder.
        settings: how long and how often.
        resume: continue from the folder's checkpoint: every later iteration equals, bit for bit, that of a run never
            stopped (on the same machine, versions and number of threads), and so does metrics.jsonl but for its timing
            fields.
        progress: where to show how far it is; by default standard output.
        started: `time.perf_counter()` at which the wall time begins to count; by default now.

    Returns:
        How the run ended; the caller prints the message.

    Raises:
        CheckpointError: the checkpoint to resume from is missing, damaged, or of another run.
        OSError: metrics.jsonl can't be opened.
    """
    progress = progress if progress is not None else Progress(settings.iterations)
    state = _Run(task, run, progress, started if started is not None else time.perf_counter())
    if resume:
        state.restore()
    log = MetricsLog(run.metrics, keep=state.iteration if resume else None)
    try:
        with StopRequest() as stop:
            return _train(state, settings, log, stop)
    finally:
        progress.close()
        log.close()


def _train(state: _Run, settings: LoopSettings, log: MetricsLog, stop: StopRequest) -> Outcome:
    task, progress = state.task, state.progress
    first = state.iteration
    shown_ms = None
    task.model.train()
    while state.iteration < settings.iterations and not state.reached and stop.signal is None:
        begun = time.perf_counter()
        state.iteration += 1
        diagnose = settings.diagnose_every > 0 and (state.iteration - 1) % settings.diagnose_every == 0
        metrics, profile = _step(task, diagnose)
        record: dict[str, Any] = {"iteration": state.iteration, **metrics}
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            state.record(log, {**record, "seconds": state.seconds()})
            return _diverged(state, settings, log, metrics)
        if diagnose:
            record |= task.diagnose()
            if profile is not None:
                record["grad_norm_through_time"] = profile
        if task.wants_evaluation(state.iteration, metrics) or state.iteration == settings.iterations:
            record |= _evaluate(state)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        record["seconds"] = state.seconds()
        record["ms_per_iteration"] = milliseconds
        record["us_per_step"] = 1e3 * milliseconds / task.time_steps
        state.record(log, record)
        # The first iteration of a process warms up; the shown time is a running mean that forgets in about ten
        # iterations.
        shown_ms = (
            milliseconds if shown_ms is None or state.iteration - first <= 2 else 0.9 * shown_ms + 0.1 * milliseconds
        )
        progress.update(
            state.iteration,
            f"{task.progress_text(metrics)}, {shown_ms:.0f} ms per iteration, "
            f"{1e3 * shown_ms / task.time_steps:.1f} µs per time step",
            force=state.iteration == settings.iterations or state.reached,
        )
        if state.iteration % settings.checkpoint_every == 0 and not state.reached:
            if not _parameters_are_finite(task):
                return _diverged(state, settings, log, metrics)
            failure = state.save(log)
            if failure is not None:
                progress.line(
                    f"warning: checkpoint at iteration {state.iteration} not written: {failure}; "
                    f"{state.last_good()}; training goes on"
                )

    if not _parameters_are_finite(task):
        return _diverged(state, settings, log, {"loss": math.nan})
    ended = state.reached or state.iteration >= settings.iterations
    failure = state.save(log) if state.iteration > first or state.saved_at is None else None
    seconds = state.seconds()
    progress.close()
    _plot(state, settings)
    if ended:
        message = task.summary(state.reached, state.iteration, seconds, state.evaluation)
        if failure is not None:
            progress.line(f"warning: the final checkpoint could not be written: {failure}; {state.last_good()}")
        return Outcome(EXIT_OK, state.reached, state.iteration, seconds, state.evaluation, message)
    name = signal.Signals(stop.signal).name if stop.signal is not None else "a signal"
    saved = "saved" if failure is None else f"NOT saved ({failure}; {state.last_good()})"
    message = f"stopped by {name} after iteration {state.iteration}, {saved}; continue with --resume {state.run.path}"
    return Outcome(stop.exit_code, False, state.iteration, seconds, state.evaluation, message)


def _step(task: Task, diagnose: bool) -> tuple[dict[str, float], list[float] | None]:
    """One optimizer step, left out if loss or gradient is not finite. Returns its numbers and, if asked, ‖dL/dh_t‖ at a
    few t."""
    task.optimizer.zero_grad(set_to_none=True)
    loss, extra = task.loss(task.next_batch())
    profile = None
    if diagnose:
        with tap() as taken:
            loss.backward()
        if taken.grad_norms:
            profile = thin_profile(taken.grad_norms[0])
    else:
        loss.backward()
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).float() for g in gradients]))
    # One transfer for all numbers: on a GPU each .item() would be a wait of its own.
    numbers: list[Tensor] = [loss.detach(), norm, *extra.values()]
    values = torch.stack([number.double() for number in numbers]).tolist()
    metrics = dict(zip(["loss", "grad_norm", *extra], values, strict=True))
    if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
        task.clip_gradients()
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()
    return metrics, profile


def _evaluate(state: _Run) -> dict[str, float]:
    """Evaluates, keeps best.pt, and returns the numbers for the record, their names beginning with "held_out_"."""
    task = state.task
    task.model.eval()
    try:
        with torch.no_grad():
            evaluation = task.evaluate(state.iteration)
    finally:
        task.model.train()
    state.evaluation = evaluation
    state.reached = task.goal_reached(evaluation)
    score = task.score(evaluation)
    if math.isfinite(score) and (state.best is None or score > state.best["score"]):
        state.best = {"score": score, "iteration": state.iteration}
        state.save_best()
    return {f"held_out_{name}": value for name, value in evaluation.items()}


def _parameters_are_finite(task: Task) -> bool:
    """So that no checkpoint is written that could only diverge."""
    return bool(torch.stack([torch.isfinite(p).all() for p in task.model.parameters()]).all())


def _diverged(state: _Run, settings: LoopSettings, log: MetricsLog, metrics: dict[str, float]) -> Outcome:
    if not math.isfinite(metrics["loss"]):
        what = f"the loss is {metrics['loss']}"
    elif not math.isfinite(metrics.get("grad_norm", 0.0)):
        what = f"the gradient's norm is {metrics['grad_norm']} (loss {metrics['loss']:.4g})"
    else:
        what = f"a parameter is no longer finite (loss {metrics['loss']:.4g})"
    seconds = state.seconds()
    state.progress.close()
    _plot(state, settings)
    advice = "lower the learning rates or clip the gradients"
    message = f"diverged: {what} at iteration {state.iteration}; {state.last_good()}; {advice}"
    return Outcome(EXIT_DIVERGED, False, state.iteration, seconds, state.evaluation, message)


def _plot(state: _Run, settings: LoopSettings) -> None:
    """Plots are a by-product: what goes wrong in them is told, and never costs the run its result."""
    if not settings.plots:
        return
    try:
        state.task.plot(read_metrics(state.run.metrics), state.run.path)
    except ImportError as error:
        state.progress.line(f"plots skipped: {error}")
    except OSError as error:
        state.progress.line(f"warning: plots not written: {error.strerror or error}")
