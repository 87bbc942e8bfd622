"""dense_scan on CUDA; the kernels: ``csrc/cuda/dense_scan.cu``."""

from torch import Tensor

from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.cuda._scan import scan_bwd, scan_fwd

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]


def dense_scan_fwd(args: ScanArgs) -> ScanStates:
    return scan_fwd(*args.parts())


def dense_scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    *,
    need_x: bool = True,
    need_params: bool = True,
) -> ScanGradients:
    return scan_bwd(*args.parts(), grad_hs, states, pre, need_x=need_x, need_params=need_params)
