"""The CUDA kernel of the modal form without a GPU, by the host harness (docs/cuda-host-harness.md).

Chunks of time are made so short that tiny problems have several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_host import build
from helpers import some_lengths
from modal_problem import Problem, compare
from torch import Tensor

from orthokern import dispatch, functional
from orthokern._scan_contract import RotationArgs
from orthokern.cuda import _call, rotation_scan
from orthokern.errors import InputError
from orthokern.ops.modal import choice, cuda, reference
from orthokern.reference import rotation_scan as exact_scan

DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def harness(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend "cuda" on CPU tensors, with chunks of 4 steps."""
    torch.set_num_threads(1)
    build.use(module, monkeypatch)
    monkeypatch.setattr(rotation_scan, "chunk_length", lambda T, lanes: min(T, 4))
    yield module
    module.set_schedule(*build.ORDERS["forward"])


def check(problem: Problem, dtype: torch.dtype, lengths: Tensor | None = None, **options: Any) -> None:
    """Parity of states and loss, with poison on the padding."""
    inexact = problem.to(dtype)
    exact, args = inexact.to(torch.float64), inexact if lengths is None else inexact.poisoned(lengths)
    compare(inexact.scan(cuda), exact.scan(reference), inexact.scan(reference))
    options["lengths"] = lengths
    compare(args.loss(cuda, **options), exact.loss(reference, **options), inexact.loss(reference, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("steps", [4, 6, 16])
def test_parity(steps: int, tokens: bool, dtype: torch.dtype, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one span and in several, in every order of blocks and threads."""
    monkeypatch.setattr(cuda, "span_steps", lambda inputs, readout: steps)
    sizes = [(1, 1, 1, 1), (3, 4, 2, 3), (5, 11, 3, 9), (17, 14, 2, 33)]
    for index, (M, T, B, C) in enumerate(sizes):
        module.set_schedule(*build.ORDERS[tuple(build.ORDERS)[index % len(build.ORDERS)]])
        problem = Problem(M, T, B, C, tokens=tokens, P=index % 3, bias=index != 2, seed=index)
        lengths = some_lengths(B, T, "any", seed=index) if (index + tokens) % 2 else None
        check(problem, dtype, lengths, reduction="sum" if index % 2 else "mean")


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 4, 5, 16, 19])
def test_rotation_scan(T: int, dtype: torch.dtype, features: bool) -> None:
    """A reset in the first and in the last step of a chunk, in none of its steps, and in all."""
    problem, generator = Problem(5, T, 4, D=1, tokens=False).to(dtype), torch.Generator().manual_seed(T)
    resets = torch.rand(T, 4, generator=generator) < 0.3
    resets[:, 0], resets[:, 1], resets[3::4, 2], resets[::4, 3] = False, True, True, True
    linear_map = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((10, 3), (10,))]
    x = torch.randn(T, 4, 3, generator=generator).to(dtype) if features else problem.entering
    for cuts in (None, resets):
        results = []
        for backend, wide in ((rotation_scan, False), (exact_scan, True), (exact_scan, False)):
            p, kind = (problem.to(torch.float64), torch.float64) if wide else (problem, dtype)
            weight, bias = (tensor.to(kind) if features else None for tensor in linear_map)
            args = RotationArgs(x.to(kind), p.re, p.im, p.z0, weight, bias, cuts)
            z = backend.rotation_scan_fwd(args)
            grads = backend.rotation_scan_bwd(args, p.x, z, need_x=True)._asdict()
            results.append({"z": z, **{name: grad.to(kind) for name, grad in grads.items() if grad is not None}})
        compare(*results)


@pytest.mark.parametrize("name", ["x", "re", "im", "h0", "resets"])
def test_rotation_scan_checks_sizes(name: str) -> None:
    """Of tensors whose data was exchanged, also between forward and backward."""
    p = Problem(3, 5, 2, D=1, tokens=False)
    args = RotationArgs(p.entering, p.re, p.im, p.z0, None, None, torch.zeros(5, 2, dtype=torch.bool))
    z = rotation_scan.rotation_scan_fwd(args)
    wrong = args._replace(**{name: getattr(args, name)[..., :1].clone()})
    with pytest.raises(InputError, match="^rotation_scan: .* must have .* elements, got"):
        rotation_scan.rotation_scan_fwd(wrong)
    if name != "x":  # the backward of a call without a map reads no x
        with pytest.raises(InputError, match="^rotation_scan: .* must have .* elements, got"):
            rotation_scan.rotation_scan_bwd(wrong, p.x, z, need_x=True)


def test_chunk_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many joined chunks as are loaded together, and more; one of a length that is no power of 2."""
    for chunk, T in ((2, 11), (8, 17), (1, 5), (9, 9)):
        monkeypatch.setattr(rotation_scan, "chunk_length", lambda T, lanes, chunk=chunk: chunk)
        check(Problem(3, T, 2, D=1), torch.float32)


def test_long_products_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_scan, "chunk_length", lambda T, lanes: 32)
    problem = Problem(2, 1000, 1, D=1, margin=1e-3, P=2).to(torch.float32)
    expected = problem.to(torch.float64).scan(reference)
    for name, tensor in problem.scan(cuda).items():
        assert (tensor.double() - expected[name]).norm() <= 1e-7 * expected[name].norm(), name


def test_a_wrong_id_makes_its_sequence_nan_and_a_wrong_target_the_loss() -> None:
    problem = Problem(3, 9, 3, D=2, tokens=True)
    problem.x[5, 0] = 2
    result = problem.loss(cuda)
    assert result["loss"].isnan() and result["grad_table"].isnan().any()
    assert result["grad_z0"][1:].isfinite().all() and result["grad_z0"][0].isnan().all()
    problem = Problem(3, 9, 3)
    problem.target[5, 0] = 3
    assert problem.loss(cuda)["loss"].isnan()


def test_another_device_is_used_and_the_current_one_left(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = build.OnSecondDevice(harness)
    monkeypatch.setattr(_call, "kernels", there)
    Problem(2, 6, 2, D=2).loss(cuda)
    assert set(there.called) == {"modal_scan", "modal_readout"} and set(
        map(tuple, map(set, there.called.values()))
    ) == {(1,)}


def test_scan_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the public function runs the kernel, and has the loss and the gradient of the sequential scan."""
    monkeypatch.setattr(choice, "backend_name", lambda call: "cuda")
    generator = torch.Generator().manual_seed(0)
    w = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0].requires_grad_()
    x, target = (torch.randint(0, 4, (9, 2), generator=generator) for _ in range(2))
    table, readout = (torch.randn(*size, generator=generator).double() for size in ((6, 4), (4, 6)))
    results = []
    for algorithm in ("modal", "sequential"):
        loss = functional.scan_cross_entropy(
            x, w, readout, target, weight=table, activation="identity", algorithm=algorithm
        ).loss
        results.append((loss, torch.autograd.grad(loss, w)[0]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_a_gpu_without_the_kernels_or_in_a_graph_has_no_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.empty(128, 128, device="meta")
    monkeypatch.setattr(choice.Call, "device", property(lambda self: torch.device("cuda")))
    call = choice.Call((w,), 10_000, 50, 9, True)
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        monkeypatch.setattr(dispatch, "choose", lambda *_: "cuda")
        assert ("captured" in (choice.why_never(call) or "")) == captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "choose", lambda *_: "reference")
    asked = choice.Call((w,), 10_000, 50, 9, True, algorithm="modal")
    with pytest.raises(InputError, match="modal on a GPU needs the CUDA kernels"):
        choice.choose(asked)
