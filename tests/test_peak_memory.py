"""Calls of many lengths need the memory of the longest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
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
train(range(900, 0, -3))  # a tensor [T, 2, 6] that one module kept for each length would take 6 MB
print((peak() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit on other systems")
def test_many_lengths_need_the_memory_of_the_longest() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=kept)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4  # MB
