"""A linear recurrence in modal form: states or a loss from W and the inputs, with the gradient of W.

It consists of the eigenbasis (``_modal_basis.py``), the recursion in that basis (the ops modal_scan and
modal_cross_entropy), and dL/dW from sums of the recursion (``_modal_gradient.py``). This file joins them, and decides
whether a call uses them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._memory import kept_states
from orthokern._products import norms_of_steps
from orthokern._scan_contract import ModalInputs, Readout, ScanInputs
from orthokern.errors import BackendUnavailable, InputError
from orthokern.ops import _route, _taps
from orthokern.ops._common import differentiable_once
from orthokern.ops._engine import save_tensors, saved_tensors
from orthokern.ops._modal_basis import Basis, NoBasis, Pending, diagonalise
from orthokern.ops._modal_gradient import close_pairs, first_close_pairs, gradient_of_w
from orthokern.ops._modal_norms import last_step_norms, norms_through_time
from orthokern.ops.modal_cross_entropy import run_fwd as loss_fwd
from orthokern.ops.modal_scan import run_bwd as scan_bwd
from orthokern.ops.modal_scan import run_fwd as scan_fwd

Matrix = tuple[Tensor, ...]  # (w,) dense [N, N], or (u, s, v) of W = U diag(s) V^T

OPS = {"states": "modal_scan", "loss": "modal_cross_entropy"}
# A span of steps has about SPAN_ROWS rows, which fit into the cache, and a multiple of SPAN_STEPS steps.
SPAN_ROWS, SPAN_STEPS = 16384, 64
ROWS = 4096  # rows of a product over all steps, between two additions in float64
INSTEAD = "; accepted is 'sequential', or 'auto', which falls back to it"


@dataclasses.dataclass(frozen=True)
class Modes:
    """W and its eigenbasis for a modal call."""

    w: Tensor  # [N, N], float64, differentiable with respect to the given matrix
    basis: Basis
    pairs: Tensor  # from `close_pairs`; for a deferred basis, from `first_close_pairs`
    backward: bool  # gradients are needed
    pending: Pending | None = None  # of a deferred basis: its report, `neglected`, and the number of pairs

    def hold(self, call: Call, asked: bool) -> bool:
        """Whether the results of a call that used these modes are valid. Waits for a deferred basis."""
        if self.pending is None:
            return True
        good, condition, neglected, count = self.pending.get()
        try:
            check_accuracy(condition, neglected, call, asked)
        except NoBasis:
            return False
        return good == 1.0 and count <= len(self.pairs)


# ---- whether the modal form serves a call ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice of an algorithm depends on, besides W."""

    kind: str  # "states" or "loss"
    T: int
    B: int
    N: int
    K: int  # N for a dense matrix
    C: int  # of the readout, 0 for states
    ids: bool  # the inputs are token ids
    backward: bool  # gradients are needed
    dtype: torch.dtype
    device: torch.device
    activation: str
    message_clip: float
    backend: str | None
    lengths: bool  # the call has them, as resets
    started: bool  # the call starts from an earlier basis
    resets: bool = False


def why_never(call: Call) -> str | None:
    """Why the modal form is not possible for any W, or None if it is."""
    if call.activation != "identity":
        return f"the activation is {call.activation!r}, and modes are for 'identity'"
    if call.message_clip > 0:
        return f"message_clip is {call.message_clip:g}, and clipping works on units, not on modes"
    if call.resets:
        return "resets replace states between steps, so the recurrence runs step by step"
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the stream is being captured in a graph, and the host has to read the modes of every call"
    features = ("lengths",) if call.lengths else ()
    facts = dispatch.Call(call.device, call.dtype, {"N": call.N, "C": call.C}, features=features)
    try:
        dispatch.choose(OPS[call.kind], call.backend, facts)
    except BackendUnavailable as error:
        return str(error)
    return None


