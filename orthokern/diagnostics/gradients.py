"""‖h_t‖ and ‖dL/dh_t‖ for every t, recorded by the scan itself. This costs one norm per time step, and no second pass.

    with orthokern.diagnostics.tap() as recorded:
        loss = criterion(model(x))
        loss.backward()
    recorded.state_norms[0]         # [T]; the Frobenius norm of h_t over batch and units; one tensor per forward scan
    recorded.grad_norms[0]          # [T]; the Frobenius norm of dL/dh_t; one tensor per backward scan

L is the tensor on which backward was called. Figure 2 of Vorontsov et al. 2017 uses the loss of the last time step: to
draw that figure, call backward on the loss of that step.
"""

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
    kept = norms[torch.tensor(profile_steps(len(norms), points), device=norms.device)].tolist()
    return [float(f"{value:.6g}") for value in kept]
