"""What an experiment tells the training loop."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Task(ABC):
    """One experiment: a model, its optimizer, its data, and when it is done.

    The loop (`orthokern.training.train`) owns the order of things, the files and the signals; a task owns the
    arithmetic. Subclasses set the attributes below in their constructor.

    Attributes:
        name: the task's name: part of the run folder's name, and written into checkpoints.
        model: every parameter that is trained or must be in a checkpoint.
        optimizer: one optimizer for all of them (`orthokern.optim.CombinedOptimizer` joins several).
        scheduler: learning-rate schedule stepped once an iteration, or None.
        plateau: learning-rate schedule stepped with the score of every evaluation that the task wanted, or None.
        baseline: loss of the best guess without memory, shown beside the loss; None if the task has none.
        time_steps: time steps per sequence, for "µs per time step".
        device: where the model lives.
        data_digest: a checksum of the training data, which a resumed run must find again; None where they are drawn.
        capturable: whether an iteration can be a CUDA graph (`orthokern.training.graphs`): `loss` and `clip_gradients`
            read no number of a tensor, and use no tensor but the batch and what the model and the optimizer own.
        iterations_per_epoch: iterations that go once through the training data; None if there is no such thing. Where
            an iteration takes several batches (setting "accumulate"), fewer.

    Several processes (`torchrun`, see `orthokern.training.distributed`): a task draws the joint batch on every rank
    from the same generator, and keeps the rows `current_shard().rows(batch)`. Its loss calls `self.module`, and is
    the mean over the shard such that the mean over the ranks is that of the joint batch. Where sequences have weights
    (their lengths, say), that means: divide by the joint batch's total weight and multiply by the number of ranks.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
    baseline: float | None = None
    time_steps: int
    device: torch.device
    data_digest: int | None = None
    capturable: bool = False
    iterations_per_epoch: int | None = None
    _module: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """What `loss` calls for the forward pass: the model, or, in several processes, the loop's wrapper around it,
        which averages the gradients. Every parameter must get a gradient in every iteration; that some are also used
        outside the forward pass (in a penalty, in a readout of its result) does no harm.

        In `evaluate` and `last_step_loss` it is the model itself.
        """
        return self.model if self._module is None else self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = module

    @abstractmethod
    def next_batch(self) -> Any:
        """The next training batch. It may be the same tensors with new content: the loop keeps no batch beyond its
        iteration."""

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's loss (0-dim, to be minimised) and other numbers worth a record (0-dim tensors, detached): fetched
        together, so that an iteration waits for the device once."""

    def last_step_loss(self, batch: Any) -> Tensor | None:
        """The loss of the last time step alone (0-dim, a mean as in `loss`), for the gradient through time of the
        paper's Figure 2 (Vorontsov et al. 2017); asked for with the setting "last_step_gradient", at diagnosed
        iterations. It must draw nothing from the task's own generators; the global ones are put back. Default: None,
        the task has no such loss."""
        return None

    def last_step_norms(self, batch: Any) -> Tensor | None:
        """‖dL/dh_t‖ [T] for L = `last_step_loss(batch)`, where a task can tell it without the states of all steps; only
        the elements at `orthokern.diagnostics.profile_steps(T)` are read. Called as `last_step_loss`. Default: None,
        then the loss is differentiated."""
        return None

    @property
    def has_last_step_loss(self) -> bool:
        """Whether the task defines `last_step_loss`."""
        return type(self).last_step_loss is not Task.last_step_loss

    def clip_gradients(self) -> None:
        """Called between backward and the optimizer's step. Default: nothing."""
        return None

    @abstractmethod
    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """Whether to evaluate after this iteration; `metrics` are this iteration's numbers. The loop also evaluates
        after the last one."""

    @abstractmethod
    def evaluate(self, iteration: int) -> dict[str, float]:
        """Forward-only evaluation on held-out data; the loop has switched the model to eval mode and gradients off.

        In several processes only rank 0 evaluates. What follows from it for the training belongs into `goal_reached`,
        which every rank calls with the same numbers.

        What is drawn at random must depend on the seed and `iteration` alone, so that an evaluation more or less
        changes nothing else.
        """

    @abstractmethod
    def score(self, evaluation: dict[str, float]) -> float:
        """The evaluation as one number, higher is better: the best one so far is kept as best.pt."""

    def test(self) -> dict[str, float]:
        """Forward-only numbers on the test data, which no decision of the run may depend on: called once, when the run
        is over, with the parameters of the best evaluation. Default: none, the task has no test data."""
        return {}

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        """Whether the run may end here. Default: never."""
        return False

    def diagnose(self) -> dict[str, Any]:
        """Numbers on the model's state for the record, taken every few iterations, on rank 0 only: must cost little.
        Default: none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Position in the data and the state of the task's own generators: with it, `next_batch` and `evaluate` go on
        as if never stopped. Types that a checkpoint may hold only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        return None

    def headline(self) -> str:
        """What the run's first line says behind the folder's name. Default: nothing."""
        return ""

    def progress_text(self, metrics: dict[str, Any]) -> str:
        """One line of numbers for the bar."""
        beside = f" (baseline {self.baseline:.4g})" if self.baseline is not None else ""
        return f"loss {metrics['loss']:.4g}{beside}"

    @abstractmethod
    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        """The run's last line."""

    def plot(self, records: list[dict[str, Any]], folder: Path) -> list[Path]:
        """Draws the run's plots from its records; returns the files. Default: none."""
        return []
