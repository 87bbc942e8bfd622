"""The training loop that every task shares, in one process or several."""

import copy
import hashlib
import io
import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthokern._state import check_integer, misfit, shown
from orthokern.diagnostics import tap, thin_profile
from orthokern.errors import CheckpointError, InputError, OutOfRange
from orthokern.training import distributed
from orthokern.training.checkpoint import (
    checkpoint_bytes,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    seed_all,
    set_rng_state,
    write_atomically,
)
from orthokern.training.distributed import Shard
from orthokern.training.metrics import HELD_OUT, MetricsLog, plain, read_metrics
from orthokern.training.profiling import WARM_UP, Profiler, table
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.schema import check_model, check_payload, json_value
from orthokern.training.signals import StopRequest
from orthokern.training.task import Task

# Settings that a resumed run may change: none of them changes what an iteration computes. (Another number of threads or
# processes may change rounding, and another number of processes what dropout draws; and a schedule that ends with the
# run, a cosine, goes on along the longer curve.)
FREE_SETTINGS = frozenset(
    {"iterations", "epochs", "data", "checkpoint_every", "threads", "plots", "processes", "process_timeout", "profile"}
)

EXIT_OK, EXIT_DIVERGED = 0, 3


@dataclass(frozen=True)
class LoopSettings:
    """How long and how often.

    Attributes:
        iterations: number of the last iteration (1 is the first).
        checkpoint_every: iterations between checkpoints; one is also written at the end and at an interrupt.
        diagnose_every: iterations between records of the spectrum and of the gradient through time; 0 for never.
        plots: draw the task's plots at the end and at an interrupt.
        accumulate: batches per iteration, whose gradients and numbers are averaged. At least 1.
        last_step_gradient: also record, at diagnosed iterations, the gradient through time of `Task.last_step_loss`.
        profile: number of iterations to time by stage; None for no profile.
    """

    iterations: int
    checkpoint_every: int = 50
    diagnose_every: int = 10
    plots: bool = True
    accumulate: int = 1
    last_step_gradient: bool = False
    profile: int | None = None


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
    """State of one call of `train`, in one process."""

    def __init__(self, task: Task, run: RunFolder, progress: Progress, started: float, shard: Shard) -> None:
        self.task = task
        self.run = run
        self.progress = progress
        self.started = started
        self.shard = shard
        self.log: MetricsLog | None = None  # rank 0's
        self.iteration = 0
        self.saved_at: int | None = None
        self.best: dict[str, Any] | None = None
        self.evaluation: dict[str, float] | None = None
        self.reached = False
        self.moved = False  # whether the optimizer has taken a step in this call
        self.earlier_seconds = 0.0
        self._disk_warned = False
        self._best_bytes: bytes | None = None  # a best.pt that is not on the disk yet

    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def open_log(self, resume: bool) -> None:
        """Opens metrics.jsonl, on rank 0.

        Raises:
            OSError, CheckpointError: as MetricsLog does.
        """

        def open_file() -> None:
            log = MetricsLog(self.run.metrics, keep=self.iteration if resume else None, lock=self.run.lock())
            if log.held_out and self.evaluation is not None and log.held_out != self.evaluation.keys():
                log.close()
                error = misfit("evaluation", self.evaluation, f"the names in metrics.jsonl: {sorted(log.held_out)}")
                raise CheckpointError(f"checkpoint {self.run.checkpoint} does not fit this run: {error}")
            self.log = log

        distributed.on_first(open_file)

    def restore(self) -> None:
        """Continues from the folder's checkpoint, which rank 0 reads for all; without one (killed before the first, see
        `RunFolder.open`) the run begins again at its beginning.

        Raises:
            CheckpointError: see `load_checkpoint`, or the checkpoint is of another task, of other settings or sizes, or
                the best state that it knows of is gone.
        """
        payload = distributed.on_first(self._read)
        if payload is not None:
            distributed.together(lambda: self._take(payload))

    def _read(self) -> dict[str, Any] | None:
        path = self.run.checkpoint
        if not path.exists():
            return None
        payload = load_checkpoint(path, self._size_limit())
        if payload.get("best") is not None:
            if not self.run.best.exists():
                raise CheckpointError(
                    f"no {self.run.best.name} beside checkpoint {path}, which knows of one; "
                    "put it back, or start a new run"
                )
            self.read_best()
        return payload

    def read_best(self) -> tuple[dict[str, Any], int]:
        """The state of the model in best.pt, and its iteration.

        Raises:
            CheckpointError: best.pt is damaged, or not of this model.
        """
        if self._best_bytes is not None:  # a full disk
            found = torch.load(io.BytesIO(self._best_bytes), map_location="cpu", weights_only=True)
        else:
            found = load_checkpoint(self.run.best, self._size_limit())
        try:
            check_model(found.get("model"), self.task)
            return found["model"], check_integer("iteration", found.get("iteration"))
        except InputError as error:
            raise CheckpointError(f"checkpoint {self.run.best} does not fit this run: {error}") from None

    def _size_limit(self) -> int:
        """Bytes that a checkpoint of this run may have: much more than the model and what optimizers keep for it."""
        tensors = [value for value in self.task.model.state_dict().values() if isinstance(value, Tensor)]
        return 2**30 + 16 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _take(self, payload: dict[str, Any]) -> None:
        path = self.run.checkpoint
        fresh = self._payload([rng_state()])
        lacking = fresh.keys() - payload.keys() - {"rng_of_other_ranks"}
        lacking -= {"data"}  # an older version's does as well
        if self.task.plateau is None:  # then too
            lacking -= {"plateau"}
        if lacking:
            raise CheckpointError(f"checkpoint {path} lacks {', '.join(sorted(lacking))}")
        if payload["task"] != self.task.name:
            raise CheckpointError(
                f"checkpoint {path} is of the task {shown(payload['task'])}, not of {self.task.name!r}"
            )
        settings = self.run.config["settings"]
        saved = payload["settings"]
        if not isinstance(saved, dict) or not all(type(key) is str and json_value(saved[key]) for key in saved):
            raise CheckpointError(f"checkpoint {path} does not fit this run: {misfit('settings', saved, 'a dict')}")
        for key, theirs in sorted(saved.items()):  # an older version had fewer: it did as the defaults say
            ours = settings.get(key)
            if key not in FREE_SETTINGS and theirs != ours:
                raise CheckpointError(
                    f"checkpoint {path} was made with {key[:40]}={_told(theirs)}, this run has {key[:40]}={_told(ours)}"
                )
        data = payload.get("data")
        if data is not None and (type(data) is not int or data != self.task.data_digest):
            raise CheckpointError(
                f"checkpoint {path} was trained on other data than {settings.get('data')} holds; give their --data"
            )
        try:
            check_payload(payload, fresh, self.task)
            self.task.model.load_state_dict(payload["model"])
            self.task.optimizer.load_state_dict(payload["optimizer"])
            if self.task.scheduler is not None:
                self.task.scheduler.load_state_dict(payload["scheduler"])
            if self.task.plateau is not None:
                self.task.plateau.load_state_dict(payload["plateau"])
            self.task.load_state_dict(payload["task_state"])
            self.iteration, self.earlier_seconds = int(payload["iteration"]), float(payload["seconds"])
            self._take_rng([payload["rng"], *payload.get("rng_of_other_ranks", [])], self.iteration)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {path} does not fit this run: {reason}") from None
        self.saved_at = self.iteration
        self.best, self.evaluation, self.reached = payload["best"], payload["evaluation"], payload["reached"]

    def _take_rng(self, states: list[dict[str, Any]], iteration: int) -> None:
        if self.shard.rank < len(states):
            set_rng_state(states[self.shard.rank])
        else:  # the run goes on in more processes than before
            seed_all(self.run.config["settings"].get("seed", 0) + self.shard.rank + self.shard.world * iteration)

    def _payload(self, rng: list[dict[str, Any]]) -> dict[str, Any]:
        scheduler, plateau = self.task.scheduler, self.task.plateau
        return {
            "task": self.task.name,
            "settings": self.run.config["settings"],
            "iteration": self.iteration,
            "seconds": self.seconds(),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "plateau": plateau.state_dict() if plateau is not None else None,
            "task_state": self.task.state_dict(),
            "data": self.task.data_digest,
            "rng": rng[0],
            "rng_of_other_ranks": rng[1:],
            "best": self.best,
            "evaluation": self.evaluation,
            "reached": self.reached,
        }

    def payload(self) -> dict[str, Any]:
        """What a checkpoint holds: rank 0's state, and the random states of all. Called by all ranks together.

        Raises:
            CheckpointError: the ranks have drifted apart, so that no state is the run's.
        """
        parts = distributed.gather((rng_state(), self._digest() if self.shard.world > 1 else ""))
        others = [str(rank) for rank, (_, digest) in enumerate(parts) if digest != parts[0][1]]
        if others:
            distributed.together(lambda: self._drifted(others))
        return self._payload([rng for rng, _ in parts])

    def _drifted(self, others: list[str]) -> None:
        raise CheckpointError(
            f"iteration {self.iteration}: the parameters of rank {', '.join(others)} differ from those of rank 0, "
            f"which processors that round differently can cause; {self.last_good()}"
        )

    def _digest(self) -> str:
        """Of the parameters' bits."""
        digest = hashlib.sha256()
        for parameter in self.task.model.parameters():
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def last_good(self) -> str:
        if self.saved_at is None:
            return "no checkpoint was written yet"
        return f"last good checkpoint: iteration {self.saved_at}, {self.run.checkpoint}"

    def save(self) -> str | None:
        """Writes checkpoint.pt, called by all ranks together; returns None, or why it could not."""
        payload = self.payload()
        failure = distributed.on_first(lambda: self._write(payload))
        if failure is None:
            self.saved_at = self.iteration
            self.prepare_for_loss()
        return failure

    def _write(self, payload: dict[str, Any]) -> str | None:
        try:
            if self.log is not None:
                self.log.sync()
            self.write_best()  # so that no checkpoint knows of a best.pt that isn't there
            save_checkpoint(self.run.checkpoint, payload)
        except OSError as error:
            return f"{error.strerror or error}"
        return None

    def prepare_for_loss(self) -> None:
        """What a rank says if another one disappears."""
        distributed.tell_on_loss(f"{self.last_good()}; continue with --resume {self.run.path}")

    def save_best(self) -> None:
        """Writes best.pt, called by all ranks together; on a full disk later."""
        payload = self.payload()
        if not self.shard.first:
            return
        self._best_bytes = checkpoint_bytes(payload)
        try:
            self.write_best()
        except OSError as error:
            self.progress.line(f"warning: {self.run.best} not written: {error.strerror or error}; training goes on")

    def has_best(self) -> bool:
        """Whether the best state is on the disk, or waits for space there."""
        return self._best_bytes is not None or self.run.best.exists()

    def write_best(self) -> None:
        """Writes best.pt, if the last attempt failed or there was none yet."""
        if self._best_bytes is not None:
            write_atomically(self.run.best, self._best_bytes)
            self._best_bytes = None

    def record(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        try:
            self.log.append(record)
            self._disk_warned = False
        except OSError as error:
            if not self._disk_warned:  # once, not at every iteration
                self.progress.line(
                    f"warning: {self.log.path} cannot be written: {error.strerror or error}; "
                    "training goes on, records wait"
                )
            self._disk_warned = True

    def show_profile(self, profiler: Profiler) -> None:
        """Prints the profile and writes profile.json, on rank 0."""
        if not self.shard.first:
            return
        self.progress.line(table(profiler.report()))
        try:
            profiler.write(self.run.profile)
        except OSError as error:
            self.progress.line(f"warning: {self.run.profile} not written: {error.strerror or error}")


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
    """Trains until the goal is reached, all iterations are done, the loss is no number, or SIGINT or SIGTERM comes.

    Files are written to the run's folder: a record per iteration to metrics.jsonl, checkpoint.pt every
    `settings.checkpoint_every` iterations and at the end, best.pt at every evaluation better than all before, the
    task's plots at the end. A full disk costs warnings and no more: the old checkpoint stays whole, records wait in
    memory, training goes on.

    In several processes, joined by `distributed.processes`, all ranks call this with the same arguments; `run` is the
    folder as rank 0 sees it, and only rank 0 writes and evaluates.

    Args:
        task: the experiment. Its model and optimizer are changed.
        run: its folder.
        settings: how long and how often.
        resume: continue from the folder's checkpoint: every later iteration equals, bit for bit, that of a run never
            stopped (on the same machine, versions and number of threads), and so does metrics.jsonl but for its timing
            fields.
        progress: where to show how far it is; by default standard output.
        started: `time.perf_counter()` at which the wall time begins to count; by default now.
        announce: called on rank 0 once nothing can refuse the run any more: its state is restored, its files are open,
            and its first iteration, if it has one, has had the memory that it needs.

    Returns:
        How the run ended; the caller prints the message.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged, or of another run; or the ranks' parameters differ.
            (Without a checkpoint the run begins at its beginning; `RunFolder.open` refuses a folder that lost one.)
        InputError: several processes that are not joined.
        OSError: metrics.jsonl can't be opened.
        EndedElsewhere: another rank raised one of these.
    """
    shard = distributed.joined()
    if progress is None:
        progress = Progress(settings.iterations) if shard.first else distributed.Silent(settings.iterations)
    state = _Run(task, run, progress, started if started is not None else time.perf_counter(), shard)
    if resume:
        state.restore()
    state.prepare_for_loss()
    state.open_log(resume)
    profiler = Profiler(settings.profile if shard.first else None, task.device)
    try:
        task.module = distributed.wrap(task.model)
        with StopRequest() as stop:
            return _train(state, settings, stop, profiler, announce if shard.first else None)
    except OutOfRange as error:
        if not state.moved:  # it was so before any step: the checkpoint's fault
            raise
        return _diverged(state, settings, {}, str(error).partition("; accepted")[0])
    finally:
        task.module = task.model
        progress.close()
        if state.log is not None:
            state.log.close()


def _train(
    state: _Run, settings: LoopSettings, stop: StopRequest, profiler: Profiler, announce: Callable[[], None] | None
) -> Outcome:
    task, progress = state.task, state.progress
    several = state.shard.world > 1
    first = state.iteration
    shown_ms = None
    task.model.train()
    stopped = None if several else stop.signal  # several processes heed a signal after all have heard of it
    while state.iteration < settings.iterations and not state.reached and stopped is None:
        begun = time.perf_counter()
        state.iteration += 1
        profiler.begin(state.iteration)
        diagnose = settings.diagnose_every > 0 and (state.iteration - 1) % settings.diagnose_every == 0
        step = _step(task, settings, diagnose, stop, profiler, check=several and state.iteration == first + 1)
        if announce is not None:
            announce()
            announce = None
        metrics = step.metrics
        state.moved |= step.taken
        record: dict[str, Any] = {"iteration": state.iteration}
        if task.iterations_per_epoch is not None:
            record["epoch"] = round(state.iteration / task.iterations_per_epoch, 4)
        record |= metrics
        if not step.taken:
            state.record({**record, "seconds": state.seconds()})
            return _diverged(state, settings, metrics)
        if diagnose:
            with profiler.stage("diagnose"):
                record |= _diagnosis(state, step.profiles)
        wanted = task.wants_evaluation(state.iteration, metrics)
        if wanted or state.iteration == settings.iterations:
            with profiler.stage("evaluate"):
                record |= _evaluate(state, wanted)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        time_steps = task.time_steps * settings.accumulate
        record["seconds"] = state.seconds()
        record["ms_per_iteration"] = milliseconds
        record["us_per_step"] = 1e3 * milliseconds / time_steps
        # The first iteration of a process warms up; the shown time is a running mean that forgets in about ten
        # iterations.
        shown_ms = (
            milliseconds if shown_ms is None or state.iteration - first <= 2 else 0.9 * shown_ms + 0.1 * milliseconds
        )
        with profiler.stage("record and checkpoint"):
            state.record(record)
            epoch = f"epoch {record['epoch']:.2f}, " if "epoch" in record else ""
            progress.update(
                state.iteration,
                f"{epoch}{task.progress_text(metrics)}, {shown_ms:.0f} ms per iteration, "
                f"{1e3 * shown_ms / time_steps:.1f} µs per time step",
                force=state.iteration == settings.iterations or state.reached,
            )
            if state.iteration % settings.checkpoint_every == 0 and not state.reached:
                if not _parameters_are_finite(task):
                    return _diverged(state, settings, metrics)
                failure = state.save()
                if failure is not None:
                    progress.line(
                        f"warning: checkpoint at iteration {state.iteration} not written: {failure}; "
                        f"{state.last_good()}; training goes on"
                    )
        if profiler.end():
            state.show_profile(profiler)
        stopped = step.stop if several else stop.signal

    if announce is not None:
        announce()
    if profiler.close():
        state.show_profile(profiler)
    elif settings.profile is not None and profiler.timed == 0:
        progress.line(f"no profile: training ended within the first {WARM_UP} iterations, which warm up")
    if not _parameters_are_finite(task):
        return _diverged(state, settings, {"loss": math.nan})
    ended = state.reached or state.iteration >= settings.iterations
    failure = state.save() if state.iteration > first or state.saved_at is None else None
    seconds = state.seconds()
    progress.close()
    _plot(state, settings)
    if ended:
        message = task.summary(state.reached, state.iteration, seconds, state.evaluation) + _finish(state, seconds)
        if failure is not None:
            progress.line(f"warning: the final checkpoint could not be written: {failure}; {state.last_good()}")
        return Outcome(EXIT_OK, state.reached, state.iteration, seconds, state.evaluation, message)
    number = signal.SIGTERM if stopped is None else stopped
    saved = "saved" if failure is None else f"NOT saved ({failure}; {state.last_good()})"
    message = (
        f"stopped by {signal.Signals(number).name} after iteration {state.iteration}, {saved}; "
        f"continue with --resume {state.run.path}"
    )
    return Outcome(128 + number, False, state.iteration, seconds, state.evaluation, message)


# ---- one iteration ---------------------------------------------------------------------------------------------------

Profiles = dict[str, Tensor]  # name of the record's field -> norms [T] of one batch


@dataclass(frozen=True)
class _Step:
    """What an iteration computed.

    Attributes:
        metrics: loss, grad_norm and the task's own numbers, averaged over batches and ranks.
        taken: whether loss and gradient were finite, and the optimizer took its step.
        stop: a signal that came on any rank, or None.
        profiles: of each of this rank's batches; empty unless asked for.
    """

    metrics: dict[str, float]
    taken: bool
    stop: int | None
    profiles: list[Profiles]


def _step(
    task: Task, settings: LoopSettings, diagnose: bool, stop: StopRequest, profiler: Profiler, *, check: bool
) -> _Step:
    """Gradients of all batches, then one optimizer step, left out if loss or gradient is not finite."""
    task.optimizer.zero_grad(set_to_none=True)
    names: list[str] = []
    rows: list[Tensor] = []  # of each batch, the loss and the task's numbers
    profiles: list[Profiles] = []
    for index in range(settings.accumulate):
        last = index + 1 == settings.accumulate
        with profiler.stage("data"):
            batch = task.next_batch()
        with nullcontext() if last else distributed.keep_own_gradients(task.module):
            with tap(sparse=True) if diagnose else nullcontext() as taken:
                with profiler.stage("forward"):
                    loss, extra = task.loss(batch)
                with profiler.stage("backward"):
                    (loss if settings.accumulate == 1 else loss / settings.accumulate).backward()
        names = list(extra)
        rows.append(torch.stack([number.double() for number in (loss.detach(), *extra.values())]))
        if taken is not None:
            with profiler.stage("diagnose"):
                profiles.append(_profiles(task, taken, batch, settings))
    if check:
        distributed.check_averaged(task.module, task.name)
    with profiler.stage("clip and step"):
        gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).float() for g in gradients]))
        # One transfer for all numbers: on a GPU each .item() would be a wait of its own.
        local = torch.cat([norm.double()[None], torch.stack(rows).mean(0)]).tolist()
        values, came = distributed.agree(local, stop.signal)
        numbers = dict(zip(["grad_norm", "loss", *names], values, strict=True))
        metrics = {"loss": numbers["loss"], **numbers}
        finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        if finite:
            task.clip_gradients()
            task.optimizer.step()
            if task.scheduler is not None:
                task.scheduler.step()
    return _Step(metrics, finite, came, profiles)


