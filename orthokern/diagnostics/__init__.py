"""What happens inside a recurrent network while it trains: its spectrum, and signal and gradient on their way through
time; and what runs recorded of that, read, compared and drawn.

`python -m orthokern.diagnostics RUN ...` does the latter. `orthokern.diagnostics.plots` loads matplotlib when it draws;
importing it, or anything here, does not.
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
