"""Recurrence, linear readout and cross-entropy in one call: in modal form where that is possible, else step by step.

Note [Chunks of states]
    The sequential scan keeps its states for the backward, and the gradient of the readout has the same size. This is
    done while the states take at most ``orthokern._memory.kept_states`` bytes, a sixteenth of the device's memory.
    Beyond that, only the states that enter each chunk of steps are kept. The backward processes the chunks from the
    last to the first: it recomputes the states of the chunk, then computes the loss and the gradients of its readout
    and the backward of its scan, which starts from the adjoint of the following chunk. This costs one more forward.
    States and hits are bitwise the same; sums over time are accumulated in float64 chunk by chunk.

    Gradients are proportional to that of the loss, so they are computed in the forward and multiplied in the backward.
    With a message clip they are not proportional, and the backward computes them, for one more forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._memory import kept_states
from orthokern._scan_contract import Readout, ScanArgs, ScanInputs, ScanOptions
from orthokern.ops import _modal, _route, _taps
from orthokern.ops._common import differentiable_once, needs_grad
from orthokern.ops._engine import save_tensors, saved_tensors
from orthokern.ops._modal import Call, Matrix
from orthokern.ops._scan import scan
from orthokern.ops.linear_cross_entropy import linear_cross_entropy

CHUNK = 2**24  # bytes of a chunk's states
LOGITS = 2**22  # elements of the logits that ``_hits`` computes at a time


class ScanLoss(NamedTuple):
    """What ``orthokern.functional.scan_cross_entropy`` returns.

    Attributes:
        loss: 0-dim, in nats; differentiable.
        hits: int64 [T], the number of sequences whose largest logit at the step is that of the target.
        basis: float64 [N, 2M], the eigenvectors that the call found, the start for the next call; None if the call
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
        u, s, v = matrix if len(matrix) == 3 else (matrix[0], None, None)
        return scan(
            ScanArgs(
                x if x.is_floating_point() else x.to(torch.int64), v, s, u, h0, weight, bias, act_param,
                self.activation, self.checkpoint_every, self.backend, self.precision, self.algorithm, self.lengths,
                self.message_clip, self.resets, reset_state,
            )
        )  # fmt: skip


