"""Recurrence, linear readout and cross-entropy in one call: in modal form if that is possible, else step by step.

Note [Chunks of states]
    The sequential scan keeps its states for the backward, and the gradient of the readout has the same size. This is
    done while the states take at most ``orthokern._memory.kept_states`` bytes, a sixteenth of the device's memory.
    Beyond that, each chunk of steps is an autograd Function that keeps only the state before it, and recomputes its
    states and its loss in the backward. This costs one more forward. States and hits are bitwise the same. The norms
    that the chunks record for an open tap are joined to one tensor [T].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._memory import kept_states
from orthokern._scan_contract import Readout, ScanArgs, join_tensors, running, split_tensors
from orthokern.ops import _taps
from orthokern.ops._common import by_reference, check_lengths, differentiable_once
from orthokern.ops._linear import linear
from orthokern.ops._scan import scan
from orthokern.ops.linear_cross_entropy import linear_cross_entropy
from orthokern.ops.modal import choice
from orthokern.ops.modal.op import modal_loss

CHUNK = 2**24  # bytes of a chunk's states
LOGITS = 2**22  # elements of the logits that ``_hits`` computes at a time


class ScanLoss(NamedTuple):
    """The result of ``orthokern.functional.scan_cross_entropy``, which describes the fields."""

    loss: Tensor
    hits: Tensor
    basis: Tensor | None
    refused: str


@torch.no_grad()
def _hits(rows: Tensor, readout: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Whether the largest logit is that of the target: bool, the shape of target [...]; rows [..., N]."""
    flat = rows.detach().flatten(0, -2)
    if torch._C._are_functorch_transforms_active():  # which may not write into a plain tensor
        return linear(flat, readout, bias).argmax(-1).view(target.shape) == target
    # One tensor for all parts: results that are kept between parts would leave holes of a part's size in the heap.
    classes = flat.new_empty(flat.shape[:1], dtype=torch.int64)  # len() would be a constant of an exported program
    step = max(1, LOGITS // len(readout))
    for part, largest in zip(flat.split(step), classes.split(step), strict=True):
        largest.copy_(linear(part, readout, bias).argmax(-1))
    return classes.view(target.shape) == target


def _readout(hs: Tensor, readout: Readout, lengths: Tensor | None, backend: str | None) -> tuple[Tensor, Tensor]:
    """(the cross-entropy over all steps but padding, hits [T])."""
    weight, bias, target, reduction = readout
    target = target.to(torch.int64)
    alive = running(hs.shape[0], lengths)
    if alive is None:
        rows, ids = hs.flatten(0, 1), target.flatten()
        hits = _hits(hs, weight, bias, target).sum(1)
    else:
        rows, ids = hs[alive], target[alive]
        right = _hits(rows, weight, bias, ids).to(torch.int64)
        hits = right.new_zeros(alive.shape[0]).index_add(0, alive.nonzero()[:, 0], right)
    return linear_cross_entropy(rows, weight, bias, ids, reduction=reduction, backend=backend), hits


class _Norms:
    """The norms of a call in chunks, for the taps that are open."""

    def __init__(self, T: int) -> None:
        self.T = T
        self.states: list[Tensor] = []  # of the chunks, from the first
        self.grads: list[Tensor] = []  # from the last

    def join(self, parts: list[Tensor]) -> Tensor:
        """One tensor [T], zeros after the last chunk that was run."""
        norms = torch.cat(parts)
        return torch.nn.functional.pad(norms, (0, self.T - len(norms)))


def _chunk(args: ScanArgs, readout: Readout, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum of the cross-entropies, hits [steps], the state [B, N] after it) of a chunk of steps from ``start`` on.
    args and readout hold the x, resets and target of the chunk, the state before it, and the lengths of the whole."""
    x, after, lengths, target, index = args.x, args.h0, args.lengths, readout.target, None
    assert x is not None
    x = x if x.is_floating_point() else x.to(torch.int64)
    if lengths is not None:  # only the sequences that have steps here
        index = (lengths > start).nonzero().squeeze(1)
        x, target = x[:, index], target[:, index]
        args = args._replace(
            h0=args.h0[index],
            lengths=(lengths[index] - start).clamp(max=len(x)),
            resets=None if args.resets is None else args.resets[:, index],
            reset_state=None if args.reset_state is None else args.reset_state[index],
        )
    hs = scan(args._replace(x=x))
    loss, hits = _readout(hs, readout._replace(target=target, reduction="sum"), args.lengths, args.backend)
    # a copy, and not a view, which would keep the states of the chunk
    return loss, hits, hs[-1].clone() if index is None else after.index_copy(0, index, hs[-1])


class _Chunk(torch.autograd.Function):
    """Note [Chunks of states]: `_chunk`, whose states are recomputed in the backward.

    fixed: its arguments without tensors; target; the readout's weight and bias; tensors: those of the arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fixed: ScanArgs,
        norms: _Norms,
        start: int,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _taps.set_aside() as aside:
            loss, hits, after = _chunk(join_tensors(fixed, tensors), Readout(weight, bias, target), start)
        norms.states += aside.state_norms
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        ctx.fixed, ctx.norms, ctx.start = fixed, norms, start
        ctx.save_for_backward(target, weight, bias, *tensors)
        return loss, hits, after

    @staticmethod
    @differentiable_once("the loss in chunks of states")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any, grad_after: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(saved, needs, strict=True)]
        target, weight, bias, *tensors = leaves
        assert target is not None and weight is not None
        with torch.enable_grad(), _taps.set_aside() as aside:
            loss, _, after = _chunk(join_tensors(ctx.fixed, tensors), Readout(weight, bias, target), ctx.start)
            pairs = [(r, g) for r, g in ((loss, grad_loss), (after, grad_after)) if g is not None and r.requires_grad]
            required = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            results, cotangents = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(results, required, cotangents, allow_unused=True))
        ctx.norms.grads += aside.grad_norms
        if ctx.start == 0 and ctx.norms.grads:
            _taps.record(aside.ops[0], ctx.norms.join(ctx.norms.grads[::-1]))
            ctx.norms.grads.clear()
        return (*(None,) * 3, *(next(grads) if need else None for need in needs))


