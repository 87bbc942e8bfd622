"""Piano rolls of four collections of polyphonic music (Boulanger-Lewandowski, Bengio and Vincent 2012).

A piece is a matrix of 0 and 1, time steps by the 88 keys of a piano, from MIDI note 21 to 108. A model predicts the
notes of every step except the first from the previous steps. Results are usually given as the negative log-likelihood
per time step, summed over notes.

Two file formats are supported. If both files exist, the .npz file is read:

    nottingham.npz    <split>_bits uint8 [steps, 11], numpy.packbits of all steps, and <split>_lengths, steps per piece
    Nottingham.mat    cell arrays traindata, validdata, testdata, with one [steps, 88] matrix per piece; needs scipy
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orthokern.data._files import read_first
from orthokern.errors import InputError, integer, one_of

NOTES = 88

# Name -> its file, without the ending, in both forms.
COLLECTIONS = {
    "nottingham": ("Nottingham", "nottingham"),
    "jsb": ("JSB_Chorales", "jsb_chorales"),
    "musedata": ("MuseData", "musedata"),
    "piano-midi": ("Piano_midi", "piano_midi"),
}
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class RollWindow:
    """A window of T steps of several pieces.

    Attributes:
        inputs: [T, B, 88] float32, 0 or 1: the notes of a step; zeros if it has no target.
        targets: [T, B, 88] float32, 0 or 1: the notes of the next step; zeros after the end of a piece.
        valid: [T, B] bool, whether the piece has a next step.
        fresh: [B] bool, whether the window is the first of its piece.
    """

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    fresh: Tensor

    def to(self, device: torch.device | str) -> RollWindow:
        """The same window on a device."""
        return RollWindow(*(tensor.to(device) for tensor in (self.inputs, self.targets, self.valid, self.fresh)))


@dataclass(frozen=True)
class Rolls:
    """Pieces of music, of at least two steps each.

    Attributes:
        notes: [total, 88] uint8, 0 or 1, all pieces concatenated.
        offsets: [n + 1] int64; piece i is notes[offsets[i] : offsets[i + 1]].
    """

    notes: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """[n] int64: steps of each piece."""
        return self.offsets.diff()

    def piece(self, index: int) -> Tensor:
        """[steps, 88] uint8."""
        return self.notes[self.offsets[index] : self.offsets[index + 1]]

    def window(self, pieces: Tensor, begin: Tensor, steps: int) -> RollWindow:
        """T = `steps` steps of the pieces with indices `pieces`, [B] int64, from the steps `begin`, [B] int64, which
        are before their last steps."""
        step = begin + torch.arange(steps, device="cpu").unsqueeze(1)  # [T, B]
        valid = step + 1 < self.lengths[pieces]
        place = (self.offsets[pieces] + step).clamp(max=len(self.notes) - 2)
        mask = valid.unsqueeze(-1)
        return RollWindow(self.notes[place].float() * mask, self.notes[place + 1].float() * mask, valid, begin == 0)

    def whole(self, batch: int, steps: int) -> Iterator[tuple[int, RollWindow]]:
        """All pieces once, for evaluation: (rows, window), where the window continues the first `rows` pieces of the
        previous window of the group. The pieces are sorted by decreasing length, and divided into groups of `batch`,
        which are cut into windows of `steps`. A piece without further steps is left out of the following windows."""
        batch, steps = integer("batch", batch), integer("steps", steps)
        lengths = self.lengths - 1  # to predict
        for pieces in lengths.argsort(descending=True, stable=True).split(batch):
            for begin in range(0, int(lengths[pieces[0]]), steps):
                alive = pieces[lengths[pieces] > begin]
                longest = min(steps, int(lengths[alive[0]]) - begin)
                yield len(alive), self.window(alive, torch.full_like(alive, begin), longest)

    def windows(self, batch: int, steps: int, generator: torch.Generator) -> RollWindows:
        """An infinite iterator over windows of `steps` steps of `batch` pieces for truncated back-propagation, see
        RollWindows. The generator, on the CPU, is used by this iterator only."""
        return RollWindows(self, batch, steps, generator)


class RollWindows:
    """An infinite iterator over windows of B pieces. Each window starts where the previous one ended.

    When a row reaches the end of its piece, the next window has the start of another piece in this row and sets `fresh`
    for it: its state must be set to zero. The pieces are in a new random order in every epoch. There is no gap between
    epochs, so that every batch is full. `per_epoch` is the number of batches needed for the windows of all pieces.
    """

    def __init__(self, rolls: Rolls, batch: int, steps: int, generator: torch.Generator) -> None:
        self.rolls = rolls
        batch = integer("batch", batch)
        self.steps = steps = integer("steps", steps)
        self.generator = generator
        self._to_predict = rolls.lengths - 1
        windows = int((-(-self._to_predict // steps)).sum())
        self.per_epoch = -(-windows // batch)
        self._drawn_from = generator.get_state()
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._next = 0  # in the order
        self._pieces = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._begin = self._to_predict[self._pieces]  # at the end: every row begins a piece

    def __iter__(self) -> RollWindows:
        return self

    def __next__(self) -> RollWindow:
        ended = (self._begin >= self._to_predict[self._pieces]).nonzero().squeeze(1)
        for row in ended.tolist():
            if self._next == len(self._order):
                self._draw()
                self._next = 0
            self._pieces[row], self._begin[row] = self._order[self._next], 0
            self._next += 1
        window = self.rolls.window(self._pieces, self._begin, self.steps)
        self._begin = self._begin + self.steps
        return window

    def _draw(self) -> None:
        self._drawn_from = self.generator.get_state()
        self._order = torch.randperm(len(self.rolls), generator=self.generator, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """The state, in types that a checkpoint may contain: tensors and integers."""
        state = {"generator": self._drawn_from.clone(), "drawn": len(self._order) > 0, "next": self._next}
        return state | {"pieces": self._pieces.clone(), "begin": self._begin.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `state_dict` of an iterator over the same pieces."""
        self.generator.set_state(state["generator"])
        self._drawn_from, self._order = state["generator"].clone(), torch.empty(0, dtype=torch.int64, device="cpu")
        if state["drawn"]:
            self._draw()
        self._next = state["next"]
        self._pieces, self._begin = state["pieces"].clone(), state["begin"].clone()


