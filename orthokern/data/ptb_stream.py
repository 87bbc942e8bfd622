"""The Penn Treebank as one stream of characters, for language models whose state is carried between batches.

    word file     " no it was <unk> \\n and \\n"
    stream        "no it was <unk>\\nand\\n"

There are no spaces around a line end, and <unk> is encoded as five characters. There are 50 different characters, those
of the character files ("pennchar") in Merity et al. 2018 and Kerg, Goyette et al. 2019. The number of characters
differs from `orthokern.data.load_ptb`, so the bits per character of the two readers cannot be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orthokern.data.ptb import ALPHABET, Sentences, decode, load_ptb
from orthokern.errors import InputError, integer

# Token id -> character.
STREAM_ALPHABET: tuple[str, ...] = (*ALPHABET[1:], "<", ">")

_IDS = bytes.maketrans("".join(STREAM_ALPHABET).encode(), bytes(range(len(STREAM_ALPHABET))))


@dataclass(frozen=True)
class PtbStream:
    """The three parts of the corpus, [n] uint8 each on the CPU: ids of orthokern.data.ptb_stream.STREAM_ALPHABET."""

    train: Tensor
    validation: Tensor
    test: Tensor


def load_ptb_stream(folder: str | Path) -> PtbStream:
    """Reads and checks the train, valid and test files in either format, as `load_ptb` does.

    Example::

        text = load_ptb_stream("data/ptb")
        rows = stream_rows(text.train, 128)  # [characters per row, 128]
    """
    data = load_ptb(folder, max_length=None)
    return PtbStream(_stream(data.train), _stream(data.validation), _stream(data.test))


def _stream(sentences: Sentences) -> Tensor:
    lines = decode(sentences.tokens).split("\n")
    text = "\n".join(line.strip(" ") for line in lines).encode("ascii")
    return torch.frombuffer(bytearray(text.translate(_IDS)), dtype=torch.uint8)


def stream_rows(tokens: Tensor, rows: int) -> Tensor:
    """Cuts a stream [n] into B rows of equal length, which are read in parallel. The remainder at the end is dropped.
    Column b of the result [n // B, B] is tokens[b (n // B) : (b + 1) (n // B)].

    Example::

        >>> stream_rows(torch.arange(7), 2)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
    """
    rows = integer("rows", rows)
    length = len(tokens) // rows
    if length < 2:
        raise InputError(f"rows, the batch, must be at most {len(tokens) // 2} for {len(tokens)} tokens, got {rows}")
    return tokens[: length * rows].view(rows, length).T.contiguous()
