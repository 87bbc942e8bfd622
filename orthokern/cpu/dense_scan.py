"""dense_scan on the CPU; the kernels: ``csrc/cpu/dense_scan.cpp``."""

from orthokern.cpu._scan import scan_bwd as dense_scan_bwd
from orthokern.cpu._scan import scan_fwd as dense_scan_fwd

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]