def _in_chunks(args: ScanArgs, readout: Readout, steps: int) -> tuple[Tensor, Tensor]:
    """(the sum of the cross-entropies in float64, hits) by chunks of ``steps`` steps."""
    weight, bias, target, _ = readout
    x, after = args.x, args.h0
    assert x is not None
    check_lengths(args.lengths, len(x))
    norms, total, hits = _Norms(len(x)), torch.zeros((), dtype=torch.float64, device=after.device), []
    for i, (part, classes) in enumerate(zip(x.split(steps), target.split(steps), strict=True)):
        start = i * steps
        if args.lengths is not None and not bool((args.lengths > start).any()):
            hits.append(torch.zeros(len(classes), dtype=torch.int64, device=after.device))
            continue
        resets = None if args.resets is None else args.resets[start : start + steps]
        own = args._replace(x=part, h0=after, resets=resets)
        fixed, tensors = split_tensors(own)
        loss, hit, after = _Chunk.apply(fixed, norms, start, classes, weight, bias, *tensors)
        total = total + loss.double()
        hits.append(hit)
    if norms.states:
        _taps.record_state_norms(args.op, norms.join(norms.states))
    return total, torch.cat(hits)


def _is_kept_whole(args: ScanArgs, step: int) -> bool:
    """Whether a call keeps the states of all steps, of ``step`` bytes each: Note [Chunks of states]. Calls of the plain
    reference code, forward mode and torch.func always do, since the chunks have no second derivative and no rules for
    transforms."""
    transformed = torch._C._are_functorch_transforms_active() or by_reference(args.backend)
    return args.time_steps * step <= kept_states(args.h0.device) or transformed


def _chunk_steps(step: int) -> int:
    return max(1, CHUNK // step)


def _sequential(args: ScanArgs, readout: Readout) -> tuple[Tensor, Tensor]:
    """(loss, hits), step by step."""
    x, h0, lengths = args.x, args.h0, args.lengths
    assert x is not None
    step = h0.numel() * h0.element_size()
    if _is_kept_whole(args, step):
        hs = scan(args if x.is_floating_point() else args._replace(x=x.to(torch.int64)))
        if lengths is None:  # bitwise the result of linear_cross_entropy with this reduction
            return _readout(hs, readout, None, args.backend)
        loss, hits = _readout(hs, readout._replace(reduction="sum"), lengths, args.backend)
    else:
        loss, hits = _in_chunks(args, readout, _chunk_steps(step))
    if readout.reduction != "sum":
        loss = loss * (1.0 / (readout.target.numel() if lengths is None else int(lengths.sum())))
    return loss.to(h0.dtype), hits


@keeps_dtype
def scan_loss(args: ScanArgs, readout: Readout, start: Tensor | None = None) -> ScanLoss:
    """See ``orthokern.functional.scan_cross_entropy``; start is its ``basis``. Arguments are assumed to be checked."""
    modes, why = choice.choose(choice.call_of(args, readout, start))
    if modes is None:
        return ScanLoss(*_sequential(args, readout), None, why)
    return ScanLoss(*modal_loss(args, readout, modes), modes.basis.right, "")
