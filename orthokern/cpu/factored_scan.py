"""factored_scan on the CPU; the kernels: ``csrc/cpu/factored_scan.cpp``."""

from orthokern.cpu._scan import scan_bwd as factored_scan_bwd
from orthokern.cpu._scan import scan_fwd as factored_scan_fwd

__all__ = ["factored_scan_bwd", "factored_scan_fwd"]