def multiply_adds(call: Call) -> tuple[float, float]:
    """The time of a loss as (modal, sequential), each in multiply-adds of a product of large matrices.

    Weights, from profiles on a CPU: one step of a mode is 4 multiply-adds in float64, which count twice. They are
    computed four times: forward, again in the backward, for the adjoint and for the diagonal. The readout runs at half
    the rate of a product. The eigensolver takes as long as 250 N^3 multiply-adds, a refinement as long as 40 N^3.
    """
    rows, N, step = float(call.T * call.B), call.N, 2.0 * call.N * call.K
    passes, directions = (4, 2) if call.backward else (1, 1)
    readout = float(call.C * N * (3 if call.backward else 1))
    modal = rows * (passes * 4 * N + 2 * readout) + (40 if call.started else 250) * N**3
    sequential = rows * (directions * step + (N * N if call.backward else 0) + readout)
    return modal, sequential


def input_bytes(call: Call) -> int:
    """Bytes of a loss's inputs in modal coordinates: none for token ids; features become [T, B, 2M] with 2M >= N."""
    return 0 if call.ids else call.T * call.B * call.N * call.dtype.itemsize


def why_not_now(call: Call) -> str | None:
    """Why "auto" does not use the modal form for a loss, whatever its W; None if it may.

    (It is never used for states: transforming them to modes and back takes products as large as those of the scan.)
    """
    if dispatch.plain_reference(call.backend):
        return "backend 'reference' runs the scan step by step, for second derivatives"
    if _route.derived() or _route.by_reference(call.backend):
        return "a derivative of torch.func or forward mode is being taken"
    if dispatch.choose(OPS[call.kind], call.backend, dispatch.Call(call.device, call.dtype, {})) == "reference":
        return f"{OPS[call.kind]} has no kernel for {call.device.type} tensors"
    if any(call.lengths or not sink.sparse for sink in _taps.SINKS):
        return "the norms of every step are being recorded"
    size = input_bytes(call)
    if size > kept_states(call.device):
        return f"the inputs in modal coordinates would take {size / 2**30:.3g} GiB"
    modal, sequential = multiply_adds(call)
    if modal >= sequential:
        return f"the modal form would cost {modal / sequential:.2g} times as much"
    return None


def rounding(condition: float, neglected: float, T: int, dtype: torch.dtype) -> float:
    """The expected relative error of the modal form: the condition of the basis times the sum of the rounding errors of
    products, of the float64 eigenvalues over T steps, and of the neglected part of W (``Basis.neglected``)."""
    return condition * (torch.finfo(dtype).eps / 2 + T * torch.finfo(torch.float64).eps + neglected)


def sequential_rounding(T: int, dtype: torch.dtype) -> float:
    """The relative error of the sequential scan of an orthogonal W: 2e-5 was measured in float32 at T = 10 000."""
    return 2.0 * torch.finfo(dtype).eps * math.sqrt(T)


LEAST_LIMIT = 1e-9  # an error that an explicit algorithm="modal" may always have


def check_accuracy(condition: float, neglected: float, call: Call, asked: bool) -> None:
    """Raise NoBasis if the modal form has larger errors than the sequential scan; arguments as in ``rounding``."""
    error, limit = rounding(condition, neglected, call.T, call.dtype), sequential_rounding(call.T, call.dtype)
    if asked:
        limit = max(limit, LEAST_LIMIT)
    if not error <= limit:
        raise NoBasis(
            f"the condition of its eigenvectors is {condition:.2g}: their rounding error, about {error:.1g}, would be "
            f"above the {limit:.1g} of the sequential scan"
        )


def find_modes(matrix: Matrix, call: Call, start: Tensor | None, asked: bool, defer: bool = False) -> Modes:
    """The modes of a matrix; NoBasis if they cannot be used.

    Args:
        start: R [N, 2M] of an earlier call, or None.
        asked: the algorithm is "modal", not "auto": then the number of close pairs has no limit.
        defer: with a start, do not wait for the device; ``Modes.hold`` returns later whether the modes are valid.
    """
    if len(matrix) == 1:
        w, thin = matrix[0].double(), None
    else:
        u, s, v = (part.double() for part in matrix)
        w = (u * s) @ v.mT
        thin = v.detach() if v.shape[1] < v.shape[0] else None
    if start is not None:
        start = start.to(w)
    none = torch.empty(0, 2, dtype=torch.int64, device=w.device)
    with torch.no_grad():
        basis = diagonalise(w.detach(), start, v=thin, dtype=call.dtype, defer=defer)
        neglected = basis.neglected(w, call.T)
        if basis.report is not None:
            pairs, count = first_close_pairs(basis, call.T, 2 * call.N) if call.backward else (none, none.sum())
            pending = Pending(torch.cat([basis.report, torch.stack([neglected, count.double()])]))
            return Modes(w, basis, pairs, call.backward, pending)
        check_accuracy(basis.condition, float(neglected), call, asked)
        pairs = close_pairs(basis, call.T) if call.backward else none
    if len(pairs) > 2 * call.N and not asked:
        raise NoBasis(f"{len(pairs) // 2} pairs of its eigenvalues are closer than 1 / T, which takes a sum for each")
    return Modes(w, basis, pairs, call.backward)


