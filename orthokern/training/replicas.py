"""Runs of one task with several seeds in one process: `--replicas R`.

Every run is a run of its own: it has its own model, optimizer, data, records and checkpoints, in a folder of its own,
and can be resumed alone. The runs go through their iterations in turns. Where torch.func.vmap can map the loss
(`Task.stacked_bytes`), the gradients of all of them are computed in one call for the stacked parameters; else, and in
iterations that record diagnostics, model by model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from orthokern._memory import kept_states
from orthokern.commandline import say
from orthokern.errors import OutOfRange
from orthokern.training.iteration import LoopSettings, Step, move, step
from orthokern.training.loop import Iterations, Outcome, iterations
from orthokern.training.profiling import Profiler
from orthokern.training.progress import Progress
from orthokern.training.rundir import RunFolder
from orthokern.training.signals import StopRequest
from orthokern.training.task import Task

__all__ = ["PreparedRun", "train_together"]


# On a CPU: bytes of the states of all models in one call, and the fewest models that such a call has to have room for.
# Measured with 5 models of 64 or 128 units: within these limits the calls take 0.7 to 0.9 of the CPU time of one call
# for each model; well beyond them, copies of states that do not stay in the cache make them slower.
CACHED, FEWEST = 2**23, 3


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


class _Labelled(Progress):
    """Plain lines that begin with the name of the run, since several runs share the terminal."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        super().__init__(total, stream)
        self.bar, self.label = False, label

    def _write(self, text: str) -> None:
        super()._write(f"{self.label}: {text}")


class _Loss(nn.Module):
    """`Task.loss` as a module, whose parameters `functional_call` replaces in the forward and in penalties alike."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss = task.model, task.loss

    def forward(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(batch)


class Stacked:
    """Takes the place of `orthokern.training.iteration.step` in the runs of `train_together`."""

    def __init__(self, tasks: Sequence[Task], settings: LoopSettings) -> None:
        self.tasks = tasks
        size = tasks[0].stacked_bytes if settings.accumulate == 1 else None
        # The states of all models exist at the same time. A single run keeps no more of them than kept_states.
        device = tasks[0].device
        limit, fewest = (CACHED, FEWEST) if device.type == "cpu" else (kept_states(device), 2)
        most = 0 if size is None else limit // size
        self.most = most if most >= fewest else 1
        self.batches: dict[int, Any] = {}  # drawn and not used yet, by the index of the run
        self.gradients: dict[int, tuple[list[str], Tensor, list[Tensor | None]]] = {}  # the same of what `move` takes

    def prepare(self, runs: list[int]) -> None:
        """Computes the gradients of the next iteration of these runs, as many at a time as memory allows."""
        for first in range(0, len(runs), self.most):
            some = runs[first : first + self.most]
            if len(some) > 1:
                self._differentiate(some)

    def _differentiate(self, runs: list[int]) -> None:
        tasks = [self.tasks[run] for run in runs]
        batches = [task.next_batch() for task in tasks]
        self.batches.update(zip(runs, batches, strict=True))
        parameters, buffers = stack_module_state([_Loss(task) for task in tasks])
        loss = functools.partial(functional_call, _Loss(tasks[0]))
        parts = list(zip(*batches, strict=True))
        places = [min(1, part[0].ndim - 1) for part in parts]  # behind time, as the scans take it
        stacked = [torch.stack(part, place) for part, place in zip(parts, places, strict=True)]
        trained = [value for value in parameters.values() if value.requires_grad]
        try:
            losses, numbers = vmap(loss, in_dims=((0, 0), tuple(places)))((parameters, buffers), tuple(stacked))
            found = iter(torch.autograd.grad(losses.sum(), trained, allow_unused=True))
        except OutOfRange:  # of one of the models: each alone, so that the others continue
            return
        rows = torch.stack([number.double() for number in (losses.detach(), *numbers.values())], 1)
        # Two biases that are added have one gradient tensor, and clipping works in place: each run has copies.
        gradients = [next(found) if value.requires_grad else None for value in parameters.values()]
        for r, run in enumerate(runs):
            self.gradients[run] = list(numbers), rows[r], [None if g is None else g[r].clone() for g in gradients]

    def take(
        self,
        run: int,
        task: Task,
        settings: LoopSettings,
        diagnose: bool,
        stop: StopRequest,
        profiler: Profiler,
        *,
        check: bool,
    ) -> Step:
        """As `orthokern.training.iteration.step`, for one of the runs."""
        batch = self.batches.pop(run, None)
        if run not in self.gradients:
            return step(task, settings, diagnose, stop, profiler, check=check, batch=batch)
        names, row, gradients = self.gradients.pop(run)
        for parameter, gradient in zip(task.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return move(task, names, [row], stop, profiler, [])


def train_together(runs: Sequence[PreparedRun], labels: Sequence[str], started: float) -> list[Outcome]:
    """Trains runs that differ in their seeds only, as `train` does each of them.

    The numbers are those of single runs to rounding; the times in the records are of all runs together. A run that
    reaches its goal or diverges ends, and the others continue. SIGINT and SIGTERM end all of them, each with its
    checkpoint. Messages are printed.

    Args:
        runs: of one task, whose random numbers after its construction come from its own generators.
        labels: the beginning of the lines of each run.
        started: as in `train`.

    Returns:
        The results, in the order of the runs.

    Raises:
        CheckpointError, OSError: as `train`, for any of the runs. No run continues then.
    """
    together = Stacked([run.task for run in runs], runs[0].settings)
    outcomes: dict[int, Outcome] = {}
    with StopRequest() as stop, contextlib.ExitStack() as opened:
        going: dict[int, Iterations] = {}
        for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
            take, progress = functools.partial(together.take, index), _Labelled(run.settings.iterations, label)
            tell = functools.partial(progress.line, run.headline())
            going[index] = opened.enter_context(
                contextlib.closing(
                    iterations(
                        run.task, run.folder, run.settings, stop, take, progress,
                        resume=run.resume, started=started, announce=tell,
                    )
                )
            )  # fmt: skip
        while going:
            plain = []  # the runs whose next iteration records no diagnostics
            for index, one in list(going.items()):
                try:
                    if not next(one):
                        plain.append(index)
                except StopIteration as ended:
                    del going[index]
                    outcomes[index] = ended.value
                    stream = sys.stderr if ended.value.exit_code else sys.stdout
                    say(f"{labels[index]}: {ended.value.message}", stream)
            together.prepare(plain)
    return [outcomes[index] for index in range(len(runs))]
