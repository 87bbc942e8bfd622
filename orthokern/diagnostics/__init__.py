"""What happens inside a recurrent network while it trains: its spectrum, and the gradient on its way back through time.

`orthokern.diagnostics.plots` loads matplotlib when it draws; importing it, or anything here, does not.
"""

from orthokern.diagnostics.gradients import profile_steps, tap, thin_profile
from orthokern.diagnostics.spectrum import summarize_spectrum

__all__ = ["profile_steps", "summarize_spectrum", "tap", "thin_profile"]
