"""dense_scan: h_t = phi(W h_{t-1} + e_t), the whole time loop in one launch.

Kernel, maps and memory: ``_scan.py``. Here: W is the one matrix, 64 KiB of registers at N = 128 in float32. Limits: N
up to 128; in float64, W is read in every step from N = 65 on.
"""

from orthokern.triton_kernels._scan import scan_bwd as dense_scan_bwd
from orthokern.triton_kernels._scan import scan_fwd as dense_scan_fwd

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]
