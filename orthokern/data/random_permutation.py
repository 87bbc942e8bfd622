"""The random permutation problem (Hochreiter & Schmidhuber 1997; Pascanu et al. 2013): what was the first symbol?

Only the answer after the last step is scored, as in the variant of Manchev & Spratling, whose sequences repeat the
first symbol at the end as the target of the last step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern.data._checks import integer
from orthokern.data._generator import OneHotGenerator

SYMBOLS = 100


class RandomPermutationTask(OneHotGenerator):
    """Generator of the random permutation problem: name the first of T symbols.

    A batch has inputs [T, B, symbols] float32, one-hot, and targets [B] int64. The first symbol, which is the target,
    is 0 or 1; the others are drawn uniformly from 2 ... symbols - 1 (Pascanu et al. 2013).

    Args:
        T: number of time steps, at least 2.
        symbols: size of the alphabet, at least 3.

    Attributes:
        num_features, num_classes: one per symbol.
        baseline: cross-entropy in nats of the best guess without memory: one of two symbols, ln 2.

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
        self.num_features = self.num_classes = symbols
        self.baseline = math.log(2.0)

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(2, self.symbols, (self.T, batch), generator=generator)
        symbols[0] = torch.randint(0, 2, (batch,), generator=generator)
        return symbols, symbols[0]
