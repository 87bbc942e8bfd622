"""Recurrence, linear readout and cross-entropy in one call: in modal form where that is possible, else step by step.

Note [Chunks of states]
    The sequential scan keeps its states for the backward, and the gradient of the readout has the same size. This is
    done while the states take at most ``orthokern._memory.kept_states`` bytes, a sixteenth of the device's memory.
    Beyond that, each chunk of steps is an autograd Function that keeps only the state before it, and recomputes its
    states and its loss in the backward. This costs one more forward. States and hits are bitwise the same. The norms
    that the chunks record for an open tap are joined to one tensor [T].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._memory import kept_states
from orthokern._scan_contract import Readout, ScanArgs, ScanInputs, ScanOptions
from orthokern.ops import _route, _taps
from orthokern.ops._common import differentiable_once, needs_grad
from orthokern.ops._engine import save_tensors, saved_tensors
from orthokern.ops._scan import scan
from orthokern.ops.linear_cross_entropy import linear_cross_entropy
from orthokern.ops.modal import choice
from orthokern.ops.modal.choice import Call, Matrix, Modes, Options
from orthokern.ops.modal.op import modal_loss, modal_states

CHUNK = 2**24  # bytes of a chunk's states
LOGITS = 2**22  # elements of the logits that ``_hits`` computes at a time


class ScanLoss(NamedTuple):
    """What ``orthokern.functional.scan_cross_entropy`` returns.

    Attributes:
        loss: 0-dim, in nats; differentiable.
        hits: int64 [T], the number of sequences whose largest logit at the step is that of the target.
        basis: float64 [N, 2M], the eigenvectors, the start for the next call; None if the call
            did not use the modal form.
        refused: why the call did not use the modal form, in one line; "" where it did.
    """

    loss: Tensor
    hits: Tensor
    basis: Tensor | None
    refused: str


@dataclasses.dataclass(eq=False)
class ScanCall(ScanOptions):
    """The arguments of ``factored_scan`` that have no gradient."""

    backend: str | None = None

    def __call__(self, inputs: ScanInputs, matrix: Matrix) -> Tensor:
        """hs [T, B, N]."""
        x, h0, weight, bias, act_param, reset_state = inputs
        assert x is not None
        second, scale, first = matrix if len(matrix) == 3 else (matrix[0], None, None)
        return scan(
            ScanArgs(
                x if x.is_floating_point() else x.to(torch.int64),
                first,
                scale,
                second,
                h0,
                weight,
                bias,
                act_param,
                self.activation,
                self.checkpoint_every,
                self.backend,
                self.precision,
                self.algorithm,
                self.lengths,
                self.message_clip,
                self.resets,
                reset_state,
            )
        )


@torch.no_grad()
def _hits(rows: Tensor, readout: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Whether the largest logit is that of the target: bool, the shape of target [...]; rows [..., N]."""
    flat = rows.detach().flatten(0, -2)
    # One tensor for all parts: results that are kept between parts would leave holes of a part's size in the heap.
    classes = flat.new_empty(flat.shape[:1], dtype=torch.int64)  # len() would be a constant of an exported program
    step = max(1, LOGITS // len(readout))
    for part, largest in zip(flat.split(step), classes.split(step), strict=True):
        largest.copy_(torch.nn.functional.linear(part, readout, bias).argmax(-1))
    return classes.view(target.shape) == target


def _readout(hs: Tensor, readout: Readout, lengths: Tensor | None, backend: str | None) -> tuple[Tensor, Tensor]:
    """(the cross-entropy over all steps but padding, hits [T])."""
    weight, bias, target, reduction = readout
    target = target.to(torch.int64)
    if lengths is None:
        rows, ids = hs.flatten(0, 1), target.flatten()
        hits = _hits(hs, weight, bias, target).sum(1)
    else:
        alive = torch.arange(len(hs), device=hs.device)[:, None] < lengths
        rows, ids = hs[alive], target[alive]
        right = torch.zeros_like(alive)
        right[alive] = _hits(rows, weight, bias, ids)
        hits = right.sum(1)
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


def _chunk(
    scan: ScanCall, start: int, target: Tensor, tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum of the cross-entropies, hits [steps], the state [B, N] after it) of a chunk of steps.

    Args:
        scan: of the whole sequence; its resets are those of the chunk.
        start: the first step.
        target: of the chunk.
        tensors: x of the chunk, the state before it, the other tensors of ScanInputs, the readout's weight and bias,
            and the matrix.
    """
    x, h, weight, bias, act_param, state, readout, readout_bias, *matrix = tensors
    assert x is not None and h is not None and readout is not None
    after = h
    if scan.lengths is not None:  # only the sequences that have steps here
        index, resets = (scan.lengths > start).nonzero().squeeze(1), scan.resets
        x, h, target = x[:, index], h[index], target[:, index]
        scan = dataclasses.replace(
            scan,
            lengths=(scan.lengths[index] - start).clamp(max=len(x)),
            resets=None if resets is None else resets[:, index],
        )
        state = None if state is None else state[index]
    hs = scan(ScanInputs(x, h, weight, bias, act_param, state), cast(Matrix, tuple(matrix)))
    loss, hits = _readout(hs, Readout(readout, readout_bias, target, "sum"), scan.lengths, scan.backend)
    # a copy, and not a view, which would keep the states of the chunk
    return loss, hits, hs[-1].clone() if scan.lengths is None else after.index_copy(0, index, hs[-1])


class _Chunk(torch.autograd.Function):
    """Note [Chunks of states]: `_chunk`, whose states are recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, scan: ScanCall, norms: _Norms, start: int, target: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _taps.set_aside() as aside:
            loss, hits, after = _chunk(scan, start, target, tensors)
        norms.states += aside.state_norms
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        ctx.scan, ctx.norms, ctx.start = dataclasses.replace(scan, lengths=None, resets=None), norms, start
        save_tensors(ctx, target, scan.lengths, scan.resets, *tensors)
        return loss, hits, after

    @staticmethod
    @differentiable_once("the loss in chunks of states")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any, grad_after: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[4:]
        target, lengths, resets, *tensors = saved_tensors(ctx)
        scan = dataclasses.replace(ctx.scan, lengths=lengths, resets=resets)
        leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        with torch.enable_grad(), _taps.set_aside() as aside:
            loss, _, after = _chunk(scan, ctx.start, target, leaves)
            pairs = [(r, g) for r, g in ((loss, grad_loss), (after, grad_after)) if g is not None and r.requires_grad]
            required = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            results, cotangents = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(results, required, cotangents, allow_unused=True))
        ctx.norms.grads += aside.grad_norms
        if ctx.start == 0 and ctx.norms.grads:
            _taps.record(aside.ops[0], ctx.norms.join(ctx.norms.grads[::-1]))
            ctx.norms.grads.clear()
        return (*(None,) * 4, *(next(grads) if need else None for need in needs))


