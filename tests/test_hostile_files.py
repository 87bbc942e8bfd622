"""Malicious or damaged files, for every format that the project reads: files that are not regular, that decompress to
too much, or that are damaged cause an error of one line, quickly and with little memory."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


Reader = Callable[[Path], Any]
# kind -> (the file that is attacked, its good content, all files beside it, what reads them)
KINDS: dict[str, tuple[str, bytes, dict[str, bytes], Reader]] = {
    "resumed": ("config.json", b'{"task": "copy", "settings": {}}', {}, lambda folder: RunFolder.open(folder, "copy")),
}
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
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"checkpoint"}))
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
    assert ("must have at most" if what == "too large" else "must be a regular file") in line


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
