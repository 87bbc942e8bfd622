"""factored_scan: h_t = phi(U (s * (V^T h_{t-1})) + e_t), the whole time loop in one launch; W is never formed.

Kernels, maps, memory and the ways to multiply: ``_scan.py``. Here: two resident matrices, 128 KiB of registers at
N = K = 128 in float32, and two products after one another in every step. Limits: N up to 128; in float64 they are read
in every step from N = 65 on, see docs/triton-kernels.md. Chunks of time form W, and run the dense scan.
"""

from torch import Tensor

from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.triton_kernels._gradients import run_backward, run_forward

__all__ = ["factored_scan_bwd", "factored_scan_fwd"]


def factored_scan_fwd(args: ScanArgs) -> ScanStates:
    return run_forward(*args.parts())


def factored_scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    return run_backward(*args.parts(), grad_hs, states, pre, need_x=need_x, need_params=need_params)
