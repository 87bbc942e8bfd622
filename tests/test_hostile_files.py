"""Malicious or damaged files, for every format that the project reads: files that are not regular, that decompress to
too much, or that are damaged cause an error of one line, quickly and with little memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import socket
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_music import mat_file, npz_arrays

from orthokern import _files
from orthokern.data import load_mnist, load_music, load_ptb, load_words
from orthokern.diagnostics import __main__ as command
from orthokern.diagnostics.runs import load_run, number_at, read_metrics
from orthokern.errors import InputError
from orthokern.training.checkpoint import load_checkpoint
from orthokern.training.rundir import RunFolder


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """What waits for a pipe's writer, or unpacks terabytes, is ended."""

    def ring(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def idx(count: int, images: bool) -> bytes:
    drawn = np.random.default_rng(count).integers(0, 256 if images else 10, (count, 784 if images else 1), np.uint8)
    shape = (28, 28) if images else ()
    return struct.pack(f">{2 + len(shape)}I", 2051 if images else 2049, count, *shape) + drawn.tobytes()


def music_parts() -> dict[str, list[np.ndarray]]:
    generator = np.random.default_rng(0)
    return {
        f"{split}data": [generator.integers(0, 2, (steps, 88), dtype=np.uint8) for steps in (5, 3)]
        for split in ("train", "valid", "test")
    }


def npz(**changes: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{**npz_arrays(music_parts()), **changes})
    return buffer.getvalue()


def text(*_: Any) -> bytes:
    return b" a line of text <unk> \n" * 20


def mnist(folder: Path) -> Any:
    return load_mnist(folder, validation=2)


Reader = Callable[[Path], Any]
# kind -> (the file that is attacked, its good content, all files beside it, what reads them)
KINDS: dict[str, tuple[str, bytes, dict[str, bytes], Reader]] = {
    "idx": (
        "train-images-idx3-ubyte",
        idx(12, True),
        {
            "train-labels-idx1-ubyte": idx(12, False),
            "t10k-images-idx3-ubyte": idx(5, True),
            "t10k-labels-idx1-ubyte": idx(5, False),
        },
        mnist,
    ),
    "mat": ("Nottingham.mat", mat_file(music_parts()), {}, load_music),
    "npz": ("nottingham.npz", npz(), {}, load_music),
    "text": ("ptb.valid.txt", text(), {"ptb.train.txt": text(), "ptb.test.txt": text()}, load_ptb),
    "words": ("ptb.test.txt", text(), {"ptb.train.txt": text(), "ptb.valid.txt": text()}, load_words),
    "config": ("config.json", b'{"task": "copy", "settings": {"T": 3}}', {}, load_run),
    "resumed": ("config.json", b'{"task": "copy", "settings": {}}', {}, lambda folder: RunFolder.open(folder, "copy")),
    "metrics": ("metrics.jsonl", b'{"iteration": 1}\n', {"config.json": b'{"task": "a", "settings": {}}'}, load_run),
    "result": ("result.json", b'{"test": {"loss": 1}}', {"config.json": b'{"task": "a", "settings": {}}'}, load_run),
}
packed = gzip.compress(KINDS["idx"][1])
KINDS["gzip"] = (KINDS["idx"][0], packed, KINDS["idx"][2], mnist)
buffer = io.BytesIO()
torch.save({"format": "orthokern.checkpoint", "version": 1, "model": {"w": torch.arange(50.0)}}, buffer)
KINDS["checkpoint"] = ("checkpoint.pt", buffer.getvalue(), {}, lambda folder: load_checkpoint(folder / "checkpoint.pt"))


def lay(folder: Path, kind: str, content: bytes | None = None) -> tuple[Path, Reader]:
    """The files of a kind, the attacked one with other content, or not there; its path, and what reads them."""
    name, good, others, read = KINDS[kind]
    folder.mkdir(exist_ok=True)
    for other, beside in others.items():
        (folder / other).write_bytes(beside)
    if content is not None:
        (folder / name).write_bytes(content)
    return folder / name, read


def refused(read: Reader, folder: Path, name: str) -> str:
    with pytest.raises(InputError) as error:
        read(folder)
    line = str(error.value)
    assert "\n" not in line and name in line and len(line) < 1000
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_good_files_are_read(tmp_path: Path, kind: str) -> None:
    _, read = lay(tmp_path, kind, KINDS[kind][1])
    read(tmp_path)


@pytest.mark.parametrize("what", ["a named pipe", "a device", "a folder", "a socket", "too large"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_of_a_bounded_size(tmp_path: Path, kind: str, what: str) -> None:
    path, read = lay(tmp_path, kind)
    if what == "a named pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    elif what == "a folder":
        path.mkdir()
    elif what == "a socket":
        here = os.getcwd()
        os.chdir(tmp_path)  # the names of sockets are short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    else:
        with path.open("wb") as file:
            file.truncate(2**43)  # without a block on the disk
    line = refused(read, tmp_path, path.name)
    assert ("accepted: at most" if what == "too large" else f"it is {what}") in line


def test_bombs_take_the_memory_that_their_header_promises(tmp_path: Path) -> None:
    bomb = 2**25  # bytes of zeros
    packer = zlib.compressobj(9)
    packed = packer.compress(struct.pack("<II", 14, 2**31 - 8)) + packer.compress(bytes(2**20)) + packer.flush()
    header = mat_file(music_parts())[:128]
    npz_bomb = io.BytesIO()
    with zipfile.ZipFile(npz_bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in npz_arrays(music_parts()):
            with archive.open(f"{name}.npy", "w") as file:
                for _ in range(bomb >> 20):
                    file.write(bytes(2**20))
    zip_bomb = io.BytesIO()
    with zipfile.ZipFile(zip_bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**24))
    contents = {
        "gzip": gzip.compress(struct.pack(">4I", 2051, 12, 28, 28) + bytes(2**26)),
        "mat": header + struct.pack("<II", 15, len(packed)) + packed,
        "npz": npz_bomb.getvalue(),
        "checkpoint": zip_bomb.getvalue(),
    }
    for kind, content in contents.items():
        path, read = lay(tmp_path / kind, kind, content)
        tracemalloc.start()
        refused(read, tmp_path / kind, path.name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24 + 4 * len(content), (kind, peak)
    promised = gzip.compress(struct.pack(">4I", 2051, 2**31, 28, 28))
    path, read = lay(tmp_path / "gzip", "gzip", promised)
    assert "accepted: at most 1 GiB" in refused(read, tmp_path / "gzip", path.name)


def test_arrays_that_no_one_wrote(tmp_path: Path) -> None:
    """A .npz archive's own ways to be wrong."""
    path, read = lay(tmp_path, "npz")
    good = npz()

    def with_entry(content: bytes, **attributes: Any) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                if entry.filename == "train_bits.npy":
                    new.writestr(entry.filename, content)
                else:
                    new.writestr(entry.filename, old.read(entry))
        return out.getvalue()

    def header(descr: str, shape: str) -> bytes:
        told = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(told)) + told

    bare = io.BytesIO()
    np.save(bare, np.zeros((3, 11), np.uint8))
    contents = [
        bare.getvalue(),
        with_entry(b""),
        with_entry(b"\0" * 100),
        with_entry(header("'|u1'", "(2**40, 11)")),
        with_entry(header("'|u1'", "(1099511627776, 11)")),
        with_entry(header("'|u1'", "(-1, 11)")),
        with_entry(header("'|O'", "(8, 11)") + b"x" * 88),
        with_entry(header("'<U1000000000'", "(1, 11)")),
        with_entry(header("[" * 40 + "]" * 40, "(8, 11)")),
        with_entry(header("'|u1'", "None")),
        npz(train_bits=np.asarray(None, dtype=object)),
        npz(train_lengths=np.asarray([2**63, 2**63 + 8], np.uint64)),
        npz(train_lengths=np.asarray([2**62, 2**62, 2**62, 2**62, 8], np.int64)),
        npz(train_lengths=np.asarray([], np.int64)),
        npz(train_lengths=np.asarray(8)),
    ]
    place = good.index(b"PK\x01\x02")  # the first entry of the directory
    for offset, value in ((8, 1), (10, 99)):  # encrypted; compressed by an unknown method
        changed = bytearray(good)
        changed[place + offset] = value
        contents.append(bytes(changed))
    for content in contents:
        path.write_bytes(content)
        refused(read, tmp_path, path.name)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_one_line_or_another_good_file(tmp_path: Path, kind: str) -> None:
    good, draw = KINDS[kind][1], random.Random(kind)
    for _ in range(60):
        content = bytearray(good)
        way = draw.randrange(4)
        for _ in range(draw.choice([1, 1, 3])):
            place = draw.randrange(len(content))
            if way == 0:
                content[place] ^= 1 << draw.randrange(8)
            elif way == 1:
                content[place : place + draw.randrange(1, 9)] = draw.randbytes(8)
            elif way == 2:
                del content[place:]
                break
            else:
                content[place:place] = content[draw.randrange(len(content)) :]
        path, read = lay(tmp_path, kind, bytes(content))
        try:
            read(tmp_path)
        except InputError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error)
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)


# ---- numbers of records and results ----------------------------------------------------------------------------------

WRONG = st.one_of(
    st.sampled_from([None, "many", [], {}, True, 10**400, -(10**400), 1e308, -1e308, 5e-324, 2**63, -1]),
    st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.text(max_size=2), st.floats(), st.integers()), max_size=3),
)
FIELDS = ["iteration", "epoch", "loss", "accuracy", "seconds", "ms_per_iteration", "us_per_step", "held_out_accuracy"]
FIELDS += ["spectrum", "eigenvalue_angles", "grad_norm_through_time", "state_norm_through_time", "spectral_radius"]
FIELDS += ["orthogonality_error", "grad_norm", "time_steps", "held_out_loss", "nll"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), WRONG, max_size=6), max_size=4), WRONG, WRONG)
def test_records_of_any_content(tmp_path_factory: pytest.TempPathFactory, drawn: Any, first: Any, second: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    config = {"task": "copy", "settings": {"accumulate": first, "iterations": second, "margin": first}}
    config |= {"time_steps": first, "baseline": second, "machine": first}
    (folder / "config.json").write_text(json.dumps(config))
    good = {"loss": 1.0, "ms_per_iteration": 1.0, "us_per_step": 2.0}
    lines = [{"iteration": index, **good, **record} for index, record in enumerate(drawn, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"test": {"loss": first}, "iteration": second, "seconds": first}))
    assert command.main([str(folder), "--figure", "none"]) in (0, 2)
    try:
        run = load_run(folder)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert (run.time_steps or 1) >= 1 and (run.iterations_per_epoch or 1.0) > 0
        assert all(np.isfinite(run.series(name)[1]).all() for name in run.quantities)
    for record in read_metrics(folder / "metrics.jsonl"):
        assert number_at(record, "loss") is None or abs(number_at(record, "loss") or 0.0) <= 1e100


def test_pictures_of_records_of_any_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [None, "many", [], {}, True, 10**400, 1e308, -1, ["a"], [10**400, 1], [1e308, 1e308], [None, None], [[1]]]
    (tmp_path / "config.json").write_text('{"task": "copy", "settings": {}}')
    for value in wrong:
        lines = [{"iteration": index, **dict.fromkeys(FIELDS[1:], value)} for index in (1, 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert command.main([str(tmp_path)]) in (0, 2), value
        assert capsys.readouterr().err.count("\n") <= 1


def test_an_unknown_quantity_leaves_nothing_and_says_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        lay(tmp_path / name, "metrics", b'{"iteration": 1, "loss": 2.0}\n')
    assert command.main(["a", "b", "--quantity", "spectrum.xyz"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "spectrum.xyz" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_numbers_and_counts() -> None:
    assert [_files.number(x) for x in (3, 2.5, "3", None, True, [1], 10**400, 1e308, float("nan"), float("inf"))] == [
        3.0,
        2.5,
        *[None] * 8,
    ]
    assert [_files.count(x) for x in (0, 2**53, 2**53 + 1, -1, 1.0, "1", True, None)] == [0, 2**53, *[None] * 6]
