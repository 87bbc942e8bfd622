"""The modal form on CUDA; the kernel: ``csrc/cuda/modal.cu``.

Note [Modal chunks]
    The kernel is parallel over sequences, modes and chunks of time. Three launches make a scan: every chunk from a zero
    state, for the states that it ends with; the recurrence of these ends with lambda^chunk, for the states between
    chunks; and every chunk from its state. lambda^chunk has the error of as many roundings as the product of the steps.
    2 chunk + T / chunk sequential steps replace T, with a minimum at chunk = sqrt(T / 2).
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern._scan_contract import Readout
from orthokern.cuda import _call as native
from orthokern.ops.modal.reference import Inputs, Loss, loss_in_spans

MIN_CHUNK = 16
ENOUGH_LANES = 2**18  # modes of sequences that fill the largest device; then time is not divided into chunks
SPAN_BYTES = 2**28  # of the states, gradients and logits of a span of steps of a loss


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2). It depends on sizes only, so that all devices give the
    same bits."""
    if lanes >= ENOUGH_LANES:
        return T
    return min(T, max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2))))))


def span_steps(B: int, M: int, C: int, itemsize: int) -> int:
    """Steps of a span: a power of 2."""
    row = B * ((6 * M + 2 * C) * itemsize + 8 * M * 8)
    return 1 << max(0, (SPAN_BYTES // row).bit_length() - 1)


def _launch(
    x: Tensor,
    re: Tensor,
    im: Tensor,
    chunk: int,
    reverse: bool,
    *,
    state: Tensor | None = None,
    z: Tensor | None = None,
    end: Tensor | None = None,
) -> None:
    (T, B), wide = x.shape[:2], z is not None and z.dtype == torch.float64
    sizes = {"T": T, "B": B, "M": len(re), "chunk": chunk, "reverse": int(reverse), "wide": int(wide)}
    tensors = {"x": x, "re": re, "im": im, "state": state, "z": z, "end": end}
    native.call("modal_scan", x.device, {"dtype": native.DTYPES[x.dtype], **sizes}, tensors)


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """See ``reference.scan`` and Note [Modal chunks]."""
    x = cast(Tensor, native.ready(x, x.dtype, x.device, "x"))
    chunk = chunk_length(len(x), z0.numel() // 2)
    state = torch.zeros(-(-len(x) // chunk), *z0.shape, dtype=torch.float64, device=x.device)
    state[-1 if reverse else 0] = z0
    if len(state) > 1:
        # the first of the chunks to be processed starts from z0, which its end then includes
        end, after = torch.empty_like(state), torch.empty_like(state)
        _launch(x, re, im, chunk, reverse, state=state, end=end)
        power = torch.complex(re, im) ** chunk
        _launch(end, power.real.contiguous(), power.imag.contiguous(), len(end), reverse, z=after)
        if reverse:
            state[:-1] = after[1:]
        else:
            state[1:] = after[:-1]
    z = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(x, re, im, chunk, reverse, state=state, z=z)
    return z


@ieee_products()
def loss(inputs: Inputs, readout: Readout, need_grad: bool) -> Loss:
    """See ``reference.loss_in_spans``."""
    z0 = inputs.z0
    steps = span_steps(len(z0), len(inputs.re), len(readout.weight), z0.dtype.itemsize)
    return loss_in_spans(scan, inputs, readout, need_grad, steps)
