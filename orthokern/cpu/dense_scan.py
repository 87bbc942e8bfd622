"""dense_scan on the CPU; the kernels: ``csrc/cpu/dense_scan.cpp``."""

from __future__ import annotations

from torch import Tensor

from orthokern.cpu._scan import scan_bwd, scan_fwd


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
    """See :mod:`orthokern.ops.dense_scan`."""
    return scan_fwd(
        "dense_scan_fwd",
        x,
        {"first": None, "scale": None, "second": w},
        h0,
        weight,
        bias,
        act_param,
        activation,
        checkpoint_every,
        lengths,
    )


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
) -> tuple[Tensor, ...]:
    """See :mod:`orthokern.ops.dense_scan`."""
    return scan_bwd(
        "dense_scan_bwd",
        grad_hs,
        states,
        pre,
        x,
        {"first": None, "scale": None, "second": w},
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
