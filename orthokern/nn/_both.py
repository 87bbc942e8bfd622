"""Both directions of a bidirectional layer in one call of a scan for two models (``orthokern.ops._replicas``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import GruInputs, ScanOptions
from orthokern.ops import _taps
from orthokern.ops._alone import quiet
from orthokern.ops._common import scan_features
from orthokern.ops._scan_op import SCANS
from orthokern.ops.gru_scan import gru_scan

if TYPE_CHECKING:
    from orthokern.nn._recurrent import Recurrent


def both_directions(
    module: Recurrent, data: Tensor, states: Sequence[Tensor | None], suffixes: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """The states [T, B, N] and the last states [B, N] of each direction; None if these need separate calls.

    Args:
        data: [T, B, D], or ids [T, B].
        states: h0 [B, N] of each direction, or None for zeros.
        suffixes: of the parameters of each direction.
    """
    name, sizes = module._op()
    if name not in (*SCANS, "gru_scan") or data.is_meta or not data.numel() or not quiet():
        return None
    if torch.is_autocast_enabled(data.device.type) or _taps.SINKS:  # taps record the directions separately
        return None
    like = module._tensor(f"weight_ih_{suffixes[0]}")
    leaf = dispatch.resolve(
        name, module.backend, device=like.device, dtype=like.dtype,
        features=scan_features(None, module.message_clip, None), **sizes,
    )  # fmt: skip
    serves = getattr(leaf, "serves_replicas", None)
    if serves is None:
        return None

    def stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.stack(present) if present else None

    matrices, biases = zip(*(module._factors(suffix) for suffix in suffixes), strict=True)
    factors = [torch.stack(each) for each in zip(*matrices, strict=True)]
    steps, B = data.shape[:2]
    zeros = like.new_zeros(B, module.hidden_size)
    h0, both = torch.stack([zeros if h is None else h for h in states]), (data, data.flip(0))
    if name == "gru_scan":
        gru, (w,) = cast(Any, module), factors
        if not serves(GruInputs(None, w, h0)):
            return None
        x = torch.stack([gru._input_term(each, suffix) for each, suffix in zip(both, suffixes, strict=True)], 1)
        hs = gru_scan(x, w, h0, stacked(biases), variant=gru.variant, backend=gru.backend)
    else:
        options = ScanOptions(module.nonlinearity, message_clip=module.message_clip, precision=module.precision)
        if not serves(SCANS[name].map_of(*factors), options, steps, B):
            return None
        hs = SCANS[name].fwd(
            torch.stack(both, 1), *factors, h0,
            stacked([module._gained(module._tensor(f"weight_ih_{suffix}")) for suffix in suffixes]), stacked(biases),
            stacked([module._act_param(suffix) for suffix in suffixes]), module.nonlinearity, module.checkpoint_every,
            module.backend, module.precision, "auto", None, module.message_clip, None, None,
        )[0]  # fmt: skip
    return [hs[:, 0], hs[:, 1].flip(0)], [hs[-1, 0], hs[-1, 1]]
