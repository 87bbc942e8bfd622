"""The CUDA scans on the host harness: which path serves which size, and on which device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import CLUSTER, LIBRARY, OPS, PATHS, RESIDENT, check, plan, run
from cuda_host import build
from helpers import (
    GruProblem,
    scan_problem,
)
from torch import Tensor

from orthokern.cuda import _call, _scan


def test_another_device_is_used_and_the_current_one_left(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every native function works on the device of its tensors; torch's current device stays what it was."""
    there = build.OnSecondDevice(harness)
    monkeypatch.setattr(_call, "kernels", there)
    for op in OPS:
        run(scan_problem(op, B=3, T=5, N=9, activation="identity").to(torch.float32), algorithm="chunked")
        ragged = torch.tensor([1, 2, 5])
        for path in ("resident", "cluster-1", "library"):
            monkeypatch.setattr(_call, "overrides", PATHS[path])
            run(scan_problem(op, B=3, T=5, N=9).to(torch.float32), lengths=ragged)
        monkeypatch.setattr(_call, "overrides", {})
    GruProblem.random("kanai", 3, 2, 9).map(Tensor.float).run("cuda", lengths=torch.tensor([1, 3]))
    torch.ops.orthokern.cayley(torch.eye(4), torch.randn(4, 4), torch.tensor(0.1), "cuda")
    called = there.called
    sized = called.pop("cayley_workspace")  # from sizes alone
    assert not sized and all(set(devices) == {1} for devices in called.values()), called
    assert set(called) >= {f"{op}{part}" for op in (*OPS, "gru_scan") for part in ("", "_plan")}
    assert set(called) >= {"scan_carry", "cayley"}

    sizes = {
        "T": 1,
        "B": 5,
        "N": 3000,
        "K": 3000,
        "sequences": 5,
        "chunk": 1,
        "backward": 0,
        "overrides": {"path": RESIDENT},
    }
    sizes |= dict.fromkeys(("precision", "activation", "act_param_stride", "leak_stride", "tokens", "cut", "leak"), 0)
    with pytest.raises(RuntimeError, match="does not serve this size"):
        harness.factored_scan_plan({**sizes, "device": 1})
    assert harness.current_device() == 0  # after an error too


@pytest.mark.parametrize("op", OPS)
def test_path_by_size(op: str, harness: Any) -> None:
    largest = 160 if op == "factored_scan" else 192
    assert plan(op, largest, 50)["path"] == RESIDENT
    assert plan(op, largest + 1, 50)["path"] == CLUSTER
    assert plan(op, 1024, 50)["path"] == CLUSTER
    assert plan(op, 1025, 50)["path"] == LIBRARY
    harness.set_chip(major=8, minor=0, multiprocessors=108, shared_per_block=163 << 10)
    assert plan(op, largest, 50)["path"] == RESIDENT
    assert plan(op, largest + 1, 50)["path"] == LIBRARY
    harness.set_chip(major=8, minor=9, multiprocessors=142, shared_per_block=99 << 10)
    assert plan(op, largest, 50)["path"] == RESIDENT
    harness.set_chip(largest_cluster=8)
    assert plan(op, 512, 50)["path"] == CLUSTER
    assert plan(op, 513, 50)["path"] == LIBRARY


def test_many_waves_of_clusters_give_way_to_library_products() -> None:
    for N, cluster, library in ((256, 512, 8192), (512, 128, 2048), (768, 128, 512), (1024, 128, 1024)):
        for backward in (False, True):
            assert plan("dense_scan", N, cluster, backward=backward)["path"] == CLUSTER, N
            assert plan("dense_scan", N, library, backward=backward)["path"] == LIBRARY, N
            for op in OPS:
                assert plan(op, N, 50, backward=backward)["path"] == CLUSTER, N
                paths = [plan(op, N, B, backward=backward)["path"] for B in range(8, 8192, 16)]
                assert paths.index(LIBRARY) > 3 and CLUSTER not in paths[paths.index(LIBRARY) + 32 :]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_library_products_below_ieee_serve_smaller_batches(precision: str) -> None:
    for N, cluster, library in ((512, 128, 2048), (1024, 64, 512)):
        for backward in (False, True):
            assert plan("dense_scan", N, cluster, backward=backward, precision=precision)["path"] == CLUSTER, N
            of_library = plan("dense_scan", N, library, backward=backward, precision=precision)
            assert (of_library["path"], of_library["precision"]) == (LIBRARY, _scan._PRECISIONS[precision]), N
    assert plan("dense_scan", 1100, 8, precision="ieee")["precision"] == 0


@pytest.mark.parametrize("op", OPS)
def test_code_for_older_gpus_has_no_clusters(op: str, harness: Any, override: Any) -> None:
    """A build for sm_80 alone on an H200: the driver compiles its PTX, whose code traps where it needs clusters."""
    for code, path in ((80, LIBRARY), (90, CLUSTER)):
        harness.set_chip(code=code)
        assert plan(op, 100, 50)["path"] == RESIDENT
        assert plan(op, 500, 50)["path"] == path
    harness.set_chip(code=80)
    check(scan_problem(op, B=3, T=3, N=257))
    override({"path": CLUSTER})
    with pytest.raises(RuntimeError, match="does not serve this size"):
        plan(op, 500, 50)


@pytest.mark.parametrize("op", OPS)
def test_sequences_are_spread_over_the_gpu(op: str) -> None:
    # a multiprocessor holds two blocks of a dense map
    expected = [1, 1, 2, 2, 4, 8] if op == "factored_scan" else [1, 1, 1, 1, 2, 4]
    assert [plan(op, 128, B)["group"] for B in (1, 132, 133, 264, 265, 1000)] == expected
    # chunks of time are one wave of blocks, and the waves of larger batches are full
    assert plan(op, 128, 50 * 100, backward=False)["blocks"] == (132 if op == "factored_scan" else 250)
    assert plan(op, 128, 50 * 100)["blocks"] == (132 if op == "factored_scan" else 500)
    assert plan(op, 128, 50 * 100, backward=False)["shared_bytes"] <= 227 << (10 if op == "factored_scan" else 9)
    groups = [plan(op, 150, B)["group"] for B in (1, 132, 133, 265, 1000)]
    assert groups == [1, 1, 2, 3 if op == "factored_scan" else 4, 8]  # one at a time, or pairs
    few, many = plan(op, 500, 1), plan(op, 500, 50)
    assert (few["cluster"], few["group"], few["blocks"]) == (8, 1, 8)
    assert many["cluster"] == 8 and many["blocks"] <= 132  # all of them run at one time
    assert plan(op, 1000, 50)["cluster"] == 16


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_shared_memory_stays_within_the_limit(shared: int, harness: Any) -> None:
    harness.set_chip(shared_per_block=shared)
    for op in OPS:
        for N in (1, 64, 100, 128, 150, 160, 192, 200, 256, 257, 500, 512, 700, 1000, 1024):
            for B in (1, 50, 200, 3000):
                for backward in (False, True):
                    made = plan(op, N, B, backward=backward, tokens=not backward)
                    assert made["shared_bytes"] <= shared, (op, N, B, made)


def test_a_path_that_cannot_serve_says_so(override: Any) -> None:
    override({"path": RESIDENT})
    with pytest.raises(RuntimeError, match="does not serve this size") as caught:
        plan("factored_scan", 300, 5)
    assert "\n" not in str(caught.value)
