"""The recurrence in modal coordinates and its loss: the CPU kernels against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import assert_same_bits, some_lengths
from modal_problem import Problem, compare

from orthokern.ops._checks import ID_DTYPES
from orthokern.ops.modal import cpu, reference

CASES = [
    *itertools.product((1, 3, 17), (1, 63, 65), (1, 3), (2, 9)),
    *((17, 65, 3, C) for C in (1, 17, 50)),
    (2, 64, 2, 3),
    (33, 130, 8, 9),
    (17, 100, 50, 9),
]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "M{}-T{}-B{}-C{}".format(*case))
def test_cpu_agrees_with_the_reference(
    case: tuple[int, ...], padded: bool, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:  # sums by token id in sorted order in place of a product
        monkeypatch.setattr(reference, "ONE_HOT", 4)
    M, T, B, C = case
    lengths = some_lengths(B, T, "any") if padded else None
    problem = Problem(M, T, B, C, tokens=tokens, bias=C != 2, P=0 if M == 2 else 3)
    args = problem if lengths is None else problem.poisoned(lengths)
    options = {"reduction": "sum" if T == 63 else "mean", "lengths": lengths}
    expected = problem.loss(reference, **options)
    compare(args.loss(cpu, **options), expected)
    only = args.loss(cpu, need_grad=False, **options)
    compare(only, {name: expected[name] for name in only})
    compare(problem.scan(cpu), problem.scan(reference))


@pytest.mark.parametrize("tokens", [True, False])
def test_float32(tokens: bool) -> None:
    problem = Problem(17, 300, 5, 9, tokens=tokens).to(torch.float32)
    exact = problem.to(torch.float64)
    for run in (Problem.loss, Problem.scan):
        compare(run(problem, cpu), run(exact, reference), run(problem, reference))


@pytest.mark.parametrize("blanks", [False, True])
def test_long_sequences_keep_their_digits_in_float32(blanks: bool) -> None:
    """Measured: at most 7e-8. The table's gradient of a blank loses most of them where its terms are rounded."""
    problem = Problem(16, 10_000, 2, 9, margin=1e-4, P=0).to(torch.float32)
    problem.table = 0.05 * problem.table
    if blanks:
        problem.x[10:] = 0
        problem.target[10:] = 0
    expected, actual = problem.to(torch.float64).loss(reference), problem.loss(cpu)
    for name in expected.keys() - {"hits"}:
        error = (actual[name] - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-7, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    problem = Problem(3, 70, 3, 5)
    narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
    for backend in (cpu, reference):
        compare(narrow.loss(backend), problem.loss(cpu))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("B", [1, 3, 8])
def test_threads_divide_the_work(threads: int, B: int) -> None:
    """Over sequences; twice the same bits."""
    lengths = some_lengths(B, 700, "any")
    problem = Problem(5, 700, B, tokens=B != 3)
    torch.set_num_threads(threads)
    loss = problem.loss(cpu, lengths=lengths)
    compare(loss, problem.loss(reference, lengths=lengths))
    assert_same_bits(problem.loss(cpu, lengths=lengths), loss)
    compare(problem.scan(cpu), problem.scan(reference))
