"""The random permutation problem (Hochreiter & Schmidhuber 1997; Pascanu et al. 2013): what was the first symbol?

    step        0 ................................. T-1
    symbol      1  57  3  98  22  57  41  9  ...  76           0 or 1, then symbols 2 to 99
    target      1                                              the first symbol, due after the last step

Every symbol except the first is drawn uniformly from the 98 others. Only the answer after the last step is scored, as
in the variant of Manchev & Spratling. Their sequences repeat the first symbol at the end as the target of the last
step, which is the same data for a network that reads steps 0 to T-1 and is scored on its last output. All 100 symbols
are possible answers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern.data._checks import integer

SYMBOLS = 100


class RandomPermutationTask:
    """Generator of the random permutation problem.

    Args:
        T: number of time steps, at least 2.
        symbols: size of the alphabet, at least 3.

    Attributes:
        length: number of time steps of a sequence, T.
        num_features: one per symbol.
        num_classes: one per symbol.
        baseline: cross-entropy in nats of the best guess without memory: one of two symbols, ln 2.

    Raises:
        InputError: T below 2, or fewer than 3 symbols.

    Example::

        >>> task = RandomPermutationTask(T=50)
        >>> inputs, targets = task.batch(4, generator=torch.Generator().manual_seed(0))
        >>> inputs.shape, torch.equal(inputs[0].argmax(-1), targets)
        (torch.Size([50, 4, 100]), True)
    """

    def __init__(self, T: int, *, symbols: int = SYMBOLS) -> None:
        self.T = integer("T", T, 2)
        self.symbols = integer("symbols", symbols, 3)
        self.length = T
        self.num_features = symbols
        self.num_classes = symbols
        self.baseline = math.log(2.0)

    def buffers(self, batch: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Tensors for `fill`.

        Args:
            batch: number of sequences B, at least 1.
            device: where the tensors live.

        Returns:
            inputs: [T, B, symbols] float32, zero; targets: [B] int64, zero.

        Raises:
            InputError: batch below 1.
        """
        integer("batch", batch)
        inputs = torch.zeros(self.T, batch, self.symbols, device=device)
        return inputs, torch.zeros(batch, dtype=torch.int64, device=device)

    def fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None = None) -> None:
        """Writes a new batch into existing tensors, so that training needs no allocation.

        Args:
            inputs: [T, B, symbols] float32 from `buffers`: the symbols, one-hot.
            targets: [B] int64 from `buffers`: 0 or 1.
            generator: a generator on the CPU, so that a seed gives the same data on every device.
        """
        symbols = torch.randint(2, self.symbols, inputs.shape[:2], generator=generator)
        symbols[0] = torch.randint(0, 2, symbols.shape[1:], generator=generator)
        inputs.zero_().scatter_(2, symbols.to(inputs.device).unsqueeze(-1), 1.0)
        targets.copy_(symbols[0])

    def batch(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A new batch.

        Args:
            batch: number of sequences B, at least 1.
            generator: as in `fill`.

        Returns:
            inputs: [T, B, symbols] float32, targets: [B] int64, on the CPU.

        Raises:
            InputError: batch below 1.
        """
        inputs, targets = self.buffers(batch)
        self.fill(inputs, targets, generator)
        return inputs, targets
