"""Calls on a device beside other work: streams, graphs, several devices, memory, and the precision of the process."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_cases import CALLS, OPS, call_of, float_problem, need, replayed, same
from helpers import assert_same_bits, run_scan

from orthokern import _gpu_scans, dispatch, functional, optim
from orthokern.cuda import _scan
from orthokern.nn import GRU, PeepholeLSTM

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_twice_and_beside_other_work(name: str, backend: str) -> None:
    """Two streams at once, and the default one alone."""
    call = call_of(name, backend)
    first = call()
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(call())
    torch.cuda.synchronize()
    assert all(same(first, other) for other in results)


@pytest.mark.parametrize("name", CALLS)
def test_capture_in_a_graph(name: str, backend: str) -> None:
    """A replay with other inputs gives the results of a plain call."""
    call = call_of(name, backend)
    changed = call.inputs[call.changed]
    captured = replayed(call, lambda: changed.copy_(torch.randn_like(changed)))
    assert same(call(), captured)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Synchronising calls of torch are errors."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_device(name: str, backend: str) -> None:
    """Under torch's own alarm for synchronising calls."""
    call = call_of(name, backend)
    call()
    with no_waits():
        call()


@pytest.mark.parametrize("name", CALLS)
def test_tf32_of_the_process_changes_no_bit(name: str, backend: str) -> None:
    """float32 is IEEE float32, also where a user allows TF32 for products of their own."""
    call = call_of(name, backend)
    before = torch.get_float32_matmul_precision()
    exact = call()
    try:
        torch.set_float32_matmul_precision("high")
        assert same(exact, call())
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", CALLS)
def test_another_device_than_the_current(name: str, backend: str) -> None:
    """The planners and the sizes of workspaces ask the device too, and must leave the current one as it is."""
    here, there = call_of(name, backend), call_of(name, backend, "cuda:1")
    for one, other in zip(here.inputs, there.inputs, strict=True):
        other.copy_(one)
    assert same(here(), there()) and torch.cuda.current_device() == 0


def test_a_readout_waits_for_nothing_with_any_backend() -> None:
    hidden = torch.randn(20, 32, device="cuda", requires_grad=True)
    classes, weight = torch.randint(0, 7, (20,), device="cuda"), torch.randn(7, 32, device="cuda")

    def losses() -> None:
        for name in (None, "reference"):
            functional.linear_cross_entropy(hidden, weight, classes, backend=name).backward()

    losses()
    with no_waits():
        losses()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_lengths_in_a_graph_and_out_of_range(op: str, activation: str, backend: str) -> None:
    """A replay reads the lengths that are there then; wrong ones count as the nearest right ones, and break nothing."""
    need(op, backend, N=34, K=34)
    problem = float_problem(op, B=4, T=300, N=34, activation=activation)
    lengths = torch.tensor([300, 1, 20, 299], device="cuda")
    wrong = torch.tensor([-(2**63), 2**40 + 1, 17, 2**63 - 1])
    captured = replayed(lambda: run_scan(problem, backend, lengths=lengths), lambda: lengths.copy_(wrong))
    right = torch.tensor([0, 300, 17, 300], device="cuda")
    assert_same_bits(run_scan(problem, backend, lengths=right), captured)


def test_products_beside_a_scan_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stream of a backward in a capture is not that of a backward outside of it."""
    need("dense_scan", "cuda", N=34, K=34)
    monkeypatch.setattr(_gpu_scans, "WINDOW_ELEMENTS", 5 * 34 * 8)  # windows of 8 steps
    monkeypatch.setattr(_scan, "_OVERLAPPED_STEPS", 8)
    problem = float_problem("dense_scan", B=5, T=40, N=34, inputs="features")
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
    for result in (captured, *results):
        assert_same_bits(plain, result)


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
    with no_waits():
        optimizers[2].step()
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


def test_auto_prefers_a_kernel_of_the_device() -> None:
    for op in OPS:
        leaf = dispatch.resolve(op, device=torch.device("cuda", 0), dtype=torch.float32, N=128, K=128)
        assert leaf.__name__ in (f"orthokern.cuda.{op}", f"orthokern.triton_kernels.{op}")


def test_a_first_call_in_inference_mode() -> None:
    """A graph that is recorded there serves training, and leaves the random numbers of torch usable."""
    rnn, x = PeepholeLSTM(3, 40, device="cuda"), torch.randn(120, 5, 3, device="cuda")
    with torch.inference_mode():
        expected = rnn(x)[0]
    output = rnn(x)[0]
    output.sum().backward()
    torch.testing.assert_close(output.detach(), expected.clone(), rtol=0, atol=0)
    assert bool(torch.randn(3, device="cuda").isfinite().all())


@pytest.mark.parametrize("N", [40, 200])
def test_graphs_of_torch_compile(N: int) -> None:
    rnn, x = GRU(3, N, device="cuda"), torch.randn(120, 5, 3, device="cuda")
    compiled, expected = torch.compile(rnn, mode="reduce-overhead"), rnn(x)[0].detach()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(x)[0]
        torch.testing.assert_close(output.detach().clone(), expected)
        output.sum().backward()
