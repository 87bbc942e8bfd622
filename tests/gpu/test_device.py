"""The Triton and CUDA backends on a device: parity with the float64 reference, and how they behave beside other work.

The kernels themselves are also proved without a device (Triton's interpreter, the CUDA host harness); what is left for
this file is what only a device has: its memory model, streams, graphs, several devices, and its rounding.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SHORT,
    GruProblem,
    ScanProblem,
    assert_each_result_alone,
    assert_matches_reference,
    assert_same_bits,
    run_scan,
    scan_problem,
    some_lengths,
    with_poisoned_padding,
    with_resets,
)

from orthokern import dispatch, functional, nn, optim
from orthokern.cuda import _call, _scan, cayley
from orthokern.ops.activations import NAMES, PARAMETER
from orthokern.ops.gru_scan import VARIANTS

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
OPS = ("factored_scan", "dense_scan")
BACKENDS = ("cuda", "triton")
DTYPES = (torch.float32, torch.float64)
KINDS = ("dense", "features", "tokens")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def need(op: str, backend: str, dtype: torch.dtype = torch.float32, **facts: Any) -> None:
    """Skip what the SUPPORT table says this backend does not serve."""
    why = dispatch.reasons(op, backend, dispatch.Call(torch.device("cuda", 0), dtype, facts))
    if why:
        pytest.skip(f"{backend}: {' and '.join(why)}")


def on(problem: ScanProblem, device: str) -> ScanProblem:
    """The problem on a device, token ids and resets too."""
    moved = problem.map(lambda t: t.to(device))
    moved.x = moved.x.to(device)
    moved.resets = None if moved.resets is None else moved.resets.to(device)
    return moved


def check(problem: ScanProblem, dtype: torch.dtype, backend: str, **options: Any) -> None:
    """Parity of everything that comes out of one problem, with the reference on the CPU."""
    inexact = problem.to(dtype)
    exact = inexact.to(torch.float64)
    same = {key: value for key, value in options.items() if key in ("lengths", "message_clip")}
    expected, plain = (run_scan(p, "reference", **same) for p in (exact, inexact))
    there = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    actual = run_scan(on(inexact, "cuda"), backend, **there)
    scales: dict[str, float] = {}
    if exact.act_param is not None and exact.act_param.numel() == 1:
        each_unit = dataclasses.replace(exact, act_param=exact.act_param.expand(exact.h0.shape[1]))
        scales["grad_act_param"] = float(run_scan(each_unit, "reference", **same)["grad_act_param"].norm())
    for name, tensor in actual.items():
        if name == "ckpt" or (name == "pre" and options.get("checkpoint_every")):
            continue
        gradient = name.startswith("grad_")
        assert_matches_reference(
            tensor.cpu(), expected[name], plain[name], name=name, gradient=gradient, scale=scales.get(name)
        )


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
    kind = KINDS[(NAMES.index(activation) + N) % 3]
    if activation not in ("identity", "tanh"):  # among more units than this some would sit on a kink
        B = min(B, max(1, 20000 // (T * N)))
    check(scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=kind, D=11, gap=1e-6), dtype, backend)


@pytest.mark.parametrize("op", OPS)
def test_scan_parity_at_1000_units(op: str, backend: str) -> None:
    need(op, backend, N=1000, K=1000)
    check(scan_problem(op, B=50, T=3, N=1000), torch.float32, backend)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_the_path_of_single_steps(op: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """csrc/cuda/scan_step.h, which only N above 1024 takes by itself on this GPU, and other GPUs above 160 or 192."""
    need(op, "cuda", N=34, K=34)
    monkeypatch.setattr(_call, "overrides", {"path": 2})
    for inputs, B, T, N in (("dense", 5, 7, 34), ("tokens", 70, 9, 130), ("features", 33, 4, 66)):
        if activation not in ("identity", "tanh"):
            B = min(B, max(1, 20000 // (T * N)))
        problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=inputs, D=11, gap=1e-6)
        check(problem, torch.float32, "cuda", algorithm="sequential")
        check(problem, torch.float32, "cuda", lengths=some_lengths(B, T, "any"), message_clip=0.3)
        there = on(problem.to(torch.float32), "cuda")
        plain = run_scan(there, "cuda", algorithm="sequential")
        recomputed = run_scan(there, "cuda", algorithm="sequential", checkpoint_every=3)
        assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))
    if activation == "identity":
        check(scan_problem(op, B=3, T=50, N=34, activation=activation), torch.float32, "cuda", algorithm="chunked")


@pytest.mark.parametrize("op", OPS)
def test_scan_parity_at_1100_units(op: str) -> None:
    """More than a cluster holds: library products, without being asked; a capture contains their kernels."""
    need(op, "cuda", N=1100, K=1100)
    check(scan_problem(op, B=5, T=3, N=1100), torch.float32, "cuda")
    problem = on(scan_problem(op, B=5, T=30, N=1100, activation="prelu").to(torch.float32), "cuda")
    run_scan(problem, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_scan(problem, "cuda")
    problem.x.copy_(torch.randn_like(problem.x))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(run_scan(problem, "cuda"), captured)


def test_products_beside_a_scan_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stream of a backward in a capture is not that of a backward outside of it."""
    need("dense_scan", "cuda", N=34, K=34)
    monkeypatch.setattr(_scan, "_WINDOW_ELEMENTS", 5 * 34 * 8)  # windows of 8 steps
    monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 8)
    problem = on(scan_problem("dense_scan", B=5, T=40, N=34, inputs="features").to(torch.float32), "cuda")
    stream, results = torch.cuda.Stream(), []

    def work() -> None:
        with torch.cuda.stream(stream):
            results.append(run_scan(problem, "cuda"))

    torch.cuda.synchronize()
    work()
    plain = run_scan(problem, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = run_scan(problem, "cuda")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert len(results) == 2
    for found in (captured, *results):
        assert_same_bits(plain, found)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inputs", KINDS)
def test_each_result_alone(op: str, inputs: str, backend: str) -> None:
    need(op, backend, N=17, K=17)
    problem = scan_problem(op, B=3, T=5, N=17, activation="prelu", inputs=inputs).to(torch.float32)
    assert_each_result_alone(on(problem, "cuda"), backend)


def test_more_sequences_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid holds 65535 blocks along y, which tiles of 32 sequences pass at 2.1 million of them."""
    need("dense_scan", "cuda", N=4)
    monkeypatch.setattr(_call, "overrides", {"path": 2})
    problem = on(scan_problem("dense_scan", B=2_100_000, T=2, N=4).to(torch.float32), "cuda")
    actual, expected = run_scan(problem, "cuda"), run_scan(problem, "reference")
    for name in ("hs", "grad_x", "grad_h0"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("inputs", KINDS)
def test_chunks_of_time(op: str, inputs: str, backend: str) -> None:
    need(op, backend, N=34, K=34, algorithm="chunked")
    for T in (1, 2, 50, 401):
        problem = scan_problem(op, B=3, T=T, N=34, activation="identity", inputs=inputs)
        if op == "dense_scan":
            problem.matrices = (torch.linalg.qr(problem.matrices[0])[0],)
        check(problem, torch.float32, backend, algorithm="chunked")


@pytest.mark.parametrize("size", [(50, 9, 64), (70, 20, 128), (7, 6, 250), (300, 5, 20)], ids=str)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_clip(op: str, activation: str, size: tuple[int, int, int], backend: str) -> None:
    B, T, N = size
    need(op, backend, N=N, K=N)
    if activation not in ("identity", "tanh"):
        B = min(B, max(1, 20000 // (T * N)))
    kind = KINDS[(NAMES.index(activation) + N) % 3]
    problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs=kind, D=11, gap=1e-6)
    for order in ("any", "falling"):
        check(problem, torch.float32, backend, lengths=some_lengths(B, T, order), message_clip=0.3)
    check(problem, torch.float32, backend, lengths=some_lengths(B, T, "rising"), checkpoint_every=3)
    check(problem, torch.float32, backend, message_clip=0.3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("N", [34, 250])
def test_padding_plays_no_part(op: str, N: int, backend: str) -> None:
    """Not its contents, not the checkpoints, on the paths for small and for large N, and for chunks of time."""
    need(op, backend, N=N, K=N)
    B, T = 9, 300
    lengths = some_lengths(B, T, "any")
    padding = (torch.arange(T).unsqueeze(1) >= lengths).cuda()
    for activation, clip in (("tanh", 0.5), ("oplu", 0.5), ("identity", 0.0)):
        problem = scan_problem(op, B=B, T=T, N=N, activation=activation, inputs="tokens", gap=-1.0).to(torch.float32)
        ragged: dict[str, Any] = {"lengths": lengths.cuda(), "message_clip": clip}
        first = run_scan(on(problem, "cuda"), backend, **ragged)
        for name in ("hs", "pre"):
            assert not first[name].numel() or not first[name][padding].any(), name
        poisoned = on(with_poisoned_padding(problem, lengths), "cuda")
        assert_same_bits(first, run_scan(poisoned, backend, **ragged))
        again = run_scan(poisoned, backend, checkpoint_every=64, **ragged)
        assert_same_bits(first, again, skip=("ckpt", "pre"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_lengths_in_a_graph_and_out_of_range(op: str, activation: str, backend: str) -> None:
    """A replay reads the lengths that are there then; wrong ones count as the nearest right ones, and break nothing."""
    need(op, backend, N=34, K=34)
    problem = on(scan_problem(op, B=4, T=300, N=34, activation=activation).to(torch.float32), "cuda")
    lengths = torch.tensor([300, 1, 20, 299], device="cuda")
    run_scan(problem, backend, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_scan(problem, backend, lengths=lengths)
    lengths.copy_(torch.tensor([-(2**63), 2**40 + 1, 17, 2**63 - 1]))
    graph.replay()
    torch.cuda.synchronize()
    right = torch.tensor([0, 300, 17, 300], device="cuda")
    assert_same_bits(run_scan(problem, backend, lengths=right), captured)


@pytest.mark.parametrize("op", OPS)
def test_short_sequences_take_no_more_time_than_they_need(op: str, backend: str) -> None:
    """A batch of short sequences in a long rectangle: most of its steps are not taken."""
    need(op, backend, N=64, K=64)
    # so long that the steps take most of the time, not the launches
    problem = on(scan_problem(op, B=20, T=40_000, N=64).to(torch.float32), "cuda")
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


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_checkpoints_give_the_same_bits(op: str, activation: str, backend: str) -> None:
    need(op, backend, N=34, K=34)
    problem = on(scan_problem(op, B=5, T=9, N=34, activation=activation, inputs="tokens").to(torch.float32), "cuda")
    plain = run_scan(problem, backend)
    for every in (1, 4, 100):
        recomputed = run_scan(problem, backend, checkpoint_every=every)
        assert_same_bits(plain, recomputed, skip=("ckpt", "pre"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
def test_forward_of_one_backward_of_the_other(op: str, activation: str) -> None:
    for name in BACKENDS:
        need(op, name, N=18, K=18)
    problem = scan_problem(op, B=4, T=7, N=18, activation=activation, inputs="features")
    expected, plain = run_scan(problem, "reference"), run_scan(problem.to(torch.float32), "reference")
    there = on(problem.to(torch.float32), "cuda")
    for fwd, bwd in (("cuda", "triton"), ("triton", "cuda"), ("reference", "cuda"), ("triton", "reference")):
        actual = run_scan(there, fwd, bwd_backend=bwd)
        for name in problem.grad_names():
            assert_matches_reference(actual[name].cpu(), expected[name], plain[name], name=f"{fwd}, {bwd}: {name}")


@pytest.mark.parametrize("op", OPS)
def test_the_same_bits_twice_and_beside_other_work(op: str, backend: str) -> None:
    """Two streams at once, and the default one alone."""
    need(op, backend, N=66, K=66)
    problem = on(
        scan_problem(op, B=50, T=40, N=66, activation="modrelu", inputs="tokens", gap=-1.0).to(torch.float32), "cuda"
    )
    first = run_scan(problem, backend)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(run_scan(problem, backend))
    torch.cuda.synchronize()
    for other in results:
        assert_same_bits(first, other)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["tanh", "identity"])
@pytest.mark.parametrize("N", [64, 300])
def test_capture_in_a_graph(op: str, activation: str, N: int, backend: str) -> None:
    """Nothing waits for the device, and a replay with other inputs gives what a plain call gives."""
    need(op, backend, N=N, K=N)
    problem = on(scan_problem(op, B=5, T=300, N=N, activation=activation).to(torch.float32), "cuda")
    if op == "dense_scan":
        problem.matrices = (torch.linalg.qr(problem.matrices[0])[0],)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_scan(problem, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_scan(problem, backend)
    problem.x.copy_(torch.randn_like(problem.x))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(run_scan(problem, backend), captured)


def small_calls(backend: str) -> dict[str, tuple[list[torch.Tensor], Callable[..., tuple[torch.Tensor, ...]]]]:
    """Calls of the ops that are no scan: what they take, and the call."""
    ops = torch.ops.orthokern
    m = torch.linalg.qr(torch.randn(2, 130, 130, device="cuda"))[0]
    g, rate = torch.randn(2, 130, 130, device="cuda"), torch.tensor([1e-4, 0.3], device="cuda", dtype=torch.float64)
    thin, thin_g = m[:, :, :7].contiguous(), g[:, :, :7].contiguous()
    x, grad_y, slope = (torch.randn(*shape, device="cuda") for shape in ((501, 66), (501, 66), (66,)))
    losses: dict[str, tuple[list[torch.Tensor], Callable[..., tuple[torch.Tensor, ...]]]] = {}
    for C in (10, 200) if backend == "triton" else ():  # a program for the classes of many rows, and for those of one
        readout = [torch.randn(C, 66, device="cuda"), torch.randn(C, device="cuda")]
        target = torch.randint(0, C, (501,), device="cuda")
        losses[f"linear_cross_entropy of {C}"] = (
            [x, *readout, target],
            lambda *args: ops.linear_cross_entropy_fwd(*args, "mean", True, backend),
        )
    return {
        **losses,
        "cayley": ([m, g, rate], lambda *args: (ops.cayley(*args, backend),)),
        "thin cayley": ([thin, thin_g, rate], lambda *args: (ops.cayley(*args, backend),)),
        "activation_fwd": ([x, slope], lambda *args: (ops.activation_fwd(*args, "modrelu", backend),)),
        "activation_bwd": ([grad_y, x, slope], lambda *args: ops.activation_bwd(*args, "prelu", backend)),
    }


def test_the_other_ops_give_the_same_bits_twice_and_beside_other_work(backend: str) -> None:
    need("cayley", backend, N=130, K=130)
    for name, (inputs, call) in small_calls(backend).items():
        first = call(*inputs)
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in range(2)], []
        for stream in streams * 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(call(*inputs))
        torch.cuda.synchronize()
        for other in results:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), name


def test_capture_of_the_other_ops_in_a_graph(backend: str) -> None:
    """Nothing waits for the device, and a replay with other inputs gives what a plain call gives."""
    need("cayley", backend, N=130, K=130)
    for name, (inputs, call) in small_calls(backend).items():
        with torch.cuda.stream(torch.cuda.Stream()):
            call(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*inputs)
        at = 0 if name == "activation_fwd" else 1  # x, or the gradient of a basis, which may be anything
        inputs[at].copy_(torch.randn_like(inputs[at]))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(call(*inputs), captured, strict=True)), name


@pytest.mark.parametrize("kind", [optim.GeodesicSGD, optim.GeodesicRMSprop])
def test_an_optimizer_step_in_a_graph(kind: Any, backend: str) -> None:
    """A captured step, clipped on the device, replayed with other gradients, is the plain step."""
    need("cayley", backend, N=33, K=33)
    bases = [torch.linalg.qr(torch.randn(33, K, device="cuda"))[0] for K in (33, 33, 5)]
    captured, plain, warm = ([torch.nn.Parameter(m.clone()) for m in bases] for _ in range(3))
    optimizers = [kind(ps, 0.05, max_grad_norm=1.0, backend=backend) for ps in (captured, plain, warm)]
    for ps in (captured, plain, warm):
        for p in ps:
            p.grad = torch.ones_like(p)
    for optimizer in optimizers:  # one step before the capture: the state of RMSprop is made in the first
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizers[2].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for scale in (0.01, 1.0, 100.0):
        for p, q in zip(captured, plain, strict=True):
            p.grad.copy_(scale * torch.randn_like(p))
            q.grad.copy_(p.grad)
        graph.replay()
        optimizers[1].step()
        for p, q in zip(captured, plain, strict=True):
            assert torch.equal(p, q)
        assert optimizers[0].last_grad_norm == optimizers[1].last_grad_norm


def check_gru(problem: GruProblem, dtype: torch.dtype, backend: str, lengths: torch.Tensor | None = None) -> None:
    """Parity of everything that comes out of one problem, with the reference on the CPU."""
    inexact = problem.map(lambda t: t.to(dtype))
    expected, plain = (p.run("reference", lengths=lengths) for p in (inexact.map(torch.Tensor.double), inexact))
    actual = inexact.map(torch.Tensor.cuda).run(backend, lengths=None if lengths is None else lengths.cuda())
    for name, tensor in actual.items():
        assert_matches_reference(tensor.cpu(), expected[name], plain[name], name=name, gradient="grad" in name)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("size", [*SIZES, (20, 35, 200), (20, 5, 650)], ids=lambda s: "B{}-T{}-N{}".format(*s))
@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_parity(variant: str, size: tuple[int, int, int], dtype: torch.dtype, backend: str) -> None:
    B, T, N = size
    need("gru_scan", backend, dtype, N=N)
    problem = GruProblem.random(variant, T, B, N, bias=B != 50)
    check_gru(problem, dtype, backend)
    check_gru(problem, dtype, backend, some_lengths(B, T, "any"))
    check_gru(problem.with_resets(state=B != 50), dtype, backend, some_lengths(B, T, "any"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_long_and_padded_in_a_graph(variant: str, backend: str) -> None:
    """Long sequences; padding plays no part; a replay reads the lengths that are there then, and breaks nothing."""
    for N in (64, 128, 200):
        need("gru_scan", backend, N=N)
        check_gru(GruProblem.random(variant, 300, 4, N), torch.float32, backend)
    problem = GruProblem.random(variant, 40, 4, 66).map(torch.Tensor.float)
    lengths = torch.tensor([40, 1, 20, 39])
    there, poisoned = (p.map(torch.Tensor.cuda) for p in (problem, problem.with_poisoned_padding(lengths)))
    lengths = lengths.cuda()
    assert_same_bits(there.run(backend, lengths=lengths), poisoned.run(backend, lengths=lengths))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = there.run(backend, lengths=lengths)
    lengths.copy_(torch.tensor([-(2**63), 2**40 + 1, 17, 2**63 - 1]))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(there.run(backend, lengths=torch.tensor([0, 40, 17, 40], device="cuda")), captured)


def test_nothing_waits_for_the_device(backend: str) -> None:
    """Under torch's own alarm for synchronising calls."""
    need("factored_scan", backend, N=32, K=32)
    problem = on(scan_problem("factored_scan", B=3, T=5, N=32, inputs="tokens").to(torch.float32), "cuda")
    ragged = {"lengths": torch.tensor([5, 2, 3], device="cuda"), "message_clip": 0.1}
    calls = small_calls(backend)
    hidden = torch.randn(20, 32, device="cuda", requires_grad=True)
    classes, weight = torch.randint(0, 7, (20,), device="cuda"), torch.randn(7, 32, device="cuda")

    def everything() -> None:
        run_scan(problem, backend)
        run_scan(problem, backend, **ragged)
        for inputs, call in calls.values():
            call(*inputs)
        for name in (None, "reference"):
            functional.linear_cross_entropy(hidden, weight, None, classes, backend=name).backward()

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wrong_token_is_nan_in_its_own_sequence(backend: str) -> None:
    need("factored_scan", backend, N=32, K=32)
    problem = on(scan_problem("factored_scan", B=3, T=5, N=32, inputs="tokens", D=7).to(torch.float32), "cuda")
    problem.x[2, 1] = 7
    hs = run_scan(problem, backend)["hs"]
    assert hs[2:, 1].isnan().all()
    assert not hs[:, [0, 2]].isnan().any() and not hs[:2].isnan().any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_another_device_than_the_current(op: str, backend: str) -> None:
    need(op, backend, N=32, K=32)
    problem = scan_problem(op, B=3, T=5, N=32, activation="prelu", inputs="features").to(torch.float32)
    here, there = run_scan(on(problem, "cuda:0"), backend), run_scan(on(problem, "cuda:1"), backend)
    assert torch.cuda.current_device() == 0
    for name, tensor in here.items():
        assert torch.equal(tensor.cpu(), there[name].cpu()), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current_for_the_other_ops(backend: str) -> None:
    """The planners and the sizes of workspaces ask the device too, and must leave the current one as it is."""
    need("cayley", backend, N=32, K=32)
    gru = GruProblem.random("torch", 5, 3, 32).map(torch.Tensor.float)
    x, slope = torch.randn(7, 6), torch.tensor([0.3])
    m, g = torch.linalg.qr(torch.randn(32, 32))[0], torch.randn(32, 32)
    results = []
    for device in ("cuda:0", "cuda:1"):
        found = gru.map(lambda t, to=device: t.to(to)).run(backend)
        assert torch.cuda.current_device() == 0
        fwd, bwd = torch.ops.orthokern.activation_fwd, torch.ops.orthokern.activation_bwd
        found["y"] = fwd(x.to(device), slope.to(device), "prelu", backend)
        grads = bwd(x.to(device), x.to(device), slope.to(device), "prelu", backend)
        found["grad_of_x"], found["grad_of_slope"] = grads
        assert torch.cuda.current_device() == 0
        found["basis"] = torch.ops.orthokern.cayley(m.to(device), g.to(device), torch.tensor(0.1), backend)
        assert torch.cuda.current_device() == 0
        results.append({name: tensor.cpu() for name, tensor in found.items()})
    assert_same_bits(*results)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("precision", ["3xtf32", "tf32", "bf16"])
def test_lower_precision_is_as_bad_as_it_says_and_no_worse(op: str, precision: str, backend: str) -> None:
    need(op, backend, N=64, K=64)
    problem = scan_problem(op, B=20, T=20, N=64)
    expected = run_scan(problem, "reference")["hs"]
    # the unit roundoff of the factors, with room for some steps of a near-isometry; 3xtf32 nearly reaches float32
    bound = {"3xtf32": 1e-5, "tf32": 2e-2, "bf16": 2e-1}[precision]

    def error() -> float:
        hs = run_scan(on(problem.to(torch.float32), "cuda"), backend, precision=precision)["hs"].cpu().double()
        return float((hs - expected).norm() / expected.norm())

    assert error() < bound


# Clusters of every group of sequences, with chunks of the map in registers, in shared memory, and read from L2.
CLUSTERS: list[tuple[int, dict[str, int]]] = [(300, {"cluster": 8, "group": group}) for group in (1, 2, 4, 8)]
CLUSTERS += [(300, {"cluster": 8, "group": 4, "shared_chunks": 0}), (600, {"cluster": 16, "group": 8})]


def need_clusters(op: str) -> None:
    need(op, "cuda", N=600, K=600)
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("no clusters of 16 blocks on this device")


@pytest.mark.parametrize(("N", "overrides"), CLUSTERS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_clusters_of_every_group(op: str, N: int, overrides: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    need_clusters(op)
    monkeypatch.setattr(_call, "overrides", {"path": 1, **overrides})
    problem = scan_problem(op, B=21, T=9, N=N, inputs="tokens")
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


@pytest.mark.parametrize("shared_chunks", [0, 8])
@pytest.mark.parametrize("N", [300, 600])
@pytest.mark.parametrize("op", OPS)
def test_precisions_of_clusters(op: str, N: int, shared_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As precise as asked, and on tensor cores, which are less precise than the FMA units."""
    need_clusters(op)
    problem = scan_problem(op, B=21, T=3, N=N, inputs="features")
    exact, there = run_scan(problem, "reference"), on(problem.to(torch.float32), "cuda")

    def errors(precision: str, tensor: int) -> dict[str, float]:
        monkeypatch.setattr(_call, "overrides", {"path": 1, "tensor": tensor, "shared_chunks": shared_chunks})
        found = run_scan(there, "cuda", precision=precision)
        names = [name for name in ("hs", *problem.grad_names()) if found[name].numel()]
        return {name: float((found[name].cpu() - exact[name]).abs().max() / exact[name].abs().max()) for name in names}

    ieee = errors("ieee", 0)["hs"]
    for precision, bound in {"tf32": 1e-2, "bf16": 1e-1}.items():
        found = errors(precision, 1)
        assert max(found.values()) < bound, (precision, found)
        assert found["hs"] > 20 * ieee


@pytest.mark.parametrize("op", OPS)
def test_the_error_after_ten_thousand_steps(op: str, backend: str) -> None:
    """Linear and near-orthogonal, the hardest case for rounding: no more than twice plain torch in float32."""
    need(op, backend, N=64, K=64)
    problem = scan_problem(op, B=3, T=10000, N=64, activation="identity", inputs="tokens")
    if op == "dense_scan":
        problem.matrices = (torch.linalg.qr(problem.matrices[0])[0],)
    else:
        problem.matrices = (problem.matrices[0], torch.ones(64).double(), problem.matrices[2])
    check(problem, torch.float32, backend, algorithm="sequential")
    check(problem, torch.float32, backend)


def test_tf32_of_the_process_changes_no_bit(backend: str) -> None:
    """float32 is IEEE float32, also where a user allows TF32 for products of their own."""
    need("factored_scan", backend, N=64, K=64)
    problem = on(scan_problem("factored_scan", B=20, T=20, N=64, inputs="features").to(torch.float32), "cuda")
    gru = GruProblem.random("torch", 9, 20, 64).map(lambda t: t.float().cuda())

    def everything() -> dict[str, torch.Tensor]:
        others = {name: call(*inputs)[0] for name, (inputs, call) in calls.items()}
        return {**run_scan(problem, backend), **{f"gru {k}": v for k, v in gru.run(backend).items()}, **others}

    calls = small_calls(backend)
    before = torch.get_float32_matmul_precision()
    exact = everything()
    try:
        torch.set_float32_matmul_precision("high")
        assert_same_bits(exact, everything())
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


SHAPES = [(1, 1), (5, 3), (33, 33), (64, 64), (65, 64), (130, 7), (3, 9, 9), (2, 128, 128), (2, 300, 300), (2, 300, 10)]
SHAPES += [(2, 300, 70)]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cayley_parity(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    need("cayley", backend, dtype, N=shape[-2], K=shape[-1])
    step = torch.ops.orthokern.cayley
    m = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)
    g = torch.randn(*shape, dtype=dtype)
    for lr in map(torch.tensor, [1e-6, 1e-2, 1.0, -0.1]):
        expected, plain = step(m.double(), g.double(), lr, "reference"), step(m, g, lr, "reference")
        actual = step(m.cuda(), g.cuda(), lr, backend).cpu()
        assert_matches_reference(actual, expected, plain, name=f"lr={lr}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(("N", "K"), [(48, 48), (300, 7)])
def test_cayley_of_a_nan_stays_in_its_matrix(N: int, K: int, dtype: torch.dtype, bad: float, backend: str) -> None:
    """The search for a pivot returns a row of the matrix, whatever is in it."""
    need("cayley", backend, dtype, N=N, K=K)
    step, lr = torch.ops.orthokern.cayley, torch.tensor(0.1)
    m = torch.linalg.qr(torch.randn(3, N, K, dtype=torch.float64))[0].to(dtype).cuda()
    g = torch.randn(3, N, K, dtype=dtype, device="cuda")
    good = step(m, g, lr, backend)
    for tensor in (m, g):
        finite = tensor[1, 2, 3].clone()
        tensor[1, 2, 3] = bad
        actual = step(m, g, lr, backend)
        assert torch.equal(actual[::2], good[::2]) and actual[1].isnan().any()
        tensor[1, 2, 3] = finite


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_cayley_of_several_sizes(dtype: torch.dtype) -> None:
    """Square and thin, more sizes than one launch holds: the bits of single calls."""
    need("cayley", "cuda", dtype, N=300, K=300)
    steps: list[Any] = []
    for index, (n, k) in enumerate([*SHAPES[:6], (300, 300), (300, 10), (300, 70), *((i, i) for i in range(2, 22))]):
        shape = (1 + index % 3, n, k)
        m = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype).cuda()
        rate = (1e-5, 3.0, torch.rand(shape[0], device="cuda"), torch.tensor(0.01))[index % 4]
        steps.append((m, torch.randn(*shape, dtype=dtype, device="cuda"), rate))
    for one, step in zip(cayley.cayley_of_many(steps), steps, strict=True):
        assert torch.equal(one, cayley.cayley(*step))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("activation", NAMES)
def test_activation_parity(activation: str, dtype: torch.dtype, backend: str) -> None:
    need("activations", backend, dtype)
    fwd, bwd = torch.ops.orthokern.activation_fwd, torch.ops.orthokern.activation_bwd
    for shape in ((2,), (7, 64), (3, 5, 34), (1001, 6), (0, 4)):
        for size in (1, shape[-1]) if activation in PARAMETER else (0,):
            x, grad_y = (3 * torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(2))
            param = 0.3 * torch.randn(size, dtype=dtype) if size else None
            exact = [None if t is None else t.double() for t in (grad_y, x, param)]
            there = [None if t is None else t.cuda() for t in (grad_y, x, param)]
            y, y64, y_torch = (
                fwd(*there[1:], activation, backend),
                fwd(*exact[1:], activation),
                fwd(x, param, activation),
            )
            assert_matches_reference(y.cpu(), y64, y_torch, name=f"y of {shape}")
            actual = bwd(*there, activation, backend)
            expected, plain = bwd(*exact, activation, "reference"), bwd(grad_y, x, param, activation, "reference")
            for name, a, e, p in zip(("grad_x", "grad_act_param"), actual, expected, plain, strict=True):
                assert_matches_reference(a.cpu(), e, p, name=f"{name} of {shape}", gradient=True)


@pytest.mark.parametrize("C", [10, 50, 128, 10_000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_parity(C: int, reduction: str) -> None:
    need("linear_cross_entropy", "triton")
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3000, 130, generator=generator), torch.randn(C, 130, generator=generator)
    bias, target = torch.randn(C, generator=generator), torch.randint(0, C, (3000,), generator=generator)

    def run(dtype: torch.dtype, device: str, backend: str) -> list[torch.Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)]
        there = target.to(device)
        loss = functional.linear_cross_entropy(*leaves, there, reduction=reduction, backend=backend)
        return [loss.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(loss, leaves))]

    results = [run(torch.float32, "cuda", "triton"), run(torch.float64, "cpu", "reference")]
    for name, *three in zip(
        ("loss", "hidden", "weight", "bias"), *results, run(torch.float32, "cpu", "reference"), strict=True
    ):
        assert_matches_reference(*three, name=name, gradient=name != "loss")


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("C", [10, 200])
def test_a_wrong_class_is_nan_in_its_own_row(C: int, name: str) -> None:
    """In the reference too, where torch's functions would end in an assertion of the device."""
    need("linear_cross_entropy", name)
    hidden, weight = torch.randn(6, 32, device="cuda", requires_grad=True), torch.randn(C, 32, device="cuda")
    target = torch.randint(0, C, (6,), device="cuda")
    target[1], target[4] = C, -1
    loss = functional.linear_cross_entropy(hidden, weight, None, target, backend=name)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    torch.cuda.synchronize()
    rows = grad.isnan().all(1).tolist()
    assert bool(loss.isnan()) and rows == [False, True, False, False, True, False]
    assert not grad[[0, 2, 3, 5]].isnan().any()


def test_a_compiled_module() -> None:
    """Forward and backward through the compiler, whose contractions round other singular values."""
    module = nn.FactorizedRNN(9, 33).cuda()
    with torch.no_grad():
        module.spectrum_l0.normal_()
    ids, cotangent = torch.randint(0, 9, (20, 5), device="cuda"), torch.randn(20, 5, 33, device="cuda")
    parameters = list(module.parameters())
    expected = module(ids)[0]
    grads = torch.autograd.grad(expected, parameters, cotangent)
    actual = torch.compile(module, fullgraph=True)(ids)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(torch.autograd.grad(actual, parameters, cotangent), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def with_gradients(
    call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """What a call gives, and the gradients of its inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = call(*inputs)
    return [out, *torch.autograd.grad(out, inputs, cotangent.to(out))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit_of_the_ops(dtype: torch.dtype, backend: str) -> None:
    """A recurrence in 16 bits is none: float32 tensors stay float32 in the ops, backward inside autocast too."""
    need("factored_scan", backend, N=32, K=32)
    T, B, N, D = 6, 5, 32, 7
    u = torch.linalg.qr(torch.randn(N, N, device="cuda"))[0]
    features, weight, bias, h0, s, x3, w3 = (
        torch.randn(*shape, device="cuda")
        for shape in ((T, B, D), (N, D), (N,), (B, N), (N,), (T, B, 3 * N), (3 * N, N))
    )
    cotangent = torch.randn(T, B, N, device="cuda")
    f = functional
    cases: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "factored_scan": (
            lambda x, u, s, v, h, w, b: f.factored_scan(x, u, s, v, h, weight=w, bias=b, backend=backend),
            [features, u, s, u.mT.contiguous(), h0, weight, bias],
        ),
        "dense_scan": (
            lambda x, w, h, i, b: f.dense_scan(x, w, h, weight=i, bias=b, activation="relu", backend=backend),
            [features, u, h0, weight, bias],
        ),
        "gru_scan": (lambda x, w, h: f.gru_scan(x, w, h, backend=backend), [x3, w3 / N**0.5, h0]),
        "activation": (lambda x, p: f.activation(x, "modrelu", p, backend=backend), [cotangent, bias]),
    }
    for name, (call, inputs) in cases.items():
        expected = with_gradients(call, inputs, cotangent)
        with torch.autocast("cuda", dtype):
            actual = with_gradients(call, inputs, cotangent)
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name
    g = torch.randn(N, N, device="cuda")
    expected_step = f.cayley(u, g, 0.1, backend=backend)
    with torch.autocast("cuda", dtype):
        assert torch.equal(f.cayley(u, g, 0.1, backend=backend), expected_step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit_of_what_modules_give(dtype: torch.dtype) -> None:
    x, cotangent = torch.randn(6, 5, 7, device="cuda"), torch.randn(6, 5, 32, device="cuda")
    for module in (nn.FactorizedRNN(7, 32), nn.RNN(7, 32), nn.GRU(7, 32), nn.ExpRNN(7, 32)):
        module = module.cuda()
        parameters = [p for p in module.parameters() if p.requires_grad]
        results = []
        for enabled in (False, True):
            with torch.autocast("cuda", dtype, enabled=enabled):
                out = module(x)[0]
                grads = torch.autograd.grad(out, parameters, cotangent.to(out), allow_unused=True)
            results.append([out, *grads])
        assert torch.equal(results[0][0], results[1][0]), type(module)
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None), type(module)
            if one is not None:  # torch's own products around the scan are in 16 bits in a backward inside autocast
                assert one.dtype == other.dtype == torch.float32
                assert (one - other).norm() <= 2e-2 * one.norm(), type(module)


@pytest.mark.parametrize("kind", [nn.FactorizedRNN, nn.RNN, nn.GRU])
def test_graphed_module(kind: Any) -> None:
    """Outputs and gradients of ``make_graphed_callables`` are the eager ones, also after steps of an optimizer."""
    eager, graphed = kind(7, 128).cuda(), kind(7, 128).cuda()
    graphed.load_state_dict(eager.state_dict())
    shape = (28, 5, 7)
    graphed = torch.cuda.make_graphed_callables(graphed, (torch.randn(shape, device="cuda", requires_grad=True),))
    optimizers = [optim.optimizer_for(module, lr=1e-2, geodesic_lr=1e-3) for module in (eager, graphed)]
    for _ in range(3):
        x, results = torch.randn(shape, device="cuda"), []
        for module, optimizer in zip((eager, graphed), optimizers, strict=True):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            output, last = module(inputs)
            (output.square().sum() + last.sum()).backward()
            grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            results.append({"output": output.detach().clone(), "x": inputs.grad, **grads})
        assert set(results[0]) == set(results[1])
        assert_same_bits(*results)
        for optimizer in optimizers:
            optimizer.step()


def test_out_of_memory(backend: str) -> None:
    """One clear error, nothing of the call stays allocated, and the process goes on."""
    need("factored_scan", backend, N=128, K=128)
    T, B, N = 20000, 50, 128  # 0.5 GiB of states
    u = torch.linalg.qr(torch.randn(N, N, device="cuda"))[0].requires_grad_()
    s, table = torch.ones(N, device="cuda"), torch.randn(N, 5, device="cuda", requires_grad=True)
    ids = torch.randint(0, 5, (T, B), device="cuda")

    def scan(steps: int) -> torch.Tensor:
        return functional.factored_scan(ids[:steps], u, s, u, weight=table, backend=backend)

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def refused(call: Callable[[], Any]) -> None:
        torch.cuda.empty_cache()
        room = torch.cuda.memory_reserved() + (64 << 20)
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
        try:
            call()
        except torch.OutOfMemoryError as error:
            assert "out of memory" in str(error)
        else:
            raise AssertionError("there was enough memory")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    expected = torch.autograd.grad(scan(100).square().sum(), (u, table))
    before = allocated()
    refused(lambda: scan(T))
    assert allocated() == before
    kept = [scan(T)]
    held = allocated()
    refused(lambda: torch.autograd.grad(kept[0], (u, table), torch.ones((), device="cuda").expand(T, B, N)))
    kept.clear()
    assert allocated() == before < held
    actual = torch.autograd.grad(scan(100).square().sum(), (u, table))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_training_learns_on_the_device() -> None:
    """A module, the geodesic optimizer and the loss, all on the device: bases stay orthonormal, the loss falls."""
    torch.manual_seed(0)
    module, readout = nn.FactorizedRNN(4, 32, nonlinearity="identity").cuda(), torch.nn.Linear(32, 4).cuda()
    optimizer = optim.optimizer_for(torch.nn.ModuleList([module, readout]), lr=1e-2, geodesic_lr=1e-3)
    ids = torch.randint(0, 4, (12, 64), device="cuda")
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(readout(module(ids)[0][-1]), ids[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert module.orthogonality_error() < 1e-5


def test_auto_prefers_a_kernel_of_the_device() -> None:
    for op in OPS:
        leaf = dispatch.resolve(op, device=torch.device("cuda", 0), dtype=torch.float32, N=128, K=128)
        assert leaf.__name__ in (f"orthokern.cuda.{op}", f"orthokern.triton_kernels.{op}")


# What compute-sanitizer runs, by the kernels that it is about. `backend` is set in front.
SANITIZED = {
    "scans": """
for n in (33, 130):
    u, table, ids = basis(n, n), torch.randn(n, 5, device="cuda", requires_grad=True), tokens()
    f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend).sum().backward()
    f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend, message_clip=0.1,
                    lengths=torch.tensor([6, -1, 2**40], device="cuda")).sum().backward()
    low = u[:, :5]
    f.factored_scan(ids, low, ones(5), low, weight=table, backend=backend,
                    lengths=torch.tensor([6, -1, 2**40], device="cuda")).sum().backward()
    f.dense_scan(ids, u, weight=table, activation="identity", backend=backend).sum().backward()
    f.dense_scan(ids, u, weight=table, activation="identity", algorithm="chunked", backend=backend).sum().backward()
""",
    "steps": """
_call.overrides = {"path": 2}
for n in (33, 66):
    u, table, ids = basis(n, n), torch.randn(n, 5, device="cuda", requires_grad=True), tokens()
    for lengths in (None, torch.tensor([6, -1, 2**40], device="cuda")):
        f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend, lengths=lengths).sum().backward()
        f.dense_scan(ids, u, weight=table, backend=backend, lengths=lengths, message_clip=0.1).sum().backward()
_call.overrides = {"path": 1}
x, w = torch.randn(11, 3, 99, device="cuda", requires_grad=True), torch.randn(99, 33, device="cuda") / 6
for variant in ("kanai", "torch"):
    f.gru_scan(x, w.requires_grad_(), variant=variant, backend=backend).sum().backward()
""",
    "checkpoints": """
for n in (33, 130):
    u, x = basis(n, n), torch.randn(6, 3, n, device="cuda", requires_grad=True)
    slope = torch.full((n,), 0.2, device="cuda", requires_grad=True)
    for every in (1, 4):
        f.factored_scan(x, u, ones(n), u, activation="prelu", act_param=slope, checkpoint_every=every,
                        backend=backend).sum().backward()
        f.dense_scan(x, u, activation="identity", algorithm="chunked", checkpoint_every=every,
                     backend=backend).sum().backward()
""",
    "gru_scan": """
for n in (33, 130):
    x, w = torch.randn(6, 3, 3 * n, device="cuda", requires_grad=True), torch.randn(3 * n, n, device="cuda") / n**0.5
    w.requires_grad_()
    for variant in ("kanai", "torch"):
        for lengths in (None, torch.tensor([6, -1, 2**40], device="cuda")):
            f.gru_scan(x, w, variant=variant, lengths=lengths, backend=backend).sum().backward()
""",
    "activations": """
for n in (2, 66, 1030):
    x = torch.randn(37, n, device="cuda", requires_grad=True)
    for name in f.ACTIVATIONS:
        for size in (1, n) if name in ("prelu", "leaky_relu", "modrelu") else (0,):
            p = torch.full((size,), 0.2, device="cuda", requires_grad=True) if size else None
            y = f.activation(x, name, p, backend=backend)
            if name != "identity":
                y.sum().backward()
""",
    "cayley": """
for n, k in ((1, 1), (33, 33), (64, 64), (130, 130), (130, 7), (66, 65), (200, 70)):
    for rate in (1e-5, 1e-2, 3.0):
        f.cayley(basis(n, k).detach(), torch.randn(n, k, device="cuda"), rate, backend=backend)
    f.cayley(torch.stack([basis(n, k).detach()] * 3), torch.randn(3, n, k, device="cuda"), 1e-2, backend=backend)
if backend == "cuda":
    sizes = ((1, 1), (33, 33), (130, 130), (130, 7), (66, 65))
    cayley.cayley_of_many([(basis(*s).detach(), torch.randn(s, device="cuda"), 1e-2) for s in sizes])
""",
}
PREAMBLE = """
import torch
from orthokern import functional as f
from orthokern.cuda import _call, cayley
def basis(n, k): return torch.linalg.qr(torch.randn(n, k, device="cuda"))[0].requires_grad_()
def ones(n): return torch.ones(n, device="cuda")
def tokens(): return torch.randint(0, 5, (6, 3), device="cuda")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("part", SANITIZED)
def test_compute_sanitizer_finds_nothing(part: str, tool: str, backend: str) -> None:
    need("factored_scan", backend, N=33, K=33)
    if part in ("steps", "graphs") and backend != "cuda":
        pytest.skip("Triton has no path of single steps: the case does not apply")
    code = f"{PREAMBLE}\nbackend = {backend!r}\n{SANITIZED[part]}\ntorch.cuda.synchronize()"
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_functional_on_the_device_matches_the_cpu() -> None:
    x, u = torch.randn(5, 3, 16), torch.linalg.qr(torch.randn(16, 16))[0]
    here = functional.factored_scan(x, u, torch.ones(16), u)
    there = functional.factored_scan(x.cuda(), u.cuda(), torch.ones(16).cuda(), u.cuda())
    torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=1e-5)
