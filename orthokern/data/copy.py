"""The copy task of Hochreiter & Schmidhuber (1997): remember ten symbols for T steps, then output them in order.

step    0 ......... K-1 | K ............... | ........... L-1    K symbols to recall, L = T + 2 K steps
input   a a a a a a a a | - - - ... - - - # | - - - - - - - -    T-1 blanks, the marker, K blanks
target  - - - - - - - - | - - - ... - - - - | a a a a a a a a    blank until the last K steps
"""

import math

import torch
from torch import Tensor

from orthokern.data._generator import Generator
from orthokern.errors import InputError, integer

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)  # of token ids that modules accept


class CopyTask(Generator):
    """Generator of the copy task of Hochreiter and Schmidhuber 1997: remember K symbols for T steps, then output them.

    A batch has tokens and targets, each [T + 2 K, B] of `dtype`. The first recalled symbol is due at the step after the
    marker (Arjovsky et al. 2015).

    Token ids: 0 is the blank, 1 ... `symbols` are the symbols, `symbols + 1` is the marker. Target classes: 0 is the
    blank, 1 ... `symbols` the symbols.

    Args:
        T: number of steps over which the symbols are remembered, at least 1.
        symbols: number of different symbols, at least 1 (8 in all papers that report the task).
        recall: number of symbols to remember, K, at least 1 (10 in all papers).
        dtype: dtype of tokens and targets; uint8 needs an eighth of the memory of int64.

    Attributes:
        length: number of time steps of a sequence, T + 2 K.
        num_ids: number of token ids, symbols + 2: the `input_size` of a module with token ids as input.
        num_classes: number of target classes, symbols + 1.
        baseline: cross-entropy in nats per step of the best guess without memory, K ln(symbols) / (T + 2 K).

    Example::

        >>> task = CopyTask(T=5, recall=3)
        >>> tokens, targets = task.batch(4, generator=torch.Generator().manual_seed(0))
        >>> tokens.shape, task.num_ids, task.num_classes
        (torch.Size([11, 4]), 10, 9)
        >>> torch.equal(tokens[:3], targets[-3:])
        True
    """

    def __init__(self, T: int, symbols: int = 8, recall: int = 10, dtype: torch.dtype = torch.int64) -> None:
        self.T = T = integer("T", T)
        self.symbols = symbols = integer("symbols", symbols)
        self.recall = recall = integer("recall", recall)
        if dtype not in _DTYPES or torch.iinfo(dtype).max <= symbols:
            raise InputError(f"dtype must be uint8, int16, int32 or int64 and hold {symbols + 1}, got {dtype}")
        self.dtype = dtype
        self.length = T + 2 * recall
        self.num_ids = symbols + 2
        self.num_classes = symbols + 1
        self.marker = symbols + 1
        self.marker_step = recall + T - 1
        self.baseline = recall * math.log(symbols) / self.length

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(1, self.symbols + 1, (self.recall, batch), generator=generator)
        tokens = torch.zeros(self.length, batch, dtype=self.dtype)
        targets = torch.zeros_like(tokens)
        tokens[: self.recall] = targets[-self.recall :] = drawn
        tokens[self.marker_step] = self.marker
        return tokens, targets

    def scalar(self, tokens: Tensor, marker: float = -1.0) -> Tensor:
        """Encodes tokens as one number per step: the value of the symbol, 0 for the blank, `marker` for the marker.

        Args:
            tokens: [T + 2 K, B].
            marker: the value of the marker: -1 in the code released by Vorontsov et al., `symbols + 1` in most other
                code.

        Returns:
            [T + 2 K, B, 1] float32, on the device of `tokens`.
        """
        values = tokens.to(torch.float32)
        values[self.marker_step] = marker
        return values.unsqueeze(-1)
