"""Recurrence, linear readout and cross-entropy in one call: modal where that serves, else step by step.

Note [Chunks of states]
    The scan step by step keeps its states for the backward, and the readout's gradient is as large once more. That is
    what is done while the states take at most ``orthokern._memory.kept_states`` bytes, a sixteenth of the device's
    memory: the scan followed by the readout, bit for bit. Beyond, the states that enter every chunk of steps are kept,
    and the backward goes through the chunks from the last to the first: states of the chunk anew, loss and gradients of
    its readout, backward of its scan with the gradient that the chunk behind it sends. This costs one more forward.
    States and hits have the same bits; sums over time are taken chunk by chunk, in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern._autocast import keeps_dtype
from orthokern._memory import kept_states
from orthokern.ops import _modal, _route, _taps, dense_scan, factored_scan
from orthokern.ops._common import differentiable_once
from orthokern.ops._modal import Call, Matrix
from orthokern.ops.linear_cross_entropy import linear_cross_entropy

CHUNK = 2**24  # bytes of a chunk's states
LOGITS = 2**22  # elements of the logits that ``_hits`` has at a time


@dataclasses.dataclass(frozen=True)
class Scan:
    """The options of a scan that have no gradient; as those of ``factored_scan``."""

    activation: str
    backend: str | None
    precision: str
    algorithm: str
    message_clip: float

    def __call__(self, tensors: list[Tensor | None], lengths: Tensor | None, resets: Tensor | None) -> Tensor:
        """hs [T, B, N]; tensors: x, h0, weight, bias, act_param, reset_state, then the matrix."""
        x, h0, weight, bias, act_param, reset_state, *matrix = tensors
        assert x is not None and h0 is not None and matrix[0] is not None
        if not x.is_floating_point():
            x = x.to(torch.int64)
        options: dict[str, Any] = {
            **dataclasses.asdict(self), "lengths": lengths, "resets": resets, "reset_state": reset_state
        }  # fmt: skip
        if len(matrix) == 1:
            return dense_scan.dense_scan(x, matrix[0], h0, weight, bias, act_param, **options)
        u, s, v = matrix
        assert u is not None and s is not None and v is not None
        return factored_scan.factored_scan(x, u, s, v, h0, weight, bias, act_param, **options)


@torch.no_grad()
def _hits(rows: Tensor, readout: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Whether the largest logit is that of the target: bool, the shape of target [...]; rows [..., N]."""
    flat, found = rows.detach().flatten(0, -2), []
    for part in flat.split(max(1, LOGITS // len(readout))):
        found.append(torch.nn.functional.linear(part, readout, bias).argmax(-1))
    return torch.cat(found).view(target.shape) == target


def _readout(
    hs: Tensor,
    readout: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lengths: Tensor | None,
    backend: str | None,
    reduction: str = "sum",
) -> tuple[Tensor, Tensor]:
    """(the cross-entropy over all steps that count, hits [T])."""
    target = target.to(torch.int64)
    alive = None if lengths is None else torch.arange(len(hs), device=hs.device)[:, None] < lengths
    if alive is None:
        rows, ids = hs.flatten(0, 1), target.flatten()
        hits = _hits(hs, readout, bias, target).sum(1)
    else:
        rows, ids = hs[alive], target[alive]
        right = torch.zeros_like(alive)
        right[alive] = _hits(rows, readout, bias, ids)
        hits = right.sum(1)
    return linear_cross_entropy(rows, readout, bias, ids, reduction=reduction, backend=backend), hits


class _ChunkedLoss(torch.autograd.Function):
    """Note [Chunks of states]: (loss, hits), the gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        scan: Scan,
        steps: int,
        scale: float,
        target: Tensor,
        lengths: Tensor | None,
        resets: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        run = _Chunks(scan, steps, scale, target, lengths, resets, list(tensors))
        loss, hits = run.backward() if any(ctx.needs_input_grad) else run.forward()
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        ctx.wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*run.grads)
        if run.op:
            _taps.record_state_norms(run.op, run.state_norms)
        ctx.op, ctx.norms = run.op, run.grad_norms
        return loss, hits

    @staticmethod
    @differentiable_once("the loss in chunks of states")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None or grad_loss is None else grad * grad_loss for grad in ctx.saved_tensors]
        if ctx.op and grad_loss is not None:
            _taps.record(ctx.op, ctx.norms * grad_loss.abs())
        return (None,) * 6 + tuple(g if wanted else None for g, wanted in zip(grads, ctx.wanted, strict=True))


class _Chunks:
    """One call of ``_ChunkedLoss``.

    tensors: x, h0, readout, readout_bias, weight, bias, act_param, reset_state, then the matrix.
    """

    def __init__(
        self,
        scan: Scan,
        steps: int,
        scale: float,
        target: Tensor,
        lengths: Tensor | None,
        resets: Tensor | None,
        tensors: list[Tensor | None],
    ) -> None:
        self.scan, self.scale, self.target, self.lengths, self.tensors = scan, scale, target, lengths, tensors
        self.resets = resets
        x, h0 = tensors[:2]
        assert x is not None and h0 is not None
        self.x, self.h0 = x, h0
        self.spans = [(start, min(start + steps, len(x))) for start in range(0, len(x), steps)]
        self.hits = torch.zeros(len(x), dtype=torch.int64, device=h0.device)
        self.grads: list[Tensor | None] = [None] * len(tensors)
        self.op = ""  # of the norms, where a tap is open
        self.state_norms, self.grad_norms = (h0.new_zeros(len(x) if _taps.SINKS else 0) for _ in range(2))

    def _take_norms(self, taken: _taps.tap, start: int, stop: int) -> None:
        if taken.state_norms:
            self.op = taken.state_ops[0]
            self.state_norms[start:stop] = taken.state_norms[0]
        if taken.grad_norms:
            self.grad_norms[start:stop] = taken.grad_norms[0]

    def _alive(self, start: int, stop: int) -> tuple[Any, Tensor | None]:
        """The sequences that have steps in a chunk, as an index, and how many of them each has there."""
        if self.lengths is None:
            return slice(None), None
        index = (self.lengths > start).nonzero().squeeze(1)
        return index, (self.lengths[index] - start).clamp(max=stop - start)

    def _empty(self, start: int) -> bool:
        return self.lengths is not None and not bool((self.lengths > start).any())

    def _states(self, start: int, stop: int, x: Tensor, h: Tensor, rest: list[Tensor | None]) -> Tensor:
        """hs of the sequences that have steps in a chunk; x, h: those of these sequences; rest: tensors[4:]."""
        index, lengths = self._alive(start, stop)
        weight, bias, act_param, state, *matrix = rest
        resets = None if self.resets is None else self.resets[start:stop, index]
        state = None if state is None else state[index]
        return self.scan([x, h, weight, bias, act_param, state, *matrix], lengths, resets)

    def forward(self) -> tuple[Tensor, Tensor]:
        """(loss, hits) alone."""
        h, total = self.h0, torch.zeros((), dtype=torch.float64, device=self.h0.device)
        _, _, readout, bias, *rest = self.tensors
        assert readout is not None
        with torch.no_grad():
            for start, stop in self.spans:
                if self._empty(start):
                    break
                index, lengths = self._alive(start, stop)
                with _taps.set_aside() as taken:
                    hs = self._states(start, stop, self.x[start:stop, index], h[index], rest)
                self._take_norms(taken, start, stop)
                loss, hits = _readout(hs, readout, bias, self.target[start:stop, index], lengths, self.scan.backend)
                total += loss.double()
                self.hits[start:stop] = hits
                h = h.index_copy(0, index, hs[-1]) if lengths is not None else hs[-1].clone()
        return (total * self.scale).to(self.h0.dtype), self.hits

    def backward(self) -> tuple[Tensor, Tensor]:
        """(loss, hits), and ``grads``."""
        entering = self._entering()
        x, _, *parameters = self.tensors
        assert x is not None
        sums: list[Tensor | None] = [None] * len(parameters)
        grad_x = torch.zeros_like(x) if x.requires_grad else None
        carry, total = torch.zeros_like(self.h0), torch.zeros((), dtype=torch.float64, device=self.h0.device)
        for (start, stop), h in zip(reversed(self.spans), reversed(entering), strict=True):
            if self._empty(start):
                continue
            index, lengths = self._alive(start, stop)
            with torch.enable_grad(), _taps.set_aside() as taken:
                leaves = [None if p is None else p.detach().requires_grad_(p.requires_grad) for p in parameters]
                piece = x[start:stop, index].detach()
                if grad_x is not None:
                    piece.requires_grad_()
                h = h[index].detach().requires_grad_()
                readout, bias, *rest = leaves
                assert readout is not None
                hs = self._states(start, stop, piece, h, rest)
                loss, hits = _readout(hs, readout, bias, self.target[start:stop, index], lengths, self.scan.backend)
                asked = [h, *([piece] if grad_x is not None else [])]
                asked += [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
                grad_loss = torch.full_like(loss, self.scale)
                found = list(torch.autograd.grad([loss, hs[-1]], asked, [grad_loss, carry[index]], allow_unused=True))
            self._take_norms(taken, start, stop)
            total += loss.detach().double()
            self.hits[start:stop] = hits
            grad_h = found.pop(0)
            carry = carry.index_copy(0, index, grad_h) if lengths is not None else grad_h
            if grad_x is not None:
                grad_x[start:stop, index] = found.pop(0)
            for i, leaf in enumerate(leaves):
                if leaf is not None and leaf.requires_grad and (grad := found.pop(0)) is not None:
                    before = sums[i]
                    sums[i] = grad.double() if before is None else before + grad
        self.grads = [grad_x, carry]
        for total_grad, parameter in zip(sums, parameters, strict=True):
            self.grads.append(None if total_grad is None or parameter is None else total_grad.to(parameter.dtype))
        return (total * self.scale).to(self.h0.dtype), self.hits

    @torch.no_grad()
    def _entering(self) -> list[Tensor]:
        """The state [B, N] before every chunk."""
        h, entering = self.h0, [self.h0]
        rest = self.tensors[4:]
        for start, stop in self.spans[:-1]:
            if not self._empty(start):
                index, lengths = self._alive(start, stop)
                with _taps.set_aside():
                    hs = self._states(start, stop, self.x[start:stop, index], h[index], rest)
                h = h.index_copy(0, index, hs[-1]) if lengths is not None else hs[-1].clone()
            entering.append(h)
        return entering


def _is_kept_whole(T: int, step: int, device: torch.device, backend: str | None) -> bool:
    """Whether a call keeps the states of T steps of ``step`` bytes: Note [Chunks of states]. Plain reference code is
    differentiated twice, so it does, and so do forward mode and torch.func."""
    transformed = torch._C._are_functorch_transforms_active()  # torch.func has no rule for the chunks
    return T * step <= kept_states(device) or transformed or _route.plain(backend)


def _chunk_steps(step: int) -> int:
    return max(1, CHUNK // step)


def state_bytes(call: Call, modal: bool) -> int:
    """Bytes that a loss holds at one time of states and of their gradients: step by step those of all steps, or of a
    chunk and those that enter chunks; in the modal form none, but features have to be taken into modes."""
    copies, step = 2 if call.backward else 1, call.B * call.N * call.dtype.itemsize
    if modal:
        return copies * _modal.input_bytes(call)
    if _is_kept_whole(call.T, step, call.device, call.backend):
        return copies * call.T * step
    steps = _chunk_steps(step)
    return copies * min(steps, call.T) * step + (-(-call.T // steps) * step if call.backward else 0)


def _sequential(
    scan: Scan,
    tensors: list[Tensor | None],
    target: Tensor,
    reduction: str,
    lengths: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(loss, hits); tensors as in ``_Chunks``."""
    x, h0, readout, readout_bias, *rest = tensors
    assert x is not None and h0 is not None and readout is not None
    if reduction == "sum":
        scale = 1.0
    else:
        scale = 1.0 / (target.numel() if lengths is None else int(lengths.sum()))
    step = h0.numel() * h0.element_size()
    if _is_kept_whole(len(x), step, h0.device, scan.backend):
        hs = scan([x, h0, *rest], lengths, resets)
        if lengths is None:  # with the reduction of the readout itself: its bits
            return _readout(hs, readout, readout_bias, target, None, scan.backend, reduction)
        loss, hits = _readout(hs, readout, readout_bias, target, lengths, scan.backend)
        return loss * scale, hits
    loss, hits = _ChunkedLoss.apply(scan, _chunk_steps(step), scale, target, lengths, resets, *tensors)
    return loss, hits


class Result(NamedTuple):
    """Of ``scan_loss``.

    Attributes:
        loss: 0-dim, nats.
        hits: int64 [T], how many sequences have their largest logit at the target.
        basis: R [N, 2M], float64, of the modes; None where the call went step by step.
        refused: why it did; "" where it used the modal form.
    """

    loss: Tensor
    hits: Tensor
    basis: Tensor | None
    refused: str


def _call(
    kind: str,
    tensors: list[Tensor | None],
    matrix: Matrix,
    C: int,
    activation: str,
    message_clip: float,
    backend: str | None,
    lengths: Tensor | None,
    resets: Tensor | None,
    start: Tensor | None = None,
) -> Call:
    x, h0 = tensors[:2]
    assert x is not None and h0 is not None
    return Call(
        kind=kind, T=x.shape[0], B=x.shape[1], N=h0.shape[1], K=matrix[-1].shape[1], C=C,
        ids=not x.is_floating_point(),
        backward=torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors),
        dtype=h0.dtype, device=h0.device, activation=activation, message_clip=message_clip, backend=backend,
        lengths=lengths is not None, started=start is not None, resets=resets is not None,
    )  # fmt: skip


def choose_for(
    matrix: Matrix,
    T: int,
    B: int,
    C: int,
    *,
    ids: bool,
    lengths: bool,
    activation: str,
    message_clip: float,
    backend: str | None,
    algorithm: str,
    start: Tensor | None,
    resets: bool = False,
) -> tuple[Call, _modal.Modes | None, str]:
    """(the call, its modes or None, why not) of a training step with ``scan_loss``; see ``_modal.choose``."""
    like = matrix[0]
    call = Call(
        kind="loss", T=T, B=B, N=like.shape[0], K=matrix[-1].shape[1], C=C, ids=ids, backward=True,
        dtype=like.dtype, device=like.device, activation=activation, message_clip=message_clip, backend=backend,
        lengths=lengths, started=start is not None, resets=resets,
    )  # fmt: skip
    with torch.no_grad():
        return call, *_modal.choose(matrix, call, start, algorithm)


@keeps_dtype
def modal_states(
    x: Tensor,
    matrix: Matrix,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    *,
    activation: str,
    backend: str | None,
    lengths: Tensor | None,
    message_clip: float,
    resets: Tensor | None,
) -> Tensor:
    """hs [T, B, N] of a scan with algorithm="modal"; arguments as those of ``factored_scan``.

    Raises:
        InputError: modes cannot serve.
    """
    tensors = [x, h0, weight, bias, *matrix]
    call = _call("states", tensors, matrix, 0, activation, message_clip, backend, lengths, resets)
    modes, _ = _modal.choose(matrix, call, None, "modal")
    assert modes is not None
    hs = _modal.modal_states(x, h0, weight, bias, modes, backend=backend, lengths=lengths)
    _taps.record_states("modal_scan", hs)
    return hs


def _is_asynchronous(device: torch.device) -> bool:
    """Whether the host has something to gain from not waiting for the device."""
    return device.type != "cpu"


@keeps_dtype
def scan_loss(
    x: Tensor,
    matrix: Matrix,
    h0: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act_param: Tensor | None,
    readout: Tensor,
    readout_bias: Tensor | None,
    target: Tensor,
    *,
    activation: str,
    reduction: str = "mean",
    backend: str | None = None,
    precision: str = "ieee",
    algorithm: str = "auto",
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
    start: Tensor | None = None,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> Result:
    """See ``orthokern.functional.scan_cross_entropy``. Inputs are taken as checked."""
    tensors = [x, h0, readout, readout_bias, weight, bias, act_param, reset_state, *matrix]
    call = _call("loss", tensors, matrix, len(readout), activation, message_clip, backend, lengths, resets, start)
    modes, why = _modal.choose(matrix, call, start, algorithm, defer=_is_asynchronous(h0.device))
    while modes is not None:
        loss, hits = _modal.modal_loss(
            x, h0, weight, bias, readout, readout_bias, target, modes,
            reduction=reduction, backend=backend, lengths=lengths,
        )  # fmt: skip
        if modes.hold(call, algorithm == "modal"):
            return Result(loss, hits, modes.basis.right, "")
        modes, why = _modal.choose(matrix, call, None, algorithm)  # the start was no good
    scan = Scan(activation, backend, precision, "auto" if algorithm == "auto" else algorithm, message_clip)
    return Result(*_sequential(scan, tensors, target, reduction, lengths, resets), None, why)
