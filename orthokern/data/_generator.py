"""What the generators of synthetic tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from orthokern.errors import cpu_generator, integer, require


class Generator(ABC):
    """Draws batches of a task: inputs [T, B, ...] and targets [B] or [T, B], as the class of the task describes them.

    Attributes:
        length: number of time steps of a sequence.
        baseline: the loss of the best guess without memory.
    """

    length: int
    baseline: float

    def buffers(self, batch: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `batch` sequences on a device, for `fill`. InputError for a batch below 1, and for
        sizes whose product overflows."""
        numbers = integer("batch", batch) * self.length * getattr(self, "num_features", 1)
        require(numbers < 2**60, "batch", "small enough for a tensor", f"{batch} sequences of {self.length} steps")
        return self._empty(batch, device)

    @abstractmethod
    def _empty(self, batch: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> None: ...

    def fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None = None) -> None:
        """Writes a new batch into tensors from `buffers`, in place. The generator is one on the CPU, so that a seed
        gives the same data on every device; torch's default generator if None. InputError for another one."""
        with torch.device("cpu"):  # where numbers are drawn, also with another default device
            self._fill(inputs, targets, cpu_generator(generator))

    def batch(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a new batch on the CPU; generator as in `fill`. InputError for a batch below 1."""
        inputs, targets = self.buffers(batch, "cpu")
        self.fill(inputs, targets, generator)
        return inputs, targets
