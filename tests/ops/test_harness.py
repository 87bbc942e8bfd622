"""The harness that compares kernels with the reference: it accepts the reference as a kernel, and rejects a kernel with
small errors."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import test_activations
import test_cayley
import test_factored_scan_dense_scan as scans
import test_linear_cross_entropy
import torch
from helpers import DTYPES, SCANS, check_scan, scan_cases, scan_problem

from orthokern import dispatch
from orthokern._scan_contract import ScanGradients
from orthokern.ops.activations import NAMES


def fake_leaf(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any]) -> None:
    """Let the reference stand in for the cpu leaf, with some of its functions replaced."""
    true_leaf = dispatch.leaf

    def leaf(op: str, backend: str) -> Any:
        functions = vars(true_leaf(op, "reference"))
        return types.SimpleNamespace(**{**functions, **changes}) if backend == "cpu" else true_leaf(op, backend)

    monkeypatch.setattr(dispatch, "leaf", leaf)
    monkeypatch.setattr(dispatch, "absence", lambda op, backend: None)
    monkeypatch.setattr(dispatch, "_chosen", {})


@pytest.mark.parametrize("op", SCANS)
def test_harness_accepts_the_reference_as_a_leaf(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_leaf(monkeypatch)
    for _, case in scan_cases([{"B": 3, "T": 5, "N": 9}]):
        for dtype in DTYPES:
            check_scan(scan_problem(op, **case), dtype, "cpu")
    scans.test_forward_of_one_backward_of_the_other(op, "cpu", "prelu", 3)
    scans.test_any_strides(op, "cpu", "tokens")
    scans.test_the_same_bits_twice(op, "cpu", torch.float32)
    scans.test_what_is_not_needed_is_empty(op, "cpu")
    scans.test_nothing_writes_to_inputs(op, "cpu")
    scans.test_units_on_a_threshold(op, "cpu", "modrelu")
    scans.test_one_thread_and_two_agree(op, "cpu", torch.float32, same_bits=False)  # torch's products promise no bits
    scans.test_gradcheck_of_the_kernels(op, "cpu")
    scans.test_a_long_scan_stays_exact(op, "cpu")


def test_harness_accepts_the_reference_of_the_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_leaf(monkeypatch)
    for shape in test_cayley.SHAPES[:6]:
        test_cayley.test_cayley_parity("cayley", "cpu", torch.float32, shape)
    test_cayley.test_cayley_of_a_large_gradient("cayley", "cpu")
    for activation in NAMES:
        test_activations.test_activation_parity("activations", "cpu", torch.float32, activation)
        test_activations.test_special_values("activations", "cpu", activation)
    test_activations.test_tanh_is_accurate_everywhere("activations", "cpu")
    test_linear_cross_entropy.test_linear_cross_entropy_parity("linear_cross_entropy", "cpu", torch.float32, 9, 7, 5)
    test_linear_cross_entropy.test_extreme_logits("linear_cross_entropy", "cpu")


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("field", ScanGradients._fields)
def test_harness_rejects_a_wrong_gradient(op: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, wrong by a hundredth of a percent of the largest."""
    problem = scan_problem(op, B=3, T=5, N=9, activation="prelu", inputs="features")
    true_bwd = getattr(dispatch.leaf(op, "reference"), f"{op}_bwd")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        grads = true_bwd(*args, **kwargs)
        grad = getattr(grads, field)
        grad.view(-1)[0] += 1e-4 * grad.abs().max()
        return grads

    fake_leaf(monkeypatch, **{f"{op}_bwd": wrong})
    with pytest.raises(AssertionError, match=problem.grad_names()[1] if field == "m" else f"grad_{field}"):
        check_scan(problem, torch.float32, "cpu")


@pytest.mark.parametrize("op", SCANS)
def test_harness_rejects_unwritten_memory(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_fwd = getattr(dispatch.leaf(op, "reference"), f"{op}_fwd")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        states = true_fwd(*args, **kwargs)
        states.hs[-1, -1, -1] = float("nan")
        return states

    fake_leaf(monkeypatch, **{f"{op}_fwd": wrong})
    with pytest.raises(AssertionError, match="hs: 1 of 135 elements are NaN or infinite"):
        check_scan(scan_problem(op, B=3, T=5, N=9), torch.float64, "cpu")
