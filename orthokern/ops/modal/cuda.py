"""The modal form on CUDA; the kernels: ``csrc/cuda/modal.cu``.

Note [Modal spans]
    The states, logits and gradients of only one span of steps exist at a time. The spans are processed from the last to
    the first; before that, a pass that writes no states computes the state before each span. A span uses a share of
    the memory of the device: a call of moderate length is one span, and a long one has few launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orthokern._memory import kept_states
from orthokern._products import ieee_products, sum_over_rows
from orthokern._scan_contract import Readout
from orthokern.cuda import _call as native
from orthokern.cuda import rotation_scan
from orthokern.cuda.rotation_scan import scan as scan
from orthokern.ops.modal.reference import ONE_HOT, Gradients, Inputs, Loss, pair_sums, sum_by_id
from orthokern.reference.rotation_scan import turn


def span_steps(inputs: Inputs, readout: Readout) -> int:
    """Steps of a span, the same for all spans but the last: Note [Modal spans]."""
    (T, B), size, M = readout.target.shape, inputs.z0.element_size(), len(inputs.re)
    ids = 0 if inputs.table is None else min(len(inputs.table), ONE_HOT)
    step = B * ((4 * M + len(readout.weight)) * size + 8 * (2 * M + ids))
    return -(-T // -(-T * step // kept_states(inputs.z0.device)))


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
    chunk = rotation_scan.chunk_length(length, B * len(re))
    length = -(-length // chunk) * chunk  # the state after a span is that after its last chunk
    starts = [z0.double()]
    fixed: dict[str, Any] = {"re": re, "im": im, "table": table, "lengths": lengths}
    for start in range(0, T - length, length):
        starts.append(rotation_scan.run(x[start : start + length], starts[-1], **fixed, start=start, chunk=chunk)[0])
    losses, right = re.new_empty(T, B), torch.empty(T, B, dtype=torch.uint8, device=re.device)
    states, adjoints, carry = [], [], None  # of the profile, the last span first
    grad_x = torch.empty_like(x) if need_grad and table is None else None
    sums: dict[str, Tensor] = {}
    for start, first in reversed(list(zip(range(0, T, length), starts, strict=True))):
        span = slice(start, start + length)
        z = z0.new_empty(len(x[span]), *z0.shape)
        rotation_scan.run(x[span], first, z, **fixed, start=start, chunk=chunk)
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
        carry, terms = rotation_scan.run(g, carry, delta, (z, first), **fixed, start=start, reverse=True, chunk=chunk)
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
