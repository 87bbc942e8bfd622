"""Layouts of a batch of sequences for one scan: all of one length, or packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from orthokern._scan_contract import running, without_padding
from orthokern.nn._checks import readable
from orthokern.ops._common import check_lengths

# the states of a recurrence: hs [T,B,N], or (hs, cs)
States = Tensor | tuple[Tensor, ...]
# (x [T,B,D] or ids [T,B], h0 [B,S] or None, lengths [B] or None) -> states of S = N or 2N numbers
Scan = Callable[[Tensor, "Tensor | None", "Tensor | None"], States]


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


def _at(data: Tensor, place: Tensor) -> Tensor:
    """data [T,B,...] of each sequence at the steps of place [P,B]: [P,B,...]."""
    if data.dim() == 3:
        place = place.unsqueeze(2).expand(-1, -1, data.shape[2])
    return data.gather(0, place)


def zero_padding(states: Tensor, lengths: Tensor | None) -> Tensor:
    """States [T,B,S] of a scan without lengths, with zeros after the end of each sequence. Checks lengths."""
    if lengths is not None and readable(lengths):
        check_lengths(lengths, states.shape[0])
    return without_padding(states, running(states.shape[0], lengths))


def _parts(states: States) -> tuple[Tensor, ...]:
    return (states,) if isinstance(states, Tensor) else states


def _joined(last: list[Tensor]) -> Tensor:
    return last[0] if len(last) == 1 else torch.cat(last, -1)


class Dense:
    """data [T,B,D] or ids [T,B]: all sequences have T steps, or lengths [B] steps, after which states are zeros."""

    def __init__(self, batch: int, lengths: Tensor | None = None) -> None:
        self.batch, self.lengths = batch, lengths

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """One recurrence in one direction: data in this form -> (hs in this form, last states [B,S])."""
        if self.lengths is None:
            hs, *more = _parts(scan(data.flip(0) if reverse else data, h0, None))
            return hs.flip(0) if reverse else hs, _joined([of[-1] for of in (hs, *more)])
        # the steps of each sequence backwards, and then those of its padding: its own inverse
        place = (self.lengths - 1 - torch.arange(data.shape[0], device=data.device).unsqueeze(1)) % data.shape[0]
        hs, *more = _parts(scan(_at(data, place) if reverse else data, h0, self.lengths))
        last = [_at(of, self.lengths.unsqueeze(0) - 1)[0] for of in (hs, *more)]
        return _at(hs, place) if reverse else hs, _joined(last)


class Packed:
    """data [P,D] or ids [P], the packed form of B sequences sorted by decreasing length (PackedSequence.data). One
    scan runs over the padded rectangle [T,B]."""

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        self.sizes = batch_sizes.to("cpu", torch.int64)
        self.steps, self.batch = len(self.sizes), int(self.sizes[0])
        self.lengths = (self.sizes.unsqueeze(1) > torch.arange(self.batch, device="cpu")).sum(0)
        ragged = int(self.sizes[-1]) != self.batch
        self.dense = Dense(self.batch, self.lengths.to(device) if ragged else None)

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        x = pad_packed_sequence(PackedSequence(data, self.sizes))[0]
        states, last = self.dense.run(scan, x, h0, reverse)
        return pack_padded_sequence(states, self.lengths).data, last


Layout = Dense | Packed  # each converts a batch for one scan, and its states back
