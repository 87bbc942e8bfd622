"""Layouts of a batch of sequences for one scan: all of one length, or packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthokern.nn._checks import readable
from orthokern.ops._common import check_lengths
from orthokern.ops._dispatcher import no_dispatch_modes

# (x [T,B,D] or ids [T,B], h0 [B,S] or None, lengths [B] or None) -> states [T,B,S]
Scan = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]


class Resets(NamedTuple):
    """The resets of a batch."""

    resets: Tensor  # bool [T, B]
    reset_state: Tensor | None  # [recurrences, B, N], or [B, N] for one; None: the initial state

    def of(self, index: int) -> Resets:
        """The resets for one recurrence."""
        return Resets(self.resets, None if self.reset_state is None else self.reset_state[index])

    def rows(self, order: Tensor) -> Resets:
        """The resets with the sequences in another order."""
        state = None if self.reset_state is None else self.reset_state.index_select(1, order)
        return Resets(self.resets.index_select(1, order), state)


class _Rows(torch.autograd.Function):
    """rows.index_select(0, place) for distinct places. Its gradient copies rows; that of index_select adds them, which
    takes several times as long."""

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
    """Rows at distinct places."""
    if torch.is_grad_enabled() and no_dispatch_modes():
        result: Tensor = _Rows.apply(rows, place)
        return result
    return rows.index_select(0, place)


def _at(data: Tensor, place: Tensor) -> Tensor:
    """data [T,B,...] of each sequence at the steps of place [P,B]: [P,B,...]."""
    if data.dim() == 3:
        place = place.unsqueeze(2).expand(-1, -1, data.shape[2])
    return data.gather(0, place)


def without_padding(states: Tensor, lengths: Tensor | None) -> Tensor:
    """States [T,B,S] of a scan without lengths, with zeros after the end of each sequence. Checks lengths."""
    if lengths is None:
        return states
    if readable(lengths):
        check_lengths(lengths, states.shape[0])
    padding = torch.arange(states.shape[0], device=states.device).unsqueeze(1) >= lengths
    return states.masked_fill(padding.unsqueeze(2), 0.0)


class Dense:
    """data [T,B,D] or ids [T,B]: all sequences have T steps, or lengths [B] of them, and zeros as states behind."""

    def __init__(self, batch: int, lengths: Tensor | None = None) -> None:
        self.batch, self.lengths = batch, lengths

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """One recurrence in one direction: data in this form -> (states in this form, last states [B,S])."""
        if self.lengths is None:
            hs = scan(data.flip(0) if reverse else data, h0, None)
            return hs.flip(0) if reverse else hs, hs[-1]
        # the steps of each sequence backwards, and then those of its padding: its own inverse
        place = (self.lengths - 1 - torch.arange(data.shape[0], device=data.device).unsqueeze(1)) % data.shape[0]
        hs = scan(_at(data, place) if reverse else data, h0, self.lengths)
        return _at(hs, place) if reverse else hs, _at(hs, self.lengths.unsqueeze(0) - 1)[0]


class Packed:
    """data [P,D] or ids [P], the packed form of B sequences sorted by decreasing length (PackedSequence.data).

    One scan runs over the rectangle [T,B]: row p of data is copied to place[p] = t*B + b, and data[mirror] holds each
    sequence reversed. Sequences of one length already form that rectangle. With `by_lengths` the scan gets the lengths
    and skips padding. For a backend without lengths, which only gated recurrences have, the states after a sequence's
    end are computed but not used: they are bounded, and their cotangents are exact zeros.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device, by_lengths: bool) -> None:
        sizes = batch_sizes.to("cpu", torch.int64)
        self.steps, self.batch = len(sizes), int(sizes[0])
        self.lengths: Tensor | None = None
        self.ragged = int(sizes[-1]) != self.batch
        if not self.ragged:
            return
        step = torch.repeat_interleave(torch.arange(self.steps, device="cpu"), sizes)
        first = torch.cumsum(sizes, 0) - sizes  # position in data of the first row of step t
        row = torch.arange(len(step), device="cpu") - first[step]
        lengths = (sizes.unsqueeze(1) > torch.arange(self.batch, device="cpu")).sum(0)
        self.lengths = lengths.to(device) if by_lengths else None
        self.place = (step * self.batch + row).to(device)
        self.mirror = (first[lengths[row] - 1 - step] + row).to(device)
        # position in data of each sequence's last row
        self.end = (first[lengths - 1] + torch.arange(self.batch, device="cpu")).to(device)

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        if not self.ragged:
            states, last = Dense(self.batch).run(scan, data.unflatten(0, (self.steps, self.batch)), h0, reverse)
            return states.flatten(0, 1), last
        ordered = _rows(data, self.mirror) if reverse else data
        x = ordered.new_zeros((self.steps * self.batch, *data.shape[1:])).index_copy(0, self.place, ordered)
        states = scan(x.unflatten(0, (self.steps, self.batch)), h0, self.lengths)
        states = _rows(states.flatten(0, 1), self.place)
        last = _rows(states, self.end)
        return (_rows(states, self.mirror) if reverse else states), last


Layout = Dense | Packed  # each converts a batch for one scan, and its states back
