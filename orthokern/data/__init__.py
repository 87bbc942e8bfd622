"""Synthetic sequence tasks and readers of standard file formats.

Generators take a `torch.Generator` and return plain tensors, time first ([T, B]), so that the same seed gives the same
data on every device. Readers check what they read: a file that is missing, damaged or of another kind is one line.
"""

from orthokern.data.adding import AddingTask
from orthokern.data.copy import CopyTask
from orthokern.data.mnist import Labelled, Mnist, load_mnist, pixel_permutation, pixel_statistics
from orthokern.data.music import Music, Rolls, RollWindow, RollWindows, load_music
from orthokern.data.ptb import Ptb, SentenceBatch, SentenceBatches, Sentences, load_ptb, read_sentences
from orthokern.data.ptb_stream import PtbStream, load_ptb_stream, stream_rows
from orthokern.data.random_permutation import RandomPermutationTask
from orthokern.data.temporal_order import TemporalOrderTask
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
