"""The steps of the CUDA scans as CUDA graphs (csrc/cuda/step_graph.h), on the host harness.

Kernel by kernel or a block of steps at a time: the same kernels in the same order, so the same bits. The harness has
the graph API under its own names (tests/cuda_host/graphs.h), copies what CUDA copies, and can hold work back and let
streams take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_host import build
from helpers import GruProblem, ScanProblem, assert_same_bits, run_scan, scan_problem
from torch import Tensor

from orthokern.cuda import _call, dense_scan, gru_scan
from orthokern.errors import InputError

KINDS = ("factored_scan", "dense_scan", "kanai", "torch")
BLOCK = 4  # steps of a graph here; a call of fewer than 4 of them makes none
STEPS = 23  # those of 5 graphs, and some left over
GRAPH_API = (
    "cudaStreamIsCapturing",
    "cudaGraphCreate",
    "cudaGraphAddKernelNode",
    "cudaGraphKernelNodeSetAttribute",
    "cudaThreadExchangeStreamCaptureMode",
    "cudaGraphInstantiateWithFlags",
    "cudaGraphExecKernelNodeSetParams",
    "cudaGraphLaunch",
)
AT_ONCE, HELD, CAPTURED = range(3)  # how the harness carries out work


class Streams:
    """The harness, with every call on the stream that its thread has chosen."""

    def __init__(self, module: Any) -> None:
        self.module, self.local = module, threading.local()

    def choose(self, stream: int) -> None:
        self.local.stream = stream

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if name.endswith("_plan"):  # plans have no stream
            return function
        return lambda arguments: function({**arguments, "stream": getattr(self.local, "stream", 0)})


@pytest.fixture(scope="session")
def module(request: pytest.FixtureRequest) -> Any:
    assert request.config.cache is not None
    return build.load(request.config.cache.mkdir("cuda_host"))


@pytest.fixture(autouse=True)
def harness(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The harness, without a graph; afterwards nothing is left of what a test made, and no error."""
    torch.set_num_threads(1)
    build.use(module, monkeypatch)
    monkeypatch.setattr(_call, "overrides", {})
    module.clear_graphs()
    module.api_calls()
    yield module
    module.hold(AT_ONCE)
    module.fail_call("", 0)
    module.set_schedule(*build.ORDERS["forward"])
    assert not module.set_capture_elsewhere(False)
    assert module.last_error() == 0
    module.clear_graphs()
    assert module.graphs_alive() == (0, 0)


@pytest.fixture
def streams(harness: Any, monkeypatch: pytest.MonkeyPatch) -> Streams:
    there = Streams(harness)
    monkeypatch.setattr(_call, "kernels", there)
    return there


def problem_of(kind: str, T: int = STEPS, B: int = 3, N: int = 9, seed: int = 0, **more: Any) -> Any:
    """Of one of KINDS, float32."""
    if kind in ("kanai", "torch"):
        return GruProblem.random(kind, T, B, N, seed=seed).map(Tensor.float)
    rank = {"K": N - 2} if kind == "factored_scan" else {}
    return scan_problem(kind, B=B, T=T, N=N, seed=seed, **rank, **more).to(torch.float32)


def run(problem: Any, graph_steps: int = BLOCK, **options: Any) -> dict[str, Tensor]:
    """Forward and backward, step by step; kernel by kernel where graph_steps is 0. Dense scans have clusters."""
    scan = isinstance(problem, ScanProblem)
    _call.overrides = {"path": 2 if scan else 1, "graph_steps": graph_steps}
    if scan and problem.op == "dense_scan":
        _call.overrides["cluster"] = 2
    return run_scan(problem, "cuda", **options) if scan else problem.run("cuda", **options)


