"""The modal form on CUDA; the kernel: ``csrc/cuda/modal.cu``.

Note [Modal chunks]
    The kernel is parallel over sequences, modes and chunks of time: 2 chunk + T / chunk sequential steps replace T,
    with a minimum at chunk = sqrt(T / 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern._scan_contract import Readout
from orthokern.cuda import _call as native
from orthokern.ops.modal.reference import Inputs, Loss, loss_in_spans

MIN_CHUNK = 16
ENOUGH_LANES = 2**18  # modes of sequences that fill the largest device; then time is not divided into chunks
SPAN_BYTES = 2**31  # of the states, gradients and logits of a span of steps of a loss


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2). It depends on sizes only, so that all devices give the
    same bits."""
    if lanes >= ENOUGH_LANES:
        return T
    return min(T, max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2))))))


def span_steps(T: int, B: int, M: int, C: int, itemsize: int) -> int:
    """Steps of a span, the same for all spans but the last."""
    row = B * ((6 * M + 2 * C) * itemsize + 8 * M * 8)
    return -(-T // -(-T * row // SPAN_BYTES))


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """See ``reference.scan`` and Note [Modal chunks]."""
    x = cast(Tensor, native.ready(x, x.dtype, x.device, "x"))
    z0 = z0.double().contiguous()
    (T, B), M = x.shape[:2], len(re)
    chunk = chunk_length(T, B * M)
    chunks = -(-T // chunk)
    space = re.new_empty(2, chunks, B, 2 * M) if chunks > 1 else None
    z = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    sizes = {"T": T, "B": B, "M": M, "chunk": chunk, "reverse": int(reverse), "wide": int(z.dtype == torch.float64)}
    ends, states = (None, None) if space is None else space.unbind(0)
    tensors = {"x": x, "re": re, "im": im, "z0": z0, "ends": ends, "states": states, "z": z}
    native.call("modal_scan", x.device, {"dtype": native.DTYPES[x.dtype], **sizes}, tensors)
    return z


@ieee_products()
def loss(inputs: Inputs, readout: Readout, need_grad: bool, profile: Sequence[int] = ()) -> Loss:
    """See ``reference.loss_in_spans``."""
    z0 = inputs.z0
    steps = span_steps(len(inputs.x), len(z0), len(inputs.re), len(readout.weight), z0.dtype.itemsize)
    return loss_in_spans(scan, inputs, readout, need_grad, steps, profile)
