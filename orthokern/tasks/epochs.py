"""Common parts of the tasks: evaluation after every epoch, data in epochs, and the seeds of a run's random streams."""

from __future__ import annotations

import hashlib
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.errors import InputError
from orthokern.optim import CombinedOptimizer
from orthokern.tasks.optimization import build_schedules
from orthokern.training import Task
from orthokern.training.averaging import Average
from orthokern.training.cli import RunOptions
from orthokern.training.options import declarations, option


class Experiment(Task):
    """The base of all tasks. It clips gradients and evaluates after every epoch; the lowest loss is the best."""

    settings: Any
    iterations_per_epoch: Any
    TITLE: tuple[str, ...] = ()  # settings in the title of plots
    # attributes that a checkpoint holds: numbers, tensors, None, generators, and objects with a state_dict
    STATE: tuple[str, ...] = ()

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)

    def train_with(self, model: nn.Module, optimizer: CombinedOptimizer) -> None:
        """Sets the model and its optimizer, with the schedules and the moving average of the settings."""
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.plateau = build_schedules(optimizer, self.settings)
        if self.settings.average is not None:
            self.average = Average(model, self.settings.average)

    def title(self) -> str:
        values = {name: getattr(self.settings, name) for name in self.TITLE}
        if values.get("model", "factorized") not in ("factorized", "rotation"):
            values.pop("margin", None)
        shown = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if value is not None
        ]
        return ", ".join([self.name, *shown])

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the model, which is called with the parts of the batch."""
        loss, numbers = self.model(*batch)
        return loss, numbers

    def clip_gradients(self) -> None:
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """After every epoch."""
        return bool(iteration % self.iterations_per_epoch == 0)

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def state_dict(self) -> dict[str, Any]:
        def saved(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return value.get_state()
            return value.state_dict() if hasattr(value, "state_dict") else value

        return {name: saved(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.STATE:
            value, saved = getattr(self, name), state[name]
            if isinstance(value, torch.Generator):
                value.set_state(saved)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved.to(self.device) if isinstance(saved, Tensor) else saved)

    @abstractmethod
    def result_text(self, evaluation: dict[str, float]) -> str:
        """The text of an evaluation in the summary."""

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        result = "not evaluated:" if evaluation is None else f"{self.result_text(evaluation)},"
        return f"{result} iteration {iteration}, {seconds:.0f} s"


class DataTask(Experiment):
    """A task with validation data, on which it is evaluated, and test data."""

    @abstractmethod
    def measure(self, part: str) -> dict[str, float]:
        """The numbers of "validation" or "test", forward only."""

    def evaluate(self, iteration: int) -> dict[str, float]:
        return self.measure("validation")

    def test(self) -> dict[str, float]:
        return self.measure("test")


def data_option(files: str) -> Any:
    """A field for the folder of a task's data; files: its content."""
    return option("", f"folder with {files} (required)", metavar="DIR", shown="", basic=True)


@dataclass(kw_only=True)
class DataOptions(RunOptions):
    """A task that reads its data from files, in epochs. By default `iterations` is computed from the number of
    epochs."""

    GROUP = "the task"
    data: str = data_option("the task's files")
    epochs: int = option(20, "stop after N epochs", high=10**6, basic=True)  # None with --iterations

    def complete(self) -> None:
        super().complete()
        if not self.data:
            files = declarations(type(self))["data"][1].help.removesuffix(" (required)")
            raise InputError(f"--data is needed: the {files}")


def stream_seed(seed: int, stream: str) -> int:
    """A seed for one of the random streams of a run: a function of the seed of the run and the name of the stream, the
    same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {stream}".encode()).digest()[:7], "big")


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """The order of the examples in an epoch, int64 [count]. It depends on the seed and the epoch only, so that the
    iteration alone determines the position of a run in its data."""
    generator = torch.Generator().manual_seed(stream_seed(seed, f"epoch {epoch}"))
    return torch.randperm(count, generator=generator)


def digest(*data: Tensor) -> int:
    """A checksum of data, for `Task.data_digest`."""
    result = 0
    for part in data:
        result = zlib.crc32(part.detach().cpu().contiguous().numpy().data, result)
    return result


def count_epochs(settings: DataOptions, batches: int) -> int:
    """The number of iterations of an epoch of `batches` batches. Converts the epochs in the settings to iterations."""
    if settings.accumulate > batches:
        raise InputError(f"--accumulate {settings.accumulate}: accepted: at most {batches}, the batches of an epoch")
    per_epoch: int = batches // settings.accumulate
    if settings.epochs is not None:
        settings.iterations = settings.epochs * per_epoch
    return per_epoch
