"""What runs around the kernels of the CUDA scans (orthokern/_gpu_scans.py), on the host harness: plans, windows of the
gradients' products, the second stream, checkpoints and chunks of time."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from cuda_cases import CLUSTER, KINDS, OPS, check, run
from float_products import FloatProducts
from helpers import GruProblem, assert_same_bits, scan_needs, scan_problem, with_resets
from torch import Tensor

from orthokern import _gpu_scans, dispatch
from orthokern.cuda import _call, _scan, gru_scan
from orthokern.errors import InputError
from orthokern.ops.activations import NAMES
from orthokern.ops.gru_scan import VARIANTS


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


@pytest.mark.parametrize("path", ["resident", "cluster-4", "library"])
@pytest.mark.parametrize("op", OPS)
def test_products_beside_the_scan_change_no_bit(
    op: str, path: str, override: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan stops after each window, whose products then have a stream of their own while it goes on."""
    override(path)
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 3 * 20 * 6)  # windows of 6 steps
    joined, true_join = [], _scan.SideStream.join
    monkeypatch.setattr(_scan.SideStream, "join", lambda self: (joined.append(self), true_join(self))[1])
    problem = scan_problem(op, B=3, T=20, N=20, activation="prelu", inputs="features").to(torch.float32)
    for options in ({}, {"lengths": torch.tensor([20, 7, 13]), "message_clip": 0.3}):
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 7)
        plain = run(problem, **options)
        assert not joined
        monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 6)
        assert_same_bits(plain, run(problem, **options))
        assert len(joined) == (path != "library")
        joined.clear()