def both(problem: Any, **options: Any) -> None:
    assert_same_bits(run(problem, 0, **options), run(problem, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_change_no_bit(kind: str, harness: Any) -> None:
    """At lengths that are and are not those of whole graphs, forward and backward, in any order of threads."""
    for index, T in enumerate((BLOCK * 4, BLOCK * 4 + 1, STEPS)):
        harness.set_schedule(*list(build.ORDERS.values())[index % 3])
        problem = problem_of(kind, T, B=34 if T == STEPS else 3)
        both(problem)
        both(problem, lengths=1 + torch.arange(problem.h0.shape[0]) * 7 % T)
        # the first step is launched by itself, but in the backward of the GRU
        in_graphs = [T - 1, T if kind in ("kanai", "torch") else T - 1]
        launches = sum(steps // BLOCK for steps in in_graphs if steps // BLOCK >= 4)
        assert harness.api_calls().get("cudaGraphLaunch", 0) == 2 * launches


@pytest.mark.parametrize("kind", ["factored_scan", "dense_scan"])
def test_graphs_with_everything_that_a_scan_takes(kind: str) -> None:
    """Gradients of a parameter, token ids, a clip, the states of checkpoints, padding."""
    for activation, inputs in (("prelu", "tokens"), ("modrelu", "features"), ("oplu", "dense")):
        problem = problem_of(kind, N=10, activation=activation, inputs=inputs, param_size="N")
        both(problem, message_clip=0.3, lengths=torch.tensor([STEPS, 1, 19]))
        both(problem, checkpoint_every=18)
    both(problem_of(kind, 300, activation="identity"), algorithm="chunked")  # chunks of 17 steps: a graph's key, too


def test_the_default_length_of_a_graph(harness: Any) -> None:
    for T, launches in ((128, 0), (134, 4)):
        problem = problem_of("dense_scan", T, B=1, N=2)
        assert_same_bits(run(problem, 0), run(problem, -1))
        assert harness.api_calls().get("cudaGraphLaunch", 0) == 2 * launches


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_many_calls(kind: str, harness: Any) -> None:
    """Other tensors, other sizes, other lengths: parameters of the same nodes."""
    run(problem_of(kind))
    assert harness.graphs_alive() == (2, 2)  # forward and backward
    harness.api_calls()
    for seed, (T, B, N) in enumerate(((STEPS, 1, 40), (20, 40, 3))):
        both(problem_of(kind, T, B, N, seed))
    calls = harness.api_calls()
    assert harness.graphs_alive() == (2, 2)
    assert calls["cudaGraphLaunch"] > 0 and calls["cudaGraphExecKernelNodeSetParams"] > 0
    assert not {"cudaGraphCreate", "cudaGraphAddKernelNode", "cudaGraphInstantiateWithFlags"} & set(calls)


def test_short_sequences_make_no_graph(harness: Any) -> None:
    for kind in KINDS:
        run(problem_of(kind, 4 * BLOCK - 1))
    assert not harness.api_calls()


def held_results(problem: Any, kept: list[Any]) -> dict[str, Tensor]:
    """The results that kernels write themselves; whatever else the call had on the stream goes to `kept`."""
    results = run(problem)
    kept.append(results)
    names = ("hs", "grad_x") if isinstance(problem, ScanProblem) else ("hs", "gates", "grad_x", "grad_h0")
    return {name: results[name] for name in names}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Holds the tensors of every native call, as torch's memory pools do for work that is under way."""
    alive: list[Any] = []
    true_call = _call.call

    def call(name: str, device: Any, sizes: Any, tensors: Any) -> None:
        alive.append(dict(tensors))
        true_call(name, device, sizes, tensors)

    monkeypatch.setattr(_call, "call", call)
    return alive


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_capture_of_the_callers(kind: str, harness: Any, kept: list[Any]) -> None:
    """The kernels are recorded one by one: no graph is launched, and a replay reads what is there then."""
    problem = problem_of(kind)
    expected = run(problem, 0)
    harness.hold(CAPTURED)
    captured = held_results(problem, kept)
    calls = harness.api_calls()
    assert not {"cudaGraphCreate", "cudaGraphLaunch", "cudaGraphExecKernelNodeSetParams"} & set(calls)
    for seed in range(2):
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        harness.run_held(seed)
        for name, tensor in captured.items():
            assert torch.equal(tensor, expected[name]), name
    other = problem_of(kind, seed=5)
    problem.x.copy_(other.x)
    harness.run_held(0)
    harness.hold(AT_ONCE)
    assert torch.equal(captured["hs"], run(problem, 0)["hs"]) and not torch.equal(captured["hs"], expected["hs"])


@pytest.mark.parametrize("kind", ["factored_scan", "kanai"])
def test_calls_that_are_under_way_at_one_time(kind: str, harness: Any, streams: Streams, kept: list[Any]) -> None:
    """Two on each of two streams, nothing of them done before the last is on its stream: no call sees another's."""
    problems = [problem_of(kind, T, seed=seed) for seed, T in enumerate((STEPS, 20, 18, STEPS))]
    expected = [run(problem, 0) for problem in problems]
    harness.hold(HELD)
    found = []
    for index, problem in enumerate(problems):
        streams.choose(1 + index % 2)
        found.append(held_results(problem, kept))
    assert harness.graphs_alive() == (4, 4)  # one for each direction and stream
    for seed in range(4):
        for results in found:
            for tensor in results.values():
                tensor.fill_(float("nan"))
        harness.run_held(seed)
        for results, right in zip(found, expected, strict=True):
            for name, tensor in results.items():
                assert torch.equal(tensor, right[name]), (name, seed)


def test_threads(harness: Any, streams: Streams) -> None:
    """Several at a time, two of them on one stream: each has a graph to itself while it works with it."""
    problems = [problem_of("factored_scan", T, seed=T) for T in (STEPS, 20, 18, STEPS)]
    expected = [run(problem, 0) for problem in problems]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            streams.choose(1 + index // 2)
            for _ in range(2):
                assert_same_bits(expected[index], run_scan(problems[index], "cuda"))
        except BaseException as error:
            failures.append(error)

    _call.overrides = {"path": 2, "graph_steps": BLOCK}
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert harness.api_calls()["cudaGraphLaunch"] == 2 * 2 * (5 + 4 + 4 + 5)


def test_a_capture_on_another_thread_is_not_disturbed(harness: Any) -> None:
    """Instantiation takes memory, which would spoil it: unless the thread says that it knows what it does."""
    problem = problem_of("dense_scan")
    expected = run(problem, 0)
    harness.set_capture_elsewhere(True)
    harness.api_calls()
    assert_same_bits(expected, run(problem))
    assert harness.api_calls()["cudaGraphLaunch"] > 0
    assert not harness.set_capture_elsewhere(False), "the capture was spoiled"


@pytest.mark.parametrize("name", GRAPH_API)
def test_whatever_the_graph_api_refuses_is_launched_plainly(name: str, harness: Any) -> None:
    """Its first call, one in the midst of things, the last: the same bits, and no error and no graph left over."""
    problem = problem_of("dense_scan")
    expected = run(problem, 0)

    def prepare(warm: bool) -> None:
        harness.clear_graphs()
        if warm:
            run(problem)
        harness.api_calls()

    reached = 0
    for warm in (False, True):  # without a graph in the cache, and with one
        prepare(warm)
        run(problem)
        count = harness.api_calls().get(name, 0)
        # every other call of this one puts the thread's mode back, which nothing can refuse
        for which in {1, count // 2, count} if name != "cudaThreadExchangeStreamCaptureMode" else {1}:
            if not 0 < which <= count:
                continue
            prepare(warm)
            harness.fail_call(name, which)
            assert_same_bits(expected, run(problem))
            assert harness.api_calls()[name] >= which and harness.last_error() == 0
            graphs, execs = harness.graphs_alive()
            assert graphs == execs == (2 if name == "cudaStreamIsCapturing" and warm else 1)
            assert_same_bits(expected, run(problem))  # and the next call makes graphs again
            assert harness.graphs_alive() == (2, 2)
            reached += 1
    assert reached


def test_the_cache_is_bounded(harness: Any, streams: Streams) -> None:
    problem = problem_of("dense_scan", 17, B=1, N=2)
    expected = run(problem, 0)
    for stream in range(40):
        streams.choose(1 + stream)
        results = run(problem)
    assert_same_bits(expected, results)
    assert harness.graphs_alive() == (64, 64)
    assert harness.clear_graphs() == 64


def test_graphs_can_be_turned_off(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, gru = problem_of("dense_scan", 134, B=1, N=2), problem_of("torch", 134, B=1, N=2)
    for setting, used in (("0", False), ("1", True)):
        monkeypatch.setenv("ORTHOKERN_CUDA_GRAPHS", setting)
        _call.overrides = {"path": 2}
        dense_scan.dense_scan_fwd(scan.args())
        assert ("cudaGraphLaunch" in harness.api_calls()) == used
        _call.overrides = {"path": 1}
        gru_scan.gru_scan_fwd(gru.args())
        assert ("cudaGraphLaunch" in harness.api_calls()) == used
    monkeypatch.setenv("ORTHOKERN_CUDA_GRAPHS", "off")
    with pytest.raises(InputError, match="ORTHOKERN_CUDA_GRAPHS is 'off'; accepted: 1 .* or 0"):
        run_scan(scan, "cuda")


def test_steps_of_a_graph_are_even(harness: Any) -> None:
    with pytest.raises(RuntimeError, match="graph_steps is 3, expected an even number or 0"):
        run(problem_of("dense_scan"), 3)
