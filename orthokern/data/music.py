"""Piano rolls of four collections of polyphonic music (Boulanger-Lewandowski, Bengio and Vincent 2012).

A piece is a matrix of 0 and 1, time steps by the 88 keys of a piano, from MIDI note 21 to 108. A model predicts the
notes of every step except the first from the previous steps. Results are usually given as the negative log-likelihood
per time step, summed over notes.

Two file formats are supported. If both files exist, the MATLAB file is read:

    Nottingham.mat    cell arrays traindata, validdata, testdata, with one [steps, 88] matrix per piece
    nottingham.npz    <split>_bits uint8 [steps, 11], numpy.packbits of all steps, and <split>_lengths, steps per piece
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orthokern._files import FILE_LIMIT, decoding, size_text
from orthokern._state import check_integer, check_tensor
from orthokern.data._checks import integer
from orthokern.data._files import data_folder, read_first
from orthokern.data._mat import read_cells
from orthokern.errors import InputError, unknown_name

NOTES = 88
LOWEST = 21  # MIDI number of the first key

# Name -> its file, without the ending, in both forms.
COLLECTIONS = {
    "nottingham": ("Nottingham", "nottingham"),
    "jsb": ("JSB_Chorales", "jsb_chorales"),
    "musedata": ("MuseData", "musedata"),
    "piano-midi": ("Piano_midi", "piano_midi"),
}
SPLITS = ("train", "valid", "test")
ARRAY_LIMIT = FILE_LIMIT // 8  # bytes of an array in a .npz file, whose bits become bytes
# Steps of each part, which identify a standard file with the wrong name.
_STEPS = {
    "nottingham": (176_561, 45_513, 44_463),
    "jsb": (13_807, 4_602, 4_725),
    "musedata": (245_202, 82_755, 64_339),
    "piano-midi": (75_911, 8_540, 19_036),
}


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

    @property
    def predictions(self) -> int:
        """Number of predicted steps: all steps except the first one of each piece."""
        return len(self.notes) - len(self)

    def piece(self, index: int) -> Tensor:
        """[steps, 88] uint8."""
        return self.notes[self.offsets[index] : self.offsets[index + 1]]

    def window(self, pieces: Tensor, begin: Tensor, steps: int) -> RollWindow:
        """A window of some pieces.

        Args:
            pieces: [B] int64, indices of the pieces.
            begin: [B] int64, first input step in each piece; must be below its last step.
            steps: T, number of steps.
        """
        step = begin + torch.arange(steps).unsqueeze(1)  # [T, B]
        valid = step + 1 < self.lengths[pieces]
        place = (self.offsets[pieces] + step).clamp(max=len(self.notes) - 2)
        kept = valid.unsqueeze(-1)
        return RollWindow(self.notes[place].float() * kept, self.notes[place + 1].float() * kept, valid, begin == 0)

    def whole(self, batch: int, steps: int) -> Iterator[tuple[int, RollWindow]]:
        """All pieces once, for evaluation. The pieces are sorted by decreasing length, and divided into groups that are
        cut into windows. A piece without further steps is left out of the following windows.

        Args:
            batch: pieces in a group, at least 1.
            steps: steps in a window, at least 1.

        Yields:
            (rows, window): the window continues the first `rows` pieces of the previous window of the group.
        """
        integer("batch", batch)
        integer("steps", steps)
        lengths = self.lengths - 1  # to predict
        for pieces in lengths.argsort(descending=True, stable=True).split(batch):
            for begin in range(0, int(lengths[pieces[0]]), steps):
                alive = pieces[lengths[pieces] > begin]
                longest = min(steps, int(lengths[alive[0]]) - begin)
                yield len(alive), self.window(alive, torch.full_like(alive, begin), longest)

    def windows(self, batch: int, steps: int, generator: torch.Generator) -> RollWindows:
        """An infinite iterator over windows for truncated back-propagation, see RollWindows.

        Args:
            batch: number of pieces in a window, B, at least 1.
            steps: number of steps of a window, T, at least 1.
            generator: a generator on the CPU that is used by this iterator only.

        Raises:
            InputError: batch or steps below 1.
        """
        return RollWindows(self, batch, steps, generator)


class RollWindows:
    """An infinite iterator over windows of B pieces. Each window starts where the previous one ended.

    When a row reaches the end of its piece, the next window has the start of another piece in this row and sets `fresh`
    for it: its state must be set to zero. The pieces are in a new random order in every epoch. There is no gap between
    epochs, so that every batch is full. The length of an epoch is the number of batches needed for the windows of all
    pieces.

    Args: as in Rolls.windows.

    Attributes:
        per_epoch: batches in an epoch.
    """

    def __init__(self, rolls: Rolls, batch: int, steps: int, generator: torch.Generator) -> None:
        self.rolls = rolls
        self.batch = integer("batch", batch)
        self.steps = integer("steps", steps)
        self.generator = generator
        self._to_predict = rolls.lengths - 1
        windows = int((-(-self._to_predict // steps)).sum())
        self.per_epoch = -(-windows // batch)
        self._drawn_from = generator.get_state()
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0  # in the order
        self._pieces = torch.zeros(batch, dtype=torch.int64)
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
        self._order = torch.randperm(len(self.rolls), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        """The state, in types that a checkpoint may contain: tensors and integers."""
        state = {"generator": self._drawn_from.clone(), "drawn": len(self._order) > 0, "next": self._next}
        state |= {"pieces": self._pieces.clone(), "begin": self._begin.clone()}
        return state | {"steps": self.steps, "total": self.rolls.predictions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `state_dict` of an iterator over the same pieces.

        Raises:
            InputError: the state belongs to other pieces, another batch or other windows.
        """
        for name, theirs, ours in (
            ("time steps to predict", state["total"], self.rolls.predictions),
            ("batch", len(state["pieces"]), self.batch),
            ("window", state["steps"], self.steps),
        ):
            if theirs != ours:
                raise InputError(f"the saved order of the data has {name} {theirs}; expected: {ours}")
        check_integer("next", state["next"], 0, len(self.rolls) if state["drawn"] else 0)
        pieces, begin = (check_tensor(name, state[name], self._pieces) for name in ("pieces", "begin"))
        if bool(((pieces < 0) | (pieces >= len(self.rolls)) | (begin < 0)).any()):
            raise InputError(f"the saved order of the data has pieces outside of 0 to {len(self.rolls) - 1}")
        self.generator.set_state(state["generator"])
        self._drawn_from, self._order = state["generator"].clone(), torch.empty(0, dtype=torch.int64)
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
    """Reads and checks a collection in either file format.

    Args:
        folder: folder of the files.
        collection: one of COLLECTIONS.

    Returns:
        Music, on the CPU; 23 MB for Nottingham.

    Raises:
        InputError: an unknown name; a file that is missing, unreadable, damaged, truncated, of another kind or another
            collection; a part without pieces; a piece of fewer than two steps or with another number of notes than 88;
            values other than 0 and 1.

    Example::

        music = load_music("data/music", "nottingham")
        music.train.notes.shape  # [total steps, 88]
    """
    if collection not in COLLECTIONS:
        raise unknown_name("collection", collection, COLLECTIONS)
    mat, npz = COLLECTIONS[collection]
    path, content = read_first(data_folder(folder), [f"{mat}.mat", f"{npz}.npz"])
    if path.suffix == ".mat":
        cells = read_cells(path, content, tuple(f"{split}data" for split in SPLITS))
        train, validation, test = (_joined(path, split, cells[f"{split}data"]) for split in SPLITS)
    else:
        train, validation, test = _from_npz(path, content)
    found = tuple(len(part.notes) for part in (train, validation, test))
    for other, steps in _STEPS.items():
        if found == steps and other != collection:
            raise InputError(f"{path} holds the collection {other}; expected: {collection}")
    return Music(train, validation, test)


