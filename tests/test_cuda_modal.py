"""The CUDA kernels of the modal ops without a GPU, by the host harness (docs/cuda-host-harness.md).

Chunks of time are made so short that tiny problems have several.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_host import build
from helpers import SHORT, some_lengths, strided
from modal_problem import Problem, compare
from torch import Tensor

from orthokern import _modal_chunks, dispatch, functional
from orthokern.cuda import _call, modal_cross_entropy, modal_scan
from orthokern.ops import _modal, _modal_basis, _scan_loss
from orthokern.ops import modal_scan as ops_modal_scan
from orthokern.ops._modal_basis import Pending
from orthokern.ops.modal_scan import ID_DTYPES

DTYPES = (torch.float32, torch.float64)
ORDERS = tuple(build.ORDERS)


@pytest.fixture(scope="session")
def module(request: pytest.FixtureRequest) -> Any:
    return build.load(request.config.cache.mkdir("cuda_host"))


@pytest.fixture(autouse=True)
def cuda(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend "cuda" on CPU tensors, with chunks of 4 steps."""
    torch.set_num_threads(1)
    build.use(module, monkeypatch)
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 4)
    yield module
    module.set_schedule(*build.ORDERS["forward"])


def check(problem: Problem, dtype: torch.dtype, lengths: Tensor | None = None, **options: Any) -> None:
    """Parity of everything that both ops give, with poison on the padding."""
    inexact = problem.to(dtype)
    exact, given = inexact.to(torch.float64), inexact if lengths is None else inexact.poisoned(lengths)
    scans = [
        p.scan(backend, lengths=lengths)
        for p, backend in ((given, "cuda"), (exact, "reference"), (inexact, "reference"))
    ]
    compare(*scans)
    losses = [
        p.loss(backend, lengths=lengths, **options)
        for p, backend in ((given, "cuda"), (exact, "reference"), (inexact, "reference"))
    ]
    compare(*losses)


# M, T, B, D, C: lanes over one block of 128, T of whole chunks, not whole, below one
SIZES = [(1, 1, 1, 1, 1), (3, 7, 2, 2, 2), (2, 8, 3, 5, 40), (17, 13, 4, 2, 9), (65, 3, 3, 3, 3), (5, 21, 1, 1, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("tokens", [True, False])
def test_parity(cuda: Any, tokens: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all orders of the threads; spans of one step (a chunk then has one), of one chunk, of several, and one."""
    for index, (M, T, B, D, C) in enumerate(SIZES):
        cuda.set_schedule(*build.ORDERS[ORDERS[index % 3]])
        monkeypatch.setattr(_modal_chunks, "span_steps", lambda *sizes, steps=(1, 4, 8, 64)[index % 4]: steps)
        problem = Problem(M, T, B, C, D=D, tokens=tokens, P=index % 3, bias=index != 2, seed=index)
        lengths = some_lengths(B, T, "any", seed=index) if (index + tokens) % 2 else None
        check(problem, dtype, lengths, reduction="sum" if index % 2 else "mean")


@pytest.mark.parametrize("tokens", [True, False])
def test_chunks(tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many joined chunks as are loaded together, and more; a single one of a length that is no power of 2."""
    for chunk, T in ((2, 11), (8, 17), (1, 5), (9, 9)):
        monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes, chunk=chunk: chunk)
        for dtype in DTYPES:
            check(Problem(3, T, 2, D=1, tokens=tokens), dtype)
            check(Problem(3, T, 2, D=1, tokens=tokens), dtype, torch.tensor([T - 1, 1]))  # nobody has the last step


def test_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    for D, span in ((5, 1), (3, 10**6)):
        monkeypatch.setattr(_modal_chunks, "DELTA_BYTES", span)
        for dtype in DTYPES:
            check(Problem(2, 14, 2, D=D), dtype)
            check(Problem(2, 14, 2, D=D), dtype, torch.tensor([14, 6]))


def test_runs_of_one_id_in_chunks_of_the_usual_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 16)
    problem = Problem(3, 70, 2, D=2)
    problem.x[3:60] = 1
    problem.x[40, 1] = 0
    for dtype in DTYPES:
        check(problem, dtype)
        check(problem, dtype, torch.tensor([50, 33]))


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    for D in (2, 5):
        problem = Problem(2, 6, 2, D=D)
        narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
        for expected, actual in (
            (problem.scan("cuda"), narrow.scan("cuda")),
            (problem.loss("cuda"), narrow.loss("cuda")),
        ):
            assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_long_products_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_modal_chunks, "chunk_length", lambda T, lanes: 32)
    problem = Problem(2, 1000, 1, D=1, margin=1e-3, P=2).to(torch.float32)
    expected = problem.to(torch.float64).scan("reference")
    for name, tensor in problem.scan("cuda").items():
        error = (tensor.double() - expected[name]).norm() / (expected[name].norm() + 1e-30)
        assert error < 1e-7, f"{name}: {error:.2e}"


