"""Piano rolls: both file formats, windows, and bad files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from scipy.io import savemat

from orthokern.data import Rolls, load_music
from orthokern.data.music import NOTES

SPLITS = ("train", "valid", "test")


def mat_file(parts: dict[str, list[np.ndarray]], **options: bool) -> bytes:
    buffer = io.BytesIO()
    cells = {}
    for name, pieces in parts.items():
        cells[name] = np.empty((1, len(pieces)), object)
        cells[name][0] = pieces
    savemat(buffer, cells, **options)
    return buffer.getvalue()


def npz_arrays(parts: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    arrays = {}
    for split in SPLITS:
        pieces = parts[f"{split}data"]
        arrays[f"{split}_bits"] = np.packbits(np.concatenate(pieces), axis=1)
        arrays[f"{split}_lengths"] = np.asarray([len(piece) for piece in pieces], np.int32)
    return arrays


@pytest.fixture
def parts() -> dict[str, list[np.ndarray]]:
    draw = np.random.default_rng(0)
    counts = {"traindata": 7, "validdata": 2, "testdata": 3}
    return {
        name: [(draw.random((draw.integers(2, 40), NOTES)) < 0.1).astype(np.uint8) for _ in range(count)]
        for name, count in counts.items()
    }


def check(folder: Path, parts: dict[str, list[np.ndarray]], collection: str = "nottingham") -> None:
    music = load_music(folder, collection)
    for rolls, name in ((music.train, "traindata"), (music.validation, "validdata"), (music.test, "testdata")):
        assert rolls.notes.dtype == torch.uint8 and rolls.lengths.tolist() == [len(piece) for piece in parts[name]]
        for index, piece in enumerate(parts[name]):
            assert np.array_equal(rolls.piece(index).numpy(), piece)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_matlab_files(tmp_path: Path, parts: dict[str, list[np.ndarray]], dtype: type, packed: bool) -> None:
    typed = {name: [piece.astype(dtype) for piece in pieces] for name, pieces in parts.items()}
    (tmp_path / "JSB_Chorales.mat").write_bytes(mat_file(typed, do_compression=packed))
    check(tmp_path, parts, "jsb")


def test_scipy_is_optional(tmp_path: Path, parts: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Nottingham.mat").write_bytes(mat_file(parts))
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert "Nottingham.mat needs scipy to be read: pip install 'orthokern[music]'" in refused(tmp_path)
    np.savez_compressed(tmp_path / "nottingham.npz", **npz_arrays(parts))
    check(tmp_path, parts)


def refused(folder: Path, collection: str = "nottingham") -> str:
    return helpers.refused(lambda: load_music(folder, collection))


def test_wrong_arguments(tmp_path: Path) -> None:
    assert "missing data file nottingham.npz (nor Nottingham.mat)" in refused(tmp_path)
    assert "did you mean 'nottingham'" in refused(tmp_path, "notingham")


def test_damaged_matlab_files(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    path = tmp_path / "Nottingham.mat"
    good = mat_file(parts, do_compression=True)
    for content in (
        b"",
        good[:130],
        good[: len(good) // 2],
        b"MATLAB 7.3".ljust(600),
    ):
        path.write_bytes(content)
        assert "damaged or not a MATLAB 5 file" in refused(tmp_path)
    buffer = io.BytesIO()
    savemat(buffer, {name: pieces[0] for name, pieces in parts.items()})
    path.write_bytes(buffer.getvalue())
    assert "must have the cell array traindata" in refused(tmp_path)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (np.eye(5, NOTES) * 2, "float64 [5, 88]"),
        (np.full((5, NOTES), np.nan), "float64 [5, 88]"),
        (np.zeros((5, 93)), "float64 [5, 93]"),
        (np.full((5, NOTES), 1j), "complex128 [5, 88]"),
    ],
)
def test_pieces_that_are_no_rolls(
    tmp_path: Path, parts: dict[str, list[np.ndarray]], piece: np.ndarray, message: str
) -> None:
    parts["validdata"][1] = piece
    (tmp_path / "Nottingham.mat").write_bytes(mat_file(parts))
    accepted = "must be 0 and 1 [steps, 88] with at least two steps"
    assert f"valid piece 1 {accepted}, got {message}" in refused(tmp_path)


def test_damaged_npz_files(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    path = tmp_path / "nottingham.npz"
    arrays = npz_arrays(parts)
    np.savez(path, **arrays)
    good = path.read_bytes()
    for content in (b"", good[: len(good) // 2], b"no archive"):
        path.write_bytes(content)
        assert "damaged or not a .npz file" in refused(tmp_path)
    for changes, text in (
        ({"train_bits": np.zeros((4, 11), np.float32)}, "train_bits uint8 [steps, 11] and train_lengths: Expected an"),
        ({"valid_bits": np.zeros((4, 12), np.uint8), "valid_lengths": [4]}, "[steps, 88] with at least two steps"),
        (
            {"test_lengths": np.asarray([1, len(arrays["test_bits"]) - 1])},
            "test_lengths must be integers of at least 2",
        ),
        ({"test_lengths": np.asarray([-2, len(arrays["test_bits"]) + 2])}, "test_lengths must be integers of at least"),
        ({"test_lengths": np.asarray([], np.int64)}, "test_lengths must be integers of at least 2 that add up to the"),
        ({"train_lengths": np.asarray([2**63, 2**63 + 8], np.uint64)}, "2 that add up to the"),
        ({"train_bits": np.asarray([{"an": "object"}], dtype=object)}, "damaged or not a .npz file"),  # a pickle
    ):
        np.savez(path, **{**arrays, **changes})
        assert text in refused(tmp_path)


# ---- windows -------------------------------------------------------------------------------------


def random_rolls(lengths: list[int]) -> Rolls:
    generator = torch.Generator().manual_seed(0)
    notes = (torch.rand(sum(lengths), NOTES, generator=generator) < 0.1).to(torch.uint8)
    return Rolls(notes, torch.tensor([0, *lengths]).cumsum(0))


def test_windows_go_through_every_piece() -> None:
    """Followed from row to row, an epoch's windows are the pieces, each once; the input is the step before."""
    rolls = random_rolls([2, 6, 8, 9, 15, 22, 4, 31])
    steps, batch = 7, 3
    stream = rolls.windows(batch, steps, torch.Generator().manual_seed(1))
    assert stream.per_epoch == -(-(1 + 1 + 1 + 2 + 2 + 3 + 1 + 5) // batch)
    begun: list[list[torch.Tensor]] = []
    rows: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    for _ in range(3 * stream.per_epoch):
        window = next(stream)
        assert window.inputs.shape == window.targets.shape == (steps, batch, NOTES)
        for row in range(batch):
            valid, targets, inputs = window.valid[:, row], window.targets[:, row], window.inputs[:, row]
            count = int(valid.sum())
            assert count >= 1 and bool(valid[:count].all()) and not targets[count:].any()
            if window.fresh[row]:
                rows[row] = [inputs[:1]]
                begun.append(rows[row])
            else:
                assert torch.equal(inputs[0], rows[row][-1][-1])
            assert torch.equal(inputs[1:count], targets[: count - 1])
            rows[row].append(targets[:count])
    expected = [rolls.piece(index).float() for index in range(len(rolls))]
    orders = []
    for epoch in (0, 1):  # the third has begun, and not ended
        pieces = [torch.cat(parts) for parts in begun[8 * epoch : 8 * epoch + 8]]
        orders.append([next(i for i, piece in enumerate(expected) if torch.equal(piece, other)) for other in pieces])
        assert sorted(orders[-1]) == list(range(8))
    assert orders[0] != orders[1]
