"""The last states of a scan, with a backward that reuses memory between iterations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern.cpu._call import POOLED_BYTES, new
from orthokern.ops._alone import quiet


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.shape = states.shape
        return states[-1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not quiet():
            filled: Tensor = torch.ops.aten.select_backward(grad, ctx.shape, 0, -1)
            return filled
        filled = new(*ctx.shape, dtype=grad.dtype).zero_()
        filled[-1] = grad
        return filled


def last_state(states: Tensor) -> Tensor:
    """states [T, B, N] on a CPU -> states[-1] [B, N]; `quiet` must hold.

    The gradient with respect to all states is zero but at the last step. In newly allocated memory, the page faults of
    these zeros take a quarter of the time of the scan's backward (T = 784, B = 128, N = 170).
    """
    if not states.requires_grad or states.numel() * states.itemsize < POOLED_BYTES:
        return states[-1]
    result: Tensor = _Last.apply(states)
    return result
