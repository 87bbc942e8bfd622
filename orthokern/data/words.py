"""Words of the Penn Treebank, one text without breaks (Marcus et al. 1993, in the preprocessing of Mikolov 2010).

    ptb.train.txt, ptb.valid.txt, ptb.test.txt      one sentence a line: " no it was <unk> \\n"

A line becomes its words and <eos>. The vocabulary is what the training file holds, 10 000 words with <eos> in the
standard files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orthokern.data._checks import integer
from orthokern.data._files import data_folder, read_first
from orthokern.data.ptb import check_part
from orthokern.errors import InputError

__all__ = ["Words", "load_words"]

END, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Words:
    """The corpus: sections 0-20, 21-22 and 23-24.

    Attributes:
        vocabulary: id -> word, the most frequent word of the training text first, equally frequent ones by alphabet.
        train, validation, test: [n] int64 each, ids.
    """

    vocabulary: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor

    def text(self, ids: Tensor) -> str:
        """The words of ids [n], joined by spaces."""
        return " ".join(self.vocabulary[i] for i in ids.tolist())


def load_words(folder: str | Path, *, limit: int = 10_000) -> Words:
    """Reads and checks the three files.

    Args:
        folder: where they are.
        limit: words that the vocabulary may have, <eos> included; at least 2.

    Returns:
        Words, on the CPU. Words of the validation and test files that the training file lacks are <unk>.

    Raises:
        InputError: a file that is missing, not readable, empty, cut off, no text, a damaged copy of one of the standard
            files or in the place of another; more distinct words in the training file than `limit`; a word unknown to a
            training file that has no <unk>.
    """
    integer("limit", limit, minimum=2)
    path = data_folder(folder)
    texts = {part: _words(*read_first(path, [f"ptb.{part}.txt"]), part) for part in ("train", "valid", "test")}
    counts = Counter(texts["train"])
    if len(counts) > limit:
        raise InputError(
            f"{path / 'ptb.train.txt'} has {len(counts)} distinct words, {END} included; accepted: at most {limit}"
        )
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    ids = {word: index for index, word in enumerate(vocabulary)}
    encoded = []
    for part, words in texts.items():
        if UNKNOWN not in ids:
            foreign = next((word for word in words if word not in ids), None)
            if foreign is not None:
                raise InputError(
                    f"{path / f'ptb.{part}.txt'} has the word {foreign!r}, which the training file lacks; "
                    f"expected: a training file with {UNKNOWN} for such words"
                )
        encoded.append(torch.tensor([ids.get(word, ids.get(UNKNOWN, 0)) for word in words]))
    return Words(vocabulary, *encoded)


def _words(path: Path, content: bytes, part: str) -> list[str]:
    content = content.removeprefix(b"\xef\xbb\xbf")  # a mark that some editors put in front of UTF-8
    if not content.strip():
        raise InputError(f"{path} is empty: {len(content)} bytes; expected: one sentence a line")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} line {line}: byte {content[error.start]:#04x} is no text in UTF-8; expected: words"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{path} line {line}: a zero byte, which is no text; expected: words")
    if not text.endswith("\n"):
        raise InputError(f"{path} does not end with a line end: is it cut off? expected: one sentence a line")
    sentences = [sentence for line in text.splitlines() if (sentence := line.split())]
    check_part(path, part, "".join(f" {' '.join(sentence)} \n" for sentence in sentences).encode())
    words: list[str] = []
    for sentence in sentences:
        words += sentence
        words.append(END)
    return words