def choose(
    matrix: Matrix, call: Call, start: Tensor | None, algorithm: str, defer: bool = False
) -> tuple[Modes | None, str]:
    """(modes, "") for a call that uses the modal form, else (None, the reason). For the algorithm "modal" the reason is
    an InputError. defer: as in ``find_modes``."""
    if algorithm not in ("auto", "modal"):
        return None, f"algorithm is {algorithm!r}"
    asked = algorithm == "modal"
    if not asked and torch.compiler.is_compiling():  # before the look for a kernel, which has no graph either
        return None, "the call is compiled, and an eigensolver has no graph"
    why = why_never(call)
    if why is None and torch._C._are_functorch_transforms_active():
        why = "torch.func transforms the call, and the host has to read the modes of one W"
    if why is None and detect_fake_mode(matrix) is not None:
        why = "its tensors are fake, and the host has to read the modes of W"
    if why is None and not asked:
        why = why_not_now(call)
    if why is None:
        try:
            return find_modes(matrix, call, start, asked, defer), ""
        except NoBasis as error:
            why = f"{'W' if len(matrix) == 1 else 'W = U diag(s) V^T'} does not suit: {error}"
    if asked:
        raise InputError(f"algorithm is 'modal': {why}{INSTEAD}")
    return None, why


# ---- calls in modal form ---------------------------------------------------------------------------------------------


def _sum_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left^T right [2M, 2M], float64, for two tensors [..., 2M]: products of ROWS rows in their dtype, summed in
    float64."""
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for a, b in zip(left.split(ROWS), right.split(ROWS), strict=True):
        total += a.mT @ b
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64."""
    return left.double().mT @ right.double()


