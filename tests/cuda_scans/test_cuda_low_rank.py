"""The kernel of factored maps of low rank on the host harness: every shape of it, and which sizes it serves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cuda_cases import KINDS, LOW_RANK, RESIDENT, check, in_every_order, plan, run
from helpers import scan_problem, some_lengths

# (N, K) for each shape of the kernel, with one block of units that is not full, and with fewer warps than four.
SHAPES = [(33, 3), (129, 8), (511, 1), (1030, 8), (130, 9), (513, 16), (40, 17), (300, 32), (66, 33), (250, 64)]


@pytest.mark.parametrize(("N", "K"), SHAPES, ids=str)
def test_parity_of_every_shape(N: int, K: int, override: Any) -> None:
    override("low-rank")
    index = SHAPES.index((N, K))
    for B, activation, T in ((1, "tanh", 35), (5, "prelu", 3)):
        inputs = KINDS[(index + B) % 3]
        check(scan_problem("factored_scan", B=B, T=T, N=N, K=K, activation=activation, inputs=inputs, gap=-1.0))


@pytest.mark.parametrize("N", [65, 128])
def test_chunks_of_time(N: int, override: Any) -> None:
    override("low-rank")
    for inputs, lengths in zip(KINDS, (None, some_lengths(3, 40, "any"), torch.tensor([40, 1, 7])), strict=True):
        problem = scan_problem("factored_scan", B=3, T=40, N=N, K=7, activation="identity", inputs=inputs)
        check(problem, algorithm="chunked", lengths=lengths)


def test_no_schedule_changes_a_bit(override: Any, harness: Any) -> None:
    override("low-rank")
    problem = scan_problem("factored_scan", B=2, T=6, N=600, K=8, activation="prelu", inputs="tokens").to(torch.float32)
    in_every_order(harness, lambda: run(problem))


def test_which_sizes_are_of_low_rank(harness: Any, override: Any) -> None:
    """What fits into the registers, unless the resident kernel multiplies no more than four times as much."""
    largest = {1: 2048, 8: 2048, 9: 1024, 16: 1024, 17: 512, 32: 512, 33: 256, 64: 256}
    for K, N in largest.items():
        assert plan("factored_scan", N, 50, K=K)["path"] == LOW_RANK
        assert plan("factored_scan", N + 1, 50, K=K)["path"] != LOW_RANK
    assert plan("factored_scan", 500, 50, K=65)["path"] != LOW_RANK
    for N, K in ((32, 8), (64, 16), (128, 32)):
        assert plan("factored_scan", N, 50, K=K)["path"] == LOW_RANK
        assert plan("factored_scan", N - 1, 50, K=K)["path"] == RESIDENT
    assert plan("factored_scan", 160, 50, K=64)["path"] == RESIDENT
    for B in (1, 132, 4000):
        made = plan("factored_scan", 512, B, K=8)
        assert (made["path"], made["blocks"], made["group"]) == (LOW_RANK, B, 1)
    for shared, N, K in itertools.product((99 << 10, 163 << 10, 227 << 10), (100, 1000, 2048), (8, 16, 64)):
        harness.set_chip(shared_per_block=shared)
        for backward in (False, True):
            assert plan("factored_scan", N, 50, K=K, backward=backward)["shared_bytes"] <= shared
    override("low-rank")
    with pytest.raises(RuntimeError, match="does not serve this size"):
        plan("dense_scan", 100, 5)
