"""The common part of the MNIST tasks: epochs, evaluations, and options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orthokern.data import load_mnist, pixel_permutation, pixel_statistics
from orthokern.errors import InputError
from orthokern.tasks.epochs import DataOptions, DataTask, count_epochs, data_option, digest, epoch_order
from orthokern.training.options import option

CLASSES = 10


@dataclass(kw_only=True)
class DigitsOptions(DataOptions):
    """The settings of a task on MNIST."""

    GROUP = "the task"
    data: str = data_option("the four MNIST files")
    validation: int = option(10_000, "training images held out for validation")
    goal: float | None = option(
        None, "stop at this validation accuracy; none: train for all epochs", above=0.0, high=100.0, metavar="PERCENT"
    )
    batch: int = 50  # declared by the options of the optimizer


class DigitsTask(DataTask):
    """Uses every training image once per epoch, in a new random order; evaluates after every epoch.

    A subclass calls `load`. Its settings extend `DigitsOptions`.
    """

    EVALUATION_BATCH = 500  # images
    PIXEL_BY_PIXEL = True  # whether the model reads one pixel per step
    scaling: tuple[Any, Any] = (0.0, 255.0)  # mean and deviation of the pixels [P]
    STATE = ("position",)
    baseline = math.log(CLASSES)
    loss_label = "cross-entropy (nats)"
    train_set: tuple[Tensor, Tensor]  # images uint8, labels [n] int64
    validation_set: tuple[Tensor, Tensor]
    test_set: tuple[Tensor, Tensor]

    def load(self) -> None:
        """Reads the data, and converts the number of epochs to iterations."""
        settings = self.settings
        data = load_mnist(settings.data, validation=settings.validation)
        self.train_set, self.validation_set, self.test_set = (
            (self._arranged(part.images).to(self.device), part.labels.to(self.device))
            for part in (data.train, data.validation, data.test)
        )
        count = len(self.train_set[1])
        if settings.batch > count:
            raise InputError(f"--batch {settings.batch}: there are {count} training images")
        # an incomplete last batch is left out; its images are read in other epochs
        self.batches_per_epoch = count // settings.batch
        self.iterations_per_epoch = count_epochs(settings, self.batches_per_epoch)
        self.data_digest = digest(*self.train_set, *self.validation_set, *self.test_set)
        if getattr(settings, "standardize", False):
            mean, deviation = pixel_statistics(self.train_set[0].cpu())
            self.scaling = mean.to(self.device), deviation.to(self.device)
        self.position = 0  # in batches
        self._order: tuple[int, Tensor] | None = None

    def _arranged(self, images: Tensor) -> Tensor:
        """images [n, P] uint8 in the order in which they are read. An image is contiguous: a batch of columns would
        read a cache line per pixel."""
        if getattr(self.settings, "permuted", False):
            images = images[:, pixel_permutation(self.settings.permutation_seed, images.shape[1])]
        return images.contiguous()

    def _batch(self, data: tuple[Tensor, Tensor], chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The scaled pixels of the chosen images, [P, B, 1] or [B, P], and their labels [B]."""
        (images, labels), (mean, deviation) = data, self.scaling
        pixels = (images[chosen].float() - mean) / deviation
        return (pixels.T.contiguous().unsqueeze(-1) if self.PIXEL_BY_PIXEL else pixels), labels[chosen]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        epoch, batch = divmod(self.position, self.batches_per_epoch)
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self.settings.seed, epoch, len(self.train_set[1]))
            self._order = (epoch, order.to(self.device))
        size = self.settings.batch
        self.position += 1
        return self._batch(self.train_set, self._order[1][batch * size : (batch + 1) * size])

    def measure(self, part: str) -> dict[str, float]:
        """Over all images of a part: "accuracy" (fraction) and "loss" (nats, without any penalty)."""
        data = self.validation_set if part == "validation" else self.test_set
        size, loss, right, count = self.EVALUATION_BATCH, 0.0, 0.0, 0
        for start in self.in_time(range(0, len(data[1]), size)):
            pixels, labels = self._batch(data, slice(start, start + size))
            batch_loss, numbers = self.model(pixels, labels)
            loss += batch_loss.item() * len(labels)
            right += numbers["accuracy"].item() * len(labels)
            count += len(labels)
        return {"loss": loss / count, "accuracy": round(right) / count}

    def score(self, evaluation: dict[str, float]) -> float:
        return evaluation["accuracy"]

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        goal = self.settings.goal
        return goal is not None and self.reaches(evaluation["accuracy"], goal)

    def progress_text(self, metrics: dict[str, Any]) -> str:
        return f"{super().progress_text(metrics)}, accuracy {100 * metrics['accuracy']:.0f} %"

    def result_text(self, evaluation: dict[str, float]) -> str:
        return f"validation accuracy {100 * evaluation['accuracy']:.2f} %"
