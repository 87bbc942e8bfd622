"""Plots of one run or of several, drawn from the records of their metrics.jsonl and written as PNG.

Functions named plot_... draw one run, from its records, to a file. Functions named compare_... draw several runs and
return the figure; `save` writes it. Figures are built without pyplot: no global state, no window, and a shorter import.
Records without the fields that a plot needs are skipped. If no record has them, the function draws nothing and returns
None. All raise ValueError if matplotlib rejects its own settings (MPLBACKEND, matplotlibrc), and plot_... OSError
where the file cannot be written; compare_... raise InputError for a setting that no run has, and for x = "epoch" if the
length of an epoch is unknown for a run. `title` is the title of the figure, `path` the PNG to write and `key` the field
of the records; `legend` and `x` are explained in `compare_curves`. The colours can be distinguished by colour-blind
readers.

Long runs are downsampled: a curve of more than 1000 points is drawn as means over 1000 intervals of equal length,
minima and maxima are taken over these intervals, and a heat map shows at most 600 columns.
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
from orthokern.diagnostics.plots.parts import compare_parts
from orthokern.diagnostics.plots.spectra import (
    compare_moduli,
    compare_spectra,
    compare_stability,
    plot_moduli,
    plot_spectrum,
    plot_stability,
)

__all__ = [
    "AXES",
    "Profiles",
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
