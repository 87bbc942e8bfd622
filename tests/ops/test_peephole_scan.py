"""peephole_scan: the reference by gradcheck, the CPU kernels against it, the op's registration and determinism."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import assert_same_bits, each, on_threads, strided
from peephole_problem import PeepholeProblem, check_peephole
from torch import Tensor

from orthokern.ops.peephole_scan import peephole_scan

NAMESPACE = torch.ops.orthokern
# T, B, N: single elements, sizes that fill no vector, more than one group of rows, results that are streamed
SIZES = [(1, 1, 1), (2, 3, 5), (7, 5, 16), (6, 4, 33), (3, 130, 17), (5, 2, 130), (100, 107, 64)]


@pytest.mark.parametrize("given", ["both", "grad_hs", "grad_cs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
@each("peephole_scan")
def test_kernels(op: str, backend: str, sizes: tuple[int, int, int], dtype: torch.dtype, given: str) -> None:
    """Every result, with the cotangent of either state missing."""
    problem = PeepholeProblem.random(*sizes)
    missing = {"both": {}, "grad_hs": {"grad_cs": None}, "grad_cs": {"grad_hs": None}}[given]
    check_peephole(dataclasses.replace(problem, **missing), dtype, backend)


@each("peephole_scan")
def test_any_strides(op: str, backend: str) -> None:
    problem = PeepholeProblem.random(5, 3, 7)
    actual = problem.map(strided).run(backend)
    assert all(tensor.is_contiguous() for tensor in actual.values())
    assert_same_bits(actual, problem.run(backend))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_gradients(backend: str | None) -> None:
    """Against differences, and the reference twice."""
    leaves = [tensor.requires_grad_() for tensor in PeepholeProblem.random(3, 2, 4).inputs()]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return peephole_scan(*tensors, backend=backend)

    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@each("peephole_scan")
def test_the_same_bits_on_any_number_of_threads(op: str, backend: str) -> None:
    """States and adjoints; sums over sequences may have another order, and are the same from run to run."""
    problem = PeepholeProblem.random(20, 9, 33).map(Tensor.float)
    alone, first, again = on_threads((1, 2, 2), lambda: problem.run(backend))
    assert_same_bits(alone, first, skip=("grad_w", "grad_peephole"))
    assert_same_bits(first, again)


@each("peephole_scan")
def test_nan_stays_in_its_sequence(op: str, backend: str) -> None:
    problem = PeepholeProblem.random(6, 5, 17)
    problem.x[2, 3, 4] = torch.nan
    hs, cs, _ = NAMESPACE.peephole_scan_fwd(*problem.inputs(), backend)
    expected = torch.zeros(6, 5, dtype=torch.bool)
    expected[2:, 3] = True
    assert torch.equal(hs.isnan().any(2), expected) and torch.equal(cs.isnan().any(2), expected)


def test_registration() -> None:
    problem = PeepholeProblem.random(3, 2, 5)
    given = [tensor.requires_grad_() for tensor in problem.inputs()]
    torch.library.opcheck(NAMESPACE.peephole_scan_fwd.default, tuple(given))
    torch.library.opcheck(NAMESPACE.peephole_scan_fwd.default, (*(t.detach() for t in given), None, False))
    with torch.no_grad():
        states, both = NAMESPACE.peephole_scan_fwd(*given), (problem.grad_hs, problem.grad_cs)
        for cotangents in (both, (both[0], None), (None, both[1])):
            arguments = (*cotangents, *states, *(tensor.detach() for tensor in given[1:]))
            torch.library.opcheck(NAMESPACE.peephole_scan_bwd.default, arguments)
