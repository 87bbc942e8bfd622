"""‖h_t‖ and ‖dL/dh_t‖ for every t, taken from the scan itself: it costs one norm per time step and no second pass.

    with orthokern.diagnostics.tap() as taken:
        loss = criterion(model(x))
        loss.backward()
    taken.state_norms[0]         # [T]; the Frobenius norm over batch and units of h_t: one tensor per scan that ran
    taken.grad_norms[0]          # [T]; that of dL/dh_t: one tensor per scan that ran backward

The loss is whatever was differentiated. The paper's Figure 2 (Vorontsov et al. 2017) shows the loss of the last step
alone: to draw exactly that, call backward on that step's loss.
"""

import torch
from torch import Tensor

from orthokern.errors import InputError
from orthokern.ops._taps import tap

__all__ = ["profile_steps", "tap", "thin_profile"]


def profile_steps(length: int, points: int = 64) -> list[int]:
    """Time steps, first and last among them, at which a profile through time is kept.

    Args:
        length: number of time steps T, at least 1.
        points: number of steps to choose, at least 2; all of them if there are no more.

    Returns:
        Increasing step numbers in [0, length).

    Raises:
        InputError: length below 1 or points below 2.
    """
    for name, value, low in (("length", length, 1), ("points", points, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(f"{name} is {value!r}; accepted: an integer of at least {low}")
    return torch.linspace(0, length - 1, min(points, length), dtype=torch.float64).round().long().tolist()


def thin_profile(norms: Tensor, points: int = 64) -> list[float]:
    """A profile through time, thinned out for the record.

    Args:
        norms: [T] float, of the states or of the gradient, on any device.
        points: as in `profile_steps`.

    Returns:
        The values at `profile_steps(T, points)`, to six significant digits.
    """
    kept = norms[torch.tensor(profile_steps(len(norms), points), device=norms.device)].tolist()
    return [float(f"{value:.6g}") for value in kept]
