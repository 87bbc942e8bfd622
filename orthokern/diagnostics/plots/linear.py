"""The response of a linear network to its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from orthokern.diagnostics.plots._figures import COLOURS, LINES, new_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


def memory(matrix: Tensor, transients: Mapping[str, Tensor], curves: Mapping[str, Tensor], title: str = "") -> Figure:
    """The response of non-normal matrices: Figure 1 of the nnRNN report (Jahagirdar et al. 2019).

    Args:
        matrix: [N, N], drawn as an image.
        transients: name -> [T, M], the norms of M states over time (`transient_norms`): mean and standard deviation are
            drawn.
        curves: name -> [T], Fisher memory curves (`fisher_memory`).
    """
    figure, axes = new_panels(["(a) the matrix", "(b) norm of the state", "(c) Fisher memory J(k)"], title)
    picture = axes[0].imshow(matrix.numpy(), cmap="viridis")
    axes[0].grid(False)
    figure.colorbar(picture, ax=axes[0], shrink=0.8)
    for index, (name, norms) in enumerate(transients.items()):
        colour, line = COLOURS[index % len(COLOURS)], LINES[index // 3 % len(LINES)]
        mean, spread = norms.mean(1).numpy(), norms.std(1).numpy()
        alive = mean > 0  # the powers of a nilpotent matrix become exactly zero
        at = np.arange(len(mean))[alive]
        axes[1].plot(at, mean[alive], color=colour, linestyle=line, linewidth=1.2, label=name)
        low = np.maximum(mean - spread, 0.1 * mean)[alive]
        axes[1].fill_between(at, low, (mean + spread)[alive], color=colour, alpha=0.15, linewidth=0)
    for index, (name, curve) in enumerate(curves.items()):
        values = curve.numpy()
        at = np.flatnonzero(values > 1e-8 * values.max())
        colour, line = COLOURS[index % len(COLOURS)], LINES[index // len(COLOURS) % len(LINES)]
        axes[2].plot(at, values[at], color=colour, linestyle=line, linewidth=1.2, label=name)
    for axis in axes[1:]:
        axis.set_yscale("log")
        axis.set_xlabel("steps after the input")
        axis.legend(loc="best", fontsize=6)
    return figure
