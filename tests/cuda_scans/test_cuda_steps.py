"""Windows of single steps on the host harness: a stand-in for a CUDA graph launches the same steps again."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_cases import GRU_PATHS, OPS, check, check_gru, run
from helpers import GruProblem, assert_same_bits, run_scan, scan_problem, some_lengths, with_resets
from peephole_problem import PeepholeProblem, check_peephole
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import ScanArgs
from orthokern.cuda import _library, _steps
from orthokern.ops.gru_scan import VARIANTS

STEPS = 11  # a window that is recorded, replays, and a remainder


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Windows of 3 steps in graphs; the number of replays so far."""
    count = [0]

    def recorded(device: torch.device, function: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            count[0] += 1
            function()

        return replay

    monkeypatch.setattr(_steps, "_WINDOW", 3)
    monkeypatch.setattr(_steps, "_may_record", lambda device: True)
    monkeypatch.setattr(_steps, "_recorded", recorded)
    _steps._kept.cache_clear()
    yield count
    _steps._kept.cache_clear()


def scan_options(index: int) -> dict[str, Any]:
    lengths = {"lengths": some_lengths(5, STEPS, "any")}
    return ({}, {**lengths, "message_clip": 0.3}, {"checkpoint_every": 7}, lengths)[index % 4]


@pytest.mark.parametrize("inputs", ("dense", "features", "tokens"))
@pytest.mark.parametrize("op", OPS)
def test_scans_in_windows(op: str, inputs: str, override: Any, replays: Any) -> None:
    override("library")
    for index, activation in enumerate(("tanh", "prelu", "oplu", "modrelu", "identity")):
        options: dict[str, Any] = {"activation": activation, "inputs": inputs, "gap": 1e-6}
        problem = scan_problem(op, B=5, T=STEPS, N=34, K=9 if index % 2 else 34, **options)
        before = replays[0]
        check(problem, algorithm="sequential", **scan_options(index))
        assert replays[0] >= before + 2
    check(scan_problem(op, B=3, T=40, N=10, activation="identity", inputs=inputs), algorithm="chunked")
    check(with_resets(scan_problem(op, B=5, T=STEPS, N=34, inputs=inputs)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_in_windows(variant: str, override: Any, replays: Any) -> None:
    override(GRU_PATHS["library"])
    lengths = some_lengths(5, STEPS, "any")
    problem = GruProblem.random(variant, STEPS, 5, 33)
    for given, of_batch in ((problem, None), (problem, lengths), (problem.with_resets(state=True), lengths)):
        check_gru(given, of_batch)
    assert replays[0] == 3 * (2 + 3) + 1


@pytest.mark.parametrize("op", OPS)
def test_bf16_in_windows(op: str, override: Any, replays: Any) -> None:
    """As precise as asked, and no more; buffers of float32 in between."""
    override("library")
    problem = scan_problem(op, B=5, T=STEPS, N=34, K=9, gap=-1.0)
    exact, inexact = run_scan(problem, "reference"), problem.to(torch.float32)
    results = [run(inexact, precision=precision) for precision in ("bf16", "ieee", "bf16")]
    assert_same_bits(results[0], results[2])
    for name, expected in exact.items():
        if name == "hs" or (name.startswith("grad_") and expected.numel()):
            bf16, ieee = ((result[name] - expected).abs().max() / expected.abs().max() for result in results[:2])
            assert 20 * ieee < bf16 < 3e-2, name
    assert replays[0] == 2 * (2 + 2 + 3)


def test_peephole_in_windows(replays: Any) -> None:
    for seed, without in enumerate(({}, {"grad_hs": None}, {"grad_cs": None})):
        problem = PeepholeProblem.random(STEPS, 5, 33, seed=seed)
        check_peephole(dataclasses.replace(problem, **without), torch.float32, "cuda")
    assert replays[0] == 2 * (2 + 3 + 3)


@pytest.mark.parametrize("op", OPS)
def test_windows_change_no_bit(op: str, override: Any, replays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls with other tensors, weights and options of the same shapes, and of other shapes in between."""
    override("library")
    for seed in range(3):
        for B, options in ((4, {}), (2, {}), (4, {"lengths": some_lengths(4, STEPS, "any", seed=seed)})):
            problem = scan_problem(op, B=B, T=STEPS + seed, N=18, activation="prelu", seed=seed).to(torch.float32)
            in_windows = run(problem, **options)
            with monkeypatch.context() as plain:
                plain.setattr(_steps, "_may_record", lambda device: False)
                assert_same_bits(run(problem, **options), in_windows)
    assert _steps._kept.cache_info().currsize == 4  # two shapes, forward and backward


def test_buffers_in_use_by_another_thread(override: Any, replays: Any) -> None:
    """Its call has tensors of its own, and waits for nobody."""
    override("library")
    problem = scan_problem("dense_scan", B=4, T=STEPS, N=18).to(torch.float32)
    expected, results = run(problem), list[dict[str, Tensor]]()
    true_window = _steps.Steps.window

    def window(steps: _steps.Steps, *args: Any) -> None:
        if isinstance(steps, _steps._Kept) and not results:
            results.append({})
            thread = threading.Thread(target=lambda: results.append(run(problem)))
            thread.start()
            thread.join()
        true_window(steps, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_steps.Steps, "window", window)
        assert_same_bits(expected, run(problem))
    assert_same_bits(expected, results[1])


def test_windows_in_and_outside_of_inference_mode(override: Any, replays: Any) -> None:
    override("library")
    problem = scan_problem("dense_scan", B=4, T=STEPS, N=18).to(torch.float32)
    args = ScanArgs(problem.x, None, None, problem.matrices[0], problem.h0, None, None, None, "tanh")
    forward = dispatch.leaf("dense_scan", "cuda").dense_scan_fwd
    with torch.inference_mode():
        first = forward(args).hs
    assert torch.equal(first, forward(args).hs) and replays[0] == 2 + 3


def test_no_graph_in_the_memory_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    device, trees = torch.device("cuda", 1), types.SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: ("stream", of.index))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    managers = [None, types.SimpleNamespace(stream=("stream", 0)), types.SimpleNamespace(stream=("stream", 1))]
    for manager, expected in zip(managers, (True, True, False), strict=True):
        trees.get_manager = lambda index, create_if_none_exists, manager=manager: manager
        assert _steps._may_record(device) == expected

    def of_another_thread(index: int, create_if_none_exists: bool) -> None:
        raise AssertionError

    trees.get_manager = of_another_thread
    assert _steps._may_record(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arguments_of_the_library(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cublasGemmEx reads matrices with columns side by side from their addresses."""
    codes = {0: torch.float32, 14: torch.bfloat16}

    def at(address: int, code: int, stride: int, rows: int, columns: int) -> Tensor:
        count = stride * (columns - 1) + rows
        values = (ctypes.c_char * (count * codes[code].itemsize)).from_address(address)
        return torch.frombuffer(values, dtype=codes[code]).as_strided((rows, columns), (1, stride))

    def gemm(handle: int, trans_a: int, trans_b: int, m: int, n: int, k: int, *rest: Any) -> int:
        one, *a, b, b_code, ldb, old, c, c_code, ldc, compute, _ = rest
        of_a = at(*a, k, m).mT if trans_a else at(*a, m, k)
        of_b = at(b, b_code, ldb, n, k).mT if trans_b else at(b, b_code, ldb, k, n)
        assert (handle, compute, one._obj.value) == (7, {torch.float32: 77, torch.bfloat16: 68}[dtype], 1)
        out = at(c, c_code, ldc, m, n)
        out.copy_(of_a.float() @ of_b.float() + (out if old._obj.value else 0))
        return int(m == 1)

    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 7)
    multiply = functools.partial(_library._product_of_library, gemm)
    for left in (torch.randn(3, 5), torch.randn(5, 3).mT, torch.randn(1, 3).mT):
        for right in (torch.randn(5, 4), torch.randn(4, 5).mT, torch.randn(4, 1).mT):
            K, out = min(left.shape[1], len(right)), torch.full((3, 4), torch.nan)
            factors = left[:, :K].to(dtype), right[:K].to(dtype)
            expected = factors[0].float() @ factors[1].float()
            multiply(*factors, out)
            torch.testing.assert_close(out, expected)
            multiply(*factors, out, add=True)
            torch.testing.assert_close(out, 2 * expected)
    with pytest.raises(RuntimeError, match="returned 1"):
        multiply(left.to(dtype), torch.randn(1, 1).to(dtype), torch.empty(3, 1))


def test_an_error_leaves_the_buffers_usable(override: Any, replays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    override("library")
    problem = scan_problem("dense_scan", B=4, T=STEPS, N=18).to(torch.float32)
    expected = run(problem)

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_steps, "_store", fail)
        with pytest.raises(MemoryError):
            run(problem)
    assert_same_bits(expected, run(problem))


def test_large_maps_and_short_scans_have_no_graph(override: Any, replays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    override("library")
    run(scan_problem("dense_scan", B=4, T=5, N=18).to(torch.float32))
    monkeypatch.setattr(_steps, "_LARGEST_MAP", 17 * 18)
    run(scan_problem("dense_scan", B=4, T=STEPS, N=18).to(torch.float32))
    assert _steps._kept.cache_info().currsize == replays[0] == 0
