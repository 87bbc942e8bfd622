"""dense_scan: h_t = phi(W h_{t-1} + e_t), the whole time loop in one launch.

Kernels, maps, memory and the ways to multiply: ``_scan.py``. Here: W is the one resident matrix, 64 KiB of registers at
N = 128 in float32. Limits: N up to 512; from N = 129 on (float64: from 65 on) W is read in every step, see
docs/triton-kernels.md.
"""

from orthokern.triton_kernels._gradients import run_backward as dense_scan_bwd
from orthokern.triton_kernels._gradients import run_forward as dense_scan_fwd
from orthokern.triton_kernels._gradients import serves_replicas

__all__ = ["dense_scan_bwd", "dense_scan_fwd", "serves_replicas"]
