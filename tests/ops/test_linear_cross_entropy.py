"""linear_cross_entropy: the reference against torch's cross_entropy, kernels against the reference, the op's
registration and autograd."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from helpers import DTYPES, SHORT, assert_matches_reference, each, served, strided
from torch import Tensor

from orthokern import dispatch, functional
from orthokern._scan_contract import Readout
from orthokern.ops import _route
from orthokern.reference import linear_cross_entropy as reference

NAMESPACE = torch.ops.orthokern
op_module = importlib.import_module("orthokern.ops.linear_cross_entropy")  # the package has the function of that name
WHY_NO_CPU = dispatch.absence("linear_cross_entropy", "cpu")


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_linear_cross_entropy(reduction: str, with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ROWS", 4)
    hidden = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 6, (rows,))

    loss, *grads = reference.linear_cross_entropy_fwd(hidden, Readout(weight, bias, target, reduction))
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, weight, bias), target, reduction=reduction
    )
    torch.testing.assert_close(loss, expected)
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    for grad, want, chunked in zip(
        grads, torch.autograd.grad(expected, inputs), torch.autograd.grad(loss, inputs), strict=False
    ):
        torch.testing.assert_close(grad, want)
        torch.testing.assert_close(chunked, want)
    if bias is None:
        assert grads[2] is None

    def loss_of(*inputs: Tensor) -> Tensor:
        readout = Readout(inputs[1], inputs[2] if with_bias else None, target, reduction)
        return reference.linear_cross_entropy_fwd(inputs[0], readout, need_grad=False).loss

    assert torch.autograd.gradcheck(loss_of, inputs)
    assert torch.autograd.gradgradcheck(loss_of, inputs)


# -------------------------------------------------------------------------------------------------------------- kernels


@each("linear_cross_entropy")
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize(
    ("R", "N", "C"), [(1, 1, 1), (1, 7, 3), (33, 128, 9), (7, 63, 10), (500, 16, 65), (9001, 5, 2), (20, 250, 130)]
)
def test_linear_cross_entropy_parity(op: str, backend: str, dtype: torch.dtype, R: int, N: int, C: int) -> None:
    run = torch.ops.orthokern.linear_cross_entropy_fwd
    hidden, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((R, N), (C, N), (C,)))
    target = torch.randint(0, C, (R,))
    for b in (bias, None):
        exact = [None if t is None else t.double() for t in (hidden, weight, b)]
        for reduction in ("mean", "sum"):
            for need_grad in (True, False):
                options = (target, reduction, need_grad)
                actual = run(hidden, weight, b, *options, backend)
                expected, plain = run(*exact, *options, "reference"), run(hidden, weight, b, *options, "reference")
                names = ("loss", "grad_hidden", "grad_weight", "grad_bias")
                for name, *three in zip(names, actual, expected, plain, strict=True):
                    assert_matches_reference(*three, name=name, gradient=name != "loss")
            again = run(
                strided(hidden),
                strided(weight),
                b if b is None else strided(b),
                strided(target),
                reduction,
                True,
                backend,
            )
            first = run(hidden, weight, b, target, reduction, True, backend)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    threads = []
    for count in (1, 2):
        torch.set_num_threads(count)
        threads.append(run(hidden, weight, bias, target, "mean", True, backend))
    for name, one, two in zip(names, *threads, strict=True):
        torch.testing.assert_close(one, two, msg=lambda m, n=name: f"{n}: {m}")


@each("linear_cross_entropy")
def test_extreme_logits(op: str, backend: str) -> None:
    """logsumexp must not overflow, and a certain prediction has loss 0 and no gradient."""
    run = torch.ops.orthokern.linear_cross_entropy_fwd
    hidden, weight = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1000.0], [-1000.0], [0.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    loss, *grads = run(hidden, weight, None, right, "sum", True, backend)
    assert float(loss) == 0
    assert all(not bool(grad.any()) for grad in grads)
    assert float(run(hidden, weight, None, wrong, "sum", True, backend)[0]) == pytest.approx(4000.0)


@each("linear_cross_entropy")
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_over_many_rows_are_as_exact_as_the_results(op: str, backend: str, threads: int) -> None:
    """Parts of a float32 sum over so many rows are added up in float64."""
    run = torch.ops.orthokern.linear_cross_entropy_fwd
    rows = 300_000
    torch.set_num_threads(threads)
    hidden, weight = torch.rand(rows, 3), torch.randn(3, 3)
    options = (torch.zeros(rows, dtype=torch.int64), "mean", True)
    found = run(hidden, weight, torch.zeros(3), *options, backend)
    exact = run(hidden.double(), weight.double(), torch.zeros(3).double(), *options, "reference")
    for name, one, other in zip(("weight", "bias"), found[2:], exact[2:], strict=True):
        assert float((one - other).norm() / other.norm()) < 1.2e-7, name
    assert all(
        torch.equal(a, b) for a, b in zip(run(hidden, weight, torch.zeros(3), *options, backend), found, strict=True)
    )


# -------------------------------------------------------------------------------------------- registration and autograd


@pytest.mark.parametrize("backend", served("linear_cross_entropy"))
@pytest.mark.parametrize("with_bias", [True, False])
def test_opcheck_linear_cross_entropy(backend: str, with_bias: bool) -> None:
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (5, 4)))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 5, (7,))
    fwd = NAMESPACE.linear_cross_entropy_fwd.default
    torch.library.opcheck(fwd, (hidden, weight, bias, target, "mean", True, backend))
    plain = [None if t is None else t.detach() for t in (hidden, weight, bias)]
    torch.library.opcheck(fwd, (*plain, target, "sum", False, backend))


def readout(rows: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, 4, requires_grad=True)
    return (
        hidden,
        torch.randn(5, 4, requires_grad=True),
        torch.randn(5, requires_grad=True),
        torch.randint(0, 5, (rows,)),
    )


def test_incoming_gradient_scales_the_saved_ones() -> None:
    hidden, weight, bias, target = readout()
    inputs = (hidden, weight, bias)
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ weight.mT + bias, target), inputs)
    for factor in (1.0, -2.5, 0.0):
        loss = functional.linear_cross_entropy(hidden, weight, bias, target)
        for a, e in zip(torch.autograd.grad(factor * loss, inputs), expected, strict=True):
            torch.testing.assert_close(a, factor * e)


def test_a_retained_graph_gives_the_same_again() -> None:
    """Backward hands its saved gradient on without a copy; accumulating into that must not change the next backward."""
    hidden, weight, bias, target = readout()
    loss = functional.linear_cross_entropy(hidden, weight, bias, target)
    loss.backward(retain_graph=True)
    first = [t.grad.clone() for t in (hidden, weight, bias)]  # type: ignore[union-attr]
    loss.backward(retain_graph=True)  # accumulates into .grad
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        tensor.grad.fill_(7.0)
        tensor.grad = None
    loss.backward()
    for tensor, gradient in zip((hidden, weight, bias), first, strict=True):
        assert torch.equal(tensor.grad, gradient)  # type: ignore[arg-type]


def test_loss_alone_keeps_nothing() -> None:
    hidden, weight, bias, target = readout()
    with torch.no_grad():
        loss = functional.linear_cross_entropy(hidden, weight, bias, target)
    assert not loss.requires_grad
    *_, grad_hidden, _, _ = NAMESPACE.linear_cross_entropy_fwd(hidden.detach(), weight, bias, target, "mean", False)
    assert grad_hidden.numel() == 0
    states = 2 * hidden
    reference = weakref.ref(states)
    loss = functional.linear_cross_entropy(states, weight, bias, target)
    loss.backward()
    del states
    gc.collect()
    assert reference() is None, "a finished backward still holds its inputs"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "op"])
def test_wrong_classes_where_nobody_reads_them(plain: bool, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the reference: no error and no wait, but NaN in the loss and in all that a wrong row enters."""
    hidden, weight, bias, target = readout(6)
    options: dict[str, Any] = {"reduction": reduction, "backend": "reference"}
    if not plain:  # the route of a call without an explicit backend
        monkeypatch.setattr(_route, "by_reference", lambda *_: False)

    def results() -> list[Tensor]:
        loss = functional.linear_cross_entropy(hidden, weight, bias, target, **options)
        grads = torch.autograd.grad(loss, (hidden, weight, bias), create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), hidden)
        return [loss.detach(), *grads, *second]

    expected = results()
    monkeypatch.setattr(op_module, "_is_read", lambda _: False)
    monkeypatch.setattr(op_module, "check_range", lambda *_: pytest.fail("the classes were read"))
    for one, other in zip(results(), expected, strict=True):
        assert torch.equal(one, other)
    target[1], target[4] = len(weight), -(2**40)
    loss, grad_hidden, grad_weight, grad_bias, second = results()
    assert all(bool(t.isnan().all()) for t in (loss, grad_weight, grad_bias))
    good = torch.tensor([0, 2, 3, 5])
    for found, want in ((grad_hidden, expected[1]), (second, expected[4])):
        assert bool(found[[1, 4]].isnan().all()) and torch.equal(found[good], want[good])
    assert target[1] == len(weight)  # the caller's
