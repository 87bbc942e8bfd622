"""The GRU, the LSTM, the Cayley step, the activations and the readout on a device, against the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checks import activation_by, check_activation, check_cayley
from comparison import assert_matches_reference
from device_cases import DTYPES, check_gru, need, replayed
from helpers import SHORT, GruProblem, assert_same_bits, bases, some_lengths
from peephole_problem import PeepholeProblem, check_lstm, check_peephole
from test_scans import SIZES
from torch import Tensor

from orthokern import functional
from orthokern.cuda import cayley
from orthokern.ops.activations import NAMES
from orthokern.ops.gru_scan import VARIANTS

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(
    "size", [*SIZES, (4, 300, 64), (4, 300, 200), (20, 5, 650)], ids=lambda s: "B{}-T{}-N{}".format(*s)
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gru_parity(variant: str, size: tuple[int, int, int], dtype: torch.dtype, backend: str) -> None:
    B, T, N = size
    need("gru_scan", backend, dtype, N=N)
    problem = GruProblem.random(variant, T, B, N, bias=B != 50)
    check_gru(problem, dtype, backend)
    check_gru(problem, dtype, backend, some_lengths(B, T, "any"))
    check_gru(problem.with_resets(state=B != 50), dtype, backend, some_lengths(B, T, "any"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_gru_in_a_graph(variant: str, backend: str) -> None:
    """Padding plays no part; a replay reads the lengths that are there then, and wrong ones count as the nearest."""
    need("gru_scan", backend, N=66)
    problem = GruProblem.random(variant, 40, 4, 66).map(torch.Tensor.float)
    lengths = torch.tensor([40, 1, 20, 39])
    there, poisoned = (p.map(torch.Tensor.cuda) for p in (problem, problem.with_poisoned_padding(lengths)))
    lengths = lengths.cuda()
    assert_same_bits(there.run(backend, lengths=lengths), poisoned.run(backend, lengths=lengths))
    wrong = torch.tensor([-(2**63), 2**40 + 1, 17, 2**63 - 1])
    captured = replayed(lambda: there.run(backend, lengths=lengths), lambda: lengths.copy_(wrong))
    assert_same_bits(there.run(backend, lengths=torch.tensor([0, 40, 17, 40], device="cuda")), captured)


@pytest.mark.parametrize(
    "size", [*SIZES, (20, 35, 200), (20, 5, 650), (3, 300, 64)], ids="B{0[0]}-T{0[1]}-N{0[2]}".format
)
def test_peephole_parity(size: tuple[int, int, int]) -> None:
    need("peephole_scan", "cuda")
    B, T, N = size
    problem = PeepholeProblem.random(T, B, N)
    for missing in ({}, {"grad_hs": None}, {"grad_cs": None}):
        check_peephole(dataclasses.replace(problem, **missing), torch.float32, "cuda", "cuda")


def test_lstm_module() -> None:
    """By the backend that "auto" takes."""
    need("peephole_scan", "cuda")
    check_lstm("cuda", 66, (80, 60, 1))


SHAPES = [(1, 1), (5, 3), (33, 33), (64, 64), (65, 64), (130, 7), (3, 9, 9), (2, 128, 128), (2, 300, 300), (2, 300, 10)]
SHAPES += [(2, 300, 70)]


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cayley_parity(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    need("cayley", backend, dtype, N=shape[-2], K=shape[-1])
    m, g = bases(shape, dtype)
    for lr in map(torch.tensor, [1e-6, 1e-2, 1.0, -0.1]):
        check_cayley(m, g, lr, lambda m, g, lr: torch.ops.orthokern.cayley(m.cuda(), g.cuda(), lr, backend).cpu())


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
    by_op = activation_by(activation, backend)

    def run(*given: Tensor | None) -> list[Tensor]:
        return [t.cpu() for t in by_op(*(None if t is None else t.cuda() for t in given))]

    check_activation(activation, dtype, run, [(2,), (7, 64), (3, 5, 34), (1001, 6), (0, 4)])


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
        h, w, b = leaves
        loss = functional.linear_cross_entropy(h, w, there, linear_bias=b, reduction=reduction, backend=backend)
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
    loss = functional.linear_cross_entropy(hidden, weight, target, backend=name)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    torch.cuda.synchronize()
    rows = grad.isnan().all(1).tolist()
    assert bool(loss.isnan()) and rows == [False, True, False, False, True, False]
    assert not grad[[0, 2, 3, 5]].isnan().any()
