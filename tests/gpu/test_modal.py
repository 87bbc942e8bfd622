"""The modal kernels on a device: parity with the float64 reference, and device synchronisation."""

from __future__ import annotations

import pytest
import torch
from helpers import SHORT, assert_matches_reference, some_lengths
from modal_problem import Problem
from torch import Tensor

from orthokern import dispatch, functional

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = (torch.float32, torch.float64)
SIZES = [(1, 1, 1, 1), (17, 65, 3, 9), (64, 1000, 50, 9), (33, 300, 8, 130)]  # M, T, B, C


def on_device(problem: Problem) -> Problem:
    """A copy with every tensor on the device."""
    copy = object.__new__(Problem)
    for name, value in vars(problem).items():
        setattr(copy, name, None if value is None else value.cuda())
    return copy


def check(actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    dtype = actual["grad_z0"].dtype
    for name, tensor in actual.items():
        if name == "hits":  # where two logits are equal to rounding, either may be the larger one
            assert (tensor.cpu() - exact[name]).abs().sum() <= exact[name].numel() // 100
            continue
        rounded = tensor.cpu().to(dtype), exact[name], plain[name].to(dtype)
        assert_matches_reference(*rounded, name=name, gradient="grad" in name)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_parity(backend: str, tokens: bool, dtype: torch.dtype) -> None:
    why = dispatch.reasons("modal_scan", backend, dispatch.Call(torch.device("cuda", 0), dtype, {}))
    if why:
        pytest.skip(f"{backend}: {' and '.join(why)}")
    for index, (M, T, B, C) in enumerate(SIZES):
        lengths = some_lengths(B, T, "any", seed=index) if index % 2 else None
        there = None if lengths is None else lengths.cuda()
        inexact = Problem(M, T, B, C, tokens=tokens, margin=1e-3, seed=index).to(dtype)
        exact, given = inexact.to(torch.float64), on_device(inexact)
        check(
            given.loss(backend, lengths=there),
            exact.loss("reference", lengths=lengths),
            inexact.loss("reference", lengths=lengths),
        )
        scan = given.scan(backend, lengths=there)
        check(scan, exact.scan("reference", lengths=lengths), inexact.scan("reference", lengths=lengths))
        again = given.scan(backend, lengths=there)
        assert all(torch.equal(tensor, again[name]) for name, tensor in scan.items())


def test_a_refined_call_waits_for_its_report_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0].cuda()
    table, readout = torch.randn(32, 10, generator=generator).cuda(), torch.randn(9, 32, generator=generator).cuda()
    x, target = (torch.randint(0, 9, (500, 16), generator=generator).cuda() for _ in range(2))

    def run(w: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        leaf = w.clone().requires_grad_()
        found = functional.scan_cross_entropy(
            x, (leaf,), readout, target, weight=table, activation="identity", algorithm="modal", basis=basis
        )
        found.loss.backward()
        assert leaf.grad is not None
        return found.loss, found.basis, leaf.grad

    _, basis, _ = run(w, None)
    moved = w + 1e-5 * torch.randn(32, 32, generator=generator).cuda()
    run(moved, basis)  # what is allocated or compiled at a first call
    torch.cuda.set_sync_debug_mode("error")  # an event that the host waits for is no such wait
    try:
        loss, _, grad = run(moved, basis)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fresh, _, expected = run(moved, None)
    torch.testing.assert_close(loss, fresh)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
