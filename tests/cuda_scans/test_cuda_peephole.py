"""The CUDA scan of the LSTM with peepholes on the host harness, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cuda_cases import in_every_order
from peephole_problem import PeepholeProblem, check_lstm, check_peephole
from torch import Tensor

from orthokern import dispatch


def test_peephole_parity() -> None:
    """With one cotangent or both, peepholes and initial states or zeros; more units than a block has threads."""
    for seed, (T, B, N) in enumerate([(4, 5, 33), (1, 1, 1), (9, 2, 7), (6, 3, 130)]):
        problem = PeepholeProblem.random(T, B, N, seed=seed)
        check_peephole(problem, torch.float32, "cuda")
        check_peephole(dataclasses.replace(problem, grad_cs=None), torch.float32, "cuda")
        zeros = {name: torch.zeros_like(getattr(problem, name)) for name in ("peephole", "h0", "c0")}
        check_peephole(dataclasses.replace(problem, grad_hs=None, **zeros), torch.float32, "cuda")


def test_peephole_no_schedule_changes_a_bit(harness: Any) -> None:
    problem = PeepholeProblem.random(5, 7, 50).map(Tensor.float)
    in_every_order(harness, lambda: problem.run("cuda"))


def test_lstm_module(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(dispatch, "resolve", lambda op, backend, **facts: dispatch.leaf(op, "cuda"))
    harness.kernels_run()
    check_lstm("cpu", 5, (6, 4, 1))
    assert harness.kernels_run() == 4 * 2 * (1 + 6)  # for each recurrence and direction, its arguments and six steps
