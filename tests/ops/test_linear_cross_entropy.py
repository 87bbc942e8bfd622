"""linear_cross_entropy: the reference against torch's cross_entropy, kernels against the reference, the op's
registration and autograd."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from comparison import assert_matches_reference
from helpers import DTYPES, SHORT, each, served, strided
from torch import Tensor

from orthokern import functional
from orthokern._scan_contract import Readout
from orthokern.errors import InputError
from orthokern.reference import linear_cross_entropy as reference

run = torch.ops.orthokern.linear_cross_entropy_fwd
op_module = importlib.import_module("orthokern.ops.linear_cross_entropy")  # the package has the function of that name


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
    wanted = torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(tuple(grads[: len(inputs)]), wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), wanted)

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
            first = run(hidden, weight, b, target, reduction, True, backend)
            views = [None if t is None else strided(t) for t in (hidden, weight, b, target)]
            again = run(*views, reduction, True, backend)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    torch.set_num_threads(2)
    torch.testing.assert_close(run(hidden, weight, None, target, "sum", True, backend), first)


@each("linear_cross_entropy")
def test_extreme_logits(op: str, backend: str) -> None:
    """logsumexp must not overflow, and a certain prediction has loss 0 and no gradient."""
    hidden, weight = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1000.0], [-1000.0], [0.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    loss, *grads = run(hidden, weight, None, right, "sum", True, backend)
    assert float(loss) == 0
    assert all(not bool(grad.any()) for grad in grads)
    assert float(run(hidden, weight, None, wrong, "sum", True, backend)[0]) == pytest.approx(4000.0)
    infinite = torch.full((3,), -torch.inf)
    assert all(bool(each.isnan().all()) for each in run(hidden, weight, infinite, right, "sum", True, backend))


def test_a_scaled_float16_loss_keeps_small_gradients() -> None:
    rows, scale = 20_000, 2.0**11
    hidden, weight = torch.randn(rows, 4).half().requires_grad_(), torch.randn(50, 4).half()
    target = torch.randint(0, 50, (rows,))
    loss = functional.linear_cross_entropy(hidden, weight, target)
    (result,) = torch.autograd.grad(scale * loss, hidden)
    exact = hidden.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact @ weight.double().mT, target), exact)
    assert float((result.double() / scale - expected).norm() / expected.norm()) < 1e-3


@each("linear_cross_entropy")
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_over_many_rows_are_as_exact_as_the_results(op: str, backend: str, threads: int) -> None:
    """Parts of a float32 sum over so many rows are added up in float64."""
    rows = 300_000
    torch.set_num_threads(threads)
    hidden, weight = torch.rand(rows, 3), torch.randn(3, 3)
    options = (torch.zeros(rows, dtype=torch.int64), "mean", True)
    exact = run(hidden.double(), weight.double(), torch.zeros(3).double(), *options, "reference")
    results = [run(hidden, weight, torch.zeros(3), *options, backend) for _ in range(2)]
    for name, one, other in zip(("weight", "bias"), results[0][2:], exact[2:], strict=True):
        assert float((one - other).norm() / other.norm()) < 1.2e-7, name
    assert all(map(torch.equal, *results))


# -------------------------------------------------------------------------------------------- registration and autograd


@pytest.mark.parametrize("backend", served("linear_cross_entropy"))
@pytest.mark.parametrize("with_bias", [True, False])
def test_opcheck_linear_cross_entropy(backend: str, with_bias: bool) -> None:
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (5, 4)))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 5, (7,))
    torch.library.opcheck(run.default, (hidden, weight, bias, target, "mean", True, backend))
    plain = [None if t is None else t.detach() for t in (hidden, weight, bias)]
    torch.library.opcheck(run.default, (*plain, target, "sum", False, backend))


def readout() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (5, 4), (5,)))
    return hidden, weight, bias, torch.randint(0, 5, (6,))


def test_every_backward_of_a_retained_graph_is_its_own() -> None:
    """The gradient of the loss scales the saved gradients; what a caller does to a result reaches no later one."""
    *inputs, target = readout()
    hidden, weight, bias = inputs
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ weight.mT + bias, target), inputs)
    loss = functional.linear_cross_entropy(hidden, weight, target, linear_bias=bias)
    for factor in (1.0, -2.5, 0.0, 1.0):
        results = torch.autograd.grad(factor * loss, inputs, retain_graph=True)
        torch.testing.assert_close(results, tuple(factor * e for e in expected))
        for gradient in results:
            gradient.fill_(7.0)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch has no such function")
def test_interface_of_torch() -> None:
    hidden, weight, bias, target = readout()
    for function in (functional, torch.nn.functional):
        loss = function.linear_cross_entropy(input=hidden, linear_weight=weight, target=target, linear_bias=bias)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.mT + bias, target))


def test_first_derivative_of_tied_weights_that_is_recorded() -> None:
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    loss = functional.linear_cross_entropy(weight.sin(), weight, torch.tensor([0, 2, 1, 4, 3]))
    expected, actual = (torch.autograd.grad(loss, weight, retain_graph=True, create_graph=c) for c in (False, True))
    torch.testing.assert_close(actual, expected)


def test_no_rows() -> None:
    none, target = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    weight = torch.randn(5, 4, requires_grad=True)
    functional.linear_cross_entropy(none, weight, target, reduction="sum").backward()
    assert none.grad is not None and torch.equal(weight.grad, torch.zeros(5, 4))
    with pytest.raises(InputError, match="input must be of 1 row or more for reduction='mean', got shape"):
        functional.linear_cross_entropy(none, weight, target)
    for call in (
        lambda: functional.linear_cross_entropy(none, weight, target, reduction="sum", backend="gpu"),
        lambda: functional.activation(none, "tanh", backend="gpu"),
    ):
        with pytest.raises(InputError, match="unknown backend 'gpu'"):
            call()


def test_loss_alone_keeps_nothing() -> None:
    hidden, weight, bias, target = readout()
    with torch.no_grad():
        loss = functional.linear_cross_entropy(hidden, weight, target, linear_bias=bias)
    assert not loss.requires_grad
    states = 2 * hidden
    reference = weakref.ref(states)
    loss = functional.linear_cross_entropy(states, weight, target, linear_bias=bias)
    loss.backward()
    del states
    gc.collect()
    assert reference() is None, "a finished backward still holds its inputs"


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "op"])
def test_wrong_classes_where_nobody_reads_them(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the reference: no error and no wait, but NaN in the loss and in all that a wrong row enters."""
    hidden, weight, bias, target = readout()
    if not plain:  # the route of a call without an explicit backend
        monkeypatch.setattr(op_module, "by_reference", lambda *_, **__: False)
    monkeypatch.setattr(op_module, "_is_read", lambda _: False)
    monkeypatch.setattr(op_module, "check_range", lambda *_: pytest.fail("the classes were read"))
    target[1], target[4] = len(weight), -(2**40)
    loss = functional.linear_cross_entropy(hidden, weight, target, linear_bias=bias, backend="reference")
    grad_hidden, *others = torch.autograd.grad(loss, (hidden, weight, bias), create_graph=True)
    assert loss.isnan() and all(bool(t.isnan().all()) for t in others)
    for gradient in (grad_hidden, *torch.autograd.grad(grad_hidden.square().sum(), hidden)):
        assert gradient.isnan().all(1).tolist() == [False, True, False, False, True, False]
    assert target[1] == len(weight)  # the caller's
