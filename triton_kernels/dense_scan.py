"""dense_scan: h_t = phi(W h_{t-1} + e_t), the whole time loop in one launch.

Kernels, maps, memory and the ways to multiply: ``_scan.py``. Here: W is the one resident matrix, 64 KiB of registers at
N = 128 in float32. Limits: N up to 128; in float64, W is read in every step from N = 65 on.
"""

from torch import Tensor

from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.triton_kernels._gradients import run_backward, run_forward

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]


def dense_scan_fwd(args: ScanArgs) -> ScanStates:
    return run_forward(*args.parts())


def dense_scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    return run_backward(*args.parts(), grad_hs, states, pre, need_x=need_x, need_params=need_params)
