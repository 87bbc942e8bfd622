"""Words of the Penn Treebank: vocabulary, streams, and bad files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import refused

from orthokern.data import load_words

TRAIN = b" the cat <unk> the dog \n a cat \n\n"
VALID = b" the bird sat \n"
TEST = b"dog the\n"


def folder(path: Path, train: bytes = TRAIN, valid: bytes = VALID, test: bytes = TEST) -> Path:
    for part, content in (("train", train), ("valid", valid), ("test", test)):
        (path / f"ptb.{part}.txt").write_bytes(content)
    return path


def test_ids(tmp_path: Path) -> None:
    words = load_words(folder(tmp_path))
    assert words.vocabulary == ("<eos>", "cat", "the", "<unk>", "a", "dog")
    assert words.train.dtype == torch.int64
    assert words.text(words.train) == "the cat <unk> the dog <eos> a cat <eos>"
    assert words.text(words.validation) == "the <unk> <unk> <eos>"  # unknown to the training text
    assert words.test.tolist() == [5, 2, 0]


@pytest.mark.parametrize("mark", ["\u2028", "\u0085", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, mark: str) -> None:
    """And only spaces and tabs separate words; a carriage return before the newline belongs to it."""
    train = f" the{mark}cat <unk>\r\n a\tdog\n{mark}\n".encode()
    words = load_words(folder(tmp_path, train=train))
    assert words.text(words.train) == f"the{mark}cat <unk> <eos> a dog <eos>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": b""}, "ptb.train.txt is empty: 0 bytes"),
        ({"valid": "\u00a0\n\u2003\n".encode()}, "ptb.valid.txt is empty"),
        ({"test": b" the dog"}, "ptb.test.txt is incomplete: its last line has no line end"),
        ({"test": b" the\n d\xffg \n"}, "ptb.test.txt line 2: byte 0xff is not UTF-8"),
        ({"valid": b" the\n the <eos> dog\n"}, "ptb.valid.txt line 2: the word '<eos>'"),
        ({"train": b" the cat dog a \n"}, "'bird', which the training file lacks"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    path = folder(tmp_path, **changes)
    refused(lambda: load_words(path), message)
