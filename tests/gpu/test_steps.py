"""The CUDA graphs of single steps on a device: the same bits as the launches that they replace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from device_cases import OPS, float_problem, on, replayed
from helpers import GruProblem, ScanProblem, assert_same_bits, run_scan, scan_problem, some_lengths
from peephole_problem import PeepholeProblem
from torch import Tensor

from orthokern.cuda import _call, _library, _steps
from orthokern.ops.gru_scan import VARIANTS

if not torch.cuda.is_available() or _call.kernels is None:
    pytest.skip("no CUDA device, or a build without CUDA", allow_module_level=True)

KINDS = (*OPS, *VARIANTS, "peephole")
B, T, N = 5, 85, 250  # a window that is recorded, two replays, and a remainder


def problem_of(kind: str, *, seed: int = 0, B: int = B, T: int = T) -> Any:
    if kind in VARIANTS:
        return GruProblem.random(kind, T, B, N, seed=seed).map(lambda t: t.float().cuda())
    if kind == "peephole":
        return PeepholeProblem.random(T, B, N, seed=seed).map(lambda t: t.float().cuda())
    return float_problem(kind, B=B, T=T, N=N, activation="prelu", gap=-1.0, seed=seed)


def run(problem: Any, **options: Any) -> dict[str, Tensor]:
    if not isinstance(problem, ScanProblem):
        return problem.run("cuda", **options)
    return run_scan(problem, "cuda", **options)


@pytest.fixture(autouse=True)
def single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _steps._kept.cache_clear()
    monkeypatch.setattr(_call, "overrides", {"path": 2})


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param not in OPS:  # N above 128 has no other path, and the number of the path is another one
        monkeypatch.setattr(_call, "overrides", {})
    return str(request.param)


def without_graphs(problem: Any, **options: Any) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_steps, "_may_record", lambda device: False)
        return run(problem, **options)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_graphs_change_no_bit(kind: str) -> None:
    """With other inputs, lengths, weights that have changed in place, and other shapes in between."""
    lengths = some_lengths(B, T, "any").cuda()
    for seed, batch, steps in ((0, B, T), (1, B, T), (2, 9, T), (3, B, T + 70), (4, B, T)):
        problem = problem_of(kind, seed=seed, B=batch, T=steps)
        assert_same_bits(without_graphs(problem), run(problem))
        if batch == B and kind != "peephole":  # which has no lengths
            assert_same_bits(without_graphs(problem, lengths=lengths), run(problem, lengths=lengths))
        weights = problem.matrices[0] if kind in OPS else problem.w
        weights.mul_(0.5)
        assert_same_bits(without_graphs(problem), run(problem))
    kept = _steps._kept.cache_info()
    assert kept.currsize == 4 and kept.hits >= 10  # two shapes, forward and backward


@pytest.mark.parametrize("op", OPS)
def test_products_below_ieee(op: str) -> None:
    """As precise as asked for and no more, for both layouts of a map; torch's own setting is not touched."""
    assert _library._gemm() is not None
    rank = {"K": 90} if op == "factored_scan" else {}
    problem = scan_problem(op, B=B, T=T, N=N, gap=-1.0, **rank)
    exact, there = run_scan(problem, "reference"), on(problem.to(torch.float32))
    results = {precision: run(there, precision=precision) for precision in ("ieee", "tf32", "bf16")}
    for name in ("hs", "grad_x", "grad_h0", "grad_u" if rank else "grad_w"):
        ieee, tf32, bf16 = (
            (result[name].cpu() - exact[name]).abs().max() / exact[name].abs().max() for result in results.values()
        )
        assert 20 * ieee < tf32 < bf16 / 2 and tf32 < 1e-2 and bf16 < 1e-1, name


@pytest.mark.parametrize("op", OPS)
def test_leak_with_products_below_ieee(op: str) -> None:
    """The kernel of a forward step reads the state that the leak keeps: it is float32 for "bf16" too."""
    problem = scan_problem(op, B=B, T=T, N=N, leak=N, gap=-1.0)
    exact, there = run_scan(problem, "reference"), on(problem.to(torch.float32))
    tf32, bf16 = (run(there, precision=precision) for precision in ("tf32", "bf16"))
    assert torch.equal(tf32["hs"], bf16["hs"])
    for name in ("hs", "grad_x", "grad_h0", "grad_leak"):
        error = (bf16[name].cpu() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < (1e-2 if name == "hs" else 1e-1), name


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_in_a_graph_of_the_caller(kind: str) -> None:
    problem = problem_of(kind)
    other = torch.randn_like(problem.x)
    captured = replayed(lambda: run(problem), lambda: problem.x.copy_(other))
    assert_same_bits(run(problem), captured)


@pytest.mark.parametrize("one_stream", [False, True])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_at_the_same_time(kind: str, one_stream: bool) -> None:
    """On two streams or one, from one thread and from two."""
    problems = [problem_of(kind, seed=seed) for seed in (0, 1)]
    expected = [without_graphs(problem) for problem in problems]
    streams = [torch.cuda.Stream()] * 2 if one_stream else [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[], []]

    def work(number: int) -> None:
        with torch.cuda.stream(streams[number]):
            results[number].append(run(problems[number]))

    for _ in range(4):
        work(0)
        work(1)
    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for plain, of_stream in zip(expected, results, strict=True):
        assert len(of_stream) == 5
        for result in of_stream:
            assert_same_bits(plain, result)


def test_more_shapes_than_are_kept() -> None:
    """Graphs are dropped while they run."""
    for batch in (*range(1, 12), 1, 2):
        problem = problem_of("dense_scan", B=batch)
        assert_same_bits(without_graphs(problem), run(problem))
    assert _steps._kept.cache_info().currsize == _steps._GRAPHS
