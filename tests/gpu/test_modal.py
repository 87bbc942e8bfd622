"""The modal kernel on a device: parity with the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SHORT, assert_same_bits, some_lengths
from modal_problem import Problem, compare
from torch import Tensor

from orthokern import functional
from orthokern.cuda import _call
from orthokern.ops.modal import cuda, reference

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not _call.AVAILABLE:
    pytest.skip(_call.REASON, allow_module_level=True)

DTYPES = (torch.float32, torch.float64)
SIZES = [(1, 1, 1, 1), (17, 65, 3, 9), (64, 1000, 50, 9), (33, 300, 8, 130)]  # M, T, B, C


def on_device(problem: Problem) -> Problem:
    """A copy with every tensor on the device."""
    copy = object.__new__(Problem)
    for name, value in vars(problem).items():
        setattr(copy, name, None if value is None else value.cuda())
    return copy


def results(problem: Problem, backend: Any, lengths: Tensor | None) -> dict[str, Tensor]:
    result = {**problem.scan(backend), **problem.loss(backend, lengths=lengths)}
    return {name: tensor.cpu() for name, tensor in result.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("spans", [1, 3])
def test_parity(spans: int, tokens: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "span_steps", lambda inputs, readout: -(-len(inputs.x) // spans))
    for index, (M, T, B, C) in enumerate(SIZES):
        lengths = some_lengths(B, T, "any", seed=index) if index % 2 else None
        there = None if lengths is None else lengths.cuda()
        inexact = Problem(M, T, B, C, tokens=tokens, margin=1e-3, seed=index).to(dtype)
        exact, device = inexact.to(torch.float64), on_device(inexact)
        result = results(device, cuda, there)
        compare(result, results(exact, reference, lengths), results(inexact, reference, lengths))
        assert_same_bits(result, results(device, cuda, there))


def test_scan_cross_entropy() -> None:
    """With a basis of an earlier call, against the sequential scan."""
    generator = torch.Generator().manual_seed(0)
    w = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0].cuda().requires_grad_()
    table, readout = torch.randn(32, 10, generator=generator).cuda(), torch.randn(9, 32, generator=generator).cuda()
    x, target = (torch.randint(0, 9, (500, 16), generator=generator).cuda() for _ in range(2))
    options = {"weight": table, "activation": "identity"}
    basis = functional.scan_cross_entropy(x, w.detach(), readout, target, algorithm="modal", **options).basis
    modal = functional.scan_cross_entropy(x, w, readout, target, algorithm="modal", basis=basis, **options).loss
    expected = functional.scan_cross_entropy(x, w, readout, target, algorithm="sequential", **options).loss
    torch.testing.assert_close(modal, expected, rtol=1e-5, atol=0)
    grads = [torch.autograd.grad(loss, w)[0] for loss in (modal, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("features", [None, 5])
@pytest.mark.parametrize("resets", [False, True])
def test_rotation_scan(resets: bool, features: int | None, dtype: torch.dtype) -> None:
    """States and every gradient."""
    for M, T, B in ((1, 1, 1), (17, 65, 3), (33, 300, 8), (64, 4096, 50)):
        generator = torch.Generator().manual_seed(M)
        shapes = {"x": (T, B, features or 2 * M), "h0": (B, 2 * M)}
        shapes |= {"weight": (2 * M, features), "bias": (2 * M,)} if features else {}
        args = {
            name: torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
            for name, shape in shapes.items()
        }
        angle = 3 * torch.rand(M, dtype=torch.float64, generator=generator)
        cuts = torch.rand(T, B, generator=generator) < 0.05 if resets else None
        results = []
        for device, kind in (("cuda", dtype), ("cpu", torch.float64), ("cpu", dtype)):
            leaves = {name: value.to(device, kind).requires_grad_() for name, value in args.items()}
            leaves["eigenvalues"] = torch.polar(torch.full_like(angle, 0.999), angle).to(device).requires_grad_()
            there = None if cuts is None else cuts.to(device)
            hs = functional.rotation_scan(**leaves, resets=there, backend="cuda" if device == "cuda" else "reference")
            grads = torch.autograd.grad(hs, list(leaves.values()), torch.cos(hs.detach()))
            values = {"hs": hs.detach(), **{f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}}
            values["grad_eigenvalues"] = torch.view_as_real(values["grad_eigenvalues"]).to(kind)
            results.append({name: value.cpu() for name, value in values.items()})
        compare(*results)