def test_equal_extreme_and_wrong_logits() -> None:
    problem = Problem(2, 4, 2, 70, D=2, bias=False)
    problem.readout[[3, 69]] = problem.readout[[35, 2]]  # equal logits: the first counts
    check(problem, torch.float64)
    for size in (1e-3, 40.0):
        problem.readout = size * problem.readout / problem.readout.abs().max()
        for dtype in DTYPES:
            check(problem, dtype)
    problem.target[3, 1] = 70
    lengths = torch.tensor([4, 3])
    found, padded, poisoned = (
        p.leaf_loss(modal_cross_entropy, lengths=n)
        for p, n in ((problem, None), (problem, lengths), (problem.poisoned(lengths), lengths))
    )
    assert found["loss"].isnan() and found["grad_readout"].isnan().all() and found["grad_table"].isnan().any()
    assert all(torch.equal(poisoned[name], tensor) for name, tensor in padded.items())


def leaf(problem: Problem, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """modal_scan of the leaf itself, behind the checks of the op, which a GPU's tensors do not get."""
    return problem.leaf_scan(modal_scan, lengths=lengths)


def test_a_wrong_id_or_length_touches_nothing_else() -> None:
    problem = Problem(3, 9, 3, D=2)
    good = leaf(problem)
    problem.x[5, 0], problem.x[2, 2] = 2, -1
    found = leaf(problem)
    assert torch.equal(found["z"][:, 1], good["z"][:, 1]) and torch.equal(found["z"][:5, 0], good["z"][:5, 0])
    assert found["z"][5:, 0].isnan().all() and found["z"][2:, 2].isnan().all()
    assert torch.equal(found["grad_z0"], good["grad_z0"]) and found["grad_table"].isfinite().all()
    problem = Problem(3, 5, 3, D=2)
    wrong, right = torch.tensor([-(2**63), 2**40, 3]), torch.tensor([0, 5, 3])
    expected = leaf(problem, right)
    for name, tensor in leaf(problem, wrong).items():
        assert torch.equal(tensor, expected[name]), name
    problem.pairs = torch.tensor([[0, 3], [1, -1], [2, 1]])
    assert leaf(problem)["grad_pairs"].isnan().flatten(1).any(1).tolist() == [True, True, False]


def test_strided_inputs_and_what_is_not_needed() -> None:
    for tokens in (True, False):
        problem = Problem(3, 6, 2, D=2, tokens=tokens)
        copy = problem.map(torch.clone)
        for one, other in (
            (problem.scan("cuda"), problem.map(strided).scan("cuda")),
            (problem.loss("cuda"), problem.map(strided).loss("cuda")),
        ):
            assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
        for name, value in vars(copy).items():
            assert value is None or torch.equal(value, getattr(problem, name)), name
        only, full = problem.loss("cuda", need_grad=False), problem.loss("cuda")
        for name, tensor in only.items():
            assert torch.equal(tensor, full[name]) if name in ("loss", "hits") else not tensor.numel(), name


def test_another_device_is_used_and_the_current_one_left(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = build.OnSecondDevice(cuda)
    monkeypatch.setattr(_call, "kernels", there)
    Problem(2, 6, 2, D=2).loss("cuda")
    called = there.called
    assert set(called) == {f"modal_{part}" for part in ("forward", "join", "backward", "pairs", "loss")}
    assert all(set(devices) == {1} for devices in called.values()), called


def test_gradcheck() -> None:
    problem = Problem(2, 5, 2, D=2, tokens=False)
    leaves = [t.clone().requires_grad_() for t in (problem.x, problem.re, problem.im, problem.z0)]
    assert torch.autograd.gradcheck(lambda *a: torch.ops.orthokern.modal_scan_fwd(*a, None, "cuda"), leaves)


# ---- the basis, found while the host goes on -------------------------------------------------------------------------


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of scan_cross_entropy as on a GPU: refinements are deferred, ids and pairs not looked at. What happened, in
    order."""
    events: list[str] = []
    monkeypatch.setattr(dispatch, "choose", lambda op, *_, **__: "cuda" if op.startswith("modal") else "cpu")
    monkeypatch.setattr(_scan_loss, "_is_asynchronous", lambda device: True)
    monkeypatch.setattr(ops_modal_scan, "check_range", lambda *_: None)
    true_call, true_get, true_solved = _call.call, Pending.get, _modal_basis._solved

    def call(name: str, *rest: Any) -> None:
        events.append("kernel")
        true_call(name, *rest)

    def get(self: Pending) -> list[float]:
        events.append("wait")
        return true_get(self)

    def solved(*args: Any) -> Tensor:
        events.append("solve")
        return true_solved(*args)

    monkeypatch.setattr(_call, "call", call)
    monkeypatch.setattr(Pending, "get", get)
    monkeypatch.setattr(_modal_basis, "_solved", solved)
    return events


def modal_step(w: Tensor, basis: Tensor | None, backend: str | None = "cuda") -> tuple[Any, Tensor]:
    """(result, dL/dw) of a small call with token ids."""
    generator = torch.Generator().manual_seed(1)
    N, w = len(w), w.clone().requires_grad_()
    x, target = (torch.randint(0, 4, (9, 2), generator=generator) for _ in range(2))
    table, readout = (torch.randn(*size, generator=generator).double() for size in ((N, 4), (4, N)))
    result = functional.scan_cross_entropy(
        x, (w,), readout, target, weight=table, activation="identity", algorithm="modal", basis=basis, backend=backend
    )
    result.loss.backward()
    assert w.grad is not None
    return result, w.grad


def test_the_host_waits_when_the_work_is_queued(deferred: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    first, _ = modal_step(w, None)
    assert "solve" in deferred and "wait" not in deferred
    deferred.clear()
    moved = w + 1e-5 * torch.randn(6, 6, dtype=torch.float64)
    late, grad = modal_step(moved, first.basis)
    assert deferred.count("wait") == 1 and deferred[-1] == "wait" and "solve" not in deferred
    monkeypatch.setattr(_scan_loss, "_is_asynchronous", lambda device: False)
    soon, expected = modal_step(moved, first.basis)
    assert torch.equal(late.loss, soon.loss) and torch.equal(late.basis, soon.basis)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_a_start_that_leads_nowhere_costs_the_call_once_more(deferred: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    w, other = (torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    fresh, expected = modal_step(w, None)
    basis = modal_step(other, None)[0].basis
    assert basis.shape == fresh.basis.shape
    deferred.clear()
    found, grad = modal_step(w, basis)
    waited, solved = deferred.index("wait"), deferred.index("solve")
    assert waited < solved and "kernel" in deferred[:waited] and "kernel" in deferred[solved:]
    assert torch.equal(found.loss, fresh.loss) and torch.equal(found.basis, fresh.basis)
    assert torch.equal(grad, expected)


def test_modes_are_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _modal.Call(
        kind="loss", T=10_000, B=50, N=128, K=128, C=9, ids=True, backward=True, dtype=torch.float32,
        device=torch.device("cuda"), activation="identity", message_clip=0.0, backend=None, lengths=False, started=True,
    )  # fmt: skip
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert ("captured" in (_modal.why_never(call) or "")) == captured


@pytest.mark.slow
@pytest.mark.parametrize("nvcc_arch", ["80", "90", "100"])
@pytest.mark.parametrize("op", ["modal_scan", "modal_cross_entropy"])
def test_no_kernel_spills(op: str, nvcc_arch: str, tmp_path: Path) -> None:
    nvcc = build.nvcc()
    if nvcc is None:
        pytest.skip("nvcc not found")
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{nvcc_arch}", "-Xptxas=-v", f"-I{build.CSRC}", "-c"]
    source = [str(build.CSRC / "cuda" / f"{op}.cu"), "-o", str(tmp_path / "out.o")]
    done = subprocess.run([*command, *source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = done.stderr.split("Compiling entry function")[1:]
    assert len(entries) == (7 if op == "modal_scan" else 2)
    assert all("0 bytes spill stores, 0 bytes spill loads" in entry for entry in entries), done.stderr
