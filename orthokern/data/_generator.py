"""What the generators of synthetic tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from orthokern.data._checks import integer


class Generator(ABC):
    """Draws batches of a task: inputs [T, B, ...] and targets [B] or [T, B], as the class of the task describes them.

    Attributes:
        length: number of time steps of a sequence.
        baseline: the loss of the best guess without memory.
    """

    length: int
    baseline: float

    def buffers(self, batch: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `batch` sequences on a device, for `fill`. InputError for a batch below 1."""
        return self._empty(integer("batch", batch), device)

    @abstractmethod
    def _empty(self, batch: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None = None) -> None:
        """Writes a new batch into tensors from `buffers`, in place. The generator is one on the CPU, so that a seed
        gives the same data on every device; torch's default generator if None."""

    def batch(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a new batch on the CPU; generator as in `fill`. InputError for a batch below 1."""
        inputs, targets = self.buffers(batch)
        self.fill(inputs, targets, generator)
        return inputs, targets


class OneHotGenerator(Generator):
    """Inputs [T, B, num_features] float32, one-hot symbols; targets [B] int64, a class due after the last step."""

    num_features: int
    num_classes: int

    def _empty(self, batch: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        inputs = torch.zeros(self.length, batch, self.num_features, device=device)
        return inputs, torch.zeros(batch, dtype=torch.int64, device=device)

    def fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None = None) -> None:
        symbols, classes = self._draw(inputs.shape[1], generator)
        inputs.zero_().scatter_(2, symbols.to(inputs.device).unsqueeze(-1), 1.0)
        targets.copy_(classes)

    @abstractmethod
    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Symbols [T, B] int64 and classes [B] int64."""
