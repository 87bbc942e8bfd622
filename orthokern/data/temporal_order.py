"""The temporal order problems of Hochreiter & Schmidhuber (1997): which of X and Y occurs at each of a few positions.

The positions are those of Pascanu et al. 2013 and of the code released with Manchev & Spratling. The original problem
has fixed ranges for sequences of about 100 steps, and special symbols for the start and the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern.data._checks import integer
from orthokern.data._generator import OneHotGenerator
from orthokern.errors import InputError

SYMBOLS = 6
_TENTHS = {2: ((1, 2), (5, 6)), 3: ((1, 2), (3, 4), (6, 7))}


class TemporalOrderTask(OneHotGenerator):
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
        self.T = integer("T", T, 10)
        if integer("bits", bits, 2) not in _TENTHS:
            raise InputError(f"bits must be 2 or 3, got {bits!r}")
        self.bits = bits
        self.length = T
        self.num_features = SYMBOLS
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
        return symbols, value
