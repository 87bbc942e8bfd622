"""Synthetic tasks with an answer after the last step (Hochreiter & Schmidhuber 1997; Pascanu et al. 2013): what was the
first symbol, and which of X and Y occurred at each of a few positions.

As in the code released with Manchev & Spratling, the temporal order has the positions of Pascanu et al.; the original
problem has fixed ranges for sequences of about 100 steps, and special symbols for the start and the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern.data._generator import Generator
from orthokern.errors import InputError, integer

_TENTHS = {2: ((1, 2), (5, 6)), 3: ((1, 2), (3, 4), (6, 7))}


def _one_hot(symbols: Tensor, count: int) -> Tensor:
    """symbols [T, B] int64 -> [T, B, count] float32."""
    return torch.zeros(*symbols.shape, count).scatter_(2, symbols.unsqueeze(-1), 1.0)


class RandomPermutationTask(Generator):
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

    def __init__(self, T: int, *, symbols: int = 100) -> None:
        self.T = T = integer("T", T, 2)
        self.symbols = symbols = integer("symbols", symbols, 3)
        self.length = T
        self.num_features = self.num_classes = symbols
        self.baseline = math.log(2.0)

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(2, self.symbols, (self.T, batch), generator=generator)
        symbols[0] = targets = torch.randint(0, 2, (batch,), generator=generator)
        return _one_hot(symbols, self.symbols), targets


class TemporalOrderTask(Generator):
    """Generator of the temporal order problem: which of X and Y occurs at each of two or three places of a sequence.

    A batch has inputs [T, B, 6] float32, one-hot, and targets [B] int64, in which the first place is the highest bit, X
    is 0 and Y is 1. Symbols 0 to 3 are distractors, 4 is X and 5 is Y. The places are uniform in [0.1 T, 0.2 T) and
    [0.5 T, 0.6 T), for 3 bits in [0.1 T, 0.2 T), [0.3 T, 0.4 T) and [0.6 T, 0.7 T) (Pascanu et al. 2013).

    Args:
        T: number of time steps, at least 10.
        bits: 2 or 3, the number of places.

    Attributes:
        num_features: 6, one per symbol.
        num_classes: 4 or 8.
        baseline: cross-entropy in nats of the best guess without memory, which is uniform: bits ln 2.

    Example::

        >>> task = TemporalOrderTask(T=50)
        >>> inputs, targets = task.batch(4, generator=torch.Generator().manual_seed(0))
        >>> inputs.shape, task.num_classes, int(inputs[..., 4:].sum())
        (torch.Size([50, 4, 6]), 4, 8)
    """

    def __init__(self, T: int, *, bits: int = 2) -> None:
        self.T = T = integer("T", T, 10)
        self.bits = bits = integer("bits", bits, 2)
        if bits not in _TENTHS:
            raise InputError(f"bits must be 2 or 3, got {bits}")
        self.length = T
        self.num_features = 6
        self.num_classes = 2**bits
        self.baseline = bits * math.log(2.0)
        self._spans = [(T * start // 10, T * end // 10) for start, end in _TENTHS[bits]]

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(0, 4, (self.T, batch), generator=generator)
        drawn = torch.randint(0, 2, (self.bits, batch), generator=generator)
        value = torch.zeros(batch, dtype=torch.int64)
        for (start, end), bit in zip(self._spans, drawn, strict=True):
            place = torch.randint(start, end, (1, batch), generator=generator)
            symbols.scatter_(0, place, 4 + bit.unsqueeze(0))
            value = 2 * value + bit
        return _one_hot(symbols, 6), value
