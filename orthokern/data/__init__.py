"""Generators of synthetic sequence tasks, and readers of standard data sets.

Generators take a `torch.Generator` on the CPU, so that a seed gives the same data on every device, and return inputs
with time first ([T, B] or [T, B, D]). Readers check their files: a missing, damaged or wrong file causes a one-line
error.
"""

from orthokern.data.adding import AddingTask
from orthokern.data.copy import CopyTask
from orthokern.data.last_answer import RandomPermutationTask, TemporalOrderTask
from orthokern.data.mnist import Labelled, Mnist, load_mnist, pixel_permutation, pixel_statistics
from orthokern.data.music import Music, Rolls, RollWindow, RollWindows, load_music
from orthokern.data.ptb import Ptb, SentenceBatch, SentenceBatches, Sentences, load_ptb, read_sentences
from orthokern.data.ptb_stream import PtbStream, load_ptb_stream, stream_rows
from orthokern.data.words import Words, load_words

__all__ = [
    "AddingTask",
    "CopyTask",
    "Labelled",
    "Mnist",
    "Music",
    "Ptb",
    "PtbStream",
    "RandomPermutationTask",
    "RollWindow",
    "RollWindows",
    "Rolls",
    "SentenceBatch",
    "SentenceBatches",
    "Sentences",
    "TemporalOrderTask",
    "Words",
    "load_mnist",
    "load_music",
    "load_ptb",
    "load_ptb_stream",
    "load_words",
    "pixel_permutation",
    "pixel_statistics",
    "read_sentences",
    "stream_rows",
]
