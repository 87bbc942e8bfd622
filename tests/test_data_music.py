"""Piano rolls: both file formats, windows, resuming, and bad files."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from orthokern.data import Rolls, load_music
from orthokern.data import music as module
from orthokern.data.music import COLLECTIONS, NOTES
from orthokern.errors import InputError

SPLITS = ("train", "valid", "test")
_CLASSES = {"u1": (9, 2), "f8": (6, 9)}  # MATLAB's class, and the type of the values' element


def element(kind: int, content: bytes, order: str = "<") -> bytes:
    """A data element of a MATLAB 5 file; the short form where it fits."""
    if len(content) <= 4 and kind != 14:
        return struct.pack(order + "I", len(content) << 16 | kind) + content.ljust(4, b"\0")
    return struct.pack(order + "II", kind, len(content)) + content + b"\0" * (-len(content) % 8)


def matrix(values: np.ndarray | list[bytes], name: str = "", order: str = "<", dtype: str = "u1") -> bytes:
    """A matrix, or a cell array [1, n] of elements."""
    if isinstance(values, list):
        code, shape, content = 1, (1, len(values)), b"".join(values)
    else:
        code, kind = _CLASSES[dtype]
        shape, data = values.shape, values.astype(order + dtype).tobytes(order="F")
        content = element(kind, data, order)
    head = element(6, struct.pack(order + "II", code, 0), order) + element(5, struct.pack(order + "2i", *shape), order)
    return element(14, head + element(1, name.encode(), order) + content, order)


def mat_file(parts: dict[str, list[np.ndarray]], *, order: str = "<", dtype: str = "u1", packed: bool = True) -> bytes:
    content = b"MATLAB 5.0 MAT-file, a test".ljust(124) + struct.pack(order + "HH", 0x0100, 0x4D49)
    for name, pieces in parts.items():
        whole = matrix([matrix(piece, "", order, dtype) for piece in pieces], name, order)
        packing = zlib.compress(whole)
        content += struct.pack(order + "II", 15, len(packing)) + packing if packed else whole
    return content


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
        assert rolls.predictions == sum(len(piece) - 1 for piece in parts[name])
        for index, piece in enumerate(parts[name]):
            assert np.array_equal(rolls.piece(index).numpy(), piece)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "f8"])
@pytest.mark.parametrize("packed", [False, True])
def test_matlab_files(tmp_path: Path, parts: dict[str, list[np.ndarray]], order: str, dtype: str, packed: bool) -> None:
    (tmp_path / "JSB_Chorales.mat").write_bytes(mat_file(parts, order=order, dtype=dtype, packed=packed))
    check(tmp_path, parts, "jsb")


def test_npz_files(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    np.savez_compressed(tmp_path / "nottingham.npz", **npz_arrays(parts))
    check(tmp_path, parts)


def refused(folder: Path, collection: str = "nottingham") -> str:
    with pytest.raises(InputError) as caught:
        load_music(folder, collection)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_damaged_matlab_files(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    path = tmp_path / "Nottingham.mat"
    assert "missing data file Nottingham.mat (nor nottingham.npz)" in refused(tmp_path)
    assert "did you mean 'nottingham'" in refused(tmp_path, "notingham")
    assert "does not exist" in refused(tmp_path / "no")
    good = mat_file(parts)
    for packed in (True, False):
        content = mat_file(parts, packed=packed)
        for end in (130, 140, 200, len(content) // 2, len(content) - 9):
            path.write_bytes(content[:end])
            message = refused(tmp_path)
            assert "damaged or cut off" in message or "no variable" in message, message
    path.write_bytes(good[:300] + bytes([good[300] ^ 0x55]) + good[301:])
    assert "damaged" in refused(tmp_path)
    path.write_bytes(b"")
    assert "no MATLAB file: 0 bytes" in refused(tmp_path)
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(600))
    assert "MATLAB 7.3" in refused(tmp_path) and ".npz" in refused(tmp_path)
    path.write_bytes(mat_file({name: parts[name] for name in ("traindata", "testdata")}))
    assert "no variable validdata" in refused(tmp_path)
    header = good[:128]
    path.write_bytes(header + b"".join(matrix(parts[f"{split}data"][0], f"{split}data") for split in SPLITS))
    assert "traindata is no cell array" in refused(tmp_path)


def test_damage_anywhere_is_one_line(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    """Whatever byte of an uncompressed file is wrong: the pieces are read, or one line says why not."""
    path = tmp_path / "Nottingham.mat"
    small = {name: [piece[:2] for piece in pieces[:1]] for name, pieces in parts.items()}
    good = mat_file(small, packed=False)
    draw = np.random.default_rng(1)
    for place in draw.choice(len(good), 150, replace=False):
        content = bytearray(good)
        content[place] ^= int(draw.integers(1, 256))
        path.write_bytes(bytes(content))
        try:
            load_music(tmp_path)
        except InputError as error:
            assert "\n" not in str(error) and "Nottingham.mat" in str(error)


def test_rolls_that_are_no_rolls(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    path = tmp_path / "Nottingham.mat"
    parts["validdata"][1] = np.zeros((5, NOTES))
    parts["validdata"][1][3, 40] = 2
    path.write_bytes(mat_file(parts))
    assert "valid piece 1 has the value 2 at step 3, note 61; expected: 0 and 1 only" in refused(tmp_path)
    parts["validdata"][1][3, 40] = 0.5
    path.write_bytes(mat_file(parts, dtype="f8"))
    assert "has the value 0.5" in refused(tmp_path)
    parts["validdata"][1][3, 40] = np.nan
    path.write_bytes(mat_file(parts, dtype="f8"))
    assert "has the value nan" in refused(tmp_path)
    parts["validdata"][1] = np.zeros((5, 93))
    path.write_bytes(mat_file(parts))
    assert "valid piece 1 is 5 x 93; expected: steps x 88 notes, two" in refused(tmp_path)
    parts["validdata"][1] = np.zeros((1, NOTES))
    path.write_bytes(mat_file(parts))
    assert "valid piece 1 is 1 x 88" in refused(tmp_path)
    path.write_bytes(mat_file({**parts, "validdata": []}))
    assert "no pieces in valid" in refused(tmp_path)


def test_damaged_npz_files(tmp_path: Path, parts: dict[str, list[np.ndarray]]) -> None:
    path = tmp_path / "nottingham.npz"
    arrays = npz_arrays(parts)
    np.savez(path, **arrays)
    good = path.read_bytes()
    for content in (b"", good[: len(good) // 2], b"no archive"):
        path.write_bytes(content)
        assert "damaged or no .npz file" in refused(tmp_path)
    for changes, text in (
        ({"train_bits": np.zeros((4, 11), np.float32)}, "train_bits is float32 [4, 11]"),
        ({"valid_bits": np.zeros((4, 12), np.uint8)}, "valid_bits is uint8 [4, 12]; expected: uint8 [steps, 11]"),
        ({"test_lengths": np.asarray([1, 3])}, "test_lengths must be integers of at least 2"),
        ({"test_lengths": np.asarray([10_000])}, "expected: the same"),
    ):
        np.savez(path, **{**arrays, **changes})
        assert text in refused(tmp_path)
    np.savez(path, **{name: arrays[name] for name in arrays if name != "test_bits"})
    assert "no array test_bits" in refused(tmp_path)
    np.savez(path, **{**arrays, "train_bits": np.asarray([{"an": "object"}], dtype=object)})
    assert "train_bits is object; expected: integers" in refused(tmp_path)  # pickles are not opened


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
    wanted = [rolls.piece(index).float() for index in range(len(rolls))]
    orders = []
    for epoch in (0, 1):  # the third has begun, and not ended
        pieces = [torch.cat(parts) for parts in begun[8 * epoch : 8 * epoch + 8]]
        orders.append([next(i for i, piece in enumerate(wanted) if torch.equal(piece, other)) for other in pieces])
        assert sorted(orders[-1]) == list(range(8))
    assert orders[0] != orders[1]


def test_windows_resume() -> None:
    rolls = random_rolls([2, 6, 8, 9, 15, 22, 4, 31])
    for taken in (0, 1, 5, 12):
        whole = rolls.windows(3, 7, torch.Generator().manual_seed(1))
        for _ in range(taken):
            next(whole)
        state = whole.state_dict()
        later = rolls.windows(3, 7, torch.Generator().manual_seed(99))
        later.load_state_dict(state)
        for _ in range(20):
            ours, theirs = next(later), next(whole)
            assert torch.equal(ours.targets, theirs.targets) and torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.fresh, theirs.fresh) and torch.equal(ours.valid, theirs.valid)
    with pytest.raises(InputError, match="batch 3; expected: 4"):
        rolls.windows(4, 7, torch.Generator()).load_state_dict(state)
    with pytest.raises(InputError, match="time steps to predict 89; expected: 4"):
        random_rolls([5]).windows(3, 7, torch.Generator()).load_state_dict(state)
    with pytest.raises(InputError, match="batch must be an integer"):
        rolls.windows(0, 7, torch.Generator())


def test_whole_pieces_for_evaluation() -> None:
    rolls = random_rolls([5, 12, 2, 8, 21])
    parts: dict[int, list[torch.Tensor]] = {}
    group, pieces = -1, 0
    for rows, window in rolls.whole(batch=2, steps=6):
        if window.fresh[0]:
            group, pieces = group + 1, rows
        assert rows <= pieces and window.targets.shape[1] == rows
        for row in range(rows):
            here = parts.setdefault(2 * group + row, [])
            here += [window.inputs[:1, row]] if window.fresh[row] else []
            here.append(window.targets[window.valid[:, row], row])
    expected = [4, 1, 3, 0, 2]  # by falling length
    assert len(parts) == 5
    for place, index in enumerate(expected):
        assert torch.equal(torch.cat(parts[place]), rolls.piece(index).float())


def test_a_collection_in_the_place_of_another(
    tmp_path: Path, parts: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._STEPS, "jsb", tuple(sum(map(len, pieces)) for pieces in parts.values()))
    np.savez_compressed(tmp_path / "jsb_chorales.npz", **npz_arrays(parts))
    check(tmp_path, parts, "jsb")
    (tmp_path / "Nottingham.mat").write_bytes(mat_file(parts))
    assert refused(tmp_path) == f"{tmp_path / 'Nottingham.mat'} holds the collection jsb; expected: nottingham"


@pytest.mark.skipif("ORTHOKERN_DATA" not in os.environ, reason="ORTHOKERN_DATA: the folder with the real files")
@pytest.mark.parametrize("collection", COLLECTIONS)
def test_the_real_files(collection: str, tmp_path: Path) -> None:
    """Both forms hold the same; sizes as published."""
    folder = Path(os.environ["ORTHOKERN_DATA"]) / "music"
    music = load_music(folder, collection)
    npz = COLLECTIONS[collection][1] + ".npz"
    (tmp_path / npz).write_bytes((folder / npz).read_bytes())
    packed = load_music(tmp_path, collection)
    for ours, theirs in ((music.train, packed.train), (music.validation, packed.validation), (music.test, packed.test)):
        assert torch.equal(ours.notes, theirs.notes) and torch.equal(ours.offsets, theirs.offsets)
    sizes = {
        "nottingham": (694, 173, 170),
        "jsb": (229, 76, 77),
        "musedata": (524, 135, 124),
        "piano-midi": (87, 12, 25),
    }
    assert (len(music.train), len(music.validation), len(music.test)) == sizes[collection]
    assert tuple(len(part.notes) for part in (music.train, music.validation, music.test)) == module._STEPS[collection]
