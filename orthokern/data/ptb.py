"""Characters of the Penn Treebank, sentence by sentence (Marcus et al. 1993, in the preprocessing of Mikolov 2010).

Two formats of the text are in use, and both are supported:

    ptb.train.txt, ...       one sentence per line, a space before and after every word   " no it was <unk> \\n"
    ptb.char.train.txt, ...  a space after every character, _ for the space               "n o _ i t ... < u n k > \\n "

A sentence is tokenised as its line in the first format, including the space before the first word and the line end:

    token     49 in all: <unk> (one token), the line end, the space, a to z, 0 to 9, N (any number), # $ & ' * - . / \\
    input     " "  n   o  " "  i   t  ...  " "        every token except the last
    target     n   o  " "  i   t  " " ...  \\n         the next token

The first character is predicted from the leading space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from orthokern.data._files import read_first, text_of
from orthokern.errors import InputError, integer

# Token id -> character, in the order of the code that Vorontsov et al. 2017 released.
ALPHABET: tuple[str, ...] = ("<unk>", *"\n#$&'*-./\\0123456789N abcdefghijklmnopqrstuvwxyz")

_UNKNOWN = "\0"  # stands for <unk> while a text is encoded
_IDS = bytes.maketrans("".join(ALPHABET[1:]).encode(), bytes(range(1, len(ALPHABET))))
_OUTSIDE = re.compile(f"[^{re.escape(''.join(ALPHABET[1:]))}]")


@dataclass(frozen=True)
class SentenceBatch:
    """A batch of sentences in the packed format of torch's PackedSequence, without padding: sorted by decreasing
    length; P tokens: the first of all sentences, then the second of those that have one, and so on.

    Attributes:
        inputs: [P] int64.
        targets: [P] int64, the token after each input.
        batch_sizes: [T] int64 on the CPU, number of sentences with a step t; not increasing.
        lengths: [B] int64 on the CPU, steps of each sentence; not increasing.
    """

    inputs: Tensor
    targets: Tensor
    batch_sizes: Tensor
    lengths: Tensor

    def packed(self) -> PackedSequence:
        """The inputs as a PackedSequence, without a copy."""
        return PackedSequence(self.inputs, self.batch_sizes)

    def to(self, device: torch.device | str) -> SentenceBatch:
        """The same batch with inputs and targets on a device."""
        return SentenceBatch(self.inputs.to(device), self.targets.to(device), self.batch_sizes, self.lengths)


@dataclass(frozen=True)
class Sentences:
    """Sentences of characters.

    Attributes:
        tokens: [total] uint8, all sentences concatenated, ids of orthokern.data.ptb.ALPHABET.
        offsets: [n + 1] int64; sentence i is tokens[offsets[i] : offsets[i + 1]].

    Example::

        >>> sentences = Sentences(torch.tensor([3, 4, 5, 6, 7], dtype=torch.uint8), torch.tensor([0, 2, 5]))
        >>> batch = sentences.batch(torch.tensor([0, 1]))
        >>> batch.lengths.tolist(), batch.inputs.tolist()
        ([2, 1], [5, 3, 6])
    """

    tokens: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """[n] int64: steps of each sentence, one less than its number of tokens."""
        return self.offsets.diff() - 1

    def text(self, index: int) -> str:
        """The text of a sentence, as in a word file."""
        return decode(self.tokens[self.offsets[index] : self.offsets[index + 1]])

    def batch(self, indices: Tensor) -> SentenceBatch:
        """A batch on the CPU of the sentences `indices`, [B] int64. Sentences of equal length keep their order."""
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        lengths, order = (ends - starts - 1).sort(descending=True, stable=True)
        steps = torch.arange(int(lengths[0]), device="cpu").unsqueeze(1)  # [T, 1]
        alive = steps < lengths  # [T, B]
        place = (starts[order] + steps)[alive]  # [P], of every input in tokens
        return SentenceBatch(
            inputs=self.tokens[place].to(torch.int64),
            targets=self.tokens[place + 1].to(torch.int64),
            batch_sizes=alive.sum(1),
            lengths=lengths,
        )

    def batches(self, batch: int, generator: torch.Generator, *, bucket: int = 16) -> SentenceBatches:
        """An infinite iterator over batches for training, see SentenceBatches.

        Args:
            batch: sentences per batch, B; the last batch of an epoch has the remaining ones.
            generator: a generator on the CPU that is used by this iterator only.
            bucket: number of batches whose sentences are drawn together and sorted by length before they are divided
                into batches. 1 gives random batches, as in Vorontsov et al. 2017; a larger number gives sentences of
                similar length.
        """
        return SentenceBatches(self, batch, generator, bucket)

    def ordered(self, batch: int) -> Iterator[SentenceBatch]:
        """All sentences once, sorted by decreasing length, in batches of at most `batch`, for evaluation."""
        batch = integer("batch", batch)
        order = self.lengths.argsort(descending=True, stable=True)
        return (self.batch(indices) for indices in order.split(batch))


class SentenceBatches:
    """An infinite iterator over batches. Every epoch has all sentences once, in a new random order, which is drawn at
    its start. Args: as in Sentences.batches.

    Attributes:
        epoch: number of the epoch of the last batch, from 0; -1 before the first.
        position: number of batches of that epoch so far.
        per_epoch: batches in an epoch.
    """

    def __init__(self, sentences: Sentences, batch: int, generator: torch.Generator, bucket: int) -> None:
        self.batch = batch = integer("batch", batch)
        self.bucket = integer("bucket", bucket)
        self.sentences = sentences
        self.generator = generator
        self.per_epoch = -(-len(sentences) // batch)
        self.epoch, self.position = -1, self.per_epoch
        self._lengths = sentences.lengths
        self._drawn_from = generator.get_state()  # state of the generator at the beginning of the epoch
        self._order: list[Tensor] = []  # indices [B] of the batches of the epoch

    def __iter__(self) -> SentenceBatches:
        return self

    def __next__(self) -> SentenceBatch:
        if self.position == self.per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self._draw()
        self.position += 1
        return self.sentences.batch(self._order[self.position - 1])

    def _draw(self) -> None:
        self._drawn_from = self.generator.get_state()
        shuffled = torch.randperm(len(self.sentences), generator=self.generator, device="cpu")
        alike: list[Tensor] = []
        for part in shuffled.split(min(self.bucket * self.batch, len(shuffled))):  # torch's sizes have 64 bits
            by_length = self._lengths[part].argsort(descending=True, stable=True)
            alike.extend(part[by_length].split(self.batch))
        turn = torch.randperm(self.per_epoch, generator=self.generator, device="cpu")
        self._order = [alike[i] for i in turn.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator at the start of the epoch, and the position, in types that a checkpoint may
        contain."""
        return {"generator": self._drawn_from.clone(), "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `state_dict` of an iterator over the same sentences."""
        self.generator.set_state(state["generator"])
        self.epoch, self.position = state["epoch"], state["position"]
        if self.epoch < 0:
            self._drawn_from, self._order = state["generator"].clone(), []
        else:
            self._draw()


@dataclass(frozen=True)
class Ptb:
    """The three parts of the corpus: sections 0-20, 21-22 and 23-24."""

    train: Sentences
    validation: Sentences
    test: Sentences


def load_ptb(folder: str | Path, *, max_length: int | None = 300) -> Ptb:
    """Reads and checks the train, valid and test files in either format.

    Args:
        folder: folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt, or ptb.char.train.txt, ...
        max_length: as in `read_sentences`.

    Example::

        ptb = load_ptb("data/ptb", max_length=75)
        batch = next(ptb.train.batches(50, torch.Generator().manual_seed(0)))
        batch.inputs.shape  # [P], all tokens of the batch
    """
    files = [read_first(folder, [f"ptb.{part}.txt", f"ptb.char.{part}.txt"]) for part in ("train", "valid", "test")]
    return Ptb(*(_sentences(*file, max_length) for file in files))


def read_sentences(path: str | Path, *, max_length: int | None = 300) -> Sentences:
    """Reads and checks one file. The format is detected from its content.

    Args:
        path: the file. Blank lines are skipped.
        max_length: leave out longer sentences; None: keep all. The length is that of the line in a word file, including
            the line end and the leading and trailing spaces, where <unk> counts as five characters. With this
            definition, 75 keeps 23 % of the training sentences and 300 keeps 99 %, as in Vorontsov et al. 2017.

    Returns:
        Sentences, on the CPU, in the order of the file.

    Example::

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "ptb.train.txt"
        >>> _ = file.write_text(" no it was <unk> \\n and so on \\n")
        >>> sentences = read_sentences(file)
        >>> len(sentences), sentences.text(1)
        (2, ' and so on \\n')
    """
    path = Path(path)
    return _sentences(*read_first(path.parent, [path.name]), max_length)


def decode(tokens: Tensor) -> str:
    """The text of token ids [n]."""
    return "".join(ALPHABET[i] for i in tokens.tolist())


def _sentences(path: Path, content: bytes, max_length: int | None) -> Sentences:
    """The lines of a file of at most max_length characters, as tokens."""
    lines = _lines(path, content)
    limit = math.inf if max_length is None else integer("max_length", max_length)
    short = [line for line in lines if len(line) <= limit]
    if not short:
        shortest = min(map(len, lines))
        raise InputError(
            f"{path} has no sentence of at most max_length = {max_length} characters; its shortest has {shortest}"
        )
    encoded = "".join(short).replace("<unk>", _UNKNOWN).encode().translate(_IDS)
    tokens = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    ends = (tokens == _IDS[ord("\n")]).nonzero().squeeze(1) + 1
    return Sentences(tokens, torch.nn.functional.pad(ends, (1, 0)))


def _lines(path: Path, content: bytes) -> list[str]:
    """The lines of a file in either format, as in a word file, without blank lines. All characters are in ALPHABET."""
    text = text_of(path, content)
    if "_" in text:  # no word file contains it
        if text[1::2].strip(" ") or " " in text[::2]:
            raise InputError(f"{path} has _ for the space between words; expected: a space after every character too")
        text = text[::2].replace("_", " ")
    foreign = _OUTSIDE.search(text.replace("<unk>", ""))  # as many lines as the text
    if foreign:
        line = foreign.string.count("\n", 0, foreign.start()) + 1
        raise InputError(
            f"{path} line {line}: character {foreign[0]!r} is outside the alphabet; expected: a to z, 0 to 9, N, the "
            "space, #$&'*-./\\ and <unk>"
        )
    return [f" {stripped} \n" for line in text.split("\n") if (stripped := line.strip(" "))]
