"""The modal ops on a GPU, independent of the kernels: chunks of time that run in parallel, and spans of chunks in turn.

    lane     b M + m, mode m of sequence b; R = B M of them
    chunk    steps [c CHUNK, (c + 1) CHUNK) of all lanes

    1  ends     every chunk from a zero state                 x -> end [chunks, 2, R]
    2  join     the chunks of a lane in sequence              state_{c+1} = lambda^CHUNK state_c + end_c
    3  chunks   every chunk from its initial state            x, state -> z

Note [Modal chunks]
    Eigenvalues, states, adjoints, powers and all sums are float64, also for float32 tensors; x is converted when it is
    used, and z is rounded when it is stored. lambda^CHUNK is computed by repeated squaring (CHUNK is a power of 2),
    with the error of CHUNK roundings, as in the product of the steps. The adjoint is computed in the same way from the
    end, with the conjugate of lambda. Only stage 2 is sequential over chunks: 2 CHUNK + chunks sequential steps replace
    T, with a minimum at CHUNK = sqrt(T / 2).

Note [Sums over equal ids]
    grad_table[d] is the sum of delta_t over the steps with id d. delta rotates with its mode, and its sum over many
    steps is far smaller than its terms, so that it is computed in float64. With few ids, each lane of each chunk has a
    sum for every id in memory, [chunks, D, 2, R]; consecutive steps with the same id are added in registers first. If
    the number of ids exceeds half of the steps of a chunk, delta itself is stored in float64 for a span of steps at a
    time, and then summed by id. There are no atomics: the same bits in every run.

Note [Spans of the loss]
    With a readout, the initial state of every chunk is computed first. Then spans of whole chunks are processed, the
    last one first: z of the steps of the span from these states; logits by a product; loss and d = dL/dlogits, which
    overwrites the logits; the gradient of the readout and g = d C by products; and the adjoint from the carry of the
    next span. SPAN_BYTES limits z, g and logits of a span, so that memory does not grow with T except for the states
    between chunks. A span takes about 40 launches, which sets its lower limit. Sums over spans are float64.

Padding is never read, and there is no device synchronization. An id outside the table makes its sequence NaN from that
step on and contributes to no row; a target outside [0, C) makes the loss NaN; a length out of range is clamped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern._scan_contract import ModalGradients, ModalInputs, ModalLoss, Readout

MIN_CHUNK = 16
# This many lanes fill the largest device; then time is not divided into chunks.
ENOUGH_LANES = 2**18
DELTA_BYTES = 2**27  # bytes of the adjoints that are stored for sums over equal ids
SPAN_BYTES = 2**28
SUM_ROWS = 1024  # rows of a product over steps, between two additions in float64


class Steps(NamedTuple):
    """The steps that a launch computes, from ``first`` on, in chunks of ``chunk`` steps."""

    re: Tensor  # float64 [M]
    im: Tensor  # float64 [M]
    lengths: Tensor | None  # int64 [B]
    B: int
    chunk: int
    first: int


class Inside(NamedTuple):
    """The inputs of the adjoint of some steps."""

    g: Tensor  # [steps, B, 2M], the gradient from outside the recurrence
    z: Tensor | None = None  # [steps, B, 2M]
    before: Tensor | None = None  # [B, 2M], the state before the first of the steps
    ids: Tensor | None = None  # [steps, B]


class Adjoints(NamedTuple):
    """Memory for the results of a backward launch. Float64, except that delta may have any dtype."""

    end: Tensor  # [chunks, 2, R], the adjoint of each chunk's first step
    delta: Tensor | None = None  # [steps, B, 2M]
    table: Tensor | None = None  # [chunks, D, 2, R], sums by id, initially zero
    sums: Tensor | None = None  # [chunks, 2, R], of delta_t conj(z_{t-1})


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A leaf's launches. All tensors are contiguous; state, carry, end and sums are float64.

    Attributes:
        forward: (Steps, x [steps, B, 2M] or ids [steps, B], table [D, 2M] or None, state, z, end): runs every chunk
            from state [chunks, 2, R], or zeros for None. Writes z [steps, B, 2M], or only end [chunks, 2, R].
        join: (re, im, entering [2, R], end, chunk, backward): returns the state before each chunk [chunks, 2, R];
            entering is the state before the first chunk or, backward, the adjoint after the last.
        backward: (Steps, Inside, carry, Adjoints): the adjoint of every chunk from carry [chunks, 2, R], or zeros for
            None.
        pairs: (Steps, Inside, pairs int64 [P, 2], carry, sums [chunks, 4, B, P]).
        by_id: (rows float64 [steps * B, 2M], ids int64, D): the sums of rows with equal ids [D, 2M], in a fixed order;
            ids outside [0, D) are skipped.
    """

    forward: Callable[..., None]
    join: Callable[..., Tensor]
    backward: Callable[..., None]
    pairs: Callable[..., None]
    by_id: Callable[..., Tensor]