@dataclass(frozen=True)
class Music:
    """The three parts of a collection."""

    train: Rolls
    validation: Rolls
    test: Rolls


def load_music(folder: str | Path, collection: str = "nottingham") -> Music:
    """Reads and checks a collection (nottingham, jsb, musedata or piano-midi) in either file format; on the CPU, 23 MB
    for Nottingham.

    Example::

        music = load_music("data/music", "nottingham")
        music.train.notes.shape  # [total steps, 88]
    """
    mat, npz = COLLECTIONS[one_of("collection", collection, COLLECTIONS)]
    path, content = read_first(folder, [f"{npz}.npz", f"{mat}.mat"])
    read = _read_mat if path.suffix == ".mat" else _read_npz
    return Music(*(_rolls(f"{path}: {split} piece", read(path, content, split)) for split in SPLITS))


def _read_mat(path: Path, content: bytes, split: str) -> list[Any]:
    """The pieces of a part of a MATLAB file."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError(f"{path} needs scipy to be read: pip install 'orthokern[music]'") from None
    name = f"{split}data"
    try:
        cells = loadmat(io.BytesIO(content), variable_names=[name]).get(name)
    except Exception as error:  # scipy's errors share no base class
        raise InputError(f"{path} is damaged or not a MATLAB 5 file ({len(content)} bytes): {error}") from None
    if not isinstance(cells, np.ndarray) or cells.dtype != object or not cells.size:
        raise InputError(f"{path} must have the cell array {name} with at least one piece")
    return list(cells.flatten(order="F"))


def _read_npz(path: Path, content: bytes, split: str) -> list[Any]:
    """The pieces of a part of a .npz file."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            bits, lengths = archive[f"{split}_bits"], archive[f"{split}_lengths"]
            notes = np.unpackbits(bits, axis=1)
    except Exception as error:  # those of numpy, zipfile and zlib share no base class
        accepted = f"a .npz file with {split}_bits uint8 [steps, {NOTES // 8}] and {split}_lengths"
        raise InputError(f"{path} is damaged or not {accepted}: {error}") from None
    fits = lengths.dtype.kind in "iu" and lengths.ndim == 1 and lengths.size > 0 and lengths.min() >= 2
    if not fits or sum(lengths.tolist()) != len(notes):
        accepted = f"integers of at least 2 that add up to the {len(notes)} steps of the bits"
        raise InputError(f"{path}: {split}_lengths must be {accepted}")
    return np.split(notes, np.cumsum(lengths)[:-1])


def _rolls(name: str, pieces: list[Any]) -> Rolls:
    """The pieces of a part, each a matrix [steps, 88] of 0 and 1."""
    for index, piece in enumerate(pieces):
        is_roll = isinstance(piece, np.ndarray) and piece.dtype.kind in "biuf" and piece.shape[1:] == (NOTES,)
        if not is_roll or len(piece) < 2 or not np.isin(piece, (0, 1)).all():
            got = f"{piece.dtype} {list(piece.shape)}" if isinstance(piece, np.ndarray) else type(piece).__name__
            raise InputError(f"{name} {index} must be 0 and 1 [steps, {NOTES}] with at least two steps, got {got}")
    offsets = np.cumsum([0, *map(len, pieces)])
    return Rolls(torch.from_numpy(np.concatenate(pieces).astype(np.uint8)), torch.from_numpy(offsets))
