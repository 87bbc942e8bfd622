"""factored_scan: a recurrence through W = U diag(s) V^T that never forms W."""

from __future__ import annotations

from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._products import ieee_products
from orthokern._scan_contract import Map
from orthokern.ops._scan_op import SUPPORT, ScanOp

__all__ = ["SUPPORT", "factored_scan"]


def _gradients(m: Tensor, map_: Map) -> tuple[Tensor, ...]:
    """The gradients of u, s and v from M = dL/dW [N, N], where W = U diag(s) V^T.

    dU = M V diag(s), ds = diag(U^T M V), dV = M^T U diag(s): Note [Factored scan backward] in
    ``orthokern/reference/factored_scan.py``.
    """
    v, s, u = map_
    assert v is not None and s is not None
    with ieee_products():
        m_v, mt_u = m @ v, m.mT @ u  # [N, K]
    each = s.unsqueeze(-2)
    return m_v * each, (u * m_v).sum(-2), mt_u * each


_OP = ScanOp("factored_scan", ("u", "s", "v"), lambda u, s, v: Map(first=v, scale=s, second=u), _gradients, ("N", "K"))


@keeps_dtype
def factored_scan(
    x: Tensor,
    u: Tensor,
    s: Tensor,
    v: Tensor,
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
    """A factored recurrent layer over a whole sequence. Inputs are taken as checked (``orthokern.functional`` does).

    Equation:
        e_t = x_t                        without weight
            = weight x_t + bias          for features; for token ids x_t is one-hot, and is not materialised
        a_t = U (s * (V^T h_{t-1})) + e_t,    h_t = phi(a_t),    t = 1 ... T;    W = U diag(s) V^T is not formed.
        With lengths, a_t = h_t = 0 for t > lengths[b]. With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [Factored scan backward] in ``orthokern/reference/factored_scan.py``.

    Args:
        As in ``orthokern.functional.factored_scan``, with int64 token ids and an h0 that is not None. Floating tensors
        share one dtype and device; any strides (tensors that are not contiguous are copied).
        x: token ids are checked on a CPU only, since a check on a GPU would synchronise; there a wrong id makes its
            sequence NaN. Nor are lengths checked on a GPU, where they are clamped to [0, T].
        u, v: with orthonormal columns, which are not required, s holds the singular values.
        backend: an explicit "reference" runs plain differentiable torch code, where checkpoint_every changes nothing.
        precision: "3xtf32" is three TF32 products, nearly float32; "tf32" and "bf16" round both factors. State and sums
            stay float32. A backend without the faster products computes IEEE ones; so does float64.
        algorithm: "chunked" forms W and uses its powers; "auto" is the choice of the backend.
        message_clip: clips delta_t, the gradient of a_t. See Note [Message clip] in ``orthokern/reference/_scan.py``.
        resets: before the step the state becomes reset_state (zeros for None). Note [Resets] there.

    Returns:
        hs [T, B, N], the states h_1 ... h_T.

    Saved:
        hs, or with checkpoint_every = k: ckpt [ceil(T/k), B, N], the states entering each segment (ckpt[0] = h0), and
        x; pre [T, B, N], the a_t, for activations that need their input, without checkpoints; x if weight is given; all
        parameters, h0, lengths, resets and reset_state. States are zero on padding, except a ckpt that enters a segment
        directly after the end of a sequence. The backward op also computes the norms over [B, N] of dL/dh_t, see
        ``_taps``.

    Cost:
        Forward 4 T B N K flops (+ 2 T B N D for features), backward scan the same, gradients of u, s, v
        2 T B N^2 + 4 N^2 K, recomputation one forward more. Writes T B N elements forward, T B N of adjoints backward.

    Numerics:
        Products and sums over time accumulate in the dtype of u (float32 means IEEE float32), in a fixed order: the
        same inputs, machine and thread count give the same bits. On the CPU, float32 gradients of parameters over about
        4096 rows are added up in float64. Rounding errors grow with T like the product of the Jacobians: not at all
        where s is near 1 and the activation is near linear. The gradients of modrelu, relu, prelu and oplu jump where a
        unit is at its threshold, so two precisions may differ there by whole terms.
    """
    return _OP(
        backend, x, u, s, v, h0, weight, bias, act_param, activation, checkpoint_every, backend, precision, algorithm,
        lengths, message_clip, resets, reset_state,
    )  # fmt: skip