def test_an_exception_joins_the_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the second stream still uses is freed to the main stream, which has to wait for it."""
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 3 * 20 * 6)
    monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 6)
    log: list[str] = []
    true_add, true_join = _gpu_scans._Sums.add, _scan.SideStream.join

    def add(self: Any, *args: Any) -> None:
        log.append("products")
        if log.count("products") == 2:
            raise torch.OutOfMemoryError("planted")
        true_add(self, *args)

    monkeypatch.setattr(_gpu_scans._Sums, "add", add)
    monkeypatch.setattr(_scan.SideStream, "join", lambda self: (log.append("join"), true_join(self))[1])
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run(scan_problem("dense_scan", B=3, T=20, N=20).to(torch.float32))
    assert log == ["products", "products", "join"]


def test_maps_are_packed_once_for_a_call(override: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    override("cluster-1")
    problem = scan_problem("dense_scan", B=2, T=20, N=20).to(torch.float32)
    harness.kernels_run()
    run(problem)
    once = harness.kernels_run()
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 2 * 20 * 5)  # four windows
    monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 5)
    run(problem)
    assert harness.kernels_run() == once + 3  # three more scans


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
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: None)
    beside = {}
    for main in (captured, eager, captured, eager):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, main=main: main)
        beside[main] = _scan.SideStream(torch.device("cuda", 0), 0)
        with beside[main]:
            pass
    assert Stream.made == 4  # two each, for all calls
    assert beside[captured].stream.awaited == [captured] * 2 and beside[eager].stream.awaited == [eager] * 2
    beside[eager].join()
    assert eager.awaited == [beside[eager].stream] and not captured.awaited


@pytest.mark.parametrize("activation", NAMES)
def test_checkpoints_give_the_same_bits(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 5 * 17 * 6)  # windows of 5 or 6 steps
    for turn, op in enumerate(OPS, NAMES.index(activation)):
        inputs = KINDS[turn % 3]
        problem = scan_problem(op, B=5, T=23, N=17, activation=activation, inputs=inputs)
        plain = check(problem)
        for every in (1, 2, 7, 16, 100):
            recomputed = run(problem.to(torch.float32), checkpoint_every=every)
            assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))
            before = torch.cat([problem.h0.float().unsqueeze(0), plain["hs"]])[0:23:every]
            assert torch.equal(recomputed["ckpt"], before)


@pytest.mark.parametrize(
    ("T", "inputs"), [(2, "dense"), (5, "features"), (16, "tokens"), (17, "dense"), (50, "features")]
)
@pytest.mark.parametrize("path", ["resident", "resident-4", "cluster-2", "library"])
@pytest.mark.parametrize("op", OPS)
def test_chunks_of_time(op: str, path: str, inputs: str, T: int, override: Any) -> None:
    """With lengths too: padding and checkpoints change no bit."""
    override(path)
    problem = scan_problem(op, B=3, T=T, N=17, activation="identity", inputs=inputs)
    for lengths in (None, torch.tensor([T, 1, T // 2 + 1])):
        plain = check(problem, algorithm="chunked", lengths=lengths)
        again = problem.to(torch.float32)
        if lengths is not None:
            again = again.with_poisoned_padding(lengths)
        recomputed = run(again, algorithm="chunked", lengths=lengths, checkpoint_every=4)
        assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))


@pytest.mark.parametrize("op", OPS)
def test_chunks_of_more_units_than_the_kernel_of_carries_holds(op: str, override: Any) -> None:
    override({"path": CLUSTER, "cluster": 4, "group": 4})
    check(scan_problem(op, B=3, T=11, N=130, activation="identity"), algorithm="chunked")


def test_auto_takes_chunks_of_a_long_sequence() -> None:
    problem = scan_problem("factored_scan", B=2, T=260, N=9, activation="identity", inputs="tokens")
    actual = check(problem)
    assert_same_bits(actual, run(problem.to(torch.float32), algorithm="chunked"))


def test_chunk_length_comes_from_sizes_alone() -> None:
    def length(T: int, B: int, N: int, activation: str = "identity", algorithm: str = "auto", clip: float = 0) -> int:
        problem = scan_problem("dense_scan", B=B, T=1, N=N, activation=activation)
        return _gpu_scans.chunk_length(problem.args(algorithm=algorithm, message_clip=clip), T)

    assert length(10_000, 50, 128) == 100
    assert length(1_000_000, 50, 128) == 128
    assert length(10_000, 50, 128, "tanh") == 0
    assert length(10_000, 50, 128, algorithm="sequential") == 0
    assert length(100, 50, 128) == 0  # too short to pay
    assert length(10_000, 1000, 128) == 0  # the sequences fill the GPU
    assert length(100, 1000, 128, algorithm="chunked") == 10
    assert length(10_000, 50, 128, clip=0.1) == 0  # not linear


def test_resets_are_for_sequential_scans() -> None:
    identity = with_resets(scan_problem("dense_scan", B=3, T=300, N=8, activation="identity"))
    assert _gpu_scans.chunk_length(identity.args(resets=None), 300) > 0
    assert _gpu_scans.chunk_length(identity.args(), 300) == 0
    check(identity)


@pytest.mark.parametrize("D", [5, 70])
def test_gradient_of_the_table(D: int) -> None:
    """Few ids: a product with their one-hot form. Many: sorted."""
    check(scan_problem("dense_scan", B=4, T=9, N=12, inputs="tokens", D=D))


def test_products_are_ieee_whatever_the_process_allows() -> None:
    """float32 is IEEE float32: TF32 that a user allows for other work must not reach the products between kernels."""
    with FloatProducts() as products:
        for op, N in itertools.product(OPS, (9, 12)):
            for inputs in ("features", "tokens"):
                problem = scan_problem(op, B=3, T=4, N=N, inputs=inputs).to(torch.float32)
                fwd, bwd = (getattr(dispatch.leaf(op, "cuda"), f"{op}_{direction}") for direction in ("fwd", "bwd"))
                hs, _, pre = fwd(problem.args())
                bwd(problem.args(), problem.grad_hs, hs, pre, scan_needs())
        for variant in VARIANTS:
            GruProblem.random(variant, 4, 3, 9).map(Tensor.float).run_leaves(gru_scan)
    assert products.seen >= {"mm", "addmm", "addmm_"}
    with pytest.raises(AssertionError, match="mm would be TF32"), FloatProducts():  # and one without a guard is seen
        torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("op", OPS)
def test_data_exchanged_between_forward_and_backward_is_an_error(op: str) -> None:
    """Each tensor of a backward with a row less: the kernels would read and write past its end."""
    problem = with_resets(scan_problem(op, B=3, T=4, N=6, K=5, inputs="features", activation="prelu")).to(torch.float32)
    args = problem.args(lengths=torch.tensor([4, 2, 3]))
    states = _scan.scan_fwd(args)
    saved = {"grad_hs": problem.grad_hs, "states": states.hs, "pre": states.pre}
    tensors = {name: tensor for name, tensor in {**args._asdict(), **saved}.items() if isinstance(tensor, torch.Tensor)}
    for name in tensors.keys() - {"h0", "second"}:  # which define the sizes
        tensor = tensors[name]
        shorter = {name: tensor[:-1] if name == "weight" else tensor[..., :-1].contiguous()}
        changed, own = (args._replace(**shorter), saved) if name in args._fields else (args, {**saved, **shorter})
        with pytest.raises(InputError, match=f"^{op}_bwd: {name} must have {tensor.numel()} elements, got "):
            _scan.scan_bwd(changed, *own.values(), scan_needs())
