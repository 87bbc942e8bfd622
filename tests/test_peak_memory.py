"""Calls of many lengths need the memory of the longest, and work that is done in parts that of a few parts.

The allocator of the C library can make the latter that of all parts: where a small result is kept after each part, the
next part no longer fits into the memory of the last one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
import sys

import torch

from orthokern._products import norms_of_steps
from orthokern.ops.modal.loss import _hits

torch.set_num_threads(2)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "hits":  # logits of 400 MB
    rows, readout, target = torch.randn(100_000, 16), torch.randn(1000, 16), torch.randint(0, 1000, (100_000,))
    work = lambda n: _hits(rows[:n], readout, None, target[:n])
else:  # 400 MB in float64
    values = torch.ones(8000, 50, 128)
    work = lambda n: norms_of_steps(values[:n])
work(10)
before = peak()
work(None)
print((peak() - before) // 1024)
"""


LENGTHS = """
import resource

import torch
from module_kinds import EVERY, made

torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
modules = [made(kind) for kind in EVERY]


def train(lengths):
    for T in lengths:
        for module in modules:
            module(torch.randn(T, 2, 3))[0].sum().backward()
            packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(1 + T // 8, 2, 3), [1 + T // 8, 1 + T // 16])
            module(packed)[0].data.sum().backward()


train(range(1000, 900, -1))
before = peak()
train(range(900, 0, -1))
print((peak() - before) // 1024)
"""


def growth(program: str, *arguments: str) -> int:
    """The MB that a program prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=kept)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit on other systems")
@pytest.mark.parametrize("what", ["hits", "norms"])
def test_parts_share_their_memory(what: str) -> None:
    assert growth(PROGRAM, what) < 150


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit on other systems")
def test_a_thousand_lengths_need_the_memory_of_the_longest() -> None:
    assert growth(LENGTHS) < 4
