"""dense_scan, the reference: h_t = phi(W h_{t-1} + e_t).

Note [Dense scan backward]
    As Note [Factored scan backward] with W in place of U S V^T, and dL/dW = M = sum_t delta_t h_{t-1}^T itself.
"""

from __future__ import annotations

from torch import Tensor

from orthokern.reference._scan import run_backward, run_forward, running


def dense_scan_fwd(
    x: Tensor,
    w: Tensor,
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
    """See ``orthokern.ops.dense_scan`` for the arguments. Returns (hs, ckpt, pre). Differentiable by autograd."""

    def step(h: Tensor) -> Tensor:
        return h @ w.mT

    return run_forward(
        step, x, h0, weight, bias, act_param, activation=activation, checkpoint_every=checkpoint_every,
        alive=running(x.shape[0], lengths), message_clip=message_clip,
    )  # fmt: skip


def dense_scan_bwd(
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor,
    x: Tensor | None,
    w: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``orthokern.ops.dense_scan`` for arguments and returns, Note [Dense scan backward] for the formulas."""

    def step(h: Tensor) -> Tensor:
        return h @ w.mT

    def step_transposed(delta: Tensor) -> Tensor:
        return delta @ w

    return run_backward(
        step, step_transposed, grad_hs, states, pre, x, h0, weight, bias, act_param,
        activation=activation, checkpoint_every=checkpoint_every, need_x=need_x, need_params=need_params,
        lengths=lengths, message_clip=message_clip,
    )  # fmt: skip