def chunk_length(T: int, lanes: int) -> int:
    """Steps of a chunk: T, or a power of 2 near sqrt(T / 2). It depends on sizes only, so that all devices give the
    same bits."""
    if lanes >= ENOUGH_LANES:
        return T
    return max(MIN_CHUNK, 2 ** round(math.log2(max(1.0, math.sqrt(T / 2)))))


def span_steps(B: int, M: int, C: int, itemsize: int) -> int:
    """Steps of a span: a power of 2."""
    return 1 << max(0, (SPAN_BYTES // (B * (4 * M + C) * itemsize)).bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A call's recurrence, by chunks of time."""

    kernels: Kernels
    inputs: ModalInputs
    T: int  # number of all steps
    chunk: int  # number of steps in a chunk

    @property
    def chunks(self) -> int:
        return -(-self.T // self.chunk)

    @property
    def lanes(self) -> int:
        """R = B M."""
        return self.inputs.z0.shape[0] * self.inputs.re.shape[0]

    def steps(self, first: int, last: int) -> slice:
        """The steps of chunks [first, last)."""
        return slice(first * self.chunk, min(last * self.chunk, self.T))

    def launch(self, first: int) -> Steps:
        """A launch from chunk ``first`` on."""
        _, re, im, z0, _, lengths, _ = self.inputs
        return Steps(re, im, lengths, z0.shape[0], self.chunk, first * self.chunk)

    def by_chunk(self, chunks: int) -> Tensor:
        """An empty float64 [chunks, 2, R]."""
        return self.inputs.re.new_empty(chunks, 2, self.lanes)

    def by_lane(self, rows: Tensor) -> Tensor:
        """[B, 2M] as float64 [2, R]."""
        return rows.double().view(-1, 2, self.inputs.re.shape[0]).transpose(0, 1).reshape(2, self.lanes)

    def by_row(self, lanes: Tensor) -> Tensor:
        """The inverse of ``by_lane``, float64."""
        return lanes.view(2, -1, self.inputs.re.shape[0]).transpose(0, 1).reshape(-1, 2 * self.inputs.re.shape[0])

    def forward(self, first: int, last: int, state: Tensor | None, z: Tensor | None, end: Tensor | None) -> None:
        """Run chunks [first, last) from state, or zeros for None. Writes z, or only end."""
        x, table = self.inputs.x, self.inputs.table
        assert x is not None
        self.kernels.forward(self.launch(first), x[self.steps(first, last)], table, state, z, end)

    def states(self) -> Tensor:
        """The state before every chunk, float64 [chunks, 2, R]."""
        end = self.by_chunk(self.chunks)
        if self.chunks > 1:  # the end of the last chunk is not needed
            self.forward(0, self.chunks - 1, None, None, end)
        return self.kernels.join(self.inputs.re, self.inputs.im, self.by_lane(self.inputs.z0), end, self.chunk, False)


class Adjoint:
    """The adjoint recurrence from the last chunk to the first, a span of chunks at a time, and its sums."""

    def __init__(self, of: Recurrence) -> None:
        _, re, _, z0, table, _, pairs = of.inputs
        M, B = re.shape[0], z0.shape[0]
        self.of = of
        self.carry = re.new_zeros(2, of.lanes)  # the adjoint after the next span
        self.sums = re.new_zeros(2, M)
        self.pair_sums = re.new_zeros(0 if pairs is None else pairs.shape[0], 2, 2)
        self.table = None if table is None else re.new_zeros(table.shape)
        self.few_ids = table is not None and 2 * table.shape[0] <= of.chunk
        row_bytes = 16 * B * M
        self.span = of.chunks if table is None or self.few_ids else max(1, DELTA_BYTES // (row_bytes * of.chunk))

    def run(self, first: int, last: int, g: Tensor, z: Tensor, before: Tensor, grad_x: Tensor | None) -> None:
        """Process chunks [first, last), which must be the next ones. g, z and grad_x are of their steps; before
        [B, 2M] is the state before the first of them."""
        of, chunks = self.of, last - first
        x, re, im, z0, rows, _, pairs = of.inputs
        end = of.by_chunk(chunks)
        if chunks > 1:  # the adjoint before the first chunk is not needed here
            of.kernels.backward(of.launch(first + 1), Inside(g[of.chunk :]), None, Adjoints(end[1:]))
        carry = of.kernels.join(re, im, self.carry, end, of.chunk, True)
        sums, table, delta, ids = torch.empty_like(end), None, grad_x, None
        B, M = z0.shape[0], re.shape[0]
        if rows is not None and self.few_ids:
            assert x is not None
            table, ids = re.new_zeros(chunks, rows.shape[0], 2, of.lanes), x[of.steps(first, last)]
        elif rows is not None:
            delta = re.new_empty(g.shape)
        inside = Inside(g, z, before, ids)
        of.kernels.backward(of.launch(first), inside, carry, Adjoints(end, delta, table, sums))
        self.carry = end[0]
        self.sums += sums.sum(0).view(2, B, M).sum(1)
        if self.table is not None and table is not None:
            self.table += table.sum(0).view(-1, 2, B, M).sum(2).view(-1, 2 * M)
        elif self.table is not None:
            assert delta is not None
            self.table += of.kernels.by_id(delta.view(-1, 2 * M), self.ids(first, last), self.table.shape[0])
        if pairs is not None and len(pairs):
            found = re.new_empty(chunks, 4, B, len(pairs))
            of.kernels.pairs(of.launch(first), inside, pairs, carry, found)
            self.pair_sums += found.sum(0).sum(1).mT.reshape(-1, 2, 2)

    def ids(self, first: int, last: int) -> Tensor:
        """int64 [steps * B], -1 on padding."""
        of, steps = self.of, self.of.steps(first, last)
        assert of.inputs.x is not None
        ids = of.inputs.x[steps].long()
        if of.inputs.lengths is not None:
            t = torch.arange(steps.start, steps.stop, device=ids.device)
            ids = torch.where(t[:, None] < of.inputs.lengths, ids, -1)
        return ids.flatten()

    def gradients(self, grad_x: Tensor | None) -> ModalGradients:
        """The gradients of the ops, when all chunks are processed."""
        inputs, dtype = self.of.inputs, self.of.inputs.z0.dtype
        real, imag = self.of.by_row(self.carry).chunk(2, 1)
        grad_z0 = torch.cat([inputs.re * real + inputs.im * imag, inputs.re * imag - inputs.im * real], 1).to(dtype)
        return ModalGradients(  # of z0: L^T delta of the first step
            x=grad_x,
            re=self.sums[0].clone(),
            im=self.sums[1].clone(),
            z0=grad_z0,
            table=None if self.table is None else self.table.to(dtype),
            pairs=None if inputs.pairs is None else self.pair_sums,
        )


def run_scan_fwd(kernels: Kernels, inputs: ModalInputs) -> Tensor:
    """z [T, B, 2M] of ``orthokern.ops.modal_scan``."""
    assert inputs.x is not None
    T, z0 = inputs.x.shape[0], inputs.z0
    call = Recurrence(kernels, inputs, T, chunk_length(T, z0.numel() // 2))
    z = z0.new_empty(T, *z0.shape)
    call.forward(0, call.chunks, call.states(), z, None)
    return z


def run_scan_bwd(kernels: Kernels, inputs: ModalInputs, grad_z: Tensor, z: Tensor, need_x: bool) -> ModalGradients:
    """The gradients of ``orthokern.ops.modal_scan``."""
    T = grad_z.shape[0]
    call = Recurrence(kernels, inputs, T, chunk_length(T, inputs.z0.numel() // 2))
    adjoint = Adjoint(call)
    grad_x = torch.empty_like(grad_z) if inputs.table is None and need_x else None
    for last in range(call.chunks, 0, -adjoint.span):
        first = max(0, last - adjoint.span)
        steps = call.steps(first, last)
        before = z[steps.start - 1] if first else inputs.z0
        adjoint.run(first, last, grad_z[steps], z[steps], before, None if grad_x is None else grad_x[steps])
    return adjoint.gradients(grad_x)


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64 for two tensors [R, *]: the sum of products of SUM_ROWS rows in their dtype."""
    whole = len(left) // SUM_ROWS * SUM_ROWS
    total = (left[whole:].mT @ right[whole:]).double()
    if whole:
        blocks = left[:whole].view(-1, SUM_ROWS, left.shape[1]).mT @ right[:whole].view(-1, SUM_ROWS, right.shape[1])
        total += blocks.sum(0, dtype=torch.float64)
    return total


@ieee_products()
def run_cross_entropy(
    kernels: Kernels,
    loss_of: Callable[..., tuple[Tensor, Tensor]],
    inputs: ModalInputs,
    readout: Readout,
    need_grad: bool,
) -> ModalLoss:
    """The results of ``orthokern.ops.modal_cross_entropy``. Note [Spans of the loss].

    loss_of: (logits [steps * B, C], bias [C] or None, target [steps, B], scale float64 [1], lengths, first, grad):
        returns float64 parts of the sum of losses, and int32 [steps * B], whether the first largest logit is that of
        the target; with grad, logits become scale times (softmax - onehot), zeros on padding.
    """
    weight, bias, target, reduction = readout
    x, re, _, z0, table, lengths, _ = inputs
    (T, B), C, M, dtype = target.shape, weight.shape[0], re.shape[0], z0.dtype
    steps, chunk = span_steps(B, M, C, dtype.itemsize), chunk_length(T, B * M)
    call = Recurrence(kernels, inputs, T, chunk if steps >= T else min(chunk, steps))
    span = max(1, steps // call.chunk)
    scale = re.new_ones(1)
    if reduction == "mean":
        scale = scale / T / B if lengths is None else scale / lengths.clamp(0, T).sum()
    adjoint = Adjoint(call) if need_grad else None
    grad_x = torch.empty_like(x) if x is not None and table is None and need_grad else None
    grad_weight, grad_bias = re.new_zeros(weight.shape), re.new_zeros(C)
    loss, hits = re.new_zeros(()), torch.empty(T, dtype=torch.int64, device=z0.device)
    states = call.states()
    for last in range(call.chunks, 0, -span):
        first = max(0, last - span)
        here = call.steps(first, last)
        z = z0.new_empty(here.stop - here.start, B, 2 * M)
        call.forward(first, last, states[first:last], z, None)
        rows = z.view(-1, 2 * M)
        d = rows @ weight.mT
        parts, right = loss_of(d, bias, target[here], scale, lengths, here.start, need_grad)
        loss += parts.sum()
        hits[here] = right.view(-1, B).sum(1)
        if adjoint is None:
            continue
        grad_weight += sum_of_products(d, rows)
        grad_bias += d.sum(0, dtype=torch.float64)
        before = call.by_row(states[first]).to(dtype)
        adjoint.run(first, last, (d @ weight).view_as(z), z, before, None if grad_x is None else grad_x[here])
    found = ModalLoss((loss * scale[0]).to(dtype), hits)
    if adjoint is None:
        return found
    return found._replace(
        inputs=adjoint.gradients(grad_x),
        weight=grad_weight.to(dtype),
        bias=None if bias is None else grad_bias.to(dtype),
    )
