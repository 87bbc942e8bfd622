"""The state of a training run: the content of a checkpoint, and how it is written and restored."""

from __future__ import annotations

import copy
import math
import sys
import time
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from orthokern.commandline import say
from orthokern.errors import CheckpointError, integer
from orthokern.training.checkpoint import load_checkpoint, rng_state, save_checkpoint, set_rng_state
from orthokern.training.iteration import LoopSettings
from orthokern.training.rundir import RunFolder
from orthokern.training.task import Task

# Settings that a resumed run may change: none of them changes the computation of an iteration. (Another number of
# threads may change rounding. A schedule that depends on the length of the run, a cosine, continues along the longer
# curve.)
FREE_SETTINGS = frozenset("iterations epochs minutes data checkpoint_every diagnose_every threads plots".split())


class RunState:
    """The state of one call of `train`."""

    def __init__(self, task: Task, run: RunFolder, started: float) -> None:
        self.task, self.run, self.started = task, run, started
        self.iteration = 0
        self.saved_at: int | None = None
        self.best: dict[str, Any] | None = None  # score and iteration of the best evaluation
        self.new_best: dict[str, Tensor] | None = None  # its parameters, until best.pt is written
        self.evaluation: dict[str, float] | None = None
        self.evaluated = 0  # the iteration of this evaluation
        self.reached = False
        self.reached_before = False  # by a part of the run that this process resumes
        self.earlier_seconds = 0.0

    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def is_over(self, settings: LoopSettings) -> bool:
        """Whether the run has done all iterations, or has reached its time limit with at least one."""
        limit = math.inf if settings.minutes is None else 60.0 * settings.minutes
        return self.iteration >= settings.iterations or (self.iteration > 0 and self.seconds() >= limit)

    def keep_best(self, score: float) -> None:
        """Keeps the current parameters as the best ones if the score is the highest: best.pt is written with the
        checkpoint of this iteration."""
        if math.isfinite(score) and (self.best is None or score > self.best["score"]):
            self.best = {"score": score, "iteration": self.iteration}
            self.new_best = copy.deepcopy(self.task.model.state_dict())

    def restore(self) -> None:
        """Continues from the checkpoint in the folder. Without a checkpoint (the run was killed before the first one,
        see `RunFolder.open`), the run starts from the beginning."""
        if not self.run.checkpoint.exists():
            return
        payload = load_checkpoint(self.run.checkpoint)
        if payload.get("best") is not None:
            self._check_best(payload)
        self._load(payload)

    def _check_best(self, payload: dict[str, Any]) -> None:
        """Forgets the best evaluation if best.pt is missing; CheckpointError if it is from another run."""
        if not self.run.best.exists():
            say(f"warning: there is no {self.run.best}: the best evaluation before is not known", sys.stderr)
            payload["best"] = None
            return
        best = load_checkpoint(self.run.best)
        model = best.get("model", {})
        shapes = {name: p.shape for name, p in self.task.model.named_parameters()}  # buffers may come later: a basis
        fits = all(getattr(model.get(name), "shape", None) == shape for name, shape in shapes.items())
        if not fits or "iteration" not in best:
            raise CheckpointError(f"{self.run.best} is not of this run; delete it to continue without it")

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
            if type(task.scheduler) is LambdaLR:  # the rates of its curve, which may have become longer
                for group, rate, factor in zip(
                    task.optimizer.param_groups, task.scheduler.base_lrs, task.scheduler.lr_lambdas, strict=True
                ):
                    group["lr"] = rate * factor(task.scheduler.last_epoch)
            task.load_state_dict(payload["task_state"])
            self.iteration = integer("iteration", payload["iteration"], 0)
            self.earlier_seconds = float(payload["seconds"])
            set_rng_state(payload["rng"])
            self.best, self.evaluation, self.reached = payload["best"], payload["evaluation"], payload["reached"]
            self.evaluated = payload["evaluated"]
            self.reached_before = self.reached
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"checkpoint {path} does not fit this run: {error}") from None
        self.saved_at = self.iteration

    def best_model(self) -> dict[str, Any] | None:
        """The parameters of the best evaluation, from best.pt; None if there was none."""
        if self.best is None:
            return None
        payload = load_checkpoint(self.run.best)
        # a run that was killed between best.pt and its checkpoint, and was then continued for fewer iterations
        return payload["model"] if payload["iteration"] == self.best["iteration"] else None

    def save(self) -> None:
        """Writes checkpoint.pt, and best.pt if this iteration had the best evaluation."""
        states = {name: getattr(self.task, name) for name in ("scheduler", "plateau", "average")}
        payload = {
            "task": self.task.name,
            "settings": self.run.config["settings"],
            "iteration": self.iteration,
            "seconds": self.seconds(),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            **{name: None if part is None else part.state_dict() for name, part in states.items()},
            "task_state": self.task.state_dict(),
            "data": self.task.data_digest,
            "rng": rng_state(),
            "best": self.best,
            "evaluation": self.evaluation,
            "evaluated": self.evaluated,
            "reached": self.reached,
        }
        self.run.log.sync()
        if self.new_best is not None:  # before the checkpoint, which refers to best.pt
            save_checkpoint(self.run.best, {**payload, "model": self.new_best})
        save_checkpoint(self.run.checkpoint, payload)
        self.saved_at, self.new_best = self.iteration, None

    def last_good(self) -> str:
        if self.saved_at is None:
            return "no checkpoint was written yet"
        return f"last good checkpoint: iteration {self.saved_at}, {self.run.checkpoint}"