def _profiles(task: Task, taken: tap, batch: Any, settings: LoopSettings) -> Profiles:
    """The last layer's norms through time, of one batch."""
    profiles = {}
    if taken.grad_norms:
        # Of the batch's own loss, not of its part in the mean.
        profiles["grad_norm_through_time"] = taken.grad_norms[0] * settings.accumulate
    if taken.state_norms:
        profiles["state_norm_through_time"] = taken.state_norms[-1]
    if settings.last_step_gradient:
        last = _last_step_gradient(task, batch)
        if last is not None:
            profiles["last_grad_norm_through_time"] = last
    return profiles


def _last_step_gradient(task: Task, batch: Any) -> Tensor | None:
    """‖dL/dh_t‖ [T] for L the loss of the last step alone. Leaves parameters' gradients, buffers and random states as
    they were, and other ranks alone."""
    rng = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in task.model.buffers()]
    module, task.module = task.module, task.model
    try:
        norms = task.last_step_norms(batch)
        if norms is not None:
            return norms
        with tap() as taken:
            loss = task.last_step_loss(batch)
            if loss is None:
                return None
            torch.autograd.grad(loss, [p for p in task.model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        task.module = module
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(rng)
    return taken.grad_norms[0] if taken.grad_norms else None


def _joint_profile(parts: list[Tensor], mean: bool) -> Tensor:
    """Norms [T] over the joint batch from those over its parts; a part that is shorter than the longest counts as zero
    beyond its end. With `mean`, of the gradient of the parts' mean loss."""
    if len(parts) == 1:
        return parts[0]
    squares = torch.zeros(max(len(part) for part in parts), dtype=torch.float64)
    for part in parts:
        squares[: len(part)] += part.double().cpu().square()
    return squares.sqrt() / (len(parts) if mean else 1)


def _diagnosis(state: _Run, profiles: list[Profiles]) -> dict[str, Any]:
    """The record of a diagnosed iteration: the task's numbers, and the norms through time over the joint batch."""
    if state.shard.world > 1:
        mine = [{name: norms.cpu() for name, norms in part.items()} for part in profiles]
        profiles = [part for parts in distributed.gather(mine) for part in parts]
    if not state.shard.first:
        return {}
    record = dict(state.task.diagnose())
    for name in profiles[0]:
        parts = [part[name] for part in profiles if name in part]
        record[name] = thin_profile(_joint_profile(parts, mean=name != "state_norm_through_time"))
    return record


def _evaluate(state: _Run, wanted: bool) -> dict[str, float]:
    """Evaluates, lets the rates fall if they are to, keeps best.pt, and returns the numbers for the record, their names
    beginning with HELD_OUT.

    Args:
        state: of the run.
        wanted: whether the task asked for it, and not only the run's end, which a longer run doesn't have here.
    """
    task = state.task

    def evaluate() -> dict[str, float]:
        module, task.module = task.module, task.model  # a wrapper's forward would wait for the other ranks
        task.model.eval()
        try:
            with torch.no_grad():
                return task.evaluate(state.iteration)
        finally:
            task.model.train()
            task.module = module

    evaluation = distributed.on_first(evaluate)
    state.evaluation = evaluation
    score = task.score(evaluation)
    if wanted and task.plateau is not None:
        task.plateau.step(score)
    state.reached = task.goal_reached(evaluation)
    if math.isfinite(score) and (state.best is None or score > state.best["score"]):
        state.best = {"score": score, "iteration": state.iteration}
        state.save_best()
    return {f"{HELD_OUT}{name}": value for name, value in evaluation.items()}


def _finish(state: _Run, seconds: float) -> str:
    """Tests with the best parameters and writes result.json, on rank 0; returns what to say of the test."""
    task = state.task

    def finish() -> str:
        last = copy.deepcopy(task.model.state_dict())
        tested = state.iteration
        if state.best is not None and state.has_best():
            parameters, tested = state.read_best()
            task.model.load_state_dict(parameters)
        task.model.eval()
        module, task.module = task.module, task.model
        try:
            with torch.no_grad():
                test = task.test()
        finally:
            task.model.load_state_dict(last)
            task.model.train()
            task.module = module
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
        # A share in per cent, as evaluations tell it.
        each = [f"{name} {100 * x:.2f} %" if name == "accuracy" else f"{name} {x:.4g}" for name, x in test.items()]
        told = ", ".join(each)
        return f"; on the test data with the parameters of iteration {tested}: {told}"

    return distributed.on_first(finish)


def _told(value: Any) -> str:
    """A setting's value, cut to what one line holds."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parameters_are_finite(task: Task) -> bool:
    """So that no checkpoint is written that could only diverge."""
    return bool(torch.stack([torch.isfinite(p).all() for p in task.model.parameters()]).all())


def _diverged(state: _Run, settings: LoopSettings, metrics: dict[str, float], what: str | None = None) -> Outcome:
    """What to tell of a divergence: `what`, or what the numbers of the iteration show."""
    if what is not None:
        pass
    elif not math.isfinite(metrics["loss"]):
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
    if not settings.plots or not state.shard.first:
        return
    try:
        state.task.plot(read_metrics(state.run.metrics), state.run.path)
    except ImportError as error:
        state.progress.line(f"plots skipped: {error}")
    except OSError as error:
        state.progress.line(f"warning: plots not written: {error.strerror or error}")
    except Exception as error:
        reason = " ".join(str(error).split())
        state.progress.line(f"warning: plots not drawn: {type(error).__name__}: {reason}")
