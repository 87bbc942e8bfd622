"""The leak of the CUDA scans on the host harness, on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import check, run
from helpers import assert_same_bits, run_scan, scan_problem, with_resets

from orthokern import _gpu_scans
from orthokern.cuda import _scan


@pytest.mark.parametrize("units", ["one", "each"])
@pytest.mark.parametrize(
    ("op", "N", "K"),
    [("factored_scan", 513, 8), ("factored_scan", 300, 16), ("factored_scan", 66, 33), ("factored_scan", 140, 140)]
    + [("dense_scan", 70, None), ("dense_scan", 129, None), ("dense_scan", 250, None)],
)
def test_the_path_of_a_size(op: str, N: int, K: int | None, units: str) -> None:
    check(scan_problem(op, B=3, T=7, N=N, K=K, leak=1 if units == "one" else N))


@pytest.mark.parametrize("path", ["resident", "cluster-4", "library", "low-rank"])
def test_what_units_carry_from_window_to_window(path: str, override: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward, from each launch to the next one."""
    override(path)
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 3 * 20 * 6)  # windows of 6 steps
    problem = scan_problem("factored_scan", B=3, T=20, N=20, activation="prelu", leak=20)
    for one in (problem, with_resets(problem)):
        lengths = torch.tensor([20, 7, 13])
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 7)
        plain = check(one, lengths=lengths)
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 6)
        assert_same_bits(plain, run(one.to(torch.float32), lengths=lengths))
        again = run(one.to(torch.float32), lengths=lengths, checkpoint_every=4)
        assert_same_bits(plain, again, skip=("ckpt", "pre"))


@pytest.mark.parametrize("op", ["factored_scan", "dense_scan"])
def test_the_state_of_library_steps_is_float32(op: str, override: Any) -> None:
    """The kernel of a step adds (1 - l) h_{t-1} from the state that is multiplied: no bfloat16 for "bf16" either."""
    override("library")
    problem = scan_problem(op, B=5, T=19, N=34, leak=34, gap=-1.0)
    tf32, bf16 = (run(problem.to(torch.float32), precision=precision) for precision in ("tf32", "bf16"))
    assert_same_bits({"hs": tf32["hs"]}, {"hs": bf16["hs"]})
    exact = run_scan(problem, "reference")["hs"]
    assert (bf16["hs"] - exact).abs().max() < 1e-2 * exact.abs().max()
