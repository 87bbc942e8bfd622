"""The harness that compares kernels with the reference: it accepts the reference as a kernel, and rejects a kernel with
small errors."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import check_scan
from helpers import scan_problem, with_resets

from orthokern import dispatch
from orthokern._scan_contract import ScanGradients


def fake_leaf(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any]) -> None:
    """Let the reference stand in for the cpu leaf, with some of its functions replaced."""
    true_leaf = dispatch.leaf

    def leaf(op: str, backend: str) -> Any:
        functions = vars(true_leaf(op, "reference"))
        return types.SimpleNamespace(**{**functions, **changes}) if backend == "cpu" else true_leaf(op, backend)

    monkeypatch.setattr(dispatch, "leaf", leaf)
    monkeypatch.setattr(dispatch, "absence", lambda op, backend: None)
    monkeypatch.setattr(dispatch, "_chosen", {})


@pytest.mark.parametrize(
    ("op", "field"),
    [
        *(("factored_scan", field) for field in ScanGradients._fields if field != "leak"),
        *(("dense_scan", field) for field in ScanGradients._fields if field not in ("first", "scale", "leak")),
    ],
)
def test_harness_rejects_a_wrong_gradient(op: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, wrong by a hundredth of a percent of the largest."""
    problem = with_resets(scan_problem(op, B=3, T=5, N=9, activation="prelu", inputs="features"))
    true_bwd = getattr(dispatch.leaf(op, "reference"), f"{op}_bwd")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        grads = true_bwd(*args, **kwargs)
        grad = getattr(grads, field)
        grad.view(-1)[0] += 1e-4 * grad.abs().max()
        return grads

    fake_leaf(monkeypatch, **{f"{op}_bwd": wrong})
    name = {"first": "v", "scale": "s", "second": "u" if op == "factored_scan" else "w"}.get(field, field)
    with pytest.raises(AssertionError, match=f"grad_{name}"):
        check_scan(problem, torch.float32, "cpu")
