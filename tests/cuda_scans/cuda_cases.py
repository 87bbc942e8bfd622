"""The problems, paths and comparison that the tests of the CUDA scans share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import checks
import torch
from checks import assert_scan_parity, assert_unchanged
from cuda_host import build
from helpers import GruProblem, ScanProblem, assert_same_bits, run_scan
from torch import Tensor

from orthokern._scan_contract import ScanArgs
from orthokern.cuda import _scan

OPS = ("factored_scan", "dense_scan")
RESIDENT, CLUSTER, LIBRARY, LOW_RANK = 0, 1, 2, 3
PATHS = {
    "resident": {"path": RESIDENT, "group": 1},
    "resident-pairs": {"path": RESIDENT, "group": 2},
    "resident-4": {"path": RESIDENT, "group": 4},
    "cluster-1": {"path": CLUSTER, "cluster": 2, "group": 1},
    "cluster-2": {"path": CLUSTER, "cluster": 2, "group": 2},
    "cluster-4": {"path": CLUSTER, "cluster": 4, "group": 4},
    "cluster-8": {"path": CLUSTER, "cluster": 2, "group": 8},
    "streamed": {"path": CLUSTER, "cluster": 4, "group": 4, "shared_chunks": 0},
    "library": {"path": LIBRARY},
    "low-rank": {"path": LOW_RANK},
}
# dense maps have no rank
OP_PATHS = [(op, path) for op in OPS for path in PATHS if (op, path) != ("dense_scan", "low-rank")]
KINDS = ("dense", "features", "tokens")
GRU_PATHS = {"resident": {"path": 0, "group": 1}, "resident-3": {"path": 0, "group": 3}, "library": {"path": 1}}

run = functools.partial(run_scan, backend="cuda")


def check(problem: ScanProblem, **options: Any) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem; returns it."""
    inexact = problem.to(torch.float32)
    before, actual = inexact.clone(), run(inexact, **options)
    assert_scan_parity(inexact, actual, lambda p, **same: run_scan(p, "reference", **same), options)
    assert_unchanged(inexact, before)
    return actual


def check_gru(problem: GruProblem, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem; returns it."""
    return checks.check_gru(problem, torch.float32, functools.partial(GruProblem.run, backend="cuda"), lengths)


def in_every_order(harness: Any, call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of a call, which have the same bits in every order of the threads."""
    results = []
    for order in build.ORDERS.values():
        harness.set_schedule(*order)
        results.append(call())
    for other in results[1:]:
        assert_same_bits(results[0], other)
    return results[0]


def plan(
    op: str,
    N: int,
    B: int,
    *,
    K: int | None = None,
    backward: bool = True,
    tokens: bool = False,
    precision: str = "ieee",
) -> dict[str, int]:
    rank = N if K is None else K
    matrices = torch.empty(N, rank), torch.empty(rank), torch.empty(N, rank)
    if op == "dense_scan":
        matrices = None, None, torch.empty(N, N)
    x = torch.zeros(1, B, dtype=torch.int64) if tokens else None
    args = ScanArgs(x, *matrices, torch.empty(B, N), None, None, None, "tanh", precision=precision)
    return _scan.Scan(args, backward=backward).plan
