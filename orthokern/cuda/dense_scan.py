"""dense_scan on CUDA; the kernels: ``csrc/cuda/dense_scan.cu``."""

from orthokern.cuda._scan import scan_bwd as dense_scan_bwd
from orthokern.cuda._scan import scan_fwd as dense_scan_fwd

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]
