"""The guard against unwritten outputs (poison.py) works, and only in the modules to which it applies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthokern import cpu
from orthokern.cpu import _call

ALLOCATIONS = [
    "torch.empty(3)",
    "torch.empty_like(x)",
    "torch.empty_strided((3,), (1,))",
    "x.new_empty(3)",
]


def evaluate(expression: str, module: str) -> Any:
    """Run an expression as a function of the named module would."""
    names = {"__name__": module, "torch": torch, "x": torch.zeros(3)}
    exec(f"def function():\n    return {expression}", names)
    return names["function"]()  # type: ignore[operator]


@pytest.mark.parametrize("expression", ALLOCATIONS)
def test_memory_of_orthokern_is_poisoned(expression: str) -> None:
    assert evaluate(expression, "orthokern.ops.factored_scan").isnan().all()
    assert evaluate("torch.empty(3, dtype=torch.int64)", "orthokern.cpu._call").tolist() == [-(2**63)] * 3


@pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_large_results_are_poisoned(dtype: torch.dtype) -> None:
    """Those of at least a mebibyte, whose memory was that of an earlier result."""
    size = _call.POOLED_BYTES // dtype.itemsize
    for count in (size - 1, size, 2 * size):
        for _ in range(2):  # the second takes the memory of the first
            result = _call.new(count, dtype=dtype)
            unwritten = result.isnan() if dtype.is_floating_point else result == torch.iinfo(dtype).min
            assert unwritten.all()
            result.zero_()
            del result
