"""The CUDA scans on the host harness: every path against the reference, at sizes that reach every branch.

The harness runs the kernel sources themselves on the CPU (tests/cuda_host). Planner overrides, which only tests set,
choose the path where the size would choose another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_host import build
from helpers import (
    FloatProducts,
    GruProblem,
    ScanProblem,
    assert_matches_reference,
    assert_same_bits,
    models_of,
    run_scan,
    scan_problem,
    some_lengths,
    with_poisoned_padding,
    with_resets,
)
from torch import Tensor

from orthokern import cpu, dispatch, nn
from orthokern._scan_contract import Map, ScanInputs, ScanOptions
from orthokern.cuda import _call, _scan, _sums, gru_scan
from orthokern.nn import _recurrent
from orthokern.ops.activations import NAMES
from orthokern.ops.gru_scan import VARIANTS

OPS = ("factored_scan", "dense_scan")
RESIDENT, CLUSTER, STEPS = 0, 1, 2
PATHS = {
    "resident": {"path": RESIDENT, "group": 1},
    "resident-pairs": {"path": RESIDENT, "group": 2},
    "resident-4": {"path": RESIDENT, "group": 4},
    "cluster-1": {"path": CLUSTER, "cluster": 2, "group": 1},
    "cluster-2": {"path": CLUSTER, "cluster": 2, "group": 2},
    "cluster-4": {"path": CLUSTER, "cluster": 4, "group": 4},
    "cluster-8": {"path": CLUSTER, "cluster": 2, "group": 8},
    "streamed": {"path": CLUSTER, "cluster": 4, "group": 4, "shared_chunks": 0},
    "steps": {"path": STEPS},
    "steps-2": {"path": STEPS, "cluster": 2},
    "steps-4": {"path": STEPS, "cluster": 4},
}
KINDS = ("dense", "features", "tokens")


@pytest.fixture(scope="session")
def module(request: pytest.FixtureRequest) -> Any:
    assert request.config.cache is not None
    return build.load(request.config.cache.mkdir("cuda_host"))


@pytest.fixture(autouse=True)
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = request.getfixturevalue("module")
    torch.set_num_threads(1)
    build.use(module, monkeypatch)
    yield module
    module.set_schedule(*build.ORDERS["forward"])
    module.set_chip()


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(path: str | dict[str, int]) -> None:
        monkeypatch.setattr(_call, "overrides", PATHS[path] if isinstance(path, str) else path)

    return choose


run = functools.partial(run_scan, backend="cuda")


def check(problem: ScanProblem, **options: Any) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem; returns it."""
    inexact = problem.to(torch.float32)
    untouched = inexact.map(torch.clone)
    exact = inexact.to(torch.float64)
    same = {key: value for key, value in options.items() if key in ("lengths", "message_clip")}
    expected, plain = (run_scan(p, "reference", **same) for p in (exact, inexact))
    actual = run(inexact, **options)
    for name in actual:
        if name == "ckpt" or (name == "pre" and options.get("checkpoint_every")):
            continue
        gradient = name.startswith("grad_")
        assert_matches_reference(actual[name], expected[name], plain[name], name=name, gradient=gradient)
    for before, after in zip(untouched.inputs(), inexact.inputs(), strict=True):
        assert (before is None) == (after is None) and (before is None or torch.equal(before, after))  # type: ignore[arg-type]
    return actual


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_parity_of_every_path(op: str, activation: str, path: str, override: Any) -> None:
    override(path)
    index = NAMES.index(activation) + list(PATHS).index(path)
    n = 34 if activation == "oplu" else 33
    rank = {"K": (n, 7)[index % 2]} if op == "factored_scan" else {}
    check(
        scan_problem(
            op,
            B=5,
            T=4,
            N=n,
            activation=activation,
            inputs=KINDS[index % 3],
            param_size="1N"[index % 2],
            gap=1e-6,
            **rank,
        )
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
def test_parity_with_resets(op: str, path: str, override: Any) -> None:
    """Every path, with lengths and without, and the same bits with checkpoints. Every width of the resident kernels."""
    override(path)
    widths = (9, 33, 100, 140) if path.startswith("resident") else (33,)
    kind = KINDS[list(PATHS).index(path) % 3]
    for index, (activation, N) in enumerate(itertools.product(("tanh", "prelu"), widths)):
        problem = scan_problem(op, B=5, T=9, N=N, activation=activation, inputs=kind)
        problem, lengths = with_resets(problem, state=index % 2 == 0), some_lengths(5, 9, "any") if index % 3 else None
        found = check(problem, lengths=lengths)
        again = run(problem.to(torch.float32), lengths=lengths, checkpoint_every=4)
        # features are multiplied by W_in in a product of torch over the steps of a segment
        rounded = tuple(name for name in found if name.startswith("grad_")) if kind == "features" else ()
        assert_same_bits(found, again, skip=("ckpt", "pre"), rounded=rounded)


@pytest.mark.parametrize(("activation", "N", "every"), [("tanh", 100, 0), ("prelu", 33, 4), ("modrelu", 9, 0)])
@pytest.mark.parametrize("inputs", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_several_models_in_one_launch(
    op: str, inputs: str, activation: str, N: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of a call for each model, bit by bit, with lengths and resets too; sequences of several blocks."""
    calls: list[str] = []
    true_call = _call.call
    monkeypatch.setattr(_call, "call", lambda name, *rest: (calls.append(name), true_call(name, *rest)))
    lengths = [some_lengths(5, 9, "any", seed) for seed in range(3)] if N == 33 else None
    problems = [
        scan_problem(op, B=5, T=9, N=N, D=6, activation=activation, inputs=inputs, param_size="N", seed=seed)
        for seed in range(3)
    ]
    if N < 100:
        problems = [with_resets(problem) for problem in problems]
    problems = [problem.to(torch.float32) for problem in problems]
    for overrides in ({}, {"path": RESIDENT, "group": 2}):
        monkeypatch.setattr(_call, "overrides", overrides)
        calls.clear()
        given = {} if lengths is None else {"lengths": torch.stack(lengths)}
        found = run(models_of(problems), checkpoint_every=every, **given)
        assert calls.count(op) == (2 if not every else 1 + 2 * 3)
        for r, problem in enumerate(problems):
            alone = run(problem, checkpoint_every=every, **({} if lengths is None else {"lengths": lengths[r]}))
            for name, expected in alone.items():
                behind_time = name in ("hs", "ckpt", "pre", "grad_x")
                actual = found[name]
                actual = actual if not actual.numel() else actual[:, r] if behind_time else actual[r]
                if behind_time:
                    assert torch.equal(actual, expected), name
                elif expected.numel():  # torch's products of batches, and partial sums of other blocks
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_both_directions_of_a_layer_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of two calls, in half as many launches."""
    calls: list[str] = []
    true_call = _call.call
    monkeypatch.setattr(_call, "call", lambda name, *rest: (calls.append(name), true_call(name, *rest)))
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "backend": "cuda"}
    ids = torch.randint(0, 5, (6, 3))
    true_both = _recurrent.both_directions
    for module, x, launches in (
        (nn.FactorizedRNN(5, 12, nonlinearity="modrelu", learned_h0=True, **options), torch.randn(6, 3, 5), (4, 8)),
        (nn.FactorizedRNN(5, 12, rank=4, checkpoint_every=4, **options), ids, (10, 20)),
        (nn.FactorizedRNN(5, 12, apply="composed", gain=0.5, **options), ids, (4, 8)),
        (nn.RNN(5, 9, bias=False, **options), torch.randn(6, 3, 5), (4, 8)),
        (nn.RNN(5, 200, **options), torch.randn(6, 3, 5), (8, 8)),  # beyond the registers of a block
        (nn.ExpRNN(5, 9, **options), torch.randn(6, 3, 5), (4, 8)),
        (nn.GRU(5, 9, bias=True, learned_h0=True, **options), torch.randn(6, 3, 5), (4, 8)),
        (nn.GRU(5, 9, variant="torch", **options), ids, (4, 8)),
        (nn.GRU(5, 140, **options), ids, (8, 8)),
    ):
        results = []
        for both in (true_both, lambda *_: None):
            monkeypatch.setattr(_recurrent, "both_directions", both)
            calls.clear()
            output, last = module(x)
            cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            grads = torch.autograd.grad([(output * cotangent).sum() + last.square().sum()], list(module.parameters()))
            results.append((len([name for name in calls if name in (*OPS, "gru_scan")]), output, last, *grads))
        (once, *found), (twice, *expected) = results
        assert (once, twice) == launches
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_models_that_one_launch_does_not_serve(override: Any) -> None:
    """Chunks of time, and maps beyond the registers of a block: one model after the other."""
    for N, T, activation in ((200, 2, "tanh"), (9, 300, "identity")):
        problems = [scan_problem("dense_scan", B=3, T=T, N=N, activation=activation, seed=seed) for seed in range(2)]
        problems = [problem.to(torch.float32) for problem in problems]
        found = run(models_of(problems))
        for r, problem in enumerate(problems):
            assert torch.equal(found["hs"][:, r], run(problem)["hs"])


def test_resets_are_for_sequential_scans() -> None:
    identity = with_resets(scan_problem("dense_scan", B=3, T=300, N=8, activation="identity"))
    options = ScanOptions("identity", resets=identity.resets)
    assert _scan.chunk_length(dataclasses.replace(options, resets=None), 300, 3, 8) > 0
    assert _scan.chunk_length(options, 300, 3, 8) == 0
    check(identity)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_forward_of_one_backward_of_the_other(op: str, activation: str) -> None:
    """What a forward saves is the same whoever ran it, with checkpoints and without."""
    problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
    expected, plain = run_scan(problem, "reference"), run_scan(problem.to(torch.float32), "reference")
    others = ("reference", "cpu") if cpu.AVAILABLE else ("reference",)
    for other, every in itertools.product(others, (0, 3)):
        for fwd, bwd in (("cuda", other), (other, "cuda")):
            actual = run_scan(problem.to(torch.float32), fwd, bwd_backend=bwd, checkpoint_every=every)
            for name in problem.grad_names():
                assert_matches_reference(
                    actual[name],
                    expected[name],
                    plain[name],
                    name=f"{fwd}, {bwd}: {name}",
                    gradient=name != "grad_norm",
                )


@pytest.mark.parametrize("inputs", KINDS)
@pytest.mark.parametrize("N", [1, 2, 16, 65, 128, 130])
@pytest.mark.parametrize("op", OPS)
def test_parity_of_the_path_that_is_chosen(op: str, N: int, inputs: str) -> None:
    for steps in (1, 20):  # more steps than inputs are fetched ahead, and than squares are summed at a time
        check(scan_problem(op, B=3, T=steps, N=N, inputs=inputs))


@pytest.mark.parametrize(
    ("N", "K", "overrides"),
    [
        (300, 290, {"cluster": 8, "group": 8, "shared_chunks": 0}),
        (300, 300, {"cluster": 8, "group": 4, "shared_chunks": 2}),
        (513, 513, {"cluster": 16, "group": 8, "shared_chunks": 1}),
        (600, 130, {"cluster": 16, "group": 1}),
        (250, 250, {}),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_parity_of_large_clusters(op: str, N: int, K: int, overrides: dict[str, int], override: Any) -> None:
    override({"path": CLUSTER, **overrides})
    check(scan_problem(op, B=3, T=3, N=N, **({"K": K} if op == "factored_scan" else {})))


# The largest relative error of a state or gradient: the unit roundoff of the factors, with room for a few steps.
PRECISION_ERRORS = {"3xtf32": 2e-6, "tf32": 3e-3, "bf16": 3e-2}


@pytest.mark.parametrize(("activation", "inputs"), [("tanh", "tokens"), ("oplu", "dense"), ("identity", "features")])
@pytest.mark.parametrize("op", OPS)
def test_precisions_of_single_steps(op: str, activation: str, inputs: str, override: Any, harness: Any) -> None:
    """On tensor cores: tiles with edges; as precise as asked, and no more; the same bits in any order of threads."""
    override("steps-2" if inputs == "tokens" else "steps")
    rank = {"K": 37} if op == "factored_scan" else {}
    problem = scan_problem(op, B=35, T=3, N=70, activation=activation, inputs=inputs, gap=-1.0, **rank)
    exact, inexact = run_scan(problem, "reference"), problem.to(torch.float32)
    ieee = run(inexact)
    for precision, bound in PRECISION_ERRORS.items():
        harness.set_schedule(*build.ORDERS["forward"])
        actual = run(inexact, precision=precision)
        for name, expected in exact.items():
            if name == "hs" or (activation != "oplu" and name.startswith("grad_") and expected.numel()):  # it has kinks
                error = (actual[name] - expected).abs().max() / expected.abs().max()
                assert error < bound, f"{precision}: {name}"
        error = (actual["hs"] - exact["hs"]).abs().max()
        assert precision == "3xtf32" or error > 20 * (ieee["hs"] - exact["hs"]).abs().max()
        harness.set_schedule(*build.ORDERS["reverse"])
        assert_same_bits(actual, run(inexact, precision=precision))
        again = run(inexact, precision=precision, checkpoint_every=2)
        assert_same_bits(actual, again, skip=("ckpt", "pre"))
    if activation == "identity":
        assert (run(inexact, precision="tf32", algorithm="chunked")["hs"] - exact["hs"]).abs().max() < 1e-2


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
    rank = {"K": K} if op == "factored_scan" else {}
    problem = scan_problem(op, B=9, T=3, N=N, inputs=inputs, gap=-1.0, **rank)
    exact, inexact = run_scan(problem, "reference"), problem.to(torch.float32)
    actual = run(inexact, precision=precision)
    for name, expected in exact.items():
        if name == "hs" or (name.startswith("grad_") and expected.numel()):
            error = (actual[name] - expected).abs().max() / expected.abs().max()
            assert error < PRECISION_ERRORS[precision], name
    error = (actual["hs"] - exact["hs"]).abs().max()
    assert precision == "3xtf32" or error > 20 * (run(inexact)["hs"] - exact["hs"]).abs().max()
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
    actual = run(problem.to(torch.float32), precision="3xtf32", **options)
    for name in ("hs", "grad_h0", "grad_act_param", "grad_norm"):
        assert (actual[name] - exact[name]).abs().max() < 1e-5 * exact[name].abs().max(), name
    pairs = scan_problem("dense_scan", B=9, T=4, N=38, activation="oplu", gap=-1.0)
    exact, actual = run_scan(pairs, "reference"), run(pairs.to(torch.float32), precision="3xtf32")
    assert (actual["hs"] - exact["hs"]).abs().max() < 2e-6 * exact["hs"].abs().max()


@pytest.mark.parametrize("precision", PRECISION_ERRORS)
@pytest.mark.parametrize("op", OPS)
def test_a_plan_is_never_less_precise_than_asked(op: str, precision: str, harness: Any) -> None:
    """Which products a size gets: tensor cores where the planner's model says that they are faster, else IEEE."""
    numbers = _scan._PRECISIONS

    def planned(N: int, sequences: int, asked: str, **overrides: int) -> dict[str, int]:
        sizes = {
            "B": sequences, "N": N, "K": N if op == "factored_scan" else 0, "sequences": sequences,
            "of_model": sequences, "precision": numbers[asked], "activation": 1, "act_param_stride": 0, "backward": 0,
            "T": 1, "chunk": 1, "tokens": 0, "device": 0, "cut": 0,
        }  # fmt: skip
        return dict(getattr(harness, f"{op}_plan")({**sizes, "overrides": overrides}))

    for N in (64, 128, 250, 500, 1000, 1100):
        for sequences in (1, 8, 50, 500):
            plan = planned(N, sequences, precision)
            assert plan["precision"] in (numbers["ieee"], numbers[precision])
            assert planned(N, sequences, "ieee")["precision"] == numbers["ieee"]
            assert planned(N, sequences, precision, path=CLUSTER, tensor=0)["precision"] == 0 if N == 500 else True
            assert plan["path"] != RESIDENT or plan["precision"] == numbers["ieee"]
            assert plan["path"] != STEPS or plan["precision"] == numbers[precision]
    found = planned(1000, 50, precision)
    assert (found["path"], found["group"], found["precision"]) == (CLUSTER, 8, numbers[precision])
    assert planned(250, 1, precision)["precision"] == numbers["ieee"]  # one sequence leaves 7 columns of 8 empty


@pytest.mark.parametrize("path", ["resident", "cluster-2"])
def test_other_forms_are_never_less_than_ieee(path: str, override: Any) -> None:
    override(path)
    problem = scan_problem("factored_scan", B=5, T=4, N=33).to(torch.float32)
    assert_same_bits(run(problem), run(problem, precision="bf16"))


@pytest.mark.parametrize("path", [{"path": STEPS}, {"path": CLUSTER, "cluster": 16, "tensor": 1}])
@pytest.mark.parametrize("precision", ["3xtf32", "tf32", "bf16"])
def test_long_sums_on_tensor_cores_do_not_drift(precision: str, path: dict[str, int], override: Any) -> None:
    """Tensor cores cut their sums. In one accumulator, positive terms would come out too small, and ever more so."""
    override(path)
    generator = torch.Generator().manual_seed(0)
    n = 1000
    w = torch.rand(n, n, generator=generator).bfloat16().float()  # exact in every precision
    h0, x = torch.rand(1, n, generator=generator).bfloat16().float(), torch.zeros(1, 1, n)
    forward = dispatch.leaf("dense_scan", "cuda").dense_scan_fwd
    options = ScanOptions("identity", precision=precision, algorithm="sequential")
    found = forward(Map(None, None, w), ScanInputs(x, h0), options).hs
    exact = w.double() @ h0[0].double()
    bias = float(((found[0, 0].double() - exact) / exact).mean())
    assert abs(bias) < 1.5e-7


@pytest.mark.parametrize("path", [{"path": STEPS}, {"path": CLUSTER, "cluster": 2, "tensor": 1}])
def test_infinity_in_three_products(path: dict[str, int], override: Any) -> None:
    """inf as a sum of two TF32 numbers is inf + 0, not inf + NaN."""
    override(path)
    generator = torch.Generator().manual_seed(0)
    w, h0 = torch.randn(40, 40, generator=generator), torch.randn(3, 40, generator=generator)
    w[5, 7], h0[1, 30] = float("inf"), -float("inf")
    forward = dispatch.leaf("dense_scan", "cuda").dense_scan_fwd
    found, expected = (
        forward(Map(None, None, w), ScanInputs(torch.zeros(1, 3, 40), h0), ScanOptions("identity", precision=p)).hs
        for p in ("3xtf32", "ieee")
    )
    assert torch.equal(found.isnan(), expected.isnan()) and bool(expected.isinf().any())
    assert torch.equal(found[expected.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize(("K", "size", "group"), [(1, 4, 2), (3, 8, 1), (13, 8, 4)])
def test_ranks_too_small_for_every_block_of_a_cluster(
    K: int, size: int, group: int, override: Any, harness: Any
) -> None:
    """Stores to other blocks keep no order: one that is late must not be taken for one of the next step."""
    override({"path": CLUSTER, "cluster": size, "group": group})
    problem = scan_problem("factored_scan", B=group, T=12, N=41, K=K)
    for seed in range(3):
        harness.set_schedule(2, seed)
        check(problem)


def test_a_plan_is_made_once_for_a_size(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner asks the driver what fits, which costs more than a launch."""
    asked = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name.endswith("_plan"):
                asked.append(name)
            return getattr(harness, name)

    monkeypatch.setattr(_call, "kernels", Counting())
    problem = scan_problem("factored_scan", B=3, T=4, N=33).to(torch.float32)
    first = run(problem)
    assert asked == ["factored_scan_plan"] * 2  # forward and backward
    assert_same_bits(first, run(problem))
    assert len(asked) == 2
    run(scan_problem("factored_scan", B=4, T=4, N=33).to(torch.float32))
    assert len(asked) == 4
    harness.set_chip(multiprocessors=2)
    run(problem)
    assert len(asked) == 6


@pytest.mark.parametrize("path", ["resident", "cluster-4", "steps"])
@pytest.mark.parametrize("op", OPS)
def test_products_beside_the_scan_change_no_bit(
    op: str, path: str, override: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan stops after each window, whose products then have a stream of their own while it goes on."""
    override(path)
    monkeypatch.setattr(_scan, "_WINDOW_ELEMENTS", 3 * 20 * 6)  # windows of 6 steps
    joined, true_join = [], _scan._Beside.join
    monkeypatch.setattr(_scan._Beside, "join", lambda self: (joined.append(self), true_join(self))[1])
    problem = scan_problem(op, B=3, T=20, N=20, activation="prelu", inputs="features").to(torch.float32)
    for options in ({}, {"lengths": torch.tensor([20, 7, 13]), "message_clip": 0.3}):
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 7)
        plain = run(problem, **options)
        assert not joined
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 6)
        assert_same_bits(plain, run(problem, **options))
        assert len(joined) == (path != "steps")
        joined.clear()


def test_every_stream_has_its_own_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beside a stream that another thread captures must not be waited for outside of the capture."""

    class Stream:
        made = 0

        def __init__(self, device: Any = None) -> None:
            Stream.made += 1
            self.cuda_stream, self.awaited = Stream.made, list[Any]()

        def wait_stream(self, other: Any) -> None:
            self.awaited.append(other)

    captured, eager = Stream(), Stream()
    monkeypatch.setattr(_scan, "_side_stream", functools.lru_cache(_scan._side_stream.__wrapped__))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    beside = {}
    for main in (captured, eager, captured, eager):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, main=main: main)
        beside[main] = _scan._Beside(torch.device("cuda", 0))
        with beside[main]:
            pass
    assert Stream.made == 4  # two each, for all calls
    assert beside[captured].stream.awaited == [captured] * 2 and beside[eager].stream.awaited == [eager] * 2
    beside[eager].join()
    assert eager.awaited == [beside[eager].stream] and not captured.awaited


def test_products_of_the_gradients_keep_the_gpu_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many partial sums whatever the number of rows; the first window of B = 50, N = 128 has 64 750 = 2 * 32 375."""
    seen, true_bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: (seen.append(a.shape[0]), true_bmm(a, b))[1])
    generator = torch.Generator().manual_seed(0)
    for rows, N, parts in ((64_750, 128, 64), (64_751, 128, 64), (1024, 8, 4), (511, 8, 1), (0, 8, 1)):
        left, right = (torch.randn(rows, N, generator=generator) for _ in range(2))
        total = torch.ones(N, N)
        _sums.add_product(total, left, right)
        torch.testing.assert_close(total.double(), 1 + left.double().mT @ right.double(), rtol=1e-4, atol=1e-2)
        assert (seen.pop() if parts > 1 else 1) == parts and not seen


@pytest.mark.parametrize("path", ["resident", "resident-4", "cluster-1", "cluster-4", "cluster-8", "streamed", "steps"])
@pytest.mark.parametrize("op", OPS)
def test_no_schedule_changes_a_bit(op: str, path: str, override: Any, harness: Any) -> None:
    """What depends on the order in which threads run is a race."""
    override(path)
    problem = scan_problem(op, B=9, T=5, N=150 if path == "streamed" else 34, activation="prelu", inputs="tokens").to(
        torch.float32
    )
    results = []
    for order in build.ORDERS.values():
        harness.set_schedule(*order)
        results.append(run(problem))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("op", OPS)
def test_group_and_cluster_change_no_bit_of_a_sequence(op: str, override: Any) -> None:
    problem = scan_problem(op, B=5, T=6, N=40).to(torch.float32)
    for paths in (("resident", "resident-pairs", "resident-4"), ("cluster-1", "cluster-2", "cluster-8", "streamed")):
        states = []
        for path in paths:
            override(path)
            states.append(run(problem)["hs"])
        assert all(torch.equal(states[0], other) for other in states[1:])


@pytest.mark.parametrize("activation", NAMES)
def test_parity_of_factored_maps_above_128_units(activation: str, override: Any) -> None:
    """Tiles of 5 rows, whose sums leave some lanes with nothing of their own, and one sequence at a time."""
    index = NAMES.index(activation)
    sizes = [(160, 160), (129, 127), (144, 144), (153, 9), (159, 158), (137, 137), (150, 149)]
    N, K = sizes[index % len(sizes)]
    group = 1 + index % 3
    override({"path": RESIDENT, "group": group})
    T, inputs = (4, 19)[index % 2], KINDS[index % 3]
    problem = scan_problem("factored_scan", B=3, T=T, N=N, K=K, activation=activation, inputs=inputs, gap=1e-6)
    check(problem)
    check(problem, lengths=torch.tensor([1, T, T - 2]), message_clip=0.3)


def test_bits_of_factored_maps_above_128_units(override: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit depends on how many sequences a block has, on the order of its threads, or on checkpoints."""
    monkeypatch.setattr(_scan, "_WINDOW_ELEMENTS", 4 * 140 * 3)  # windows of 3 steps
    problem = scan_problem("factored_scan", B=4, T=7, N=140, activation="prelu", inputs="tokens").to(torch.float32)
    results = []
    for (order, schedule), group, every in zip(build.ORDERS.items(), (1, 3, 3), (0, 0, 2), strict=True):
        override({"path": RESIDENT, "group": group})
        harness.set_schedule(*schedule)
        results.append(run(problem, checkpoint_every=every))
        for name in ("hs", "grad_x") if order == "reverse" else ():
            assert torch.equal(results[0][name], results[1][name]), name
    assert_same_bits(results[1], results[2], skip=("ckpt", "pre"))
    linear = scan_problem("factored_scan", B=2, T=10, N=140, activation="identity")
    check(linear, algorithm="chunked")


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("inputs", KINDS)
def test_checkpoints_give_the_same_bits(activation: str, inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "_WINDOW_ELEMENTS", 5 * 17 * 6)  # windows of 5 or 6 steps
    for op in OPS:
        problem = scan_problem(
            op, B=5, T=23, N=18 if activation == "oplu" else 17, activation=activation, inputs=inputs
        )
        plain = check(problem)
        for every in (1, 2, 7, 16, 100):
            recomputed = run(problem.to(torch.float32), checkpoint_every=every)
            assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))
            before = torch.cat([problem.h0.float().unsqueeze(0), plain["hs"]])[0:23:every]
            assert torch.equal(recomputed["ckpt"], before)


@pytest.mark.parametrize("T", [2, 5, 16, 17, 50])
@pytest.mark.parametrize("inputs", KINDS)
@pytest.mark.parametrize("path", ["resident", "resident-4", "steps"])
@pytest.mark.parametrize("op", OPS)
def test_chunks_of_time(op: str, path: str, inputs: str, T: int, override: Any) -> None:
    override(path)
    problem = scan_problem(op, B=3, T=T, N=17, activation="identity", inputs=inputs)
    plain = check(problem, algorithm="chunked")
    recomputed = run(problem.to(torch.float32), algorithm="chunked", checkpoint_every=4)
    assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))


def test_chunks_of_time_with_a_cluster(override: Any) -> None:
    override({"path": CLUSTER, "cluster": 4, "group": 4})
    check(scan_problem("factored_scan", B=3, T=11, N=50, activation="identity"), algorithm="chunked")


def test_auto_takes_chunks_of_a_long_sequence() -> None:
    problem = scan_problem("factored_scan", B=2, T=260, N=9, activation="identity", inputs="tokens")
    actual = check(problem)
    assert_same_bits(actual, run(problem.to(torch.float32), algorithm="chunked"))


def test_chunk_length_comes_from_sizes_alone() -> None:
    def length(T: int, B: int, N: int, activation: str = "identity", algorithm: str = "auto", clip: float = 0) -> int:
        return _scan.chunk_length(ScanOptions(activation, algorithm=algorithm, message_clip=clip), T, B, N)

    assert length(10_000, 50, 128) == 100
    assert length(1_000_000, 50, 128) == 128
    assert length(10_000, 50, 128, "tanh") == 0
    assert length(10_000, 50, 128, algorithm="sequential") == 0
    assert length(100, 50, 128) == 0  # too short to pay
    assert length(10_000, 1000, 128) == 0  # the sequences fill the GPU
    assert length(100, 1000, 128, algorithm="chunked") == 10
    assert length(10_000, 50, 128, clip=0.1) == 0  # not linear


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
def test_a_token_out_of_range_is_nan_in_its_sequence_alone(op: str, path: str, override: Any) -> None:
    override(path)
    problem = scan_problem(op, B=5, T=12, N=20, inputs="tokens", D=6).to(torch.float32)
    # the op checks the ids of CPU tensors, and nobody those of CUDA tensors
    forward = getattr(dispatch.leaf(op, "cuda"), f"{op}_fwd")
    expected = forward(*problem.leaf_arguments()).hs
    problem.x[3, 1], problem.x[10, 4] = 6, -1
    actual = forward(*problem.leaf_arguments()).hs
    good = torch.ones(12, 5, dtype=torch.bool)
    good[3:, 1] = good[10:, 4] = False
    assert torch.equal(actual[good], expected[good])
    assert bool(actual[~good].isnan().all())
    backward = getattr(dispatch.leaf(op, "cuda"), f"{op}_bwd")
    backward(*problem.leaf_arguments(), problem.grad_hs, actual, None)  # reads and writes nothing out of bounds


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_clip_on_every_path(op: str, activation: str, path: str, override: Any) -> None:
    override(path)
    index = NAMES.index(activation) + list(PATHS).index(path)
    n = 34 if activation == "oplu" else 33
    rank = {"K": (n, 7)[index % 2]} if op == "factored_scan" else {}
    B, T = 5, (4, 19)[index % 2]  # more steps than inputs are fetched ahead, and than squares are summed at a time
    problem = scan_problem(
        op, B=B, T=T, N=n, activation=activation, inputs=KINDS[index % 3], param_size="N1"[index % 2], gap=1e-6, **rank
    )
    lengths = some_lengths(B, T, ("any", "rising", "falling")[index % 3], seed=index)
    lengths -= (lengths == T).long() * (index % 4 == 0)  # nobody has the last step
    check(problem, lengths=lengths, message_clip=(0.0, 0.3)[index % 2])
    check(problem, message_clip=0.3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
def test_padding_plays_no_part(op: str, path: str, override: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its contents, not the checkpoints: the same bits, and zeros there."""
    override(path)
    monkeypatch.setattr(_scan, "_WINDOW_ELEMENTS", 5 * 18 * 6)  # windows of 6 steps
    B, T, inputs = 5, 11, KINDS[(list(PATHS).index(path) + OPS.index(op)) % 3]
    activation = {"dense": "tanh", "features": "prelu", "tokens": "oplu"}[inputs]
    problem = scan_problem(op, B=B, T=T, N=18, activation=activation, inputs=inputs, D=70, gap=-1.0).to(torch.float32)
    lengths = torch.tensor([4, 1, 10, 3, 10])
    padding = torch.arange(T).unsqueeze(1) >= lengths
    ragged: dict[str, Any] = {"lengths": lengths, "message_clip": 0.5}
    first = run(problem, **ragged)
    for name in ("hs", "pre", "grad_x"):
        assert not first[name].numel() or not first[name][padding].any(), name
    poisoned = with_poisoned_padding(problem, lengths)
    assert_same_bits(first, run(poisoned, **ragged))
    again = run(poisoned, checkpoint_every=4, **ragged)
    assert_same_bits(first, again, skip=("ckpt", "pre"))
    assert torch.equal(again["ckpt"], torch.cat([problem.h0.unsqueeze(0), first["hs"]])[0:T:4])
    full = run(problem, lengths=torch.full((B,), T), message_clip=0.5)
    assert_same_bits(full, run(problem, message_clip=0.5))


@pytest.mark.parametrize("path", ["resident", "resident-4", "cluster-2", "steps"])
@pytest.mark.parametrize("op", OPS)
def test_lengths_in_chunks_of_time(op: str, path: str, override: Any) -> None:
    override(path)
    for T, lengths, inputs in ((17, [17, 3, 9], "dense"), (16, [2, 5, 12], "tokens"), (5, [3, 5, 1], "features")):
        problem = scan_problem(op, B=3, T=T, N=17, activation="identity", inputs=inputs)
        ragged = torch.tensor(lengths)
        plain = check(problem, algorithm="chunked", lengths=ragged)
        poisoned = with_poisoned_padding(problem.to(torch.float32), ragged)
        assert_same_bits(plain, run(poisoned, algorithm="chunked", lengths=ragged))
        recomputed = run(poisoned, algorithm="chunked", lengths=ragged, checkpoint_every=4)
        assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
def test_a_length_out_of_range_counts_as_the_nearest_one(op: str, path: str, override: Any) -> None:
    """Nobody checks the lengths of a GPU's tensors: what is wrong must not be read or written with."""
    override(path)
    problem = scan_problem(op, B=5, T=4, N=17, activation="identity", inputs="tokens").to(torch.float32)
    wrong = torch.tensor([-(2**63), 2**40 + 1, 2**63 - 1, -1, 2])
    leaf = dispatch.leaf(op, "cuda")  # the ops check the CPU's
    fwd, bwd = (getattr(leaf, f"{op}_{direction}") for direction in ("fwd", "bwd"))
    for options in ({}, {"checkpoint_every": 3}, {"algorithm": "chunked"}):
        results = []
        for lengths in (wrong, wrong.clamp(0, 4)):
            given = problem.leaf_arguments(lengths=lengths, **options)
            hs, ckpt, pre = fwd(*given)
            results.append([hs, ckpt, *bwd(*given, problem.grad_hs, hs if ckpt is None else ckpt, pre)])
        for one, other in zip(*results, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_a_clip_leaves_a_nan() -> None:
    """As torch.clamp does: a NaN in the gradient has to be seen."""
    problem = scan_problem("dense_scan", B=3, T=4, N=9).to(torch.float32)
    problem.grad_hs[2, 1, 5] = float("nan")
    grad = run(problem, message_clip=0.1)["grad_x"]
    assert grad[:3, 1].isnan().any(-1).all() and not grad[:, [0, 2]].isnan().any()


@pytest.mark.parametrize("op", OPS)
def test_no_schedule_changes_a_bit_with_lengths(op: str, override: Any, harness: Any) -> None:
    for path in ("resident-4", "cluster-4", "steps"):
        override(path)
        problem = scan_problem(op, B=9, T=5, N=34, activation="prelu", inputs="tokens").to(torch.float32)
        options: dict[str, Any] = {"lengths": torch.tensor([1, 2, 3, 4, 4, 3, 2, 1, 1]), "message_clip": 0.3}
        results = []
        for order in build.ORDERS.values():
            harness.set_schedule(*order)
            results.append(run(problem, **options))
        assert_same_bits(results[0], results[1])
        assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("D", [5, 70])
def test_gradient_of_the_table(D: int) -> None:
    """Few ids: a product with their one-hot form. Many: sorted."""
    check(scan_problem("dense_scan", B=4, T=9, N=12, inputs="tokens", D=D))


@pytest.mark.parametrize("op", OPS)
def test_only_what_is_needed(op: str) -> None:
    problem = scan_problem(op, B=3, T=5, N=17, activation="prelu", inputs="features").to(torch.float32)
    everything = run(problem)
    for need_x, need_params in ((False, True), (True, False), (False, False)):
        some = run(problem, need_x=need_x, need_params=need_params)
        for name, tensor in some.items():
            wanted = {"grad_x": need_x, "grad_h0": True, "grad_norm": True, "hs": True, "pre": True}.get(
                name, need_params
            )
            if name != "ckpt":
                assert torch.equal(tensor, everything[name]) if wanted else not tensor.numel(), name


def test_many_sequences(harness: Any, override: Any) -> None:
    """A grid holds 65535 blocks along y and z, and any number along x: here 2, and 4 tiles of sequences.

    In earnest that is 2 097 120 sequences, which chunks of time reach.
    """
    harness.set_chip(largest_grid_yz=2)
    for path in ("resident-4", "cluster-8", "steps"):
        override(path)
        for op in OPS:
            check(scan_problem(op, B=100, T=2, N=40 if path == "steps" else 9))
    override("steps")
    check(scan_problem("factored_scan", B=5, T=40, N=9, activation="identity"), algorithm="chunked")
    for variant in VARIANTS:
        override(GRU_PATHS["steps"])
        check_gru(GruProblem.random(variant, 2, 100, 40))
    override("steps")
    with pytest.raises(RuntimeError, match="more than one launch holds: use a smaller batch"):
        plan("dense_scan", 3000, 1 << 31)


# ----------------------------------------------------------------------------------------------------------------- GRU

GRU_PATHS = {"resident": {"path": 0, "group": 1}, "resident-3": {"path": 0, "group": 3}, "steps": {"path": 1}}


def check_gru(problem: GruProblem, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Parity of everything that comes out of one problem; returns it."""
    inexact = problem.map(Tensor.float)
    untouched = inexact.map(torch.clone)
    expected, plain = (p.run("reference", lengths=lengths) for p in (inexact.map(Tensor.double), inexact))
    actual = inexact.run("cuda", lengths=lengths)
    for name, tensor in actual.items():
        assert_matches_reference(tensor, expected[name], plain[name], name=name, gradient="grad" in name)
    for before, after in zip(untouched.inputs(), inexact.inputs(), strict=True):
        assert (before is None) == (after is None) and (before is None or torch.equal(before, after))  # type: ignore[arg-type]
    return actual


@pytest.mark.parametrize("group", [0, 1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_several_grus_in_one_launch(variant: str, group: int, override: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a call for each model, with lengths and resets too, whatever blocks their sequences share. Sizes
    that no launch serves: one model after the other."""
    calls: list[str] = []
    true_call = _call.call
    monkeypatch.setattr(_call, "call", lambda name, *rest: (calls.append(name), true_call(name, *rest)))
    override({"path": RESIDENT, "group": group} if group else {})
    for R, T, B, N in ((3, 6, 5, 33), (1, 35, 2, 7), (2, 3, 1, 100)) if group else ((3, 2, 4, 9), (2, 2, 2, 140)):
        problems = [GruProblem.random(variant, T, B, N, bias=N != 7, seed=seed).map(Tensor.float) for seed in range(R)]
        problems = [p.with_resets(state=N != 9, seed=seed) for seed, p in enumerate(problems)]
        lengths = [some_lengths(B, T, "any", seed) for seed in range(R)]
        calls.clear()
        found = models_of(problems).run("cuda", lengths=torch.stack(lengths))
        assert calls.count("gru_scan") == (2 if N <= 128 else 2 * R)
        for r, (problem, own) in enumerate(zip(problems, lengths, strict=True)):
            for name, tensor in problem.run("cuda", lengths=own).items():
                if tensor.numel():
                    of_all = found[name].select(int(name in ("hs", "gates", "pre", "grad_x")), r)
                    assert torch.equal(of_all, tensor) if name != "grad_norm" else torch.allclose(of_all, tensor), name


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
        results = []
        for order in build.ORDERS.values():
            harness.set_schedule(*order)
            results.append(problem.run("cuda", lengths=lengths))
        assert_same_bits(results[0], results[1])
        assert_same_bits(results[0], results[2])


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


def test_gru_with_the_reference_and_without_parameters() -> None:
    for variant in VARIANTS:
        problem = GruProblem.random(variant, 4, 3, 9).map(Tensor.float)
        expected = problem.run("cuda")
        for one, other in (("cuda", "reference"), ("reference", "cuda")):
            for name, tensor in problem.run(one, other).items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
        some = problem.run_leaves(gru_scan, need_params=False)
        assert set(some) == {name for name, t in expected.items() if t.numel()} - {"grad_w", "grad_bias"}
        assert_same_bits(some, {name: expected[name] for name in some})


def test_gru_plan(harness: Any) -> None:
    def made(N: int, B: int, backward: bool = True, models: int = 1, **overrides: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "T": 1,
            "B": B,
            "N": N,
            "of_model": B // models,
            "kanai": 1,
            "backward": int(backward),
            "device": 0,
        }
        asked |= {"overrides": overrides}
        plan: dict[str, int] = harness.gru_scan_plan(asked)
        return plan

    # 5 models of 50: two sequences a block, 25 blocks a model; 200 models of one sequence: none beside it
    assert [(made(9, *size)["group"], made(9, *size)["blocks"]) for size in ((250, True, 5), (200, True, 200))] == [
        (2, 125),
        (1, 200),
    ]
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
    with pytest.raises(RuntimeError, match="so many models of this size"):
        made(129, 6, models=2)


def test_products_are_ieee_whatever_the_process_allows() -> None:
    """float32 is IEEE float32: TF32 that a user allows for other work must not reach the products between kernels."""
    with FloatProducts() as products:
        for op, N in itertools.product(OPS, (9, 12)):
            for inputs in ("features", "tokens"):
                problem = scan_problem(op, B=3, T=4, N=N, inputs=inputs).to(torch.float32)
                fwd, bwd = (getattr(dispatch.leaf(op, "cuda"), f"{op}_{direction}") for direction in ("fwd", "bwd"))
                hs, _, pre = fwd(*problem.leaf_arguments())
                bwd(*problem.leaf_arguments(), problem.grad_hs, hs, pre)
        for variant in VARIANTS:
            GruProblem.random(variant, 4, 3, 9).map(Tensor.float).run_leaves(gru_scan)
    assert products.seen >= {"mm", "addmm", "addmm_"}
    with pytest.raises(AssertionError, match="mm would be TF32"), FloatProducts():  # and one without a guard is seen
        torch.ones(2, 2) @ torch.ones(2, 2)


# -------------------------------------------------------------------------------------------------------------- device


def test_another_device_is_used_and_the_current_one_left(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every native function works on the device of its tensors; torch's current device stays what it was."""
    called: dict[str, list[int]] = {}

    class There:
        """The harness, with every tensor on cuda:1."""

        def __getattr__(self, name: str) -> Any:
            def call(arguments: dict[str, Any]) -> Any:
                harness.devices_used()
                result = getattr(harness, name)({**arguments, "device": 1})
                assert harness.current_device() == 0, name
                called.setdefault(name, []).extend(harness.devices_used())
                return result

            return call

    monkeypatch.setattr(_call, "kernels", There())
    for op in OPS:
        run(scan_problem(op, B=3, T=5, N=9, activation="identity").to(torch.float32), algorithm="chunked")
        ragged = torch.tensor([1, 2, 5])
        for path in ("resident", "cluster-1", "steps"):
            monkeypatch.setattr(_call, "overrides", PATHS[path])
            run(scan_problem(op, B=3, T=5, N=9).to(torch.float32), lengths=ragged)
        monkeypatch.setattr(_call, "overrides", {})
    GruProblem.random("kanai", 3, 2, 9).map(Tensor.float).run("cuda", lengths=torch.tensor([1, 3]))
    x, slope = torch.randn(4, 6), torch.tensor([0.3])
    torch.ops.orthokern.activation_fwd(x, slope, "prelu", "cuda")
    torch.ops.orthokern.activation_bwd(x, x, slope, "prelu", "cuda")
    torch.ops.orthokern.cayley(torch.eye(4), torch.randn(4, 4), torch.tensor(0.1), "cuda")
    sized = called.pop("cayley_workspace")  # from sizes alone
    assert not sized and all(set(devices) == {1} for devices in called.values()), called
    assert set(called) >= {f"{op}{part}" for op in (*OPS, "gru_scan") for part in ("", "_plan")}
    assert set(called) >= {"scan_carry", "activation_fwd", "activation_bwd", "activation_workspace", "cayley"}

    sizes = {
        "T": 1,
        "B": 5,
        "N": 3000,
        "K": 3000,
        "sequences": 5,
        "of_model": 5,
        "chunk": 1,
        "backward": 0,
        "overrides": {"path": RESIDENT},
    }
    sizes |= {"precision": 0, "activation": 0, "act_param_stride": 0, "tokens": 0, "cut": 0}
    with pytest.raises(RuntimeError, match="does not serve this size"):
        harness.factored_scan_plan({**sizes, "device": 1})
    assert harness.current_device() == 0  # after an error too


# ------------------------------------------------------------------------------------------------------------- planner


def plan(
    op: str,
    N: int,
    B: int,
    *,
    K: int | None = None,
    backward: bool = True,
    tokens: bool = False,
    models: int = 1,
) -> dict[str, int]:
    rank = N if K is None else K
    map_ = Map(torch.empty(N, rank), torch.empty(rank), torch.empty(N, rank))
    if op == "dense_scan":
        map_ = Map(None, None, torch.empty(N, N))
    return _scan.Scan(map_, ScanOptions("tanh"), None, backward=backward, B=B, tokens=tokens, models=models).plan


@pytest.mark.parametrize("op", OPS)
def test_path_by_size(op: str, harness: Any) -> None:
    largest = 160 if op == "factored_scan" else 192
    assert plan(op, largest, 50)["path"] == RESIDENT
    assert plan(op, largest + 1, 50)["path"] == CLUSTER
    assert plan(op, 1024, 50)["path"] == CLUSTER
    assert plan(op, 1025, 50)["path"] == STEPS
    # 35 tiles for each 32 sequences, on 132 multiprocessors
    assert [plan(op, 1100, B)["cluster"] for B in (1, 32, 50, 64, 100)] == [4, 4, 2, 2, 1]
    harness.set_chip(major=8, minor=0, multiprocessors=108, shared_per_block=163 << 10)
    assert plan(op, largest, 50)["path"] == RESIDENT
    assert plan(op, largest + 1, 50)["path"] == STEPS and plan(op, 1100, 1)["cluster"] == 1
    harness.set_chip(major=8, minor=9, multiprocessors=142, shared_per_block=99 << 10)
    assert plan(op, largest, 50)["path"] == RESIDENT
    harness.set_chip(largest_cluster=8)
    assert plan(op, 512, 50)["path"] == CLUSTER
    assert plan(op, 513, 50)["path"] == STEPS


@pytest.mark.parametrize("op", OPS)
def test_code_for_older_gpus_has_no_clusters(op: str, harness: Any, override: Any) -> None:
    """A build for sm_80 alone on an H200: the driver compiles its PTX, whose code traps where it needs clusters."""
    for code, path, split in ((80, STEPS, 1), (90, CLUSTER, 4)):
        harness.set_chip(code=code)
        assert plan(op, 100, 50)["path"] == RESIDENT
        assert (plan(op, 500, 50)["path"], plan(op, 1100, 1)["cluster"]) == (path, split)
    harness.set_chip(code=80)
    check(scan_problem(op, B=3, T=3, N=257))
    override({"path": CLUSTER})
    with pytest.raises(RuntimeError, match="does not serve this size"):
        plan(op, 500, 50)
    override({"path": STEPS, "cluster": 2})
    with pytest.raises(RuntimeError, match="no clusters of 2 blocks on this device with this build"):
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
    # 5 models of 50: two sequences a block, 25 blocks a model; models of one or two sequences: no empty slots
    of_models = [plan(op, 64, B, models=models) for B, models in ((250, 5), (200, 200), (1000, 1000), (2000, 1000))]
    assert [(made["group"], made["blocks"]) for made in of_models] == [(2, 125), (1, 200), (1, 1000), (2, 1000)]


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
