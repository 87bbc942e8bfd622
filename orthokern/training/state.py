"""The state of a training run: the content of a checkpoint, and how it is written, restored and checked."""

import hashlib
import io
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from orthokern._state import check_integer, misfit, shown
from orthokern.errors import CheckpointError, InputError
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
from orthokern.training.metrics import MetricsLog
from orthokern.training.profiling import Profiler, table
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.schema import check_model, check_payload, json_value
from orthokern.training.task import Task

# Settings that a resumed run may change: none of them changes the computation of an iteration. (Another number of
# threads or processes may change rounding, and another number of processes changes dropout. A schedule that depends on
# the length of the run, a cosine, continues along the longer curve.)
FREE_SETTINGS = frozenset(
    {
        "iterations",
        "epochs",
        "minutes",
        "data",
        "checkpoint_every",
        "diagnose_every",
        "threads",
        "plots",
        "processes",
        "process_timeout",
        "profile",
    }
)


class RunState:
    """The state of one call of `train` in one process."""

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
        self.evaluated_at: int | None = None  # the iteration of the evaluation
        self.reached = False
        self.moved = False  # whether the optimizer has taken a step in this call
        self.earlier_seconds = 0.0
        self._disk_warned = False
        self._best_bytes: bytes | None = None  # a best.pt that is not written yet

    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def is_over(self, settings: LoopSettings) -> bool:
        """Whether the run has done all iterations, or has reached its time limit with at least one."""
        limit = math.inf if settings.minutes is None else 60.0 * settings.minutes
        return self.iteration >= settings.iterations or (self.iteration > 0 and self.seconds() >= limit)

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

    def keep_settings(self) -> None:
        """Writes the settings of a resumed run to config.json, on rank 0. On a full disk the run trains anyway."""

        def rewrite() -> None:
            try:
                self.run.rewrite()
            except OSError as error:
                self.progress.line(
                    f"warning: {self.run.path / 'config.json'} not written: {error.strerror or error}; "
                    "a later --resume needs the options of this one again"
                )

        distributed.on_first(rewrite)

    def restore(self) -> None:
        """Continues from the checkpoint in the folder, which rank 0 reads for all ranks. Without a checkpoint (the run
        was killed before the first one, see `RunFolder.open`), the run starts from the beginning.

        Raises:
            CheckpointError: see `load_checkpoint`; or the checkpoint has another task, other settings or sizes; or it
                refers to a best.pt that is missing.
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
                    f"no {self.run.best.name} beside checkpoint {path}, which refers to it; "
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
        """The size limit of a checkpoint of this run in bytes: far above the model and the state of any optimizer."""
        tensors = [value for value in self.task.model.state_dict().values() if isinstance(value, Tensor)]
        return 2**30 + 16 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _take(self, payload: dict[str, Any]) -> None:
        path = self.run.checkpoint
        fresh = self._payload([rng_state()])
        lacking = fresh.keys() - payload.keys()
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
        for key, theirs in sorted(saved.items()):  # a later version, which may continue a run, has more settings
            ours = settings.get(key)
            if key not in FREE_SETTINGS and theirs != ours:
                raise CheckpointError(
                    f"checkpoint {path} was made with {key[:40]}={_short(theirs)}, "
                    f"this run has {key[:40]}={_short(ours)}"
                )
        data = payload["data"]
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
                self._rates_of_this_run()
            if self.task.plateau is not None:
                self.task.plateau.load_state_dict(payload["plateau"])
            if self.task.average is not None:
                self.task.average.load_state_dict(payload["average"])
            self.task.load_state_dict(payload["task_state"])
            self.iteration, self.earlier_seconds = int(payload["iteration"]), float(payload["seconds"])
            self._take_rng([payload["rng"], *payload["rng_of_other_ranks"]], self.iteration)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {path} does not fit this run: {reason}") from None
        self.saved_at = self.iteration
        self.best, self.evaluation, self.reached = payload["best"], payload["evaluation"], payload["reached"]
        self.evaluated_at = payload["evaluated_at"]

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

    def _take_rng(self, states: list[dict[str, Any]], iteration: int) -> None:
        if self.shard.rank < len(states):
            set_rng_state(states[self.shard.rank])
        else:  # the run continues in more processes than before
            seed_all(self.run.config["settings"].get("seed", 0) + self.shard.rank + self.shard.world * iteration)

    def _payload(self, rng: list[dict[str, Any]]) -> dict[str, Any]:
        scheduler, plateau, average = self.task.scheduler, self.task.plateau, self.task.average
        return {
            "task": self.task.name,
            "settings": self.run.config["settings"],
            "iteration": self.iteration,
            "seconds": self.seconds(),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "plateau": plateau.state_dict() if plateau is not None else None,
            "average": average.state_dict() if average is not None else None,
            "task_state": self.task.state_dict(),
            "data": self.task.data_digest,
            "rng": rng[0],
            "rng_of_other_ranks": rng[1:],
            "best": self.best,
            "evaluation": self.evaluation,
            "evaluated_at": self.evaluated_at,
            "reached": self.reached,
        }

    def payload(self) -> dict[str, Any]:
        """The payload of a checkpoint: the state of rank 0, and the random states of all ranks. A collective call.

        Raises:
            CheckpointError: the parameters of the ranks differ, so that there is no common state.
        """
        parts = distributed.gather((rng_state(), self._digest() if self.shard.world > 1 else ""))
        others = [str(rank) for rank, (_, digest) in enumerate(parts) if digest != parts[0][1]]
        if others:
            distributed.together(lambda: self._drifted(others))
        return self._payload([rng for rng, _ in parts])

    def _drifted(self, others: list[str]) -> None:
        raise CheckpointError(
            f"iteration {self.iteration}: the parameters of rank {', '.join(others)} differ from those of rank 0, "
            f"which can be caused by processors that round differently; {self.last_good()}"
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
            self.prepare_for_loss()
        return failure

    def _write(self, payload: dict[str, Any]) -> str | None:
        try:
            if self.log is not None:
                self.log.sync()
            self.write_best()  # before the checkpoint, which refers to best.pt
            save_checkpoint(self.run.checkpoint, payload)
        except OSError as error:
            return f"{error.strerror or error}"
        return None

    def prepare_for_loss(self) -> None:
        """Sets the text that a rank prints if another one is lost."""
        distributed.tell_on_loss(f"{self.last_good()}; continue with --resume {self.run.path}")

    def save_best(self) -> None:
        """Keeps the present state as the best one, in memory: best.pt is written with the next checkpoint, so that the
        two agree after a kill. A collective call."""
        payload = self.payload()
        if self.shard.first:
            self._best_bytes = checkpoint_bytes(payload)

    def has_best(self) -> bool:
        """Whether there is a best state, on the disk or waiting to be written."""
        return self._best_bytes is not None or self.run.best.exists()

    def write_best(self) -> None:
        """Writes best.pt if it is not written yet."""
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
                    "training continues, records are kept in memory"
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


def _short(value: Any) -> str:
    """The value of a setting, shortened to fit on a line."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
