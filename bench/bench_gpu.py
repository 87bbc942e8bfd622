"""The timed cases of first_hour_cases.py on a CUDA device: `pytest bench/bench_gpu.py --benchmark-only`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import first_hour
import first_hour_cases
import pytest
import torch
from harness import Bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TIMED = [name for name in first_hour_cases.cases() if not name.startswith(("versions", "parity"))]


@pytest.mark.parametrize("name", TIMED)
def test_case(benchmark: Any, bench: Bench, name: str, tmp_path: Path) -> None:
    """One row for each case, with its bar; a quick run has tiny sizes."""
    machine = first_hour_cases.Machine(dry=bench.quick, folder=tmp_path)
    result = first_hour_cases.cases()[name](machine)
    benchmark.pedantic(lambda: None, rounds=1)  # the case has its own rounds
    bar, _ = first_hour.bars_of(name)
    better = "lower" if result["unit"] in first_hour.TIMES else "higher"
    bench.record("gpu", name, {}, result["value"], unit=result["unit"], target=bar, better=better)