def _in_chunks(
    inputs: ScanInputs, matrix: Matrix, readout: Readout, scan: ScanCall, steps: int
) -> tuple[Tensor, Tensor]:
    """(the sum of the cross-entropies in float64, hits) by chunks of ``steps`` steps."""
    (x, after, *rest), (weight, bias, target, _) = inputs, readout
    assert x is not None
    norms, op = _Norms(len(x)), "dense_scan" if len(matrix) == 1 else "factored_scan"
    total, hits = torch.zeros((), dtype=torch.float64, device=after.device), []
    for i, (part, classes) in enumerate(zip(x.split(steps), target.split(steps), strict=True)):
        start = i * steps
        if scan.lengths is not None and not bool((scan.lengths > start).any()):
            hits.append(torch.zeros(len(classes), dtype=torch.int64, device=after.device))
            continue
        own = scan if scan.resets is None else dataclasses.replace(scan, resets=scan.resets[start : start + steps])
        tensors = (part, after, *rest, weight, bias, *matrix)
        loss, hit, after = _Chunk.apply(own, norms, start, classes, *tensors)
        total = total + loss.double()
        hits.append(hit)
    if norms.states:
        _taps.record_state_norms(op, norms.join(norms.states))
    return total, torch.cat(hits)


def _is_kept_whole(T: int, step: int, scan: ScanCall, device: torch.device) -> bool:
    """Whether a call keeps the states of T steps of ``step`` bytes: Note [Chunks of states]. Calls of the plain
    reference code, forward mode and torch.func always do, since the chunks have no second derivative and no rules for
    transforms."""
    transformed = torch._C._are_functorch_transforms_active() or _route.by_reference(scan.backend)
    return T * step <= kept_states(device) or transformed


