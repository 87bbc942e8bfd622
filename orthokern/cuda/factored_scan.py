"""factored_scan on CUDA; the kernels: ``csrc/cuda/factored_scan.cu``."""

from orthokern.cuda._scan import scan_bwd as factored_scan_bwd
from orthokern.cuda._scan import scan_fwd as factored_scan_fwd

__all__ = ["factored_scan_bwd", "factored_scan_fwd"]
