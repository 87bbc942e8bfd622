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
            = weight x_t + bias          for features; for token ids x_t is one-hot, and never materialised
        a_t = W h_{t-1} + e_t,    h_t = phi(a_t),    t = 1 ... T.
        With lengths, a_t = h_t = 0 for t > lengths[b]. With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [Dense scan backward] in ``orthokern/reference/dense_scan.py``.

    Args:
        x: [T, B, N], or [T, B, D] with weight, in the floating dtype of w; or int64 [T, B] token ids in [0, D)
            (checked on a CPU; not on a GPU, where a check would synchronise: a wrong id makes its sequence NaN).
        w: [N, N], applied to column vectors (row form: h @ w.T), as torch's weight_hh.
        h0: [B, N], the state before the first step.
        weight: [N, D] or None; bias: [N] or None.
        act_param: [1] or [N]: slope (prelu, leaky_relu) or bias (modrelu); else None.
        activation: a name of ``orthokern.ops.activations.NAMES``.
        checkpoint_every: k > 0 keeps every k-th state for the backward and recomputes the others; 0 keeps all.
        backend: a name, "auto" or None. An explicit "reference" runs plain differentiable torch code, where
            checkpoint_every changes nothing.
        precision: the least precision of float32 products that a kernel may use: "ieee", "3xtf32" (three TF32 products,
            nearly float32), "tf32" or "bf16" (both factors rounded). State and sums stay float32. A backend without
            the faster products computes IEEE ones, as cpu and reference always do; so does float64.
        algorithm: "sequential", step after step; "chunked", over chunks of time in parallel through powers of the map
            (activation identity and no message_clip only; forms W); "auto", the backend's choice of what it has.
        lengths: int64 [B], in [1, T], the steps that each sequence has; None: T for all. Checked on a CPU; not on a
            GPU, where a check would synchronise: a wrong one counts as 0 or T. States and gradients are zeros on
            padding, and values of x (NaN, wrong token ids) and of the cotangent there have no effect.
        message_clip: c > 0 clips delta_t, the gradient of a_t, to [-c, c] element by element in every step of the
            backward, before anything else is computed from it; 0 does not clip. See Note [Message clip] in
            ``orthokern/reference/_scan.py``.
        resets: bool [T, B]: before the step the state becomes reset_state [B, N] (zeros for None). Note [Resets] there.
        Floating tensors share one dtype and device; any strides (what is not contiguous is copied).

    Returns:
        hs [T, B, N], the states h_1 ... h_T.

    Saved:
        hs, or with checkpoint_every = k: ckpt [ceil(T/k), B, N], the states entering each segment (ckpt[0] = h0), and
        x; pre [T, B, N], the a_t, for activations that need their input, without checkpoints; x if weight is given; all
        parameters, h0, lengths, resets and reset_state; all zero on padding, but for the ckpt that enters right at a
        sequence's end. The backward op also computes the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 2 T B N^2 flops (+ 2 T B N D for features), backward scan the same, gradient of w 2 T B N^2,
        recomputation one forward more. Writes T B N elements forward, T B N of adjoints backward.

    Numerics:
        As factored_scan: accumulation in the dtype of w, fixed order of sums, the same bits for the same inputs,
        machine and thread count; rounding grows with T as the product of the Jacobians does.
    """
    return _OP(
        backend, x, w, h0, weight, bias, act_param, activation, checkpoint_every, backend, precision, algorithm,
        lengths, message_clip, resets, reset_state,
    )  # fmt: skip


_OP.public = dense_scan.__wrapped__  # type: ignore[attr-defined]
