"""dense_scan: a recurrence with a dense matrix."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from orthokern._scan_contract import ScanOptions
from orthokern.errors import InputError
from orthokern.ops._checks import is_float, is_tensor, scan_args
from orthokern.ops._scan import SUPPORT, scan
from orthokern.ops.modal.op import modal_scan

__all__ = ["SUPPORT", "dense_scan"]


def dense_scan(x: Tensor, w: Tensor, h0: Tensor | None = None, **options: Unpack[ScanOptions]) -> Tensor:
    """h_t = phi(W h_{t-1} + e_t) over a sequence.

    Equation:
        a_t = W h_{t-1} + e_t,    h_t = phi(a_t),    t = 1 ... T,    and e_t as in ``factored_scan``.
        Backward: Note [Dense scan backward] in ``orthokern/reference/dense_scan.py``.

    Args:
        w: [N, N], applied to column vectors as torch's weight_hh. All floating tensors have its dtype.
        x, h0, options: as in ``factored_scan``.

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps.
        Differentiable in x, w, h0, weight, bias, act_param, reset_state, leak.

    Raises:
        InputError: wrong shapes, dtypes, devices, names, token ids or values of options.
        BackendUnavailable: the requested backend does not support the call.

    Saved:
        As ``factored_scan``.

    Cost:
        Forward 2 T B N^2 flops (+ 2 T B N D for features), backward scan the same, gradient of w 2 T B N^2,
        recomputation one forward more. Writes T B N elements forward, T B N of adjoints backward.

    Numerics:
        As ``factored_scan``, in the dtype of w.

    Example::

        >>> w = torch.linalg.qr(torch.randn(8, 8))[0]
        >>> dense_scan(torch.randn(100, 4, 8), w, activation="relu").shape
        torch.Size([100, 4, 8])
    """
    is_tensor("w", w)
    if w.ndim != 2 or w.shape[0] != w.shape[1] or w.shape[0] < 1:
        raise InputError(f"w has shape {list(w.shape)}: accepted is [N, N], N at least 1")
    is_float("w", w)
    args = scan_args("w", (w,), x, h0, options)
    return modal_scan(args) if args.algorithm == "modal" else scan(args)
