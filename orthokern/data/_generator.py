"""The common part of the generators of synthetic tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from orthokern.errors import cpu_generator, integer, require


class Generator(ABC):
    """Draws batches of a task: inputs [T, B, ...] and targets [B] or [T, B], as described in the class of the task.

    Attributes:
        length: number of time steps of a sequence.
        baseline: the loss of the best guess without memory.
    """

    length: int
    baseline: float

    @abstractmethod
    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a new batch, on torch's default device."""

    def batch(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a new batch, on the CPU. The generator must be on the CPU, so that a seed gives the
        same data on every device; None: torch's default generator. InputError for any other generator, for a batch
        below 1, and for sizes whose product overflows."""
        batch = integer("batch", batch)
        numbers = batch * self.length * getattr(self, "num_features", 1)
        require(numbers < 2**60, "batch", "small enough for a tensor", f"{batch} sequences of {self.length} steps")
        with torch.device("cpu"):  # even with another default device
            return self._draw(batch, cpu_generator(generator))
