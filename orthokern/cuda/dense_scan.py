"""dense_scan on CUDA; the kernels: ``csrc/cuda/dense_scan.cu``."""

from __future__ import annotations

from torch import Tensor

from orthokern.cuda._scan import Map, scan_bwd, scan_fwd


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
    """See :mod:`orthokern.ops.dense_scan`. A precision below "ieee" shows where single steps are launched."""
    map_ = Map(w, precision=precision)
    return scan_fwd(
        map_, x, h0, weight, bias, act_param, activation, checkpoint_every, algorithm, lengths, message_clip
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.dense_scan`. A precision below "ieee" shows where single steps are launched."""
    map_ = Map(w, precision=precision)
    return scan_bwd(
        map_, grad_hs, states, pre, x, h0, weight, bias, act_param, activation, checkpoint_every, need_x, need_params,
        algorithm, lengths, message_clip,
    )  # fmt: skip
