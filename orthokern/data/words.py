"""Words of the Penn Treebank as one continuous text (Marcus et al. 1993, in the preprocessing of Mikolov 2010).

    ptb.train.txt, ptb.valid.txt, ptb.test.txt      one sentence per line: " no it was <unk> \\n"

Only spaces and tabs separate words; other white space is part of a word, except in a line of only white space, which is
blank. A line is converted to its words and <eos>. The vocabulary consists of the words of the training file: 10 000
words, including <eos>, in the standard files.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orthokern.data._files import read_first, text_of
from orthokern.errors import InputError

END, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Words:
    """The corpus: sections 0-20, 21-22 and 23-24.

    Attributes:
        vocabulary: id -> word, sorted by decreasing frequency in the training text, then alphabetically.
        train, validation, test: [n] int64 each, ids.
    """

    vocabulary: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor

    def text(self, ids: Tensor) -> str:
        """The words of ids [n], joined by spaces."""
        return " ".join(self.vocabulary[i] for i in ids.tolist())


def load_words(folder: str | Path) -> Words:
    """Reads and checks ptb.train.txt, ptb.valid.txt and ptb.test.txt in a folder. The result is on the CPU. Words of
    the validation and test files that are not in the training file become <unk>, which the training file must then
    contain.

    Example::

        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for part in ("train", "valid", "test"):
        ...     _ = (folder / f"ptb.{part}.txt").write_text(" a rose is a rose \\n is <unk> \\n")
        >>> words = load_words(folder)
        >>> words.text(words.train)
        'a rose is a rose <eos> is <unk> <eos>'
    """
    texts = {part: _words(*read_first(folder, [f"ptb.{part}.txt"])) for part in ("train", "valid", "test")}
    counts = Counter(texts["train"])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    ids = {word: index for index, word in enumerate(vocabulary)}
    for part, words in texts.items():
        foreign = next((word for word in words if word not in ids), None)
        if foreign is not None and UNKNOWN not in ids:
            raise InputError(
                f"{Path(folder) / f'ptb.{part}.txt'} has the word {foreign!r}, which the training file lacks; "
                f"expected: a training file with {UNKNOWN} for such words"
            )
    unknown = ids.get(UNKNOWN, 0)
    return Words(vocabulary, *(torch.tensor([ids.get(word, unknown) for word in words]) for words in texts.values()))


def _words(path: Path, content: bytes) -> list[str]:
    text = text_of(path, content)
    # splitlines and split recognise more line ends and more spaces, such as U+2028 and \x1c
    rows = [re.findall(r"[^ \t\r]+", row) if row.strip() else [] for row in text.split("\n")]
    for number, row in enumerate(rows, 1):
        foreign = next((word for word in row if word == END or "\0" in word), None)
        if foreign is not None:
            raise InputError(f"{path} line {number}: the word {foreign!r}; expected: text without {END} and zero bytes")
    return [word for row in rows if row for word in (*row, END)]
