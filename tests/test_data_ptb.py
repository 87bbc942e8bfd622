"""Characters of the Penn Treebank: tokens, lengths, batches, and bad files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers import refused
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from orthokern.data import load_ptb, read_sentences
from orthokern.data.ptb import ALPHABET, decode

LINES = ["no it was n't black monday", "<unk> N/N", "a", "$ 1\\2 & #4 <unk>. *", "xy-z quiz"]


def word_file(lines: list[str]) -> bytes:
    return "".join(f" {line} \n" for line in lines).encode()


def char_file(lines: list[str]) -> bytes:
    return "".join(f"{c} " for line in lines for c in line.replace(" ", "_") + "\n").encode()


def written(folder: Path, content: bytes, name: str = "ptb.train.txt") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def random_lines(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(["ab", "<unk>", "xyz", "N"], k=rng.randint(1, 20))) for _ in range(count)]


def test_tokens(tmp_path: Path) -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 49 and ALPHABET[:2] == ("<unk>", "\n") and ALPHABET[22] == " "
    sentences = read_sentences(written(tmp_path, word_file(LINES)))
    assert sentences.tokens.dtype == torch.uint8 and sentences.offsets.dtype == torch.int64
    assert [sentences.text(i) for i in range(len(sentences))] == [f" {line} \n" for line in LINES]
    start, end = sentences.offsets[1:3].tolist()
    assert sentences.tokens[start:end].tolist() == [22, 0, 22, 21, 9, 21, 22, 1]  # " <unk> N/N \n"
    assert sentences.lengths[1] == 7


@pytest.mark.parametrize("max_length", [None, 12, 75])
def test_both_forms_give_the_same_tokens(tmp_path: Path, max_length: int | None) -> None:
    lines = LINES + random_lines(50)
    words = read_sentences(written(tmp_path, word_file(lines)), max_length=max_length)
    variants = [
        char_file(lines),
        char_file(lines)[:-1],  # editors take a space off the end
        b"\xef\xbb\xbf" + word_file(lines),
        word_file(lines).replace(b"\n", b"\r\n"),
        char_file(lines).replace(b"\n", b"\r\n"),
        "\n\n".join(lines).encode() + b"\n",  # blank lines, and no spaces at the ends
    ]
    for content in variants:
        other = read_sentences(written(tmp_path, content), max_length=max_length)
        assert torch.equal(words.tokens, other.tokens) and torch.equal(words.offsets, other.offsets)


def test_max_length_counts_the_line_as_written(tmp_path: Path) -> None:
    path = written(tmp_path, word_file(["ab <unk>", "abcdefghi"]))  # 11 and 12 characters, 7 and 12 tokens
    assert [len(read_sentences(path, max_length=n)) for n in (11, 12)] == [1, 2]
    told = "no sentence of at most max_length = 10 characters; its shortest has 11"
    refused(lambda: read_sentences(path, max_length=10), told)


def test_a_batch_is_what_torch_packs(tmp_path: Path) -> None:
    sentences = read_sentences(written(tmp_path, word_file(random_lines(40))))
    indices = torch.tensor([7, 3, 39, 0, 11])
    batch = sentences.batch(indices)
    o = sentences.offsets
    rows = sorted((sentences.tokens[o[i] : o[i + 1]].long() for i in indices.tolist()), key=len, reverse=True)
    for ours, expected in ((batch.inputs, [s[:-1] for s in rows]), (batch.targets, [s[1:] for s in rows])):
        packed = pack_sequence(expected)
        assert ours.dtype == torch.int64 and torch.equal(ours, packed.data)
        assert torch.equal(batch.batch_sizes, packed.batch_sizes)
    padded, lengths = pad_packed_sequence(batch.packed())
    assert torch.equal(lengths, batch.lengths) and padded.shape == (int(lengths[0]), 5)


@pytest.mark.parametrize(("batch", "bucket"), [(7, 4), (50, 16), (50, 2**60)])
def test_an_epoch_has_every_sentence_once(tmp_path: Path, batch: int, bucket: int) -> None:
    sentences = read_sentences(written(tmp_path, word_file(random_lines(200))))
    texts = sorted(sentences.text(i) for i in range(200))
    stream = sentences.batches(batch, torch.Generator().manual_seed(0), bucket=bucket)
    orders = []
    for epoch in range(2):
        seen = []
        for _ in range(stream.per_epoch):
            chunk = next(stream)
            assert stream.epoch == epoch
            assert (chunk.lengths.diff() <= 0).all()
            padded, lengths = pad_packed_sequence(chunk.packed())
            ends, _ = pad_packed_sequence(type(chunk.packed())(chunk.targets, chunk.batch_sizes))
            seen += [decode(padded[:n, b]) + decode(ends[n - 1 : n, b]) for b, n in enumerate(lengths.tolist())]
        assert sorted(seen) == texts
        orders.append(seen)
    if batch < 200:
        assert orders[0] != orders[1]
    in_order = torch.cat([chunk.lengths for chunk in sentences.ordered(batch)])
    assert torch.equal(in_order, sentences.lengths.sort(descending=True).values)


GOOD = LINES[:2]
REFUSED = {
    "empty": (b"", "is empty: 0 bytes; expected: one sentence per line"),
    "capital": (word_file([*GOOD, "a Big one"]), "line 3: character 'B' is outside the alphabet; expected: a to z"),
    "accent in a char file": (
        char_file([*GOOD[:1], "caf\u00e9"]),
        "line 2: character '\u00e9' is outside the alphabet",
    ),
    "Latin-1": (word_file(GOOD) + b" caf\xe9 \n", "line 3: byte 0xe9 is not UTF-8; expected: text"),
    "cut off": (word_file(GOOD)[:-4], "is incomplete: its last line has no line end"),
    "damaged char file": (
        char_file(LINES)[:60] + b"q" + char_file(LINES)[60:],
        "has _ for the space between words; expected: a space after every character",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(tmp_path: Path, what: str) -> None:
    content, expected = REFUSED[what]
    path = written(tmp_path, content)
    assert refused(lambda: read_sentences(path), expected).startswith(str(path))


def test_missing_files(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        written(tmp_path, word_file(LINES), f"ptb.{part}.txt")
    refused(lambda: load_ptb(tmp_path), "missing data file ptb.test.txt (nor ptb.char.test.txt); looked for in /")


def test_load(tmp_path: Path) -> None:
    for part, count in (("train", 30), ("valid", 20), ("test", 10)):
        make, name = (char_file, f"ptb.char.{part}.txt") if part == "valid" else (word_file, f"ptb.{part}.txt")
        written(tmp_path, make(random_lines(count)), name)
    data = load_ptb(tmp_path)
    assert [len(s) for s in (data.train, data.validation, data.test)] == [30, 20, 10]
    for call, argument in (
        (lambda: load_ptb(tmp_path, max_length=0), "max_length"),
        (lambda: data.train.batches(0, torch.Generator()), "batch"),
        (lambda: data.train.batches(5, torch.Generator(), bucket=0), "bucket"),
    ):
        refused(call, f"{argument} must be an integer of at least 1, got 0")
