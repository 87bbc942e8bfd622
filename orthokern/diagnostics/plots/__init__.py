"""Plots of one run or of several, drawn from the records of their metrics.jsonl and written as PNG.

Functions named plot_... draw one run, from its records, to a file. Functions named compare_... draw several runs and
return the figure; `save` writes it. Figures are built without pyplot: no global state, no window, and a shorter import.
Records that lack what a plot needs are passed over; a function returns None, and draws nothing, when none has it.
Colours are told apart by colour-blind readers too.

Long runs are thinned before anything is drawn: a curve of more than 1000 points becomes means over as many stretches of
equal length, extremes become those of the stretch, and a heat map shows 600 of its columns.
"""

from orthokern.diagnostics.plots._figures import AXES, save, thin_curve
from orthokern.diagnostics.plots.curves import (
    compare_curves,
    compare_dynamics,
    iterations_over_lengths,
    plot_layers,
    plot_learning,
    plot_losses,
)
from orthokern.diagnostics.plots.heat_maps import (
    Profiles,
    compare_angles,
    compare_gradients,
    compare_states,
    plot_angles,
    plot_gradients,
    plot_states,
    profiles,
)
from orthokern.diagnostics.plots.linear import memory
from orthokern.diagnostics.plots.spectra import compare_spectra, plot_moduli, plot_spectrum
from orthokern.diagnostics.plots.stability import compare_stability, plot_stability

__all__ = [
    "AXES",
    "Profiles",
    "compare_angles",
    "compare_curves",
    "compare_dynamics",
    "compare_gradients",
    "compare_spectra",
    "compare_stability",
    "compare_states",
    "iterations_over_lengths",
    "memory",
    "plot_angles",
    "plot_gradients",
    "plot_layers",
    "plot_learning",
    "plot_losses",
    "plot_moduli",
    "plot_spectrum",
    "plot_stability",
    "plot_states",
    "profiles",
    "save",
    "thin_curve",
]
