"""The comparison of kernels with the reference rejects a kernel with small errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_scan
from helpers import SCANS, backends, scan_problem, with_resets

from orthokern import dispatch
from orthokern._scan_contract import ScanGradients

CASES = [
    pytest.param(op, *one.values, field, id=f"{op}-{one.id}-{field}", marks=one.marks)
    for op in SCANS
    for one in backends(op)
    for field in ScanGradients._fields
    if field != "leak" and (op == "factored_scan" or field not in ("first", "scale"))  # dense_scan has one matrix
]


@pytest.mark.parametrize(("op", "backend", "field"), CASES)
def test_harness_rejects_a_wrong_gradient(op: str, backend: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, wrong by a hundredth of a percent of the largest."""
    problem, leaf = scan_problem(op, B=3, T=5, N=9, activation="prelu", inputs="features"), dispatch.leaf(op, backend)
    true_bwd = getattr(leaf, f"{op}_bwd")

    def wrong(*args: Any) -> Any:
        grads = true_bwd(*args)
        grad = getattr(grads, field)
        grad.view(-1)[0] += 1e-4 * grad.abs().max()
        return grads

    monkeypatch.setattr(leaf, f"{op}_bwd", wrong)
    name = {"first": "v", "scale": "s", "second": "u" if op == "factored_scan" else "w"}.get(field, field)
    with pytest.raises(AssertionError, match=f"grad_{name}"):
        check_scan(with_resets(problem), torch.float32, backend)
