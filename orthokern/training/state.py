"""The state of a training run: the content of a checkpoint, and how it is written and restored."""

from __future__ import annotations

import hashlib
import io
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from orthokern.errors import CheckpointError
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
from orthokern.training.iteration import LoopSettings
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.task import Task

# Settings that a resumed run may change: none of them changes the computation of an iteration. (Another number of
# threads or processes may change rounding, and another number of processes changes dropout. A schedule that depends on
# the length of the run, a cosine, continues along the longer curve.)
FREE_SETTINGS = frozenset(
    "iterations epochs minutes data checkpoint_every diagnose_every threads plots processes process_timeout"
    " profile".split()
)


class RunState:
    """The state of one call of `train` in one process."""

    def __init__(self, task: Task, run: RunFolder, progress: Progress, started: float, shard: Shard) -> None:
        self.task = task
        self.run = run
        self.progress = progress
        self.started = started
        self.shard = shard
        self.iteration = 0
        self.saved_at: int | None = None
        self.best: dict[str, Any] | None = None
        self.evaluation: dict[str, float] | None = None
        self.evaluated_at: int | None = None  # the iteration of the evaluation
        self.reached = False
        self.earlier_seconds = 0.0
        self._disk_is_full = False
        self._best_bytes: bytes | None = None  # a best.pt that is not written yet

    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def is_over(self, settings: LoopSettings) -> bool:
        """Whether the run has done all iterations, or has reached its time limit with at least one."""
        limit = math.inf if settings.minutes is None else 60.0 * settings.minutes
        return self.iteration >= settings.iterations or (self.iteration > 0 and self.seconds() >= limit)

    # ---- restoring

    def restore(self) -> None:
        """Continues from the checkpoint in the folder, which rank 0 reads for all ranks. Without a checkpoint (the run
        was killed before the first one, see `RunFolder.open`), the run starts from the beginning."""
        payload = distributed.on_first(self._read)
        if payload is not None:
            distributed.on_all(lambda: self._load(payload))

    def _read(self) -> dict[str, Any] | None:
        if not self.run.checkpoint.exists():
            return None
        payload = load_checkpoint(self.run.checkpoint)
        if payload.get("best") is not None:
            load_checkpoint(self.run.best)
        return payload

    def _load(self, payload: dict[str, Any]) -> None:
        path, task, settings = self.run.checkpoint, self.task, self.run.config["settings"]
        if payload.get("task") != task.name:
            raise CheckpointError(f"checkpoint {path} is of the task {payload.get('task')!r}, not of {task.name!r}")
        try:
            for key, saved in sorted(payload["settings"].items()):  # a later version may have more settings
                if key not in FREE_SETTINGS and saved != settings.get(key):
                    raise CheckpointError(
                        f"checkpoint {path} was written with {key}={saved}, this run has {key}={settings.get(key)}"
                    )
            if payload["data"] not in (None, task.data_digest):
                raise CheckpointError(
                    f"checkpoint {path} was trained on other data than {settings.get('data')} holds; give their --data"
                )
            task.model.load_state_dict(payload["model"])
            task.optimizer.load_state_dict(payload["optimizer"])
            for name in ("scheduler", "plateau", "average"):
                if (part := getattr(task, name)) is not None:
                    part.load_state_dict(payload[name])
            self._rates_of_this_run()
            task.load_state_dict(payload["task_state"])
            self.iteration, self.earlier_seconds = payload["iteration"], payload["seconds"]
            self._set_rng([payload["rng"], *payload["rng_of_other_ranks"]])
            self.best, self.evaluation, self.reached = payload["best"], payload["evaluation"], payload["reached"]
            self.evaluated_at = payload["evaluated_at"]
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {path} does not fit this run: {reason}") from None
        self.saved_at = self.iteration

    def _rates_of_this_run(self) -> None:
        """Sets the learning rates of the next iteration. Those of the checkpoint are of the old length of the run."""
        scheduler = self.task.scheduler
        if isinstance(scheduler, LambdaLR):
            groups = scheduler.optimizer.param_groups
            for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                new = rate * factor(scheduler.last_epoch)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(new)
                else:
                    group["lr"] = new

    def _set_rng(self, states: list[dict[str, Any]]) -> None:
        rank, world = self.shard.rank, self.shard.world
        if rank < len(states):
            set_rng_state(states[rank])
        else:  # the run continues in more processes than before
            seed_all(self.run.config["settings"].get("seed", 0) + rank + world * self.iteration)

    def read_best(self) -> tuple[dict[str, Any], int] | None:
        """The state of the model with the best evaluation, and its iteration; None if there is none. A best.pt that a
        killed run wrote just before its checkpoint is not of this run."""
        if self._best_bytes is not None:  # a full disk
            payload = torch.load(io.BytesIO(self._best_bytes), map_location="cpu", weights_only=True)
        elif self.run.best.exists():
            payload = load_checkpoint(self.run.best)
        else:
            return None
        if self.best is None or payload["iteration"] != self.best["iteration"]:
            return None
        return payload["model"], payload["iteration"]

    # ---- saving

    def payload(self) -> dict[str, Any]:
        """The payload of a checkpoint: the state of rank 0, and the random states of all ranks. A collective call."""
        parts = distributed.gather((rng_state(), self._digest() if self.shard.world > 1 else ""))
        others = [str(rank) for rank, (_, digest) in enumerate(parts) if digest != parts[0][1]]
        if others:
            distributed.on_all(lambda: self._raise_drift(others))
        task = self.task
        states = {name: getattr(task, name) for name in ("scheduler", "plateau", "average")}
        return {
            "task": task.name,
            "settings": self.run.config["settings"],
            "iteration": self.iteration,
            "seconds": self.seconds(),
            "model": task.model.state_dict(),
            "optimizer": task.optimizer.state_dict(),
            **{name: None if part is None else part.state_dict() for name, part in states.items()},
            "task_state": task.state_dict(),
            "data": task.data_digest,
            "rng": parts[0][0],
            "rng_of_other_ranks": [rng for rng, _ in parts[1:]],
            "best": self.best,
            "evaluation": self.evaluation,
            "evaluated_at": self.evaluated_at,
            "reached": self.reached,
        }

    def _raise_drift(self, others: list[str]) -> None:
        raise CheckpointError(
            f"iteration {self.iteration}: the parameters of rank {', '.join(others)} differ from those of rank 0: a "
            f"loss calls self.model in place of self.module, or processors round differently; {self.last_good()}"
        )

    def _digest(self) -> str:
        """A checksum of the bits of the parameters."""
        digest = hashlib.sha256()
        for parameter in self.task.model.parameters():
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def last_good(self) -> str:
        if self.saved_at is None:
            return "no checkpoint was written yet"
        return f"last good checkpoint: iteration {self.saved_at}, {self.run.checkpoint}"

    def save(self) -> str | None:
        """Writes checkpoint.pt. A collective call. Returns None, or the reason of a failure."""
        payload = self.payload()
        failure = distributed.on_first(lambda: self._write(payload))
        if failure is None:
            self.saved_at = self.iteration
        return failure

    def _write(self, payload: dict[str, Any]) -> str | None:
        try:
            if self.run.log is not None:
                self.run.log.sync()
            self.write_best()  # before the checkpoint, which refers to best.pt
            save_checkpoint(self.run.checkpoint, payload)
        except OSError as error:
            return f"{error.strerror or error}"
        return None

    def keep_best(self) -> None:
        """Keeps the present state as the best one, in memory: best.pt is written with the next checkpoint, so that the
        two agree after a kill. A collective call."""
        payload = self.payload()
        if self.shard.first:
            self._best_bytes = checkpoint_bytes(payload)

    def write_best(self) -> None:
        """Writes best.pt if it is not written yet."""
        if self._best_bytes is not None:
            write_atomically(self.run.best, self._best_bytes)
            self._best_bytes = None

    def record(self, record: dict[str, Any]) -> None:
        """Appends a record to metrics.jsonl, on rank 0."""
        if self.run.log is None:
            return
        try:
            self.run.log.append(record)
            self._disk_is_full = False
        except OSError as error:
            if not self._disk_is_full:  # once, not at every iteration
                self.progress.line(
                    f"warning: {self.run.metrics} cannot be written: {error.strerror or error}; training continues, "
                    "records are kept in memory"
                )
            self._disk_is_full = True
