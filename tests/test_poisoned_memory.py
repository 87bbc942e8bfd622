"""The guard against unwritten outputs (poison.py) works."""

from __future__ import annotations

import pytest
import torch

from orthokern import cpu
from orthokern.cpu import _call

ALLOCATIONS = ["torch.empty(3)", "torch.empty_like(x)", "torch.empty_strided((3,), (1,))", "x.new_empty(3)"]


@pytest.mark.parametrize("expression", ALLOCATIONS)
def test_memory_of_orthokern_is_poisoned(expression: str) -> None:
    """Where a module of the package allocates it, as this function would be one of."""
    names = {"__name__": "orthokern.ops.factored_scan", "torch": torch, "x": torch.zeros(3)}
    exec(f"def function():\n    return {expression}", names)
    assert names["function"]().isnan().all()  # type: ignore[operator]


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_large_results_are_poisoned(dtype: torch.dtype) -> None:
    """Those of at least a mebibyte, whose memory was that of an earlier result."""
    for _ in range(2):  # the second takes the memory of the first
        result = _call.new(_call.POOLED_BYTES // dtype.itemsize, dtype=dtype)
        unwritten = result.isnan() if dtype.is_floating_point else result == torch.iinfo(dtype).min
        assert unwritten.all()
        result.zero_()
        del result
