"""How a batch of sequences is laid out for one scan: all of one length, or packed.

Letters: B sequences, T time steps, N hidden_size, D input features, P rows of a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from orthokern.ops._alone import quiet

# (x [T,B,D] or ids [T,B], h0 [B,N] or None, lengths [B] or None) -> states [T,B,N]
Scan = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]


class Cuts(NamedTuple):
    """Where sequences begin anew."""

    resets: Tensor  # bool [T, B]
    reset_state: Tensor | None  # [recurrences, B, N], or [B, N] for one; None: the initial state

    def of(self, index: int) -> Cuts:
        """Those of one recurrence."""
        return Cuts(self.resets, None if self.reset_state is None else self.reset_state[index])

    def rows(self, order: Tensor) -> Cuts:
        """Those of the sequences in another order."""
        state = None if self.reset_state is None else self.reset_state.index_select(1, order)
        return Cuts(self.resets.index_select(1, order), state)


class _Rows(torch.autograd.Function):
    """rows.index_select(0, place) for places that differ: the gradient is a copy of rows, where that of index_select is
    a sum, which takes several times as long."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        ctx.count = rows.shape[0]
        ctx.save_for_backward(place)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return grad.new_zeros((ctx.count, *grad.shape[1:])).index_copy_(0, place, grad), None


def _rows(rows: Tensor, place: Tensor) -> Tensor:
    """Rows at different places."""
    if torch.is_grad_enabled() and quiet():
        found: Tensor = _Rows.apply(rows, place)
        return found
    return rows.index_select(0, place)


class Layout(Protocol):
    """How a batch of sequences is laid out for one scan, and its states read back."""

    batch: int

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """One recurrence in one direction: data in the layout's form -> (output in that form, last states [B,N])."""
        ...


class Dense:
    """data [T,B,D] or ids [T,B]: all sequences have T steps."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        if not reverse:
            hs = scan(data, h0, None)
            return hs, hs[-1]
        hs = scan(data.flip(0), h0, None)
        return hs.flip(0), hs[-1]


class Packed:
    """data [P,D] or ids [P], the packed form of B sequences sorted by falling length (PackedSequence.data).

    One scan over the rectangle [T,B]: row p of data goes to place[p] = t*B + b, and data[mirror] is each sequence
    reversed. Sequences of one length are that rectangle already. With `by_lengths` the scan is given the lengths and
    does nothing on padding.

    Otherwise (a backend that knows no lengths) the states after a sequence's end are computed and never read, so their
    cotangents are exact zeros and add exact zeros to every gradient, as long as the states are finite: 0 * inf is not
    0. An overflow on padding is the one way for padding to reach a result, so it is looked for, and such a batch is run
    again without padding, one scan per stretch of steps in which the same sequences are alive.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device, by_lengths: bool) -> None:
        sizes = batch_sizes.to("cpu", torch.int64)
        self.sizes: list[int] = sizes.tolist()
        self.steps, self.batch = len(self.sizes), self.sizes[0]
        self.ragged = ragged = self.sizes[-1] != self.batch
        self.lengths: Tensor | None = None
        self.overflow = ragged and not by_lengths  # whether it may happen, and has to be looked for
        if not ragged:
            return
        step = torch.repeat_interleave(torch.arange(self.steps, device="cpu"), sizes)
        first = torch.cumsum(sizes, 0) - sizes  # position in data of the first row of step t
        row = torch.arange(len(step), device="cpu") - first[step]
        lengths = (sizes.unsqueeze(1) > torch.arange(self.batch, device="cpu")).sum(0)
        last = lengths[row] - 1
        place = step * self.batch + row
        self.lengths = lengths.to(device) if by_lengths else None
        if self.overflow:
            padding = torch.ones(self.steps * self.batch, dtype=torch.bool, device="cpu").index_fill_(0, place, False)
            self.padding = padding.to(device)
        self.place = place.to(device)
        self.mirror = (first[last - step] + row).to(device)
        end = first[lengths - 1] + torch.arange(self.batch, device="cpu")
        self.end = end.to(device)  # where each sequence's last row is in data

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        if not self.ragged:
            states, last = Dense(self.batch).run(scan, data.unflatten(0, (self.steps, self.batch)), h0, reverse)
            return states.flatten(0, 1), last
        ordered = _rows(data, self.mirror) if reverse else data
        x = ordered.new_zeros((self.steps * self.batch, *data.shape[1:])).index_copy(0, self.place, ordered)
        x = x.unflatten(0, (self.steps, self.batch))
        states = scan(x, h0, self.lengths).flatten(0, 1)
        if self.overflow and states.requires_grad and not states.detach()[self.padding].isfinite().all():
            states = self._by_stretches(scan, x, h0)
        else:
            states = _rows(states, self.place)
        last = _rows(states, self.end)
        return (_rows(states, self.mirror) if reverse else states), last

    def _by_stretches(self, scan: Scan, x: Tensor, h0: Tensor | None) -> Tensor:
        pieces, start, h = [], 0, h0
        while start < self.steps:
            alive = self.sizes[start]
            stop = start
            while stop < self.steps and self.sizes[stop] == alive:
                stop += 1
            hs = scan(x[start:stop, :alive], None if h is None else h[:alive], None)
            pieces.append(hs.flatten(0, 1))
            start, h = stop, hs[-1]
        return torch.cat(pieces)
