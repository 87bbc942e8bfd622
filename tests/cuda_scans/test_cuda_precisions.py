"""The CUDA scans on the host harness: products on tensor cores, in every precision."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cuda_cases import CLUSTER, KINDS, LIBRARY, LOW_RANK, OPS, RESIDENT, plan, run
from cuda_host import build
from helpers import (
    assert_same_bits,
    run_scan,
    scan_problem,
)

from orthokern import dispatch
from orthokern._scan_contract import ScanArgs
from orthokern.cuda import _library, _scan

# The largest relative error of a state or gradient: the unit roundoff of the factors, with room for a few steps.
PRECISION_ERRORS = {"tf32": 3e-3, "bf16": 3e-2}


# Clusters whose products are on tensor cores: chunks of the map in registers, in shared memory, and read from L2.
TENSOR_CLUSTERS = {
    "small": (37, 7, {"cluster": 2}),
    "chunks": (250, 130, {"cluster": 4}),
    "streamed": (250, 250, {"cluster": 4, "shared_chunks": 0}),
}


@pytest.mark.parametrize("precision", PRECISION_ERRORS)
@pytest.mark.parametrize("size", TENSOR_CLUSTERS)
@pytest.mark.parametrize("op", OPS)
def test_precisions_of_clusters(op: str, size: str, precision: str, override: Any, harness: Any) -> None:
    """As precise as asked, and no more; the same bits in any order of threads and with checkpoints."""
    N, K, overrides = TENSOR_CLUSTERS[size]
    override({"path": CLUSTER, "tensor": 1, **overrides})
    inputs = KINDS[list(TENSOR_CLUSTERS).index(size)]
    problem = scan_problem(op, B=9, T=3, N=N, K=K, inputs=inputs, gap=-1.0)
    exact, inexact = run_scan(problem, "reference"), problem.to(torch.float32)
    actual = run(inexact, precision=precision)
    for name, expected in exact.items():
        if name == "hs" or (name.startswith("grad_") and expected.numel()):
            error = (actual[name] - expected).abs().max() / expected.abs().max()
            assert error < PRECISION_ERRORS[precision], name
    error = (actual["hs"] - exact["hs"]).abs().max()
    assert error > 20 * (run(inexact)["hs"] - exact["hs"]).abs().max()
    if size != "small":
        return
    for order in ("reverse", "random"):
        harness.set_schedule(*build.ORDERS[order])
        assert_same_bits(actual, run(inexact, precision=precision))
    again = run(inexact, precision=precision, checkpoint_every=2)
    assert_same_bits(actual, again, skip=("ckpt", "pre"))


def test_precisions_of_clusters_with_lengths_and_pairs(override: Any) -> None:
    override({"path": CLUSTER, "cluster": 2, "tensor": 1})
    problem = scan_problem("factored_scan", B=11, T=6, N=34, activation="prelu", inputs="tokens", gap=-1.0)
    options = {"lengths": torch.tensor([6, 1, 3, 1, 6, 2, 5, 4, 6, 6, 1]), "message_clip": 0.05}
    exact = run_scan(problem, "reference", **options)
    actual = run(problem.to(torch.float32), precision="tf32", **options)
    for name in ("hs", "grad_h0", "grad_act_param", "grad_norm"):
        assert (actual[name] - exact[name]).abs().max() < 1e-2 * exact[name].abs().max(), name
    pairs = scan_problem("dense_scan", B=9, T=4, N=38, activation="oplu", gap=-1.0)
    exact, actual = run_scan(pairs, "reference"), run(pairs.to(torch.float32), precision="tf32")
    assert (actual["hs"] - exact["hs"]).abs().max() < 3e-3 * exact["hs"].abs().max()


@pytest.mark.parametrize("path", [{"path": CLUSTER, "tensor": 1}, {"path": LIBRARY}, {"path": RESIDENT}], ids=str)
def test_products_of_the_gradient(path: dict[str, int], override: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32 where those of the scan are below IEEE."""
    override(path)
    asked: list[tuple[bool, bool]] = []

    def product(device: torch.device, *, ieee: bool) -> Any:
        multiply = _library.product(device, ieee=ieee)

        def recorded(*tensors: torch.Tensor, add: bool = False) -> None:
            asked.append((ieee, tensors[2].shape == (34, 34)))  # of the map
            multiply(*tensors, add=add)

        return recorded

    monkeypatch.setattr(_scan, "product", product)
    problem = scan_problem("dense_scan", B=9, T=3, N=34).to(torch.float32)
    for precision in ("ieee", "tf32", "bf16"):
        asked.clear()
        run(problem, precision=precision)
        below = precision != "ieee" and path["path"] != RESIDENT
        assert asked.count((False, True)) == below and (True, True) not in asked


@pytest.mark.parametrize("precision", PRECISION_ERRORS)
@pytest.mark.parametrize("op", OPS)
def test_a_plan_is_never_less_precise_than_asked(op: str, precision: str, override: Any) -> None:
    """Which products a size gets: tensor cores where the planner's model says that they are faster, else IEEE."""
    ieee, lower = _scan._PRECISIONS["ieee"], _scan._PRECISIONS[precision]
    for N, B in itertools.product((64, 128, 250, 500, 1000, 1100), (1, 8, 50, 500)):
        of_size = plan(op, N, B, precision=precision, backward=False)
        expected = {RESIDENT: (ieee,), CLUSTER: (ieee, lower), LIBRARY: (lower,), LOW_RANK: (ieee,)}
        assert of_size["precision"] in expected[of_size["path"]]
        assert plan(op, N, B, backward=False)["precision"] == ieee
    large = plan(op, 1000, 50, precision=precision, backward=False)
    assert (large["path"], large["group"], large["precision"]) == (CLUSTER, 8, lower)
    # one sequence leaves 7 columns of 8 empty
    assert plan(op, 250, 1, precision=precision, backward=False)["precision"] == ieee
    override({"path": CLUSTER, "tensor": 0})
    assert plan(op, 500, 50, precision=precision, backward=False)["precision"] == ieee


@pytest.mark.parametrize("path", ["resident", "cluster-2"])
def test_other_forms_are_never_less_than_ieee(path: str, override: Any) -> None:
    override(path)
    problem = scan_problem("factored_scan", B=5, T=4, N=33).to(torch.float32)
    assert_same_bits(run(problem), run(problem, precision="bf16"))
    assert_same_bits(run(problem), run(problem, precision="3xtf32"))


@pytest.mark.parametrize("precision", PRECISION_ERRORS)
def test_long_sums_on_tensor_cores_do_not_drift(precision: str, override: Any) -> None:
    """Tensor cores cut their sums. In one accumulator, positive terms would come out too small, and ever more so."""
    override({"path": CLUSTER, "cluster": 16, "tensor": 1})
    generator = torch.Generator().manual_seed(0)
    n = 1000
    w = torch.rand(n, n, generator=generator).bfloat16().float()  # exact in every precision
    h0, x = torch.rand(1, n, generator=generator).bfloat16().float(), torch.zeros(1, 1, n)
    forward = dispatch.leaf("dense_scan", "cuda").dense_scan_fwd
    args = ScanArgs(x, None, None, w, h0, None, None, None, "identity", precision=precision, algorithm="sequential")
    actual = forward(args).hs
    exact = w.double() @ h0[0].double()
    bias = float(((actual[0, 0].double() - exact) / exact).mean())
    assert abs(bias) < 1.5e-7
