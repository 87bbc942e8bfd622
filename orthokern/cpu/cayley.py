"""cayley on the CPU; the kernel: ``csrc/cpu/cayley.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern.cpu._call import call
from orthokern.errors import InputError


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See ``orthokern.ops.cayley``."""
    if m.shape != g.shape or 0 in m.shape[-2:]:
        shapes = f"{list(m.shape)} and {list(g.shape)}"
        raise InputError(f"cayley: m and g have shapes {shapes}: accepted is one shape [..., N, K] with N, K >= 1")
    N, K = m.shape[-2:]
    batch = m.numel() // (N * K)
    out = torch.empty(m.shape, dtype=m.dtype, device="cpu")
    rates = (
        lr.to(torch.float64).expand(m.shape[:-2]).contiguous()
        if isinstance(lr, Tensor)
        else torch.full((batch,), lr, dtype=torch.float64, device="cpu")
    )
    call("cayley", m.dtype, {"batch": batch, "N": N, "K": K}, {"m": m, "g": g, "lr": rates, "out": out})
    return out
