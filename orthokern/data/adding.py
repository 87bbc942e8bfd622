"""The adding problem of Hochreiter & Schmidhuber (1997): add the two marked numbers among T numbers."""

import torch
from torch import Tensor

from orthokern.data._generator import Generator
from orthokern.errors import InputError, integer, one_of

POSITIONS = ("halves", "pascanu")
TARGETS = ("sum", "mean")


class AddingTask(Generator):
    """Generator of the adding problem of Hochreiter and Schmidhuber 1997: add the two marked numbers among T.

    A batch has inputs [T, B, 2] float32, a value in [0, 1) and an indicator, which is 1 at the marks and 0 elsewhere,
    and targets [B] float32.

    Args:
        T: number of time steps, at least 2; at least 10 for positions "pascanu".
        target: "sum" (Arjovsky et al. 2015) or "mean" of the two marked numbers (Pascanu et al. 2013, and the code that
            Vorontsov et al. 2017 released).
        positions: "halves": one mark in [0, T // 2), one in [T // 2, T), as in Arjovsky et al. 2015 and Vorontsov et
            al. 2017; "pascanu": one in [0, T // 10), one in [T // 10, T // 2), as in Pascanu et al. 2013.

    Attributes:
        num_features: 2, the value and the indicator.
        baseline: mean squared error of the best guess without memory, the expected target: 1/6 for the sum, 1/24 for
            the mean.

    Example::

        >>> task = AddingTask(T=100)
        >>> inputs, targets = task.batch(4, generator=torch.Generator().manual_seed(0))
        >>> inputs.shape, targets.shape
        (torch.Size([100, 4, 2]), torch.Size([4]))
        >>> torch.allclose((inputs[..., 0] * inputs[..., 1]).sum(0), targets)
        True
    """

    def __init__(self, T: int, *, target: str = "sum", positions: str = "halves") -> None:
        self.target = one_of("target", target, TARGETS)
        self.positions = one_of("positions", positions, POSITIONS)
        self.T = T = integer("T", T)
        self.length = T
        self.num_features = 2
        self._bounds = (0, T // 2, T) if positions == "halves" else (0, T // 10, T // 2)
        smallest = 2 if positions == "halves" else 10
        if T < smallest:
            raise InputError(f"T must be at least {smallest} for positions {positions!r}, got {T}")
        # the variance of one uniform number is 1/12
        self.baseline = 1 / 6 if target == "sum" else 1 / 24

    def _draw(self, batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        values = torch.rand(self.T, batch, generator=generator)
        start, middle, end = self._bounds
        first = torch.randint(start, middle, (batch,), generator=generator)
        second = torch.randint(middle, end, (batch,), generator=generator)
        marked = torch.stack([first, second])  # [2, B]
        total = values.gather(0, marked).sum(0)
        indicators = torch.zeros_like(values).scatter_(0, marked, 1.0)
        return torch.stack([values, indicators], -1), total if self.target == "sum" else total / 2
