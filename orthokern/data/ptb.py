"""Characters of the Penn Treebank, sentence by sentence (Marcus et al. 1993, in the preprocessing of Mikolov 2010).

Two forms of the text are in use, and both are read, whichever is there:

    ptb.train.txt, ...        one sentence a line, a space before and after every word    " no it was <unk> \\n"
    ptb.char.train.txt, ...   a space after every character, _ for the space              "n o _ i t ... < u n k > \\n "

A sentence becomes the line of the first form as tokens, the space before its first word and the line end included:

    token     49 in all: <unk> (one token), the line end, the space, a to z, 0 to 9, N (any number), # $ & ' * - . / \\
    input     " "  n   o  " "  i   t  ...  " "        every token but the last
    target     n   o  " "  i   t  " " ...  \\n         the token after it

The space in front is what the first character is predicted from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from orthokern._files import read_file
from orthokern._state import check_integer
from orthokern.data._checks import integer
from orthokern.data._files import Standard, check_standard, data_folder, read_first
from orthokern.errors import InputError

__all__ = ["ALPHABET", "Ptb", "SentenceBatch", "SentenceBatches", "Sentences", "decode", "load_ptb", "read_sentences"]

# The text of the three standard files, as it stands in the word files.
_FILES = {
    "train": Standard(5_101_618, (0x5D8449F8, 0xFDA42216, 0x707DDA68, 0x30F01F9E)),
    "valid": Standard(399_782, (0x03426952, 0x9F497897, 0x44A8C2F1, 0xF20E51BE)),
    "test": Standard(449_945, (0x808CB103, 0xC92CEB5F, 0xF1A65F91, 0x9C9915F3)),
}

# Token id -> character, in the order of the code that Vorontsov et al. 2017 released.
ALPHABET: tuple[str, ...] = ("<unk>", *"\n#$&'*-./\\0123456789N abcdefghijklmnopqrstuvwxyz")

_OUTSIDE = 255
_IDS = bytearray([_OUTSIDE]) * 256
_IDS[0] = 0  # stands for <unk> while a text is encoded
for _id, _character in enumerate(ALPHABET[1:], start=1):
    _IDS[ord(_character)] = _id
# The same for a check that keeps every character in its place: \1 stands for the five of <unk>.
_IN_PLACE = bytearray(_IDS)
_IN_PLACE[0], _IN_PLACE[1] = _OUTSIDE, 0


@dataclass(frozen=True)
class SentenceBatch:
    """Sentences as a recurrence takes them, in the packed form of torch's PackedSequence: no padding anywhere.

    Step t of the sentences that have one, longest sentence first, follows step t - 1 of all that have that; P tokens.

    Attributes:
        inputs: [P] int64.
        targets: [P] int64, the token after each input.
        batch_sizes: [T] int64 on the CPU, how many sentences have a step t; falling.
        lengths: [B] int64 on the CPU, steps of each sentence; falling.
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
        tokens: [total] uint8, all sentences one after the other, ids of ALPHABET.
        offsets: [n + 1] int64; sentence i is tokens[offsets[i] : offsets[i + 1]].
    """

    tokens: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """[n] int64: steps of each sentence, one fewer than its tokens."""
        return self.offsets.diff() - 1

    @property
    def targets(self) -> int:
        """Number of targets in all sentences."""
        return int(self.lengths.sum())

    def text(self, index: int) -> str:
        """One sentence, as it stands in a word file."""
        return decode(self.tokens[self.offsets[index] : self.offsets[index + 1]])

    def batch(self, indices: Tensor) -> SentenceBatch:
        """Some sentences as one batch.

        Args:
            indices: [B] int64, in any order; sentences of equal length keep theirs.

        Returns:
            The batch, on the CPU.
        """
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        lengths, order = (ends - starts - 1).sort(descending=True, stable=True)
        steps = torch.arange(int(lengths[0])).unsqueeze(1)  # [T, 1]
        alive = steps < lengths  # [T, B]
        place = (starts[order] + steps)[alive]  # [P], of every input in tokens
        return SentenceBatch(
            inputs=self.tokens[place].to(torch.int64),
            targets=self.tokens[place + 1].to(torch.int64),
            batch_sizes=alive.sum(1),
            lengths=lengths,
        )

    def batches(
        self, batch: int, generator: torch.Generator, *, bucket: int = 16, part: tuple[int, int] = (0, 1)
    ) -> SentenceBatches:
        """An endless stream of batches for training, see SentenceBatches.

        Args:
            batch: sentences per batch, B, at least 1; the last batch of an epoch takes what is left.
            generator: on the CPU, for this stream alone.
            bucket: how many batches' worth of sentences are drawn together and sorted by length before they are cut
                into batches. 1 gives batches of sentences drawn at random, as Vorontsov et al. 2017 have them; more
                gives batches of sentences of like length. Of the steps of a batch of 50 sentences of up to 300
                characters times its longest sentence, 1 leaves 54 % empty and 16 leaves 8 %.
            part: (rank, world): of every batch only the sentences rank, rank + world, ..., for one of `world` processes
                that share the batches.

        Raises:
            InputError: batch or bucket below 1; an epoch's last batch has fewer sentences than there are processes.
        """
        return SentenceBatches(self, batch, generator, bucket, part)

    def ordered(self, batch: int) -> Iterator[SentenceBatch]:
        """Every sentence once, the longest first, for evaluation: the batches hold the least padding there can be.

        Args:
            batch: sentences per batch, B, at least 1; the last one takes what is left.

        Raises:
            InputError: batch below 1.
        """
        integer("batch", batch)
        order = self.lengths.argsort(descending=True, stable=True)
        return (self.batch(indices) for indices in order.split(batch))


class SentenceBatches:
    """An endless stream of batches: epoch after epoch, each with every sentence once, in an order of its own.

    Everything random about an epoch is drawn when it begins. So the generator's state at that moment and the position
    in the epoch are the whole state: a stream that loads them goes on with the very same batches.

    Args: as in Sentences.batches.

    Attributes:
        epoch: number of the epoch of the batch that was given last, from 0; -1 before the first.
        position: how many batches of that epoch have been given.
        per_epoch: batches in an epoch.
        joint_targets: number of targets of the batch that was given last, all processes' parts together.
    """

    def __init__(
        self,
        sentences: Sentences,
        batch: int,
        generator: torch.Generator,
        bucket: int = 16,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.batch = integer("batch", batch)
        self.bucket = integer("bucket", bucket)
        rank, world = part
        last = len(sentences) % batch or batch
        if last < world:
            raise InputError(
                f"the last batch of an epoch has {last} of {len(sentences)} sentences, fewer than {world} processes; "
                f"choose another batch than {batch}"
            )
        self.part = slice(rank, None, world)
        self.sentences = sentences
        self.generator = generator
        self.per_epoch = -(-len(sentences) // batch)
        self.epoch, self.position = -1, self.per_epoch
        self.joint_targets = 0
        self._lengths = sentences.lengths
        self._drawn_from = generator.get_state()  # state of the generator at the beginning of the epoch
        self._order: list[Tensor] = []  # indices [B] of the epoch's batches

    def __iter__(self) -> SentenceBatches:
        return self

    def __next__(self) -> SentenceBatch:
        if self.position == self.per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self._draw()
        indices = self._order[self.position]
        self.position += 1
        self.joint_targets = int(self._lengths[indices].sum())
        return self.sentences.batch(indices[self.part])

    def _draw(self) -> None:
        self._drawn_from = self.generator.get_state()
        shuffled = torch.randperm(len(self.sentences), generator=self.generator)
        alike: list[Tensor] = []
        for part in shuffled.split(self.bucket * self.batch):
            by_length = self._lengths[part].argsort(descending=True, stable=True)
            alike.extend(part[by_length].split(self.batch))
        turn = torch.randperm(self.per_epoch, generator=self.generator)
        self._order = [alike[i] for i in turn.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The state, of types that a checkpoint may hold: the generator's as a uint8 tensor, and integers."""
        return {
            "generator": self._drawn_from.clone(),
            "epoch": self.epoch,
            "position": self.position,
            "sentences": len(self.sentences),
            "batch": self.batch,
            "bucket": self.bucket,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a stream over the same sentences was when `state_dict` was called.

        Raises:
            InputError: the state is one of another number of sentences, another batch or another bucket.
        """
        for name, ours in (("sentences", len(self.sentences)), ("batch", self.batch), ("bucket", self.bucket)):
            if state[name] != ours:
                raise InputError(f"the saved order of the data has {name} {state[name]}; expected: {ours}")
        check_integer("epoch", state["epoch"], -1)
        check_integer("position", state["position"], self.per_epoch if state["epoch"] < 0 else 0, self.per_epoch)
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


def load_ptb(folder: str | Path, *, max_length: int | None = 300, released_targets: bool = False) -> Ptb:
    """Reads and checks the train, valid and test files of either form.

    Args:
        folder: where ptb.train.txt, ptb.valid.txt and ptb.test.txt, or ptb.char.train.txt, ... are.
        max_length, released_targets: as in `read_sentences`.

    Returns:
        Ptb, on the CPU.

    Raises:
        InputError: a file that is missing, or what `read_sentences` refuses; a damaged copy of one of the standard
            files, or one in the place of another.
    """
    path = data_folder(folder)
    train, validation, test = (
        _sentences(*read_first(path, [f"ptb.{part}.txt", f"ptb.char.{part}.txt"]), max_length, released_targets, part)
        for part in ("train", "valid", "test")
    )
    return Ptb(train, validation, test)


def read_sentences(path: str | Path, *, max_length: int | None = 300, released_targets: bool = False) -> Sentences:
    """Reads and checks one file of either form; which one it is, its content tells.

    Args:
        path: the file. Blank lines are skipped.
        max_length: leave longer sentences out; None: keep all. The length is that of the line in a word file with its
            line end, the spaces at its ends, and <unk> as the five characters it is written with. So counted, 75 keeps
            23 % of the training sentences and 300 keeps 99 %, as in Vorontsov et al. 2017.
        released_targets: count as the code did that Vorontsov et al. released, whose masks reach one step too far, over
            the zeros behind a sentence: <unk> is then to be predicted from the line end, and again from that <unk>.
            These two targets a sentence (one where the sentence has max_length tokens) are always the same, and lower
            the mean loss by about their share of all targets: compare such a number only with such numbers.

    Returns:
        Sentences, on the CPU, in the order of the file.

    Raises:
        InputError: a file that is missing, not readable, empty, cut off or no text; a character outside the alphabet
            (with its line); no sentence of at most max_length characters; max_length below 1.
    """
    path = Path(path)
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise InputError(f"missing data file {path.name}; looked for in {path.parent.absolute()}") from None
    return _sentences(path, content, max_length, released_targets)


def decode(tokens: Tensor) -> str:
    """The text of token ids [n]."""
    return "".join(ALPHABET[i] for i in tokens.tolist())


def check_part(path: Path, part: str, text: bytes) -> None:
    """Refuses a damaged copy of a standard file, and one in the place of another.

    Args:
        path: of the file, for the error; part: "train", "valid" or "test".
        text: in the form of the word files.
    """
    check_standard(path, part, text, _FILES, "the Penn Treebank's")


def _sentences(
    path: Path, content: bytes, max_length: int | None, released_targets: bool, part: str | None = None
) -> Sentences:
    """As `read_sentences`, of the file's content; `part`: which of the three it should be."""
    if max_length is not None:
        integer("max_length", max_length)
    text = _checked_text(path, content)
    lines = [b" %b \n" % stripped for line in text.split(b"\n") if (stripped := line.strip(b" "))]
    if not lines:
        raise InputError(f"{path} holds blank lines only; expected: one sentence a line")
    if part is not None:
        check_part(path, part, b"".join(lines))
    kept = lines if max_length is None else [line for line in lines if len(line) <= max_length]
    if not kept:
        shortest = min(map(len, lines))
        raise InputError(
            f"{path} has no sentence of at most max_length = {max_length} characters; its shortest has {shortest}"
        )
    encoded = b"".join(kept).replace(b"<unk>", b"\0").translate(_IDS)
    tokens = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    ends = (tokens == _IDS[ord("\n")]).nonzero().squeeze(1) + 1
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    if released_targets:
        # the zeros are <unk>; the released code's rows have max_length places, which cut the last one off
        places = lengths + 2 if max_length is None else (lengths + 2).clamp(max=max_length + 1)
        starts = places.cumsum(0) - places
        padded = torch.zeros(int(places.sum()), dtype=torch.uint8)
        shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
        padded[torch.arange(len(tokens)) + shift] = tokens
        tokens, lengths = padded, places
    return Sentences(tokens, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


def _checked_text(path: Path, content: bytes) -> bytes:
    """The text in the form of a word file, all of its characters in the alphabet."""
    if content.startswith(b"\xef\xbb\xbf"):
        content = content[3:]  # a mark that some editors put in front of UTF-8
    if not content.strip():
        raise InputError(f"{path} is empty: {len(content)} bytes; expected: one sentence a line")
    try:
        decoded = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} line {line}: byte {content[error.start]:#04x} is no text in UTF-8; expected: the characters of "
            "the Penn Treebank in ASCII"
        ) from None
    if not content.isascii():  # before the two forms are told apart: such a character takes several bytes
        foreign = next(i for i, character in enumerate(decoded) if not character.isascii())
        raise _outside(path, decoded.count("\n", 0, foreign) + 1, decoded[foreign])
    text = _despaced(path, content) if _is_char_file(content) else content
    if b"\1" in text:
        raise _outside(path, text.count(b"\n", 0, text.index(b"\1")) + 1, "\1")
    position = text.replace(b"<unk>", b"\1" * 5).translate(_IN_PLACE).find(_OUTSIDE)
    if position >= 0:
        raise _outside(path, text.count(b"\n", 0, position) + 1, chr(text[position]))
    if not text.endswith(b"\n"):
        raise InputError(f"{path} does not end with a line end: is it cut off? expected: one sentence a line")
    return text


def _outside(path: Path, line: int, character: str) -> InputError:
    return InputError(
        f"{path} line {line}: character {character!r} is outside the alphabet; expected: a to z, 0 to 9, N, the space, "
        "#$&'*-./\\ and <unk>"
    )


def _is_char_file(content: bytes) -> bool:
    """Whether the text begins with a character, and characters and spaces alternate, but for a few places: these are
    damage, which `_despaced` reports."""
    start = content[:4096]
    alternating = sum((a == 32) != (b == 32) for a, b in zip(start, start[1:], strict=False))
    return start[0] != 32 and alternating > 0.9 * (len(start) - 1)


def _despaced(path: Path, content: bytes) -> bytes:
    """A character file in the form of a word file."""
    text, spaces = content[0::2], content[1::2]
    wrong = [len(spaces) - len(spaces.lstrip(b" ")), text.find(b" ")]
    found = [position for position, end in zip(wrong, (len(spaces), -1), strict=True) if position != end]
    if found:
        line = text.count(b"\n", 0, min(found)) + 1
        raise InputError(
            f"{path} line {line}: characters and spaces do not alternate; expected: a space after every character, "
            "and _ for the space between words"
        )
    return text.replace(b"_", b" ")
