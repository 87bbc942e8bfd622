"""The modal form on CUDA; the kernels: ``csrc/cuda/modal.cu``.

Note [Modal chunks]
    The scan is parallel over sequences, modes and chunks of time: 2 chunk + T / chunk sequential steps replace T, with
    a minimum at chunk = sqrt(T / 2).

Note [Modal spans]
    The states, logits and gradients of one span of steps exist at a time. The spans are processed from the last to the
    first; before that, a pass that writes no states computes the one before each span. A span takes a share of the
    memory of the device: a call of moderate length is one span, and a long one has few launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthokern._memory import kept_states
from orthokern._products import ieee_products, sum_over_rows
from orthokern._scan_contract import Readout
from orthokern.cuda import _call as native
from orthokern.ops.modal.reference import ONE_HOT, Gradients, Inputs, Loss, pair_sums, sum_by_id, turn

MIN_CHUNK = 16
ENOUGH_LANES = 2**18  # modes of sequences that fill the largest device; then time is not divided into chunks


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2)."""
    if lanes >= ENOUGH_LANES:
        return T
    return min(T, max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2))))))


def span_steps(inputs: Inputs, readout: Readout) -> int:
    """Steps of a span, the same for all spans but the last: Note [Modal spans]."""
    (T, B), size, M = readout.target.shape, inputs.z0.element_size(), len(inputs.re)
    ids = 0 if inputs.table is None else min(len(inputs.table), ONE_HOT)
    step = B * ((4 * M + len(readout.weight)) * size + 8 * (2 * M + ids))
    return -(-T // -(-T * step // kept_states(inputs.z0.device)))


def _run(
    inputs: Inputs,
    x: Tensor,
    z0: Tensor | None,
    z: Tensor | None = None,
    before: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    start: int = 0,
    reverse: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over x, the steps of a call from ``start`` on, whose states are written to z: Note [Modal chunks].

    z0: float64, or None for zeros; before: (states of the forward scan in the dtype of x, the one before them in
    float64). Returns (the state after the last step, forward only for a multiple of ``chunk`` steps; with ``before``
    terms [2, *, M] of the gradients of re and im).
    """
    (T, B), M, (h, h0), ids = x.shape[:2], len(inputs.re), before, not x.is_floating_point()
    table = inputs.table if ids else None
    chunk = chunk_length(T, B * M) if chunk is None else min(chunk, T)
    chunks = -(-T // chunk)
    space = inputs.re.new_empty(min(chunks, 2), chunks, B, 2 * M)
    sums = inputs.re.new_empty(2, 0 if h is None else chunks * B, M)
    sizes = {"T": T, "B": B, "M": M, "D": 0 if table is None else len(table), "chunk": chunk, "start": start}
    sizes |= {"reverse": int(reverse), "wide": int(z is not None and z.dtype == torch.float64)}
    own = {"x": None if ids else x, "tokens": x if ids else None, "table": table, "z0": z0, "z": z, "h": h, "h0": h0}
    work = {"ends": space[0], "states": space[1] if chunks > 1 else None, "sums": sums}
    fixed = {"re": inputs.re, "im": inputs.im, "lengths": inputs.lengths}
    sizes["dtype"] = native.DTYPES[x.dtype if table is None else table.dtype]
    native.call("modal_scan", x.device, sizes, {**own, **work, **fixed})
    return space[-1, 0 if reverse else -1], sums


def scan(x: Tensor, re: Tensor, im: Tensor, z0: Tensor, *, reverse: bool = False) -> Tensor:
    """See ``reference.scan``."""
    x, z0 = x.contiguous(), z0.double().contiguous()
    z = torch.empty_like(x)
    _run(Inputs(x, re, im, z0), x, z0, z, reverse=reverse)
    return z


@ieee_products()
@torch.no_grad()
def loss(inputs: Inputs, readout: Readout, need_grad: bool, profile: Sequence[int] = ()) -> Loss:
    """See ``reference.loss``; Note [Modal spans]."""
    x, re, im, z0, table, lengths, pairs = inputs
    weight, bias, target, reduction = readout
    (T, B), dtype, target = target.shape, z0.dtype, target.to(torch.int64)
    x = x if table is None else x.to(torch.int64)
    count = lengths.sum().double() if reduction == "mean" and lengths is not None else None
    scale = 1.0 / (T * B) if reduction == "mean" and lengths is None else 1.0
    length = span_steps(inputs, readout)
    chunk = chunk_length(length, B * len(re))
    length = -(-length // chunk) * chunk  # the state after a span is that after its last chunk
    starts = [z0.double()]
    for start in range(0, T - length, length):
        starts.append(_run(inputs, x[start : start + length], starts[-1], start=start, chunk=chunk)[0])
    losses, right = re.new_empty(T, B), torch.empty(T, B, dtype=torch.uint8, device=re.device)
    states, adjoints, carry = [], [], None  # of the profile, the last span first
    grad_x = torch.empty_like(x) if need_grad and table is None else None
    sums: dict[str, Tensor] = {}
    for start, first in reversed(list(zip(range(0, T, length), starts, strict=True))):
        span = slice(start, start + length)
        z = z0.new_empty(len(x[span]), *z0.shape)
        _run(inputs, x[span], first, z, start=start, chunk=chunk)
        d = torch.nn.functional.linear(z, weight, bias)
        sizes = {"dtype": native.DTYPES[dtype], "T": len(z), "B": B, "C": len(weight), "start": start, "scale": scale}
        own = {"logits": d, "target": target[span], "losses": losses[span], "right": right[span]}
        native.call("modal_readout", x.device, sizes, {**own, "lengths": lengths, "count": count})
        rows = [t - start for t in profile if start <= t < start + length]
        if rows:
            states.append(z[rows])
        if not need_grad:
            continue
        new = {"weight": sum_over_rows(d, z), "bias": d.sum((0, 1), dtype=torch.float64)}
        g = d @ weight
        delta = torch.empty_like(g, dtype=torch.float64)
        carry, terms = _run(inputs, g, carry, delta, (z, first), start=start, reverse=True, chunk=chunk)
        new["values"] = terms.sum(1)
        if table is not None:
            new["table"] = sum_by_id(x[span], delta, len(table))
        if grad_x is not None:
            grad_x[span] = delta
        if pairs is not None:
            first = first if lengths is None else torch.where((lengths > start)[:, None], first, 0)
            new["pairs"] = pair_sums(delta, torch.cat([first.to(dtype)[None], z[:-1]]), pairs)
        if rows:
            adjoints.append(delta[rows].to(dtype))
        sums = {name: sums[name].add_(value) if sums else value for name, value in new.items()}
    grads = None
    if need_grad and carry is not None:
        grads = Gradients(
            grad_x,
            sums["values"][0],
            sums["values"][1],
            turn(carry, re, -im).to(dtype),
            None if table is None else sums["table"].to(dtype),
            sums.get("pairs"),
            sums["weight"].to(dtype),
            None if bias is None else sums["bias"].to(dtype),
        )
    profiles = [torch.cat(rows[::-1]) if rows else None for rows in (states, adjoints)]
    return Loss(losses.sum().to(dtype), right.sum(1, dtype=torch.int64), grads, *profiles)
