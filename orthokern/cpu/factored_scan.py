"""factored_scan on the CPU; the kernels: ``csrc/cpu/factored_scan.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern.cpu._scan import scan_bwd, scan_fwd


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
    """See :mod:`orthokern.ops.factored_scan`."""
    maps: dict[str, Tensor | None] = {"first": v, "scale": s, "second": u}
    return scan_fwd("factored_scan_fwd", x, maps, h0, weight, bias, act_param, activation, checkpoint_every, lengths)


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
    """See :mod:`orthokern.ops.factored_scan`."""
    maps: dict[str, Tensor | None] = {"first": v, "scale": s, "second": u}
    grad_x, m, grad_h0, *others = scan_bwd(
        "factored_scan_bwd",
        grad_hs,
        states,
        pre,
        x,
        maps,
        h0,
        weight,
        bias,
        act_param,
        activation,
        checkpoint_every,
        need_x,
        need_params,
        lengths,
        message_clip,
    )
    if not need_params:
        return grad_x, m, torch.empty_like(m), torch.empty_like(m), grad_h0, others[0], others[1], others[2], others[3]
    with ieee_products():
        mv, mu = m @ v, m.mT @ u  # [N, K]
    grad_s = (u * mv).sum(0)
    return grad_x, mv * s, grad_s, mu * s, grad_h0, others[0], others[1], others[2], others[3]