class _ModalLoss(torch.autograd.Function):
    """modal_cross_entropy with the gradient of W. Returns (loss, hits)."""

    @staticmethod
    def forward(
        ctx: Any, modes: Modes, backend: str | None, target: Tensor, reduction: str, lengths: Tensor | None, w: Tensor,
        x: Tensor, z0: Tensor, table: Tensor | None, weight: Tensor, bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        basis, pairs = modes.basis, modes.pairs if len(modes.pairs) else None
        inputs = ModalInputs(x, basis.re, basis.im, z0, table, lengths, pairs)
        readout = Readout(weight, bias, target, reduction)
        # ctx.needs_input_grad of parameters is true under no_grad too
        loss, hits, *grads = loss_fwd(inputs, readout, modes.backward, backend)
        ctx.mark_non_differentiable(hits)
        ctx.set_materialize_grads(False)
        ctx.modes, ctx.has_bias, ctx.norms = modes, bias is not None, None
        if _taps.SINKS and lengths is None:
            state_norms, ctx.norms = norms_through_time(inputs._replace(pairs=None), readout, basis, backend)
            _taps.record_state_norms("modal_cross_entropy", state_norms)
        if modes.backward:
            save_tensors(ctx, x if table is None else None, table, z0, weight, *grads)
        return loss, hits

    @staticmethod
    @differentiable_once("the modal form", "algorithm='sequential'")
    def backward(ctx: Any, grad_loss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 11
        x, table, z0, weight, *grads = saved_tensors(ctx)
        grad_x, grad_re, grad_im, grad_z0, grad_table, grad_weight, grad_bias, grad_pairs = grads
        if ctx.norms is not None:
            _taps.record("modal_cross_entropy", ctx.norms * grad_loss.abs())
        grad_w = None
        if ctx.needs_input_grad[5]:
            inputs = _sum_over_rows(grad_x, x) if table is None else _product(grad_table, table)
            h = _product(weight, grad_weight) - inputs - _product(grad_z0, z0)
            grad_w = gradient_of_w(ctx.modes.basis, h, grad_re, grad_im, ctx.modes.pairs, grad_pairs) * grad_loss
        return (
            *(None,) * 5,
            grad_w,
            grad_x * grad_loss if table is None else None,
            grad_z0 * grad_loss,
            None if table is None else grad_table * grad_loss,
            grad_weight * grad_loss,
            grad_bias * grad_loss if ctx.has_bias else None,
        )


class _ModalStates(torch.autograd.Function):
    """hs [T, B, N] of the recurrence, span by span of time; with the gradients of W, x, table and h0.

    Note [States in spans]
        In modal coordinates, x, z and their cotangents are as large as hs. They exist for one span of steps at a time,
        in the cache; only hs and the gradient of x are stored for all steps. A span starts from the last state of the
        previous one, and the adjoint from the following span is added to the cotangent of its last step. The sums of
        Note [Divided differences] hold for each span as for a separate sequence. With features, the gradient of W is
        sum_t d_t h_{t-1}^T with d_t = L^T delta_t: one product instead of two, since d_t is the gradient of x_t.
    """

    @staticmethod
    def forward(
        ctx: Any, modes: Modes, backend: str | None, lengths: Tensor | None, w: Tensor, x: Tensor, h0: Tensor,
        table: Tensor | None, offset: Tensor | None,
    ) -> Tensor:  # fmt: skip
        call = _Spans(modes, backend, lengths, x, h0, table, offset)
        right = modes.basis.right.to(h0.dtype).mT.contiguous()
        hs = h0.new_empty(x.shape[0], *h0.shape)
        starts = [call.z0]
        for begin, end in call.spans:
            z = call.states(begin, end, starts[-1])
            torch.mm(z.flatten(0, 1), right, out=hs[begin:end].view(-1, hs.shape[2]))
            starts.append(z[-1].clone())
        ctx.set_materialize_grads(False)
        ctx.call = call
        save_tensors(ctx, x, table, h0, hs, *starts[:-1])
        return hs

    @staticmethod
    @differentiable_once("the modal form", "algorithm='sequential'")
    def backward(ctx: Any, grad_hs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_hs is None:
            return (None,) * 8
        x, table, h0, hs, *starts = saved_tensors(ctx)
        call: _Spans = ctx.call
        call.norms = h0.new_empty(len(x)) if _taps.SINKS else None
        grads = call.backward_of_features if x.is_floating_point() else call.backward_of_ids
        found = grads(x, h0, table, hs, grad_hs, starts, ctx.needs_input_grad[3])
        if call.norms is not None:
            _taps.record("modal_scan", call.norms)
        return (*(None,) * 3, *found)


class _Spans:
    """One call of `_ModalStates`: the states of a span, and the backwards of token ids and features."""

    def __init__(
        self, modes: Modes, backend: str | None, lengths: Tensor | None, x: Tensor, h0: Tensor, table: Tensor | None,
        offset: Tensor | None,
    ) -> None:  # fmt: skip
        self.modes, self.backend, self.basis = modes, backend, modes.basis
        (T, B), self.dtype = x.shape[:2], h0.dtype
        steps = T if h0.is_cuda else max(SPAN_ROWS // B // SPAN_STEPS, 1) * SPAN_STEPS
        self.spans = [(begin, min(begin + steps, T)) for begin in range(0, T, steps)]
        self.padding = None
        if lengths is not None:
            self.padding = torch.arange(T, device=lengths.device)[:, None] >= lengths
        self.left = self.basis.left.to(self.dtype)
        self.z0 = (h0.double() @ self.basis.left.mT).to(self.dtype)
        self.x, self.offset = x, offset
        self.norms: Tensor | None = None  # of dL/dh_t [T], in a backward while a tap is open
        self.table = table if table is not None else self.left.mT.contiguous()

    def _masked(self, x: Tensor, begin: int, end: int) -> Tensor:
        """x [steps, B, ...] of a span, with zeros on padding."""
        if self.padding is None:
            return x
        padding = self.padding[begin:end]
        return x.masked_fill(padding if x.ndim == 2 else padding[..., None], 0)

    def states(self, begin: int, end: int, z0: Tensor) -> Tensor:
        """z [steps, B, 2M] of a span, with zeros on padding, where a state that grew out of range would turn the
        zeros of the adjoint into NaN."""
        x, table = self._masked(self.x[begin:end], begin, end), None
        if not x.is_floating_point():
            table = self.table
        elif self.offset is None:
            x = x @ self.table
        else:
            x = torch.addmm(self.offset, x.flatten(0, 1), self.table).view(*x.shape[:2], -1)
        z = scan_fwd(ModalInputs(x, self.basis.re, self.basis.im, z0, table), self.backend)
        return z if self.padding is None else z.masked_fill_(self.padding[begin:end, :, None], 0)

    def _cotangent(self, grad_hs: Tensor, begin: int, end: int, carried: Tensor | None) -> Tensor:
        """dL/dz of a span through its own states, at its last step also through all later ones."""
        grad_z = self._masked(grad_hs[begin:end], begin, end) @ self.basis.right.to(self.dtype)
        if carried is not None:
            grad_z[-1] += carried
        return grad_z

    def _take_norms(self, begin: int, end: int, adjoint: Tensor) -> None:
        """Stores the norms of dL/dh_t of a span, for open taps."""
        if self.norms is not None:
            self.norms[begin:end] = norms_of_steps(adjoint)

    def backward_of_ids(
        self, x: Tensor, h0: Tensor, table: Tensor, hs: Tensor, grad_hs: Tensor, starts: list[Tensor], need_w: bool
    ) -> tuple[Tensor | None, ...]:
        """(grad_w, None, grad_h0, grad_table, None)."""
        basis, pairs = self.basis, self.modes.pairs
        sums: list[Tensor] | None = None
        carried: Tensor | None = None
        h = torch.zeros(2 * len(basis.re), 2 * len(basis.re), dtype=torch.float64, device=basis.re.device)
        for (begin, end), z0 in zip(reversed(self.spans), reversed(starts), strict=True):
            ids, z = self._masked(x[begin:end], begin, end), self.states(begin, end, z0)
            inputs = ModalInputs(ids, basis.re, basis.im, z0, table, pairs=pairs if len(pairs) else None)
            grad_z = self._cotangent(grad_hs, begin, end, carried)
            _, *found = scan_bwd(inputs, grad_z, z, False, self.backend)
            if self.norms is not None:  # with token ids the op does not return the adjoint
                delta, *_ = scan_bwd(inputs._replace(x=None, table=None, pairs=None), grad_z, z, True, self.backend)
                self._take_norms(begin, end, delta @ self.left)
            carried = found[2]
            h += _sum_over_rows(grad_z, z) - _product(found[2], z0)
            sums = [f.double() for f in found] if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        assert sums is not None and carried is not None
        grad_re, grad_im, _, grad_table, grad_pairs = sums
        grad_w = None
        if need_w:
            grad_w = gradient_of_w(basis, h - grad_table.mT @ table.double(), grad_re, grad_im, pairs, grad_pairs)
        return grad_w, None, self._of_h0(carried, h0), grad_table.to(table.dtype), None

    def backward_of_features(
        self, x: Tensor, h0: Tensor, table: Tensor | None, hs: Tensor, grad_hs: Tensor, starts: list[Tensor],
        need_w: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(grad_w, grad_x, grad_h0, grad_table, grad_offset)."""
        basis, carried = self.basis, None
        grad_w = torch.zeros_like(self.modes.w, dtype=torch.float64)
        grad_table, grad_offset = (torch.zeros_like(part, dtype=torch.float64) for part in (self.table, self.table[0]))
        grad_x = torch.empty_like(x)
        for (begin, end), z0 in zip(reversed(self.spans), reversed(starts), strict=True):
            grad_z = self._cotangent(grad_hs, begin, end, carried)
            # the argument z is only read for sums that are not used here
            inputs = ModalInputs(None, basis.re, basis.im, z0)
            delta, _, _, carried, *_ = scan_bwd(inputs, grad_z, grad_z, True, self.backend)
            torch.matmul(delta, self.table.mT, out=grad_x[begin:end])
            if table is not None:
                grad_table += _sum_over_rows(self._masked(x[begin:end], begin, end), delta)
                grad_offset += delta.sum((0, 1), dtype=torch.float64)
            if need_w or self.norms is not None:
                d = grad_x[begin:end] if table is None else delta @ self.left
                self._take_norms(begin, end, d)
            if need_w:
                grad_w += _product(d[0], h0 if begin == 0 else hs[begin - 1])
                grad_w += _sum_over_rows(d[1:], hs[begin : end - 1])
        assert carried is not None
        return (
            grad_w,
            grad_x,
            self._of_h0(carried, h0),
            None if table is None else grad_table.to(table.dtype),
            None if self.offset is None else grad_offset.to(self.offset.dtype),
        )

    def _of_h0(self, grad_z0: Tensor, h0: Tensor) -> Tensor:
        return (grad_z0.double() @ self.basis.left).to(h0.dtype)


def _table(inputs: ScanInputs, basis: Basis) -> tuple[Tensor | None, Tensor | None]:
    """(table [D, 2M], offset [2M]) in modal coordinates; for token ids the table includes the offset."""
    x, h0, weight, bias, *_ = inputs
    if weight is None:
        return None, None
    assert x is not None
    table = (basis.left @ weight.double()).mT
    offset = None if bias is None else basis.left @ bias.double()
    if offset is not None and not x.is_floating_point():
        table, offset = table + offset, None
    return table.to(h0.dtype).contiguous(), None if offset is None else offset.to(h0.dtype)


def _into_modes(
    inputs: ScanInputs, readout: Readout, basis: Basis, lengths: Tensor | None
) -> tuple[ModalInputs, Readout]:
    """The arguments of a call in modal coordinates. Token ids stay, with a table that includes the bias; features are
    multiplied by the table."""
    (x, h0, *_), left = inputs, basis.left
    assert x is not None
    if lengths is not None and x.is_floating_point():  # the gradient of a product reads all of x, and 0 * NaN is NaN
        x = torch.where(torch.arange(len(x), device=x.device)[:, None, None] < lengths[:, None], x, 0)
    table, offset = _table(inputs, basis)
    if table is None:
        x = x @ left.to(x.dtype).mT
    elif x.is_floating_point():
        x, table = x @ table, None
        x = x if offset is None else x + offset
    z0 = (h0.double() @ left.mT).to(h0.dtype)
    rows = (readout.weight.double() @ basis.right).to(readout.weight.dtype)
    return ModalInputs(x, basis.re, basis.im, z0, table, lengths), readout._replace(weight=rows)


@keeps_dtype
def modal_states(
    inputs: ScanInputs, modes: Modes, *, backend: str | None = None, lengths: Tensor | None = None
) -> Tensor:
    """hs [T, B, N] of the linear recurrence with W = ``modes.w``; inputs as those of ``factored_scan``."""
    table = _table(inputs, modes.basis)
    hs: Tensor = _ModalStates.apply(modes, backend, lengths, modes.w, inputs.x, inputs.h0, *table)
    return hs


@keeps_dtype
def modal_loss(
    inputs: ScanInputs, readout: Readout, modes: Modes, *, backend: str | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, hits) of ``modal_cross_entropy`` for the linear recurrence with W = ``modes.w``; inputs as those of
    ``factored_scan``, the readout's weight [C, N]."""
    modal, (weight, bias, target, reduction) = _into_modes(inputs, readout, modes.basis, lengths)
    loss, hits = _ModalLoss.apply(
        modes, backend, target, reduction, lengths, modes.w, modal.x, modal.z0, modal.table, weight, bias
    )
    return loss, hits


@torch.no_grad()
def modal_last_step_norms(inputs: ScanInputs, readout: Readout, modes: Modes, *, backend: str | None = None) -> Tensor:
    """||dL/dh_t|| [T], NaN except at ``profile_steps(T)``, for L the mean cross-entropy of the last step alone;
    arguments as those of ``modal_loss``."""
    return last_step_norms(*_into_modes(inputs, readout, modes.basis, None), modes.basis, backend)
