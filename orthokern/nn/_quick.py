"""The short way through the forward of a recurrence: all its checks as a few comparisons.

``Recurrent.forward`` tries it first. A call of plain CPU tensors in the ordinary layout goes straight to the op of
each layer. For anything else, bad input included, the answer is None, and the full path runs, which handles every
case and every error. For one step of one sequence the checks of the full path take several times as long as the step.

Letters: B batch, T time, N hidden_size, D input_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.ops._alone import quiet
from orthokern.ops._last import last_state
from orthokern.ops._taps import SINKS

if TYPE_CHECKING:
    from orthokern.nn._recurrent import Recurrent

__all__ = ["forward"]


def common_dtype(module: Recurrent) -> torch.dtype | None:
    """The dtype of the parameters if all are plain CPU tensors of it and the kernels take it; else None. Their shapes
    are checked where they are read."""
    shapes = module.__dict__.get("_shapes")
    if not shapes:
        return None
    parameters: dict[str, Tensor | None] = module._parameters or module._buffers  # type: ignore[assignment]
    first = parameters.get("weight_ih_l0")
    if first is None:
        return None
    dtype = first.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        return None
    for name in shapes:
        value = parameters.get(name)
        kind = type(value)
        if value is None or (kind is not nn.Parameter and kind is not Tensor):
            return None
        if value.dtype is not dtype or not value.is_cpu:
            return None
    return dtype


def forward(module: Recurrent, input: object, hx: object) -> tuple[Tensor, Tensor] | None:
    """(output, h_n) as ``Recurrent.forward`` returns them, or None where the full path has to run."""
    if type(input) is not Tensor or not quiet() or module.bidirectional:
        return None
    dtype = common_dtype(module)
    if dtype is None or not input.is_cpu or input.layout is not torch.strided or input.is_nested:
        return None
    shape, layers, N = input.shape, module.num_layers, module.hidden_size
    if input.dtype is dtype:
        if len(shape) != 3 or shape[2] != module.input_size:
            return None
    elif input.dtype is not torch.int64 or len(shape) != 2:
        return None
    data = input.transpose(0, 1) if module.batch_first else input
    T, B = data.shape[:2]
    if T < 1 or B < 1 or (module.training and module.dropout > 0.0):
        return None
    if hx is not None:
        if type(hx) is not Tensor or hx.dtype is not dtype or not hx.is_cpu or hx.layout is not torch.strided:
            return None
        if hx.is_nested or hx.shape != (layers, B, N):
            return None
    op, sizes = module._op()
    leaf = dispatch.cpu_leaf(op, module.backend, dtype, **sizes)
    if leaf is None:
        return None
    recorded = torch.is_grad_enabled() or bool(SINKS)
    last = []
    for layer in range(layers):
        suffix = f"l{layer}"
        if hx is not None:
            h0 = hx[layer]
        elif module.learned_h0:
            h0 = module._tensor(f"h0_{suffix}").expand(B, N)
        else:
            h0 = torch.zeros(B, N, dtype=dtype, device="cpu")
        data = module._quick_scan(leaf, suffix, data, h0, recorded)
        last.append(last_state(data))
    return (data.transpose(0, 1) if module.batch_first else data), torch.stack(last)
