"""Diagnostics of recurrent networks during training: the spectrum of the recurrent matrix, and the norms of states and
gradients through time; and tools that read, compare and plot the records of training runs.

`python -m orthokern.diagnostics RUN ...` compares and plots runs. `orthokern.diagnostics.plots` loads matplotlib when
it draws; importing this package does not.
"""

from orthokern.diagnostics.fisher import FisherMemory, fisher_memory, transient_norms
from orthokern.diagnostics.gradients import profile_steps, tap, thin_profile
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.diagnostics.spectrum import (
    angle_histogram,
    diagnose_recurrence,
    eigenvalue_angles,
    spectral_radius,
    summarize_spectrum,
)
from orthokern.diagnostics.stability import diagnose_stability

__all__ = [
    "FisherMemory",
    "RunRecord",
    "angle_histogram",
    "diagnose_recurrence",
    "diagnose_stability",
    "eigenvalue_angles",
    "fisher_memory",
    "load_run",
    "profile_steps",
    "spectral_radius",
    "summarize_spectrum",
    "tap",
    "thin_profile",
    "transient_norms",
]