def _joined(path: Path, split: str, pieces: list[np.ndarray]) -> Rolls:
    """One part of a MATLAB file."""
    for index, piece in enumerate(pieces):
        if piece.shape[1] != NOTES or len(piece) < 2:
            raise InputError(
                f"{path}: {split} piece {index} is {piece.shape[0]} x {piece.shape[1]}; "
                f"expected: steps x {NOTES} notes, two steps at least"
            )
        wrong = np.argwhere((piece != 0) & (piece != 1))
        if len(wrong):
            step, key = wrong[0].tolist()
            raise InputError(
                f"{path}: {split} piece {index} has the value {piece[step, key]} at step {step}, note {LOWEST + key}; "
                "expected: 0 and 1 only"
            )
    if not pieces:
        raise InputError(f"{path} has no pieces in {split}; expected: at least one")
    notes = torch.from_numpy(np.concatenate([piece.astype(np.uint8) for piece in pieces]))
    return Rolls(notes, _offsets(np.asarray([len(piece) for piece in pieces])))


def _from_npz(path: Path, content: bytes) -> tuple[Rolls, Rolls, Rolls]:
    wanted = [f"{split}_{part}" for split in SPLITS for part in ("bits", "lengths")]
    with decoding(path, "damaged or no .npz file", len(content)), zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        missing = [name for name in wanted if f"{name}.npy" not in entries]
        if missing:
            raise InputError(f"{path} has no array {missing[0]}; expected: {', '.join(wanted)}")
        arrays = {name: _array(path, archive, entries[f"{name}.npy"]) for name in wanted}
    parts = []
    for split in SPLITS:
        bits, lengths = arrays[f"{split}_bits"], arrays[f"{split}_lengths"]
        if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] * 8 != NOTES:
            raise InputError(
                f"{path}: {split}_bits is {bits.dtype} {list(bits.shape)}; expected: uint8 [steps, {NOTES // 8}]"
            )
        if lengths.dtype.kind not in "iu" or lengths.ndim != 1 or not len(lengths) or lengths.min() < 2:
            raise InputError(f"{path}: {split}_lengths must be integers of at least 2, for at least one piece")
        # no length exceeds the total, so that their sum does not overflow int64
        total = int(lengths.max()) if lengths.max() > len(bits) else int(lengths.astype(np.int64).sum())
        if total != len(bits):
            raise InputError(
                f"{path}: {split}_lengths tell of {total} steps{' in one piece' if total == lengths.max() else ''}, "
                f"{split}_bits has {len(bits)}; expected: the same"
            )
        parts.append(Rolls(torch.from_numpy(np.unpackbits(bits, axis=1)), _offsets(lengths)))
    return parts[0], parts[1], parts[2]


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """One array of a .npz file. The sizes in its header are checked before its content is read."""
    name = f"{path}: {entry.filename.removesuffix('.npy')}"
    if entry.flag_bits & 1:
        raise InputError(f"{name} is encrypted; expected: an array as numpy.savez writes it")
    if entry.file_size > ARRAY_LIMIT:
        raise InputError(f"{name} unpacks to {size_text(entry.file_size)}; accepted: at most {size_text(ARRAY_LIMIT)}")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise InputError(f"{name} has the .npy version {version}; accepted: 1.0 and 2.0")
        read_header = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = read_header(file)
        if dtype.kind not in "biuf":
            raise InputError(f"{name} is {dtype}; expected: integers")
        data = file.read(entry.file_size)  # to its end, where its checksum is compared
    if any(not isinstance(size, int) or size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise InputError(
            f"{name} holds {len(data)} bytes for {dtype} {list(shape)}; expected: as many as its shape says"
        )
    return np.frombuffer(data, dtype).reshape(shape, order="F" if columns_first else "C")


def _offsets(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths.astype(np.int64))]))
