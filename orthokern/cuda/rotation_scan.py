"""rotation_scan on CUDA; the kernel: ``csrc/cuda/rotation_scan.cu``.

Note [Modal chunks]
    The scan is parallel over sequences, modes and chunks of time: 2 chunk + T / chunk sequential steps replace T, with
    a minimum at chunk = sqrt(T / 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orthokern._elements import check, elements_of
from orthokern._products import ieee_products, linear, linear_gradients
from orthokern._scan_contract import RotationArgs, RotationGradients
from orthokern.cuda import _call as native

MIN_CHUNK = 16
ENOUGH_LANES = 2**18  # modes of sequences that fill the largest device; then time is not divided into chunks


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2)."""
    if lanes >= ENOUGH_LANES:
        return T
    return min(T, max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2))))))


def run(
    x: Tensor,
    z0: Tensor | None,
    z: Tensor | None = None,
    before: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    re: Tensor,
    im: Tensor,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    start: int = 0,
    reverse: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over x, the steps of a call from ``start`` on, whose states are written to z: Note [Modal chunks].

    x: [T, B, 2M], or token ids [T, B] of the table. z0: float64, or None for zeros; before: (states of the forward scan
    in the dtype of x, the one before them in float64). Returns (the state after the last step, forward only for a
    multiple of ``chunk`` steps; with ``before`` terms [2, *, M] of the gradients of re and im).
    """
    (T, B), M, (h, h0), ids = x.shape[:2], len(re), before, not x.is_floating_point()
    table = table if ids else None
    chunk = chunk_length(T, B * M) if chunk is None else min(chunk, T)
    chunks = -(-T // chunk)
    space = re.new_empty(min(chunks, 2), chunks, B, 2 * M)
    sums = re.new_empty(2, 0 if h is None else chunks * B, M)
    sizes = {"T": T, "B": B, "M": M, "D": 0 if table is None else len(table), "chunk": chunk, "start": start}
    sizes |= {"reverse": int(reverse), "wide": int(z is not None and z.dtype == torch.float64)}
    own = {"x": None if ids else x, "tokens": x if ids else None, "table": table, "z0": z0, "z": z, "h": h, "h0": h0}
    work = {"ends": space[0], "states": space[1] if chunks > 1 else None, "sums": sums}
    resets = None if resets is None else resets.contiguous()
    cuts = {"resets": resets, "chunk_resets": _chunk_resets(resets, chunk, reverse)}
    fixed = {"re": re, "im": im, "lengths": lengths, **cuts}
    sizes["dtype"] = native.DTYPES[x.dtype if table is None else table.dtype]
    native.call("modal_scan", x.device, sizes, {**own, **work, **fixed})
    return space[-1, 0 if reverse else -1], sums


def _chunk_resets(resets: Tensor | None, chunk: int, reverse: bool) -> Tensor | None:
    """The resets [chunks, B] of the recurrence of the chunks' ends: a chunk with a reset does not depend on the chunks
    before it. In the adjoint, the reset of a step ends the chunk of the step before."""
    if resets is None:
        return None
    T = len(resets)
    if reverse:
        resets = torch.cat([resets[1:], resets.new_zeros(1, resets.shape[1])])
    padding = resets.new_zeros(-T % chunk, resets.shape[1])
    any_reset = torch.cat([resets, padding]).unflatten(0, (-1, chunk)).any(1)
    return any_reset.roll(1, 0) if reverse else any_reset


def scan(
    x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False, resets: Tensor | None = None
) -> Tensor:
    """See ``orthokern.reference.rotation_scan.scan``."""
    _check_sizes(x, re, im, resets)
    check("rotation_scan", "z0", z0, z0.dtype, native.DEVICE, x.shape[1] * x.shape[2])
    x, re, im, z0 = (tensor.contiguous() for tensor in (x, re, im, z0.double()))
    z = torch.empty_like(x)
    run(x, z0, z, re=re, im=im, reverse=reverse, resets=resets)
    return z


def _check_sizes(x: Tensor, re: Tensor, im: Tensor, resets: Tensor | None, **own: Tensor) -> None:
    """InputError for a tensor that does not have the size of the call: its ``data`` was exchanged. x: or grad_hs."""
    elements = elements_of("rotation_scan", {"T": x.shape[0], "B": x.shape[1], "M": len(re), "D": 0})
    dtypes = {"re": torch.float64, "im": torch.float64, "resets": torch.bool}
    for name, tensor in {"x": x, "re": re, "im": im, "resets": resets, **own}.items():
        if tensor is not None:
            check("rotation_scan", name, tensor, dtypes.get(name, x.dtype), native.DEVICE, elements[name])


@ieee_products()
def rotation_scan_fwd(args: RotationArgs) -> Tensor:
    """See ``orthokern.reference.rotation_scan``."""
    x, re, im, h0, weight, bias, resets, _ = args
    assert x is not None
    return scan(x if weight is None else linear(x, weight, bias), re, im, h0, resets=resets)


@ieee_products()
def rotation_scan_bwd(args: RotationArgs, grad_hs: Tensor, hs: Tensor, *, need_x: bool) -> RotationGradients:
    """See ``orthokern.reference.rotation_scan``."""
    x, _, _, h0, weight, bias, resets, _ = args
    _check_sizes(grad_hs, args.re, args.im, resets, h=hs, h0=h0)
    grad_hs, re, im, z, z0 = (tensor.contiguous() for tensor in (grad_hs, args.re, args.im, hs, h0.double()))
    delta = torch.empty_like(grad_hs)
    first, sums = run(grad_hs, None, delta, (z, z0), re=re, im=im, reverse=True, resets=resets)
    first = first if resets is None else first.masked_fill(resets[0].unsqueeze(1), 0)
    real, imag = first.chunk(2, -1)
    grad_h0 = torch.cat([re * real + im * imag, re * imag - im * real], -1).to(h0.dtype)
    grad_re, grad_im = sums.sum(1)
    if x is None or weight is None:
        return RotationGradients(delta, grad_re, grad_im, grad_h0)
    of_x, of_weight, of_bias = linear_gradients(delta, x, weight, (need_x, True, bias is not None))
    return RotationGradients(of_x, grad_re, grad_im, grad_h0, of_weight, of_bias)
