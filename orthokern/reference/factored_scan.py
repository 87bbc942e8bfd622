"""factored_scan, the reference: h_t = phi(U (s * (V^T h_{t-1})) + e_t), W = U diag(s) V^T never formed.

Note [Factored scan backward]
    Let a_t = U S V^T h_{t-1} + e_t, h_t = phi(a_t), S = diag(s), and g_t the gradient that reaches h_t from outside
    the recurrence. Write ghat_t = dL/dh_t and delta_t = dL/da_t. h_t acts on the loss directly and through a_{t+1}:

        ghat_t  = g_t + (U S V^T)^T delta_{t+1} = g_t + V (s * (U^T delta_{t+1})),     delta_{T+1} = 0
        delta_t = phi'(a_t) ghat_t                                        (a diagonal, or oplu's permutation)
        dL/dh_0 = V (s * (U^T delta_1))

    e_t enters a_t with weight one, so dL/de_t = delta_t. For the parameters, a_t = W h_{t-1} + e_t gives
    dL/dW = M := sum_t delta_t h_{t-1}^T, one product over all time steps, and the chain rule through
    W = U S V^T, dL = <M, dU S V^T + U dS V^T + U S dV^T>, gives

        dL/dU = M V S,     dL/dV = M^T U S,     dL/ds = diag(U^T M V).

    Lengths and the clipping of delta_t: Note [Sequences of different lengths] and Note [Message clip] in ``_scan.py``.

    In row form (a row per sequence): h V S U^T + e, ghat = g + ((delta U) s) V^T, M = delta^T h.
"""

from __future__ import annotations

from torch import Tensor

from orthokern.reference._scan import run_backward, run_forward, running


def factored_scan_fwd(
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
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``orthokern.ops.factored_scan`` for the arguments. Returns (hs, ckpt, pre). Differentiable by autograd."""

    def step(h: Tensor) -> Tensor:
        return ((h @ v) * s) @ u.mT

    return run_forward(
        step, x, h0, weight, bias, act_param, activation=activation, checkpoint_every=checkpoint_every,
        alive=running(x.shape[0], lengths), message_clip=message_clip,
    )  # fmt: skip


def factored_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
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
    need_x: bool = True,
    need_params: bool = True,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``orthokern.ops.factored_scan`` for arguments and returns, Note [Factored scan backward] for the formulas."""

    def step(h: Tensor) -> Tensor:
        return ((h @ v) * s) @ u.mT

    def step_transposed(delta: Tensor) -> Tensor:
        return ((delta @ u) * s) @ v.mT

    grads = run_backward(
        step, step_transposed, grad_hs, states, pre, x, h0, weight, bias, act_param,
        activation=activation, checkpoint_every=checkpoint_every, need_x=need_x, need_params=need_params,
        lengths=lengths, message_clip=message_clip,
    )  # fmt: skip
    grad_x, m, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm = grads
    if need_params:
        m_v = m @ v
        grad_u = m_v * s
        grad_s = (u * m_v).sum(0)
        grad_v = (m.mT @ u) * s
    else:
        grad_u = grad_s = grad_v = m  # empty
    return grad_x, grad_u, grad_s, grad_v, grad_h0, grad_weight, grad_bias, grad_act_param, grad_norm
