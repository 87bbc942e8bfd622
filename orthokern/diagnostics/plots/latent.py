"""The dynamics of a recurrence of low rank: trajectories of its latent states, and its eigenvalues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from orthokern.diagnostics.plots._figures import BLUE, GREY, new_figure
from orthokern.errors import InputError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@torch.no_grad()
def plot_latent(
    module: Any,
    states: Tensor,
    groups: Tensor | None = None,
    *,
    layer: int = 0,
    reverse: bool = False,
    axes: Any = None,
) -> Figure:
    """Trajectories of kappa = V^T h, the K numbers of a state that W reads, and the eigenvalues of V^T U diag(s).

    kappa is drawn over time for K = 1, in its plane for K = 2, and in the plane of its first two principal components
    for K > 2. The eigenvalues are those of W except for N - K zeros; the circle is the unit circle.

    Args:
        module: a FactorizedRNN.
        states: [T, B, N] of one recurrence, time first.
        groups: numbers [B]: a trajectory is the mean over the sequences with the same number, and the legend has these
            numbers. None: a trajectory for each sequence.
        layer, reverse: the recurrence.
        axes: two axes of matplotlib to draw into; None: those of a new figure.

    Returns:
        The figure.

    Raises:
        InputError: the module has no latent states, or states or groups have another shape or type, or are not finite.
    """
    if not hasattr(module, "latent_matrix"):
        raise InputError(f"module is of type {type(module).__name__}; accepted: a FactorizedRNN")
    kappa = module.latent(states, layer, reverse).double().cpu()  # [T, B, K]
    require(kappa.dim() == 3, "states", f"[T, B, {module.hidden_size}]", list(states.shape))
    require(bool(kappa.isfinite().all()), "states", "finite", "NaN or infinity")
    names, K = None, kappa.shape[2]
    if axes is None:
        axes = new_figure(1, 2, (8.4, 3.8), f"rank {module.rank}: latent states and eigenvalues")[1][0]
    if groups is not None:
        fits = isinstance(groups, Tensor) and groups.shape == kappa.shape[1:2]
        shape = list(getattr(groups, "shape", []))
        require(fits, "groups", f"a Tensor [B] = [{kappa.shape[1]}]", shape or type(groups).__name__)
        names, place = groups.cpu().unique(return_inverse=True)
        kappa = torch.stack([kappa[:, place == index].mean(1) for index in range(len(names))], 1)
    if K > 2:
        kappa = kappa - kappa.mean((0, 1))
        kappa = kappa @ torch.linalg.svd(kappa.flatten(0, 1), full_matrices=False).Vh[:2].mT
    from matplotlib import colormaps

    colours = colormaps["coolwarm"](np.linspace(0, 1, kappa.shape[1]))
    for index, colour in enumerate(colours):
        label = None if names is None else f"{names[index].item():g}"
        axes[0].plot(*kappa[:, index].unbind(-1), color=colour, linewidth=1.2, label=label)
    what = "principal component {} of κ" if K > 2 else "κ{}"
    axes[0].set(xlabel="step" if K == 1 else what.format(1), ylabel=what.format(1 if K == 1 else 2))
    if names is not None:
        axes[0].legend(loc="best", fontsize=7)
    values = torch.linalg.eigvals(module.latent_matrix(layer, reverse).double().cpu())
    circle = torch.linspace(0, 2 * torch.pi, 200)
    axes[1].plot(circle.cos(), circle.sin(), color=GREY, linewidth=0.8)
    axes[1].plot(values.real, values.imag, "o", color=BLUE, markersize=4)
    axes[1].set(xlabel="real part", ylabel="imaginary part", title="eigenvalues of W", aspect="equal")
    figure: Figure = axes[0].figure
    return figure
