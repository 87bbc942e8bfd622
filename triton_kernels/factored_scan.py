"""factored_scan: h_t = phi(U (s * (V^T h_{t-1})) + e_t), the whole time loop in one launch; W is never formed.

Kernel, maps and memory: ``_scan.py``. Here: two matrices, 128 KiB of registers at N = K = 128 in float32, and two
successive products in every step. Limits: N up to 128; in float64 they are read in every step from N = 65 on, see
docs/triton-kernels.md. Chunks of time form W, and run the dense scan.
"""

from orthokern.triton_kernels._scan import scan_bwd as factored_scan_bwd
from orthokern.triton_kernels._scan import scan_fwd as factored_scan_fwd

__all__ = ["factored_scan_bwd", "factored_scan_fwd"]