def _chunk_steps(step: int) -> int:
    return max(1, CHUNK // step)


def _sequential(inputs: ScanInputs, matrix: Matrix, readout: Readout, scan: ScanCall) -> tuple[Tensor, Tensor]:
    """(loss, hits), step by step."""
    (x, h0, *_), lengths = inputs, scan.lengths
    assert x is not None
    step = h0.numel() * h0.element_size()
    whole = _is_kept_whole(len(x), step, scan, h0.device)
    if whole and lengths is None:  # bitwise the result of linear_cross_entropy with this reduction
        return _readout(scan(inputs, matrix), readout, None, scan.backend)
    if whole:
        loss, hits = _readout(scan(inputs, matrix), readout._replace(reduction="sum"), lengths, scan.backend)
    else:
        loss, hits = _in_chunks(inputs, matrix, readout, scan, _chunk_steps(step))
    if readout.reduction != "sum":
        loss = loss * (1.0 / (readout.target.numel() if lengths is None else int(lengths.sum())))
    return loss.to(h0.dtype), hits


def _call(inputs: ScanInputs, matrix: Matrix, readout: Readout | None, scan: ScanCall, started: bool) -> Call:
    x = inputs.x
    assert x is not None
    layer = (None, None) if readout is None else readout[:2]
    options = Options(
        scan.activation,
        scan.message_clip,
        scan.backend,
        scan.algorithm,
        scan.lengths is not None,
        scan.resets is not None,
    )
    backward = needs_grad(*inputs, *layer, *matrix)
    C = 0 if readout is None else len(readout.weight)
    return Call(matrix, x.shape[0], x.shape[1], C, not x.is_floating_point(), backward, started, options)


@keeps_dtype
def modal_scan(args: ScanArgs) -> Tensor:
    """hs [T, B, N] with algorithm="modal"; InputError where the modal form is not possible."""
    _, inputs, options = args.parts()
    matrix = (args.second,) if args.first is None else (args.second, args.scale, args.first)
    call = ScanCall(**{name: getattr(options, name) for name in options.__slots__}, backend=args.backend)
    modes, _ = choice.choose(_call(inputs, cast(Matrix, matrix), None, call, started=False), None)
    assert modes is not None
    return modal_states(inputs, modes, args.lengths)


@torch.no_grad()
def choose_for(
    matrix: Matrix, T: int, B: int, C: int, *, ids: bool, start: Tensor | None, options: Options
) -> tuple[Modes | None, str]:
    """(modes or None, why there are none) for a training step with ``scan_loss``; see ``choice.choose``."""
    return choice.choose(Call(matrix, T, B, C, ids, True, start is not None, options), start)


@keeps_dtype
def scan_loss(
    inputs: ScanInputs, matrix: Matrix, readout: Readout, scan: ScanCall, start: Tensor | None = None
) -> ScanLoss:
    """See ``orthokern.functional.scan_cross_entropy``; start is its ``basis``. The arguments are checked."""
    modes, why = choice.choose(_call(inputs, matrix, readout, scan, start is not None), start)
    if modes is None:
        return ScanLoss(*_sequential(inputs, matrix, readout, scan), None, why)
    return ScanLoss(*modal_loss(inputs, readout, modes, scan.lengths), modes.basis.right, "")
