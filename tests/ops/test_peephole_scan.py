"""peephole_scan: the reference by gradcheck, the CPU kernels against it, the op's registration and determinism."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_matches_reference, each
from torch import Tensor

from orthokern import dispatch
from orthokern._scan_contract import PeepholeInputs, PeepholeStates
from orthokern.ops.peephole_scan import peephole_scan

NAMESPACE = torch.ops.orthokern
# T, B, N: single elements, sizes that fill no vector, more than one group of rows, results that are streamed
SIZES = [(1, 1, 1), (2, 3, 5), (7, 5, 16), (6, 4, 33), (3, 130, 17), (5, 2, 130), (100, 107, 64)]


def problem(T: int, B: int, N: int, dtype: torch.dtype = torch.float64) -> tuple[PeepholeInputs, Tensor, Tensor]:
    """Inputs and cotangents of both results."""
    generator = torch.Generator().manual_seed(T + 10 * B + 100 * N)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, dtype=torch.float64, generator=generator)).to(dtype)

    inputs = PeepholeInputs(
        normal(T, B, 4 * N), normal(4 * N, N, scale=N**-0.5), normal(3, N, scale=0.5), normal(B, N), normal(B, N)
    )
    return inputs, normal(T, B, N), normal(T, B, N)


def leaf_results(
    backend: str, inputs: PeepholeInputs, grad_hs: Tensor | None, grad_cs: Tensor | None
) -> dict[str, Tensor]:
    leaf = dispatch.leaf("peephole_scan", backend)
    states = leaf.peephole_scan_fwd(inputs)
    grads = leaf.peephole_scan_bwd(inputs._replace(x=None), grad_hs, grad_cs, states)
    return {**states._asdict(), **{f"grad_{name}": grad for name, grad in grads._asdict().items()}}


def to(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("given", ["both", "grad_hs", "grad_cs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
@each("peephole_scan")
def test_kernels(op: str, backend: str, sizes: tuple[int, int, int], dtype: torch.dtype, given: str) -> None:
    """Every result, with the cotangent of either state missing."""
    inputs, grad_hs, grad_cs = problem(*sizes)
    cotangents = (None if given == "grad_cs" else grad_hs, None if given == "grad_hs" else grad_cs)
    narrow = PeepholeInputs(*to(dtype, *inputs))  # type: ignore[arg-type]
    exact = leaf_results("reference", PeepholeInputs(*to(torch.float64, *narrow)), *cotangents)
    rounded = leaf_results("reference", narrow, *to(dtype, *cotangents))
    for name, actual in leaf_results(backend, narrow, *to(dtype, *cotangents)).items():
        assert_matches_reference(actual, exact[name], rounded[name], name=name, gradient=name.startswith("grad"))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_gradients(backend: str | None) -> None:
    """Against differences, and the reference twice."""
    inputs, _, _ = problem(3, 2, 4)
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return peephole_scan(*tensors, backend=backend)

    assert torch.autograd.gradcheck(run, leaves)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(run, leaves)


@each("peephole_scan")
def test_the_same_bits_on_any_number_of_threads(op: str, backend: str) -> None:
    """States and adjoints; sums over sequences may have another order, and are the same from run to run."""
    inputs, *cotangents = problem(20, 9, 33, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            found.append(leaf_results(backend, inputs, *cotangents))
    finally:
        torch.set_num_threads(threads)
    for name, one in found[0].items():
        if name not in ("grad_w", "grad_peephole"):
            assert torch.equal(one, found[1][name]), name
        assert torch.equal(found[1][name], found[2][name]), name


@each("peephole_scan")
def test_nan_stays_in_its_sequence(op: str, backend: str) -> None:
    inputs, _, _ = problem(6, 5, 17)
    assert inputs.x is not None
    inputs.x[2, 3, 4] = torch.nan
    states = dispatch.leaf("peephole_scan", backend).peephole_scan_fwd(inputs)
    expected = torch.zeros(6, 5, dtype=torch.bool)
    expected[2:, 3] = True
    assert torch.equal(states.hs.isnan().any(2), expected) and torch.equal(states.cs.isnan().any(2), expected)


def test_registration() -> None:
    inputs, grad_hs, grad_cs = problem(3, 2, 5)
    given = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
    torch.library.opcheck(NAMESPACE.peephole_scan_fwd.default, tuple(given))
    with torch.no_grad():
        states = PeepholeStates(*NAMESPACE.peephole_scan_fwd(*given))
        for cotangents in ((grad_hs, grad_cs), (grad_hs, None), (None, grad_cs)):
            arguments = (*cotangents, *states, *(tensor.detach() for tensor in given[1:]))
            torch.library.opcheck(NAMESPACE.peephole_scan_bwd.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_that_share_the_columns_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    """Few sequences with weights of more than 256 KiB; and more threads than there are processors."""
    for steps, batch in ((9, 1), (5, 2)):
        inputs, _, _ = problem(steps, batch, 263, dtype)
        found = []
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            found.append(dispatch.leaf("peephole_scan", "cpu").peephole_scan_fwd(inputs))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)
