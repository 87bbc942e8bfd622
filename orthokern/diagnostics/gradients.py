"""The norms of states and gradients that the scans record: `tap`, and curves of them for a plot."""

import torch
from torch import Tensor

from orthokern.ops._taps import profile_steps, tap

__all__ = ["profile_steps", "tap", "thin_profile"]


def thin_profile(norms: Tensor, points: int = 64) -> list[float]:
    """A profile through time, norms [T] on any device, reduced to at most `points` values for a record: those at
    `profile_steps(T, points)`, with the first and the last, rounded to six significant digits.

    Example::

        >>> thin_profile(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), points=3)
        [1.0, 3.0, 5.0]
    """
    values = norms[torch.tensor(profile_steps(len(norms), points), device=norms.device)].tolist()
    return [float(f"{value:.6g}") for value in values]
