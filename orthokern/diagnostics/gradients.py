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

from orthokern.ops._taps import profile_steps, tap

__all__ = ["profile_steps", "tap", "thin_profile"]


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
