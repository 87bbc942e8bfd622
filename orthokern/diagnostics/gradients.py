"""‖dL/dh_t‖ for every t, taken from the scan's own backward pass: it costs one norm per time step and no second pass.

    with orthokern.diagnostics.tap() as taken:
        loss.backward()
    taken.grad_norms[0]          # [T]; the Frobenius norm over batch and units of dL/dh_t, one tensor per scan that ran
    backward

The loss is whatever was differentiated. The paper's Figure 2 (Vorontsov et al. 2017) shows the loss of the last step
alone: to draw exactly that, call backward on that step's loss.
"""

import torch
from torch import Tensor

from orthokern.ops._taps import tap

__all__ = ["profile_steps", "tap", "thin_profile"]


def profile_steps(length: int, points: int = 64) -> list[int]:
    """Time steps, first and last among them, at which a profile through time is kept.

    Args:
        length: number of time steps T, at least 1.
        points: number of steps to choose, at least 2; all of them if there are no more.

    Returns:
        Increasing step numbers in [0, length).
    """
    return torch.linspace(0, length - 1, min(points, length), dtype=torch.float64).round().long().tolist()


def thin_profile(grad_norm: Tensor, points: int = 64) -> list[float]:
    """A profile through time, thinned out for the record.

    Args:
        grad_norm: [T] float, on any device.
        points: as in `profile_steps`.

    Returns:
        The values at `profile_steps(T, points)`, to six significant digits.
    """
    kept = grad_norm[torch.tensor(profile_steps(len(grad_norm), points), device=grad_norm.device)].tolist()
    return [float(f"{value:.6g}") for value in kept]
