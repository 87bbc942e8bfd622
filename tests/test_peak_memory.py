"""Work that is done in parts needs the memory of a few parts. The allocator of the C library can make it that of all
parts: where a small result is kept after each part, the next part no longer fits into the memory of the last one."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit on other systems")
@pytest.mark.parametrize("what", ["hits", "norms"])
def test_parts_share_their_memory(what: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, env=kept, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150, f"{done.stdout.strip()} MB for {what}"
