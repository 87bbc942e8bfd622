"""What the leaves of ``factored_scan`` and ``dense_scan`` take and return, with the same names on every backend.

A leaf has two functions, named after the op:

    <op>_fwd(map_, inputs, options) -> ScanStates
    <op>_bwd(map_, inputs, options, grad_hs, states, pre, *, need_x=True, need_params=True) -> ScanGradients

All tensors are contiguous, but those of the reference may have any strides. B batch, T time, N hidden, K rank, D
features or token ids. ``ScanArgs`` in ``csrc/cpu/ops.h`` and ``csrc/cuda/scan.h`` uses the same names.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from orthokern._activations import ACTIVATIONS


class Map(NamedTuple):
    """The recurrent map W [N, N]: W = second diag(scale) first^T, or W = second where first and scale are None."""

    first: Tensor | None  # V [N, K], the factor that a forward step applies first
    scale: Tensor | None  # s [K]
    second: Tensor  # U [N, K], or W [N, N]

    @property
    def op(self) -> str:
        """The name of the op."""
        return "dense_scan" if self.first is None else "factored_scan"


class ScanInputs(NamedTuple):
    """The other tensors of a scan; see ``orthokern.ops.factored_scan``."""

    x: Tensor | None  # [T, B, N] without weight, else [T, B, D] or int64 [T, B]; a backward that reads no x has None
    h0: Tensor  # [B, N]
    weight: Tensor | None = None  # [N, D]
    bias: Tensor | None = None  # [N]
    act_param: Tensor | None = None  # [1] or [N]
    reset_state: Tensor | None = None  # [B, N], the state that resets start from; None: zeros


@dataclasses.dataclass(eq=False, slots=True)
class ScanOptions:
    """What else a scan depends on; see ``orthokern.ops.factored_scan``."""

    activation: str
    checkpoint_every: int = 0
    precision: str = "ieee"
    algorithm: str = "auto"
    lengths: Tensor | None = None  # int64 [B]
    message_clip: float = 0.0
    resets: Tensor | None = None  # bool [T, B]: before these steps the state becomes reset_state

    @property
    def keeps_pre(self) -> bool:
        """Whether the forward saves the pre-activations for the backward."""
        return ACTIVATIONS[self.activation].needs_input and not self.checkpoint_every


class ScanStates(NamedTuple):
    """Results of a forward."""

    hs: Tensor  # [T, B, N]
    ckpt: Tensor | None  # [ceil(T / checkpoint_every), B, N], the states that enter the segments, or None without them
    pre: Tensor | None  # [T, B, N] if the options say keeps_pre, else None


class ScanGradients(NamedTuple):
    """Results of a backward; None for what does not apply or is not needed."""

    x: Tensor | None
    m: Tensor | None  # M = dL/dW = sum_t delta_t h_{t-1}^T [N, N], at a reset with reset_state in place of h_{t-1}
    h0: Tensor  # [B, N]
    weight: Tensor | None
    bias: Tensor | None
    act_param: Tensor | None
    reset_state: Tensor | None  # [B, N]
    norm: Tensor  # [T], the Frobenius norm over [B, N] of dL/dh_t
