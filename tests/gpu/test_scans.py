"""The scans of Triton and CUDA on a device, against the float64 reference.

The kernels are also tested without a device (Triton's interpreter, the CUDA host harness). These tests are for what
only a device has: its memory model, its sizes and its rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_padding
from device_cases import DTYPES, KINDS, OPS, check, few, float_problem, need, on, orthogonal
from helpers import SHORT, ScanProblem, assert_same_bits, run_scan, scan_problem, some_lengths, with_resets
from torch import Tensor

from orthokern import _gpu_scans
from orthokern.cuda import _call, _scan
from orthokern.ops.activations import NAMES

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

SIZES = [
    (1, 1, 1),
    (3, 7, 33),
    (50, 5, 64),
    (5, 20, 128),
    (3, 4, 130),
    (200, 20, 160),
    (200, 3, 96),
    (3, 3, 250),
    (50, 3, 500),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "B{}-T{}-N{}".format(*s))
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_scan_parity(op: str, activation: str, size: tuple[int, int, int], dtype: torch.dtype, backend: str) -> None:
    B, T, N = size
    N += N % 2 if activation == "oplu" else 0
    need(op, backend, dtype, N=N, K=N)
    kind, B = KINDS[(NAMES.index(activation) + N) % 3], few(B, T, N, activation)
    check(scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=kind, D=11, gap=1e-6), dtype, backend)


@pytest.mark.parametrize(("N", "B", "T"), [(1000, 50, 3), (1100, 5, 3)])
@pytest.mark.parametrize("op", OPS)
def test_scan_parity_of_many_units(op: str, N: int, B: int, T: int) -> None:
    """The largest clusters, and more units than they hold: library products, without an override."""
    need(op, "cuda", N=N, K=N)
    check(scan_problem(op, B=B, T=T, N=N), torch.float32, "cuda")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_the_path_of_single_steps(op: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """csrc/cuda/scan_step.h, which this GPU takes by itself for N above 1024 and for large batches, others above 160
    or 192."""
    need(op, "cuda", N=34, K=34)
    monkeypatch.setattr(_call, "overrides", {"path": 2})
    for inputs, B, T, N in (("dense", 5, 7, 34), ("tokens", 70, 9, 130), ("features", 33, 4, 66)):
        B = few(B, T, N, activation)
        problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=inputs, D=11, gap=1e-6)
        check(problem, torch.float32, "cuda", algorithm="sequential")
        check(problem, torch.float32, "cuda", lengths=some_lengths(B, T, "any"), message_clip=0.3)
        there = on(problem.to(torch.float32))
        plain = run_scan(there, "cuda", algorithm="sequential")
        recomputed = run_scan(there, "cuda", algorithm="sequential", checkpoint_every=3)
        assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))
    if activation == "identity":
        check(scan_problem(op, B=3, T=50, N=34, activation=activation), torch.float32, "cuda", algorithm="chunked")


def test_more_sequences_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid holds 65535 blocks along y, which tiles of 32 sequences pass at 2.1 million of them."""
    need("dense_scan", "cuda", N=4)
    monkeypatch.setattr(_call, "overrides", {"path": 2})
    problem = float_problem("dense_scan", B=2_100_000, T=2, N=4)
    actual, expected = run_scan(problem, "cuda"), run_scan(problem, "reference")
    for name in ("hs", "grad_x", "grad_h0"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("N", [34, 140])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inputs", KINDS)
def test_chunks_of_time(op: str, inputs: str, N: int, backend: str) -> None:
    need(op, backend, N=N, K=N, algorithm="chunked")
    for T in (1, 2, 50, 401):
        problem = orthogonal(scan_problem(op, B=3, T=T, N=N, activation="identity", inputs=inputs))
        check(problem, torch.float32, backend, algorithm="chunked")


@pytest.mark.parametrize("size", [(50, 9, 64), (70, 20, 128), (7, 6, 250), (300, 5, 20)], ids=str)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_clip(op: str, activation: str, size: tuple[int, int, int], backend: str) -> None:
    B, T, N = size
    need(op, backend, N=N, K=N)
    kind, B = KINDS[(NAMES.index(activation) + N) % 3], few(B, T, N, activation)
    problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=kind, D=11, gap=1e-6)
    for order in ("any", "falling"):
        check(problem, torch.float32, backend, lengths=some_lengths(B, T, order), message_clip=0.3)
    check(problem, torch.float32, backend, lengths=some_lengths(B, T, "rising"), checkpoint_every=3)
    check(problem, torch.float32, backend, message_clip=0.3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("N", [34, 250])
def test_padding_and_checkpoints_change_no_bit(op: str, N: int, backend: str) -> None:
    """On the paths for small and for large N, and for chunks of time."""
    need(op, backend, N=N, K=N)
    lengths = some_lengths(9, 300, "any")

    def run(problem: ScanProblem, lengths: Tensor, **options: Any) -> dict[str, Tensor]:
        results = run_scan(on(problem), backend, lengths=lengths.cuda(), **options)
        return {name: tensor.cpu() for name, tensor in results.items()}

    for activation, clip in (("tanh", 0.5), ("oplu", 0.5), ("prelu", 0.0), ("identity", 0.0)):
        problem = scan_problem(op, B=9, T=300, N=N, activation=activation, inputs="tokens", gap=-1.0).to(torch.float32)
        check_padding(problem, lengths, run, (1, 64, 1000), message_clip=clip)


@pytest.mark.parametrize("op", OPS)
def test_short_sequences_take_no_more_time_than_they_need(op: str, backend: str) -> None:
    """A batch of short sequences in a long rectangle: most of its steps are not taken."""
    need(op, backend, N=64, K=64)
    # so long that the steps take most of the time, not the launches
    problem = float_problem(op, B=20, T=40_000, N=64)
    short, full = (torch.full((20,), steps, device="cuda") for steps in (1000, 40_000))

    def milliseconds(lengths: torch.Tensor) -> float:
        run_scan(problem, backend, lengths=lengths)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run_scan(problem, backend, lengths=lengths)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    assert milliseconds(short) < 0.6 * milliseconds(full)


def test_a_wrong_token_is_nan_in_its_own_sequence(backend: str) -> None:
    need("factored_scan", backend, N=32, K=32)
    problem = float_problem("factored_scan", B=3, T=5, N=32, inputs="tokens", D=7)
    problem.x[2, 1] = 7
    hs = run_scan(problem, backend)["hs"]
    assert hs[2:, 1].isnan().all()
    assert not hs[:, [0, 2]].isnan().any() and not hs[:2].isnan().any()


# Clusters of every group of sequences, with chunks of the map in registers, in shared memory, and read from L2.
CLUSTERS: list[tuple[int, dict[str, int]]] = [(300, {"cluster": 8, "group": group}) for group in (1, 2, 4, 8)]
CLUSTERS += [(300, {"cluster": 8, "group": 4, "shared_chunks": 0}), (600, {"cluster": 16, "group": 8})]
CLUSTERS += [(600, {"cluster": 16, "group": 8, "shared_chunks": 0})]


def need_clusters(op: str) -> None:
    need(op, "cuda", N=600, K=600)
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("no clusters of 16 blocks on this device")


@pytest.mark.parametrize(("N", "overrides"), CLUSTERS, ids=str)
@pytest.mark.parametrize("inputs", ["tokens", "dense"])
@pytest.mark.parametrize("op", OPS)
def test_clusters_of_every_group(
    op: str, inputs: str, N: int, overrides: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_clusters(op)
    monkeypatch.setattr(_call, "overrides", {"path": 1, **overrides})
    problem = scan_problem(op, B=21, T=9, N=N, inputs=inputs)
    check(problem, torch.float32, "cuda")
    check(problem, torch.float32, "cuda", lengths=some_lengths(21, 9, "any"), message_clip=0.3)


# Every shape of the kernel of low rank, with lanes that have no unit and blocks of every number of warps.
LOW_RANKS = [(129, 8), (511, 1), (1000, 8), (1030, 8), (2048, 3), (130, 9), (1024, 16), (40, 17), (511, 32), (250, 64)]


@pytest.mark.parametrize(("N", "K"), LOW_RANKS, ids=str)
@pytest.mark.parametrize("activation", ["tanh", "identity", "prelu", "oplu"])
def test_low_ranks(N: int, K: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("factored_scan", "cuda", N=N, K=K)
    monkeypatch.setattr(_call, "overrides", {"path": 3})
    N += N % 2 if activation == "oplu" else 0
    gap = 1e-6 if N < 300 else -1.0  # among more units some sit near a kink
    for B, T, inputs in ((5, 70, "tokens"), (300, 3, "dense")) if N < 300 else ((3, 9, "tokens"),):
        T, B = (T, B) if activation in ("tanh", "identity") else (min(T, 9), min(B, 5))
        problem = scan_problem("factored_scan", B=B, T=T, N=N, K=K, activation=activation, inputs=inputs, gap=gap)
        check(problem, torch.float32, "cuda")
        check(problem, torch.float32, "cuda", lengths=some_lengths(B, T, "any"), message_clip=0.3)
        check(with_resets(problem, gap=gap), torch.float32, "cuda", lengths=some_lengths(B, T, "any"))


# (N, K, planner overrides) of calls with a leak: K None for dense maps.
LEAKS: list[tuple[int, int | None, dict[str, int]]] = [(N, K, {"path": 3}) for N, K in LOW_RANKS]
LEAKS += [(N, N, {"path": 0}) for N in (33, 128, 160)] + [(N, None, {"path": 0}) for N in (33, 128, 192)]
LEAKS += [(N, K, {"path": 1, "group": group}) for N, K in ((300, 300), (300, None)) for group in (1, 2, 4, 8)]
LEAKS += [(130, 130, {"path": 2}), (130, None, {"path": 2})]


@pytest.mark.parametrize(("N", "K", "overrides"), LEAKS, ids=str)
@pytest.mark.parametrize("activation", ["tanh", "identity", "prelu"])
def test_leak(
    N: int, K: int | None, overrides: dict[str, int], activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = "dense_scan" if K is None else "factored_scan"
    need_clusters(op) if overrides["path"] == 1 else need(op, "cuda", N=N, K=N)
    monkeypatch.setattr(_call, "overrides", overrides)
    check_leak(op, N, K, activation, torch.float32, "cuda")


def check_leak(op: str, N: int, K: int | None, activation: str, dtype: torch.dtype, backend: str) -> None:
    """One leak and one for each unit, with lengths and a clip or resets."""
    for B, T, leak in ((5, 70, 1), (21, 9, N)):
        B, T = (B, T) if activation in ("tanh", "identity") else (3, 9)
        problem = scan_problem(op, B=B, T=T, N=N, K=K, activation=activation, inputs="tokens", leak=leak, gap=-1.0)
        lengths = some_lengths(B, T, "any")
        check(problem, dtype, backend, lengths=lengths, message_clip=0.3)
        check(with_resets(problem, gap=-1.0), dtype, backend, lengths=lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("N", [34, 64, 128])
@pytest.mark.parametrize("activation", ["tanh", "prelu", "oplu"])
@pytest.mark.parametrize("op", OPS)
def test_leak_of_triton(op: str, activation: str, N: int, dtype: torch.dtype) -> None:
    need(op, "triton", dtype, N=N, K=N)
    check_leak(op, N, None if op == "dense_scan" else N, activation, dtype, "triton")


@pytest.mark.parametrize("path", [0, 1, 2, 3])
def test_the_leak_in_windows_and_graphs(path: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What units carry passes from launch to launch of the backward: the bits are those of one launch."""
    need_clusters("factored_scan")
    monkeypatch.setattr(_call, "overrides", {"path": path})
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 20 * 100 * 64)
    problem = on(with_resets(scan_problem("factored_scan", B=20, T=300, N=100, K=16, leak=100)).to(torch.float32))
    results = []
    for overlapped in (1 << 30, 0):
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", overlapped)
        results.append(run_scan(problem, "cuda"))
    assert_same_bits(*results)
    assert_same_bits(results[0], run_scan(problem, "cuda", checkpoint_every=50), skip=("ckpt", "pre"))


@pytest.mark.parametrize("shared_chunks", [0, 8])
@pytest.mark.parametrize("N", [300, 600])
@pytest.mark.parametrize("op", OPS)
def test_precisions_of_clusters(op: str, N: int, shared_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As precise as asked, and on tensor cores, which are less precise than the FMA units."""
    need_clusters(op)
    problem = scan_problem(op, B=21, T=3, N=N, inputs="features")
    exact, there = run_scan(problem, "reference"), on(problem.to(torch.float32))

    def errors(precision: str, tensor: int) -> dict[str, float]:
        monkeypatch.setattr(_call, "overrides", {"path": 1, "tensor": tensor, "shared_chunks": shared_chunks})
        result = run_scan(there, "cuda", precision=precision)
        names = [name for name in ("hs", *problem.grad_names()) if result[name].numel()]
        return {name: float((result[name].cpu() - exact[name]).abs().max() / exact[name].abs().max()) for name in names}

    ieee = errors("ieee", 0)["hs"]
    for precision, bound in {"tf32": 1e-2, "bf16": 1e-1}.items():
        result = errors(precision, 1)
        assert max(result.values()) < bound, (precision, result)
        assert result["hs"] > 20 * ieee


@pytest.mark.parametrize("op", OPS)
def test_the_error_after_ten_thousand_steps(op: str, backend: str) -> None:
    """Linear and near-orthogonal, the hardest case for rounding: no more than twice plain torch in float32."""
    need(op, backend, N=64, K=64)
    problem = orthogonal(scan_problem(op, B=3, T=10000, N=64, activation="identity", inputs="tokens"))
    expected = run_scan(problem.to(torch.float32).to(torch.float64), "reference")["grad_bias"]
    for algorithm in ("sequential", "auto"):
        # The sum of all adjoints lies near an eigenvector of W with eigenvalue 1. Its error is one random number for
        # each order of the products, torch's as well: 3e-7 to 2e-5 of its size for six orders.
        actual = check(problem, torch.float32, backend, algorithm=algorithm, skip=("grad_bias",))["grad_bias"]
        assert (actual - expected).norm() < 1e-4 * expected.norm()
