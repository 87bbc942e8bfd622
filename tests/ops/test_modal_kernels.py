"""The recurrence in modal coordinates and its loss: the reference against autograd, the CPU kernels against it."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import some_lengths
from modal_problem import Problem, compare
from torch import Tensor

from orthokern.ops._checks import ID_DTYPES
from orthokern.ops.modal import cpu, reference


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Same names, shapes and dtypes; differences relative in norm below the bound; integers equal."""
    for name, right in expected.items():
        result = actual[name]
        assert result.shape == right.shape and (bound > 0 or result.dtype == right.dtype), name
        if right.dtype == torch.int64:
            assert torch.equal(result, right), name
            continue
        error = (result.double() - right.double()).norm() / (right.double().norm() + 1e-30)
        assert error <= bound, f"{name}: {error:.2e}"


def by_autograd(problem: Problem, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """The loss by complex numbers and autograd, in float64. Pairs by the gradient of a full matrix in the modes."""
    names = [name for name in ("re", "im", "z0", "table", "readout", "bias") if getattr(problem, name) is not None]
    leaves = {name: getattr(problem, name).double().requires_grad_() for name in names}
    (T, B), M = problem.target.shape, len(problem.re)
    x = problem.x if problem.table is not None else problem.x.double().requires_grad_()
    entering = leaves["table"][problem.x] if problem.table is not None else x
    blocks = torch.zeros(2 * M, 2 * M, dtype=torch.float64, requires_grad=True)  # added to the diagonal form
    lam, z, states = torch.complex(leaves["re"], leaves["im"]), leaves["z0"], []
    for row in entering.unbind(0):
        turned = lam * torch.complex(*z.chunk(2, 1))
        z = torch.cat([turned.real, turned.imag], 1) + z @ blocks.mT + row
        states.append(z)
    logits = torch.stack(states) @ leaves["readout"].mT + leaves.get("bias", 0)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), problem.target.flatten(), reduction="none")
    alive = torch.ones(T, B, dtype=torch.bool) if lengths is None else torch.arange(T)[:, None] < lengths
    loss = losses[alive.flatten()].mean()
    loss.backward()
    result = {"loss": loss.detach(), **{f"grad_{name}": leaf.grad for name, leaf in leaves.items()}}
    result["grad_weight"] = result.pop("grad_readout")
    if problem.table is None:
        result["grad_x"] = x.grad
    if problem.pairs is not None:
        j, k = problem.pairs.unbind(1)
        result["grad_pairs"] = blocks.grad.view(2, M, 2, M)[:, j, :, k]
    return result


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_the_reference(padded: bool, tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums by token id as a product, and in sorted order."""
    monkeypatch.setattr(reference, "ONE_HOT", 4 if padded else 5)
    lengths = torch.tensor([7, 2, 5]) if padded else None
    for problem in (Problem(3, 7, 3, tokens=tokens), Problem(1, 7, 3, tokens=tokens, bias=False, P=0)):
        expected = by_autograd(problem, lengths)
        result = problem.loss(reference, lengths=lengths)
        first, adjoints = result.pop("states")[0], result.pop("adjoints")
        assert_near(result, expected, 1e-11)
        entering = reference.entering(problem.x[:1], problem.table, None)
        assert torch.equal(first, reference.scan(entering, problem.re, problem.im, problem.z0)[0])
        torch.testing.assert_close(reference.turn(adjoints[0], problem.re, -problem.im), expected["grad_z0"])


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
def test_cpu_agrees_with_the_reference(case: tuple[int, ...], padded: bool, tokens: bool) -> None:
    M, T, B, C = case
    lengths = some_lengths(B, T, "any") if padded else None
    problem = Problem(M, T, B, C, tokens=tokens, bias=C != 2, P=0 if M == 2 else 3)
    args = problem if lengths is None else problem.poisoned(lengths)
    options = {"reduction": "sum" if T == 63 else "mean", "lengths": lengths}
    expected = problem.loss(reference, **options)
    assert_near(args.loss(cpu, **options), expected, 1e-11)
    only = args.loss(cpu, need_grad=False, **options)
    assert_near(only, {name: expected[name] for name in ("loss", "hits")}, 1e-12)
    assert_near(problem.scan(cpu), problem.scan(reference), 1e-12)


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
    assert_near(problem.loss(cpu), by_autograd(problem), 1e-7)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    problem = Problem(3, 70, 3, 5)
    narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
    for backend in (cpu, reference):
        assert_near(narrow.loss(backend), problem.loss(cpu), 1e-12)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("B", [1, 3, 8])
def test_threads_divide_the_work(threads: int, B: int) -> None:
    """Over sequences; twice the same bits."""
    lengths = some_lengths(B, 700, "any")
    problem = Problem(5, 700, B, tokens=B != 3)
    torch.set_num_threads(threads)
    loss = problem.loss(cpu, lengths=lengths)
    assert_near(loss, problem.loss(reference, lengths=lengths), 1e-11)
    assert_near(problem.loss(cpu, lengths=lengths), loss, 0)
    assert_near(problem.scan(cpu), problem.scan(reference), 1e-11)
