"""The CUDA GRU scan on the host harness: both paths against the reference."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from cuda_cases import GRU_PATHS, check_gru, in_every_order
from helpers import (
    GruProblem,
    assert_same_bits,
    some_lengths,
)
from torch import Tensor

from orthokern.cuda import gru_scan
from orthokern.ops.gru_scan import VARIANTS


@pytest.mark.parametrize("path", GRU_PATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_parity_of_every_path(variant: str, path: str, override: Any) -> None:
    override(GRU_PATHS[path])
    # more steps than inputs are fetched ahead, and than squares are summed at a time; every number of warps
    for index, (T, B, N) in enumerate([(4, 5, 33), (35, 2, 7), (1, 1, 1), (6, 4, 100)]):
        problem = GruProblem.random(variant, T, B, N, bias=index % 3 != 0, seed=index)
        check_gru(problem)
        lengths = some_lengths(B, T, ("any", "rising", "falling")[index % 3], seed=index)
        lengths -= (lengths > 1).long() * (index % 2)  # nobody has the last step
        check_gru(problem, lengths)
        check_gru(problem.with_resets(state=index % 2 == 0, seed=index), None if index % 2 else lengths)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_parity_at_large_sizes(variant: str) -> None:
    for T, B, N in ((3, 3, 200), (2, 40, 130), (3, 2, 128)):
        check_gru(GruProblem.random(variant, T, B, N))


@pytest.mark.parametrize("path", GRU_PATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_no_schedule_changes_a_bit(variant: str, path: str, override: Any, harness: Any) -> None:
    override(GRU_PATHS[path])
    plain = GruProblem.random(variant, 6, 7, 34).map(Tensor.float)
    ragged = torch.tensor([1, 5, 3, 4, 4, 3, 2])
    for problem, lengths in ((plain, None), (plain, ragged), (plain.with_resets(), ragged)):
        in_every_order(harness, functools.partial(problem.run, "cuda", lengths=lengths))


@pytest.mark.parametrize("path", GRU_PATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_padding_plays_no_part(variant: str, path: str, override: Any) -> None:
    """Not its contents, and a length out of range, which nobody checks on a GPU, counts as the nearest one."""
    override(GRU_PATHS[path])
    B, T = 5, 11
    problem = GruProblem.random(variant, T, B, 18).map(Tensor.float)
    lengths = torch.tensor([4, 1, 10, 3, 10])
    first = problem.run("cuda", lengths=lengths)
    padding = torch.arange(T).unsqueeze(1) >= lengths
    for name in ("hs", "gates", "pre", "grad_x"):
        assert not first[name].numel() or not first[name][padding].any(), name
    assert_same_bits(first, problem.with_poisoned_padding(lengths).run("cuda", lengths=lengths))
    assert_same_bits(problem.run("cuda", lengths=torch.full((B,), T)), problem.run("cuda"))
    results = []
    for given in (torch.tensor([-(2**63), 2**40 + 1, 2**63 - 1, -1, 2]), torch.tensor([0, T, T, 0, 2])):
        results.append(problem.run_leaves(gru_scan, lengths=given))  # the ops check the lengths of CPU tensors
    assert_same_bits(*results)


def test_gru_without_parameters() -> None:
    for variant in VARIANTS:
        problem = GruProblem.random(variant, 4, 3, 9).map(Tensor.float)
        expected = problem.run("cuda")
        some = problem.run_leaves(gru_scan, need_params=False)
        assert set(some) == {name for name, t in expected.items() if t.numel()} - {"grad_w", "grad_bias"}
        assert_same_bits(some, {name: expected[name] for name in some})


def test_gru_plan(harness: Any) -> None:
    def made(N: int, B: int, backward: bool = True, **overrides: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "T": 1,
            "B": B,
            "N": N,
            "kanai": 1,
            "backward": int(backward),
            "device": 0,
        }
        asked |= {"overrides": overrides}
        plan: dict[str, int] = harness.gru_scan_plan(asked)
        return plan

    assert [made(N, 50)["path"] for N in (1, 128, 129, 650)] == [0, 0, 1, 1]
    assert [made(128, B)["group"] for B in (1, 132, 133, 265)] == [1, 1, 2, 3]
    # shared memory holds 12 sequences of a backward and 23 of a forward: two full waves rather than 132 and 2 blocks
    large = [made(128, B) for B in (1584, 1600, 3000)]
    assert [(plan["group"], plan["blocks"]) for plan in large] == [(12, 132), (7, 229), (12, 250)]
    assert [made(128, 3100, backward)["group"] for backward in (False, True)] == [12, 12]
    assert made(128, 1600, group=16)["group"] == 12
    for shared in (99 << 10, 163 << 10, 227 << 10):
        harness.set_chip(shared_per_block=shared)
        for N, B, backward in itertools.product((1, 64, 128), (1, 200, 3000), (False, True)):
            plan = made(N, B, backward)
            assert plan["path"] == 0 and plan["shared_bytes"] <= shared
            assert plan["blocks"] * plan["group"] >= B
    with pytest.raises(RuntimeError, match="does not serve this size"):
        made(129, 5, path=0)
