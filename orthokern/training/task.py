"""The interface between a task and the training loop."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orthokern.training.averaging import Average

T = TypeVar("T")


class Task(ABC):
    """Base class of tasks: a model, its optimizer, its data, and the goal.

    The loop (`orthokern.training.train`) controls the order of operations, the files and the signals; a task does the
    computation. Subclasses set the attributes below in their constructor.

    Attributes:
        name: name of the task, used in the name of the run folder and in checkpoints.
        model: module with all parameters that are trained or saved in checkpoints.
        optimizer: one optimizer for all of them (`orthokern.optim.CombinedOptimizer` joins several).
        scheduler: learning-rate schedule stepped once per iteration, or None.
        plateau: learning-rate schedule stepped with the score of every evaluation that the task requests, or None.
        average: moving average of the parameters, which evaluations and best.pt use in their place, or None.
        loss_label: name and unit of the loss in plots.
        baseline: loss of the best guess without memory, shown with the loss; None if the task has none.
        goal: accuracy to reach, a fraction, shown with the accuracy; None if the task has none.
        time_steps: time steps per sequence, for "µs per time step"; if batches differ, of the last iteration.
        device: device of the model.
        data_digest: a checksum of all data, which must be the same in a resumed run; None for generated data.
        iterations_per_epoch: iterations per epoch, with the setting "accumulate" taken into account; None if there are
            no epochs.
        evaluation_seconds: time for one evaluation or test, for `in_time`; set by the loop if the run has a time limit.

    Example: tests/toy_task.py is a small task, orthokern/tasks/adding.py one with evaluations, a goal and presets.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
    average: Average | None = None
    loss_label: str = "loss"
    baseline: float | None = None
    goal: float | None = None
    time_steps: int
    device: torch.device
    data_digest: int | None = None
    iterations_per_epoch: int | None = None
    evaluation_seconds: float = math.inf

    def begin(self) -> None:  # noqa: B027
        """Called before the first iteration of a process. Default: nothing."""

    @abstractmethod
    def next_batch(self) -> Any:
        """The next training batch. It may reuse the tensors of the previous one."""

    def next_batches(self, count: int) -> Iterator[Any]:
        """The batches of an iteration, each drawn after the previous one has been used. The iteration uses the mean of
        their losses: a task whose losses are means over unequal numbers of targets overrides this method and weights
        them."""
        for _ in range(count):
            yield self.next_batch()

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch (0-dim) and other numbers for the record (0-dim tensors, detached), of which a "penalty"
        is subtracted from the recorded loss. They are copied from the device together, so that an iteration
        synchronises once."""

    def last_step_loss(self, batch: Any) -> Tensor | None:
        """The loss of the last time step only (0-dim, a mean as in `loss`), for the gradient through time in Figure 2
        of Vorontsov et al. 2017; called in diagnosed iterations with the setting "last_step_gradient". It must not use
        the generators of the task; the global generators are restored. Default: None, for a task without such a loss.
        """
        return None

    def clip_gradients(self) -> None:
        """Called between the backward pass and the optimizer step. Default: does nothing."""
        return None

    @abstractmethod
    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """Whether to evaluate after this iteration; `metrics` has its numbers. The loop also evaluates after the last
        iteration."""

    @abstractmethod
    def evaluate(self, iteration: int) -> dict[str, float]:
        """Evaluation on held-out data, in eval mode and with gradients disabled. Random numbers must depend on the seed
        and `iteration` only, so that additional evaluations change nothing else."""

    @staticmethod
    def reaches(fraction: float, percent: float) -> bool:
        """Whether a fraction, such as an accuracy, is at least `percent`, also where 100 * fraction is rounded down."""
        return 100.0 * fraction >= percent - 1e-9

    def in_time(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of an evaluation or test, as many as `evaluation_seconds` allow, and at least one. The numbers
        are then means over these batches."""
        end = time.monotonic() + self.evaluation_seconds
        for batch in batches:
            yield batch
            if time.monotonic() >= end:
                return

    @abstractmethod
    def score(self, evaluation: dict[str, float]) -> float:
        """The evaluation as one number; higher is better. The state with the best score is saved as best.pt."""

    def test(self) -> dict[str, float]:
        """Numbers on the test data, on which no decision of the run may depend. It is called once, at the end of the
        run, with the parameters of the best evaluation. Default: {}, for a task without test data."""
        return {}

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        """Whether the goal is reached and the run ends. Default: never."""
        return False

    def diagnose(self) -> dict[str, Any]:
        """Numbers about the state of the model for the record, computed every few iterations. It should be fast.
        Default: none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and the states of the task's generators. After they are restored, `next_batch` and
        `evaluate` continue as in an uninterrupted run. Only types that a checkpoint may contain."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
        return None

    def headline(self) -> str:
        """Text after the folder name in the first line of output. Default: ""."""
        return ""

    def progress_text(self, metrics: dict[str, Any]) -> str:
        """The numbers shown in the progress bar, one line."""
        baseline = f" (baseline {self.baseline:.4g})" if self.baseline is not None else ""
        return f"loss {metrics['loss']:.4g}{baseline}"

    @abstractmethod
    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        """The last line of output."""

    def title(self) -> str:
        """Title of the plots. Default: the name of the task."""
        return self.name

    def facts(self) -> dict[str, Any]:
        """Values for config.json that the plots of the run use; see `orthokern.diagnostics.drawing.draw_run`."""
        return {
            "title": self.title(),
            "loss_label": self.loss_label,
            "baseline": self.baseline,
            "goal": self.goal,
            "time_steps": self.time_steps,
        }
