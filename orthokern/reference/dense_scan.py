"""dense_scan, the reference: h_t = phi(W h_{t-1} + e_t).

Note [Dense scan backward]
    As Note [Factored scan backward] with W instead of U S V^T, and dL/dW = M = sum_t delta_t h_{t-1}^T itself.
"""

from orthokern.reference._scan import scan_bwd as dense_scan_bwd
from orthokern.reference._scan import scan_fwd as dense_scan_fwd

__all__ = ["dense_scan_bwd", "dense_scan_fwd"]
