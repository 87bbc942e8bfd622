"""dense_scan: a recurrence through a dense W."""

from __future__ import annotations

from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import Map
from orthokern.ops._scan_op import SUPPORT, ScanOp

__all__ = ["SUPPORT", "dense_scan"]

_OP = ScanOp("dense_scan", ("w",), lambda w: Map(None, None, w), lambda m, map_: (m,), ("N",))


@keeps_dtype
def dense_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    checkpoint_every: int = 0,
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> Tensor:
    """A dense recurrent layer over a whole sequence. Inputs are taken as checked (``orthokern.functional`` does).

    Equation:
        e_t = x_t                        without weight
            = weight x_t + bias          for features; for token ids x_t is one-hot, and is not materialised
        a_t = W h_{t-1} + e_t,    h_t = phi(a_t),    t = 1 ... T.
        With lengths, a_t = h_t = 0 for t > lengths[b]. With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [Dense scan backward] in ``orthokern/reference/dense_scan.py``.

    Args:
        w: [N, N], applied to column vectors (row form: h @ w.T), as torch's weight_hh.
        The others: as in ``orthokern.ops.factored_scan``, in the floating dtype of w.

    Returns:
        hs [T, B, N], the states h_1 ... h_T.

    Saved:
        As ``factored_scan``.

    Cost:
        Forward 2 T B N^2 flops (+ 2 T B N D for features), backward scan the same, gradient of w 2 T B N^2,
        recomputation one forward more. Writes T B N elements forward, T B N of adjoints backward.

    Numerics:
        As ``factored_scan``, in the dtype of w.
    """
    return _OP(
        backend, x, w, h0, weight, bias, act_param, activation, checkpoint_every, backend, precision, algorithm,
        lengths, message_clip, resets, reset_state,
    )  # fmt: skip