@torch.no_grad()
def _hits(rows: Tensor, readout: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Whether the largest logit is that of the target: bool, the shape of target [...]; rows [..., N]."""
    flat = rows.detach().flatten(0, -2)
    # One tensor for all parts: results that are kept between parts would leave holes of a part's size in the heap.
    classes = flat.new_empty(flat.shape[:1], dtype=torch.int64)  # len() would be a constant of an exported program
    step = max(1, LOGITS // len(readout))
    for part, found in zip(flat.split(step), classes.split(step), strict=True):
        found.copy_(torch.nn.functional.linear(part, readout, bias).argmax(-1))
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


class _ChunkedLoss(torch.autograd.Function):
    """Note [Chunks of states]: (loss, hits). For calls that need gradients alone: inside, ``ctx.needs_input_grad`` of
    parameters is true under no_grad too."""

    @staticmethod
    def forward(
        ctx: Any, scan: ScanCall, steps: int, scale: float, target: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        run = _Chunks(scan, steps, scale, target, tensors)
        ctx.wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        ctx.later = scan.message_clip > 0
        loss, hits = run.forward() if ctx.later else run.backward()
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        if ctx.later:
            ctx.scan, ctx.steps, ctx.scale = scan, steps, scale
            save_tensors(ctx, *tensors, target, scan.lengths, scan.resets)
        else:
            save_tensors(ctx, *run.grads)
            ctx.op, ctx.norms = run.op, run.grad_norms
        return loss, hits

    @staticmethod
    @differentiable_once("the loss in chunks of states")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * (4 + len(ctx.wanted))
        if ctx.later:
            *tensors, target, lengths, resets = saved_tensors(ctx)
            scan = dataclasses.replace(ctx.scan, lengths=lengths, resets=resets)
            leaves = [
                None if t is None else t.detach().requires_grad_(wanted)
                for t, wanted in zip(tensors, ctx.wanted, strict=True)
            ]
            run = _Chunks(scan, ctx.steps, ctx.scale, target, tuple(leaves))
            run.adjoint(grad_loss)
            grads, op, norms = run.grads, run.op, run.grad_norms
        else:
            grads = [None if grad is None else grad * grad_loss for grad in saved_tensors(ctx)]
            op, norms = ctx.op, ctx.norms * grad_loss.abs()
        if op:
            _taps.record(op, norms)
        return (None,) * 4 + tuple(g if wanted else None for g, wanted in zip(grads, ctx.wanted, strict=True))


class _Chunks:
    """One loss in chunks of states.

    tensors: those of ScanInputs, the readout's weight and bias, then the matrix.
    """

    def __init__(
        self, scan: ScanCall, steps: int, scale: float, target: Tensor, tensors: tuple[Tensor | None, ...]
    ) -> None:
        x, h0, *self.parameters = tensors
        assert x is not None and h0 is not None
        self.scan, self.scale, self.target, self.x, self.h0 = scan, scale, target, x, h0
        self.spans = [(start, min(start + steps, len(x))) for start in range(0, len(x), steps)]
        self.hits = torch.zeros(len(x), dtype=torch.int64, device=h0.device)
        self.total = torch.zeros((), dtype=torch.float64, device=h0.device)
        self.grads: list[Tensor | None] = [None] * len(tensors)
        self.op = ""  # of the norms, where a tap is open
        self.state_norms, self.grad_norms = (h0.new_zeros(len(x) if _taps.SINKS else 0) for _ in range(2))

    def _take_norms(self, taken: _taps.tap, start: int, stop: int) -> None:
        if taken.state_norms:
            self.op = taken.state_ops[0]
            self.state_norms[start:stop] = taken.state_norms[0]
        if taken.grad_norms:
            self.grad_norms[start:stop] = taken.grad_norms[0]

    def _alive(self, start: int) -> Any:
        """The sequences that have steps from ``start`` on, as an index."""
        return slice(None) if self.scan.lengths is None else (self.scan.lengths > start).nonzero().squeeze(1)

    def _empty(self, start: int) -> bool:
        return self.scan.lengths is not None and not bool((self.scan.lengths > start).any())

    def _after(self, h: Tensor, index: Any, last: Tensor) -> Tensor:
        """h [B, N], states or adjoints, with the rows ``index``, which have steps in a chunk, replaced by ``last``."""
        return last.clone() if self.scan.lengths is None else h.index_copy(0, index, last)

    def _states(
        self, start: int, stop: int, x: Tensor, h: Tensor, parameters: list[Tensor | None]
    ) -> tuple[Tensor, ScanCall]:
        """hs of the sequences that have steps in a chunk, and their scan; x and h hold only these sequences."""
        index, (lengths, resets) = self._alive(start), (self.scan.lengths, self.scan.resets)
        scan = dataclasses.replace(
            self.scan,
            lengths=None if lengths is None else (lengths[index] - start).clamp(max=stop - start),
            resets=None if resets is None else resets[start:stop, index],
        )
        weight, bias, act_param, state, _, _, *matrix = parameters
        inputs = ScanInputs(x, h, weight, bias, act_param, None if state is None else state[index])
        return scan(inputs, cast(Matrix, tuple(matrix))), scan

    def _loss(self, start: int, stop: int, hs: Tensor, scan: ScanCall, parameters: list[Tensor | None]) -> Tensor:
        """The sum of a chunk's cross-entropies. Adds it to the total and stores the chunk's hits."""
        weight, bias = parameters[4:6]
        assert weight is not None
        readout = Readout(weight, bias, self.target[start:stop, self._alive(start)], "sum")
        loss, self.hits[start:stop] = _readout(hs, readout, scan.lengths, scan.backend)
        self.total += loss.detach().double()
        return loss

    def _result(self) -> tuple[Tensor, Tensor]:
        if self.op:
            _taps.record_state_norms(self.op, self.state_norms)
        return (self.total * self.scale).to(self.h0.dtype), self.hits

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """(loss, hits), without gradients."""
        h = self.h0
        for start, stop in self.spans:
            if self._empty(start):
                break
            index = self._alive(start)
            with _taps.set_aside() as taken:
                hs, scan = self._states(start, stop, self.x[start:stop, index], h[index], self.parameters)
            self._take_norms(taken, start, stop)
            self._loss(start, stop, hs, scan, self.parameters)
            h = self._after(h, index, hs[-1])
        return self._result()

    def backward(self) -> tuple[Tensor, Tensor]:
        """(loss, hits); sets ``grads``."""
        self.adjoint()
        return self._result()

    def adjoint(self, of_loss: Tensor | None = None) -> None:
        """Sets ``grads`` and ``grad_norms``; of_loss: the gradient of the loss [], 1 for None."""
        entering = self._entering()
        sums: list[Tensor | None] = [None] * len(self.parameters)
        grad_x = torch.zeros_like(self.x) if self.x.requires_grad else None
        carry = torch.zeros_like(self.h0)
        for (start, stop), h in zip(reversed(self.spans), reversed(entering), strict=True):
            if self._empty(start):
                continue
            index = self._alive(start)
            with torch.enable_grad(), _taps.set_aside() as taken:
                leaves = [None if p is None else p.detach().requires_grad_(p.requires_grad) for p in self.parameters]
                piece = self.x[start:stop, index].detach().requires_grad_(grad_x is not None)
                h = h[index].detach().requires_grad_()
                hs, scan = self._states(start, stop, piece, h, leaves)
                loss = self._loss(start, stop, hs, scan, leaves)
                asked = [leaf for leaf in (h, piece, *leaves) if leaf is not None and leaf.requires_grad]
                grad_loss = torch.full_like(loss, self.scale) if of_loss is None else self.scale * of_loss.to(loss)
                found = list(torch.autograd.grad([loss, hs[-1]], asked, [grad_loss, carry[index]], allow_unused=True))
            self._take_norms(taken, start, stop)
            carry = self._after(carry, index, found.pop(0))
            if grad_x is not None:
                grad_x[start:stop, index] = found.pop(0)
            for i, leaf in enumerate(leaves):
                if leaf is not None and leaf.requires_grad and (grad := found.pop(0)) is not None:
                    before = sums[i]
                    sums[i] = grad.double() if before is None else before + grad
        self.grads = [grad_x, carry]
        for total_grad, parameter in zip(sums, self.parameters, strict=True):
            self.grads.append(None if total_grad is None or parameter is None else total_grad.to(parameter.dtype))

    @torch.no_grad()
    def _entering(self) -> list[Tensor]:
        """The state [B, N] before every chunk."""
        h, entering = self.h0, [self.h0]
        for start, stop in self.spans[:-1]:
            if not self._empty(start):
                index = self._alive(start)
                with _taps.set_aside():
                    hs, _ = self._states(start, stop, self.x[start:stop, index], h[index], self.parameters)
                h = self._after(h, index, hs[-1])
            entering.append(h)
        return entering


def _is_kept_whole(T: int, step: int, device: torch.device, backend: str | None) -> bool:
    """Whether a call keeps the states of T steps of ``step`` bytes: Note [Chunks of states]. Calls of the plain
    reference code, forward mode and torch.func always do, since the chunks have no second derivative and no rules for
    transforms."""
    transformed = torch._C._are_functorch_transforms_active()
    return T * step <= kept_states(device) or transformed or _route.by_reference(backend)


def _chunk_steps(step: int) -> int:
    return max(1, CHUNK // step)


def state_bytes(call: Call, modal: bool) -> int:
    """Bytes of states and of their gradients that a loss holds at one time. Sequential: those of all steps, or of one
    chunk and the states that enter chunks. Modal: those of features in modal coordinates."""
    copies, step = 2 if call.backward else 1, call.B * call.N * call.dtype.itemsize
    if modal:
        return copies * _modal.input_bytes(call)
    if _is_kept_whole(call.T, step, call.device, call.backend):
        return copies * call.T * step
    steps = _chunk_steps(step)
    return copies * min(steps, call.T) * step + (-(-call.T // steps) * step if call.backward else 0)


def _sequential(inputs: ScanInputs, matrix: Matrix, readout: Readout, scan: ScanCall) -> tuple[Tensor, Tensor]:
    """(loss, hits)."""
    weight, bias, target, reduction = readout
    (x, h0, *_), lengths = inputs, scan.lengths
    assert x is not None
    scale = 1.0
    if reduction != "sum":
        scale /= target.numel() if lengths is None else int(lengths.sum())
    step = h0.numel() * h0.element_size()
    if _is_kept_whole(x.shape[0], step, h0.device, scan.backend):
        hs = scan(inputs, matrix)
        if lengths is None:  # bitwise the result of linear_cross_entropy with this reduction
            return _readout(hs, readout, None, scan.backend)
        loss, hits = _readout(hs, readout._replace(reduction="sum"), lengths, scan.backend)
        return loss * scale, hits
    tensors = (*inputs, weight, bias, *matrix)
    if not needs_grad(*tensors):
        return _Chunks(scan, _chunk_steps(step), scale, target, tensors).forward()
    loss, hits = _ChunkedLoss.apply(scan, _chunk_steps(step), scale, target, *tensors)
    return loss, hits


def _call(kind: str, inputs: ScanInputs, matrix: Matrix, C: int, scan: ScanCall, backward: bool, started: bool) -> Call:
    x, h0 = inputs[:2]
    assert x is not None
    return Call(
        kind=kind, T=x.shape[0], B=x.shape[1], N=h0.shape[1], K=matrix[-1].shape[1], C=C,
        ids=not x.is_floating_point(), backward=backward, dtype=h0.dtype, device=h0.device, started=started,
        activation=scan.activation, message_clip=scan.message_clip, backend=scan.backend,
        lengths=scan.lengths is not None, resets=scan.resets is not None,
    )  # fmt: skip


def choose_for(
    matrix: Matrix, T: int, B: int, C: int, *, algorithm: str, start: Tensor | None, **facts: Any
) -> tuple[Call, _modal.Modes | None, str]:
    """(the call, its modes or None, why it has none) for a training step with ``scan_loss``; see ``_modal.choose``.

    facts: ids, activation, message_clip, backend, lengths, resets of ``Call``.
    """
    like = matrix[0]
    call = Call(
        kind="loss", T=T, B=B, N=like.shape[0], K=matrix[-1].shape[1], C=C, backward=True, dtype=like.dtype,
        device=like.device, started=start is not None, **facts,
    )  # fmt: skip
    with torch.no_grad():
        return call, *_modal.choose(matrix, call, start, algorithm)


def modal_scan(args: ScanArgs) -> Tensor:
    """`modal_states` of checked arguments."""
    _, inputs, options = args.parts()
    matrix = (args.second,) if args.first is None else (args.second, args.scale, args.first)
    scan = ScanCall(**{name: getattr(options, name) for name in options.__slots__}, backend=args.backend)
    return modal_states(inputs, cast(Matrix, matrix), scan)


@keeps_dtype
def modal_states(inputs: ScanInputs, matrix: Matrix, scan: ScanCall) -> Tensor:
    """hs [T, B, N] of a scan with algorithm="modal"; InputError where the modal form is not possible."""
    call = _call("states", inputs, matrix, 0, scan, needs_grad(*inputs, *matrix), False)
    modes, _ = _modal.choose(matrix, call, None, "modal")
    assert modes is not None
    hs = _modal.modal_states(inputs, modes, backend=scan.backend, lengths=scan.lengths)
    _taps.record_states("modal_scan", hs)
    return hs


def _is_asynchronous(device: torch.device) -> bool:
    """Whether kernels on this device run asynchronously to the host."""
    return device.type != "cpu"


@keeps_dtype
def scan_loss(
    inputs: ScanInputs, matrix: Matrix, readout: Readout, scan: ScanCall, start: Tensor | None = None
) -> ScanLoss:
    """See ``orthokern.functional.scan_cross_entropy``; start is its ``basis``. Inputs are taken as checked."""
    backward = needs_grad(*inputs, readout.weight, readout.bias, *matrix)
    call = _call("loss", inputs, matrix, len(readout.weight), scan, backward, start is not None)
    modes, why = _modal.choose(matrix, call, start, scan.algorithm, defer=_is_asynchronous(inputs.h0.device))
    while modes is not None:
        loss, hits = _modal.modal_loss(inputs, readout, modes, backend=scan.backend, lengths=scan.lengths)
        if modes.hold(call, scan.algorithm == "modal"):
            return ScanLoss(loss, hits, modes.basis.right, "")
        modes, why = _modal.choose(matrix, call, None, scan.algorithm)  # the start did not lead to a basis
    return ScanLoss(*_sequential(inputs, matrix, readout, scan), None, why)
