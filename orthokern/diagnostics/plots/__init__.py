"""Plots of one run or of several, drawn from the records of their metrics.jsonl and written as PNG.

Functions named compare_... draw one run or several, those named plot_... one run, and `plot_latent` a module. They
return the figure, or None if no record has the fields that the plot needs; `save` writes it. Figures are built without
pyplot: no global state, no window, and a shorter import. `legend`, `x` and `title`, in `common`, are explained in
`compare_curves`. The colours can be distinguished by colour-blind readers.

InputError is raised for a setting that no run has, and for x = "epoch" if the length of an epoch is unknown for a run.

Long runs are downsampled: a curve of more than 1000 points is drawn as means over 1000 intervals of equal length,
minima and maxima are taken over these intervals, and a heat map shows at most 600 columns.
"""

from orthokern.diagnostics.plots._figures import AXES, save
from orthokern.diagnostics.plots.curves import compare_curves, plot_layers, plot_learning
from orthokern.diagnostics.plots.heat_maps import compare_angles, compare_gradients, compare_states
from orthokern.diagnostics.plots.latent import plot_latent
from orthokern.diagnostics.plots.spectra import compare_moduli, compare_spectra, compare_stability
from orthokern.diagnostics.plots.studies import compare_dynamics, compare_parts, iterations_over_lengths, memory

__all__ = [
    "AXES",
    "compare_angles",
    "compare_curves",
    "compare_dynamics",
    "compare_gradients",
    "compare_moduli",
    "compare_parts",
    "compare_spectra",
    "compare_stability",
    "compare_states",
    "iterations_over_lengths",
    "memory",
    "plot_latent",
    "plot_layers",
    "plot_learning",
    "save",
]
