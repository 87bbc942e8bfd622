"""modal_scan and modal_cross_entropy: the reference by gradcheck, the CPU kernels against it."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import some_lengths, strided
from modal_problem import LOSS_NAMES, Problem
from torch import Tensor

from orthokern.errors import InputError
from orthokern.ops.modal_cross_entropy import modal_cross_entropy
from orthokern.ops.modal_scan import ID_DTYPES, modal_scan

NAMESPACE = torch.ops.orthokern


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Same names, shapes and dtypes; differences relative in norm below the bound; integers equal."""
    for name, right in expected.items():
        found = actual[name]
        assert found.shape == right.shape, name
        if right.dtype == torch.int64:
            assert torch.equal(found, right), name
            continue
        error = (found.double() - right.double()).norm() / (right.double().norm() + 1e-30)
        assert error <= bound, f"{name}: {error:.2e}"


CASES = [
    *itertools.product((1, 2, 3, 17), (1, 2, 63, 64, 65), (1, 3), (2, 9)),
    *((17, 65, 3, C) for C in (1, 17, 50)),
    (33, 130, 8, 9),
    (17, 100, 50, 9),
    (3, 1000, 2, 9),
]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "M{}-T{}-B{}-C{}".format(*case))
def test_cpu_agrees_with_the_reference(case: tuple[int, ...], padded: bool, tokens: bool) -> None:
    M, T, B, C = case
    lengths = some_lengths(B, T, "any") if padded else None
    problem = Problem(M, T, B, C, tokens=tokens, bias=C != 2, P=0 if M == 2 else 3)
    given = problem if lengths is None else problem.poisoned(lengths)
    reduction = "sum" if T == 63 else "mean"
    expected = problem.loss("reference", reduction=reduction, lengths=lengths)
    assert_near(given.loss("cpu", reduction=reduction, lengths=lengths), expected, 1e-11)
    loss = given.loss("cpu", reduction=reduction, need_grad=False, lengths=lengths)
    assert_near(
        {name: loss[name] for name in ("loss", "hits")}, {name: expected[name] for name in ("loss", "hits")}, 1e-12
    )
    assert all(loss[name].numel() == 0 for name in LOSS_NAMES[2:])
    assert_near(given.scan("cpu", lengths=lengths), problem.scan("reference", lengths=lengths), 1e-11)


def loop(problem: Problem) -> dict[str, Tensor]:
    """modal_cross_entropy by complex numbers and autograd, in float64."""
    leaves = {
        name: getattr(problem, name).double().requires_grad_()
        for name in ("re", "im", "z0", "table", "readout", "bias")
    }
    lam = torch.complex(leaves["re"], leaves["im"])
    z, states = torch.complex(*leaves["z0"].chunk(2, 1)), []
    for row in torch.complex(*leaves["table"].chunk(2, 1))[problem.x].unbind(0):
        z = lam * z + row
        states.append(z)
    stack = torch.stack(states)
    logits = torch.cat([stack.real, stack.imag], -1) @ leaves["readout"].mT + leaves["bias"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), problem.target.flatten())
    loss.backward()
    return {
        "loss": loss.detach(),
        **{f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    }


@pytest.mark.parametrize("blanks", [False, True])
def test_long_sequences_keep_their_digits_in_float32(blanks: bool) -> None:
    """Measured: at most 7e-8. The table's gradient of a blank loses most of them where its terms are rounded."""
    problem = Problem(16, 10_000, 2, 9, margin=1e-4).to(torch.float32)
    problem.table = 0.05 * problem.table
    if blanks:
        problem.x[10:] = 0
        problem.target[10:] = 0
    assert_near(problem.loss("cpu"), loop(problem), 1e-7)


def test_long_runs_of_one_id() -> None:
    """Chunks of time in which nothing but a blank comes are jumped over."""
    problem = Problem(5, 1200, 4, D=3)
    problem.x[100:1100] = 1
    problem.x[500, 2] = 2
    lengths = torch.tensor([1200, 700, 1000, 130])
    for chosen in (None, lengths):
        assert_near(problem.loss("cpu", lengths=chosen), problem.loss("reference", lengths=chosen), 1e-11)
        assert_near(problem.scan("cpu", lengths=chosen), problem.scan("reference", lengths=chosen), 1e-11)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    problem = Problem(3, 70, 3, 5)
    expected, states = problem.loss("cpu"), problem.scan("cpu")
    narrow = problem.map(lambda t: t if t.is_floating_point() else t.to(dtype))
    for backend in ("cpu", "reference"):
        assert_near(narrow.loss(backend), expected, 1e-12)
        assert_near(narrow.scan(backend), states, 1e-12)


def test_strided_inputs() -> None:
    for tokens in (True, False):
        problem = Problem(3, 9, 3, tokens=tokens)
        assert_near(problem.map(strided).loss("cpu"), problem.loss("cpu"), 0)
        assert_near(problem.map(strided).scan("cpu"), problem.scan("cpu"), 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("B", [1, 3, 8])
def test_threads_divide_the_work(threads: int, B: int) -> None:
    """Over sequences, and over time where there are few of them; twice the same bits."""
    lengths = some_lengths(B, 700, "any")
    problem, before = Problem(5, 700, B, tokens=B != 3), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for chosen in (None, lengths):
            loss, scan = problem.loss("cpu", lengths=chosen), problem.scan("cpu", lengths=chosen)
            assert_near(loss, problem.loss("reference", lengths=chosen), 1e-11)
            assert_near(scan, problem.scan("reference", lengths=chosen), 1e-11)
            assert_near(problem.loss("cpu", lengths=chosen), loss, 0)
            assert_near(problem.scan("cpu", lengths=chosen), scan, 0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": 5}, r"x holds 5: token ids must be in \[0, 5\)"),
        ({"x": -1}, r"x holds -1: token ids"),
        ({"target": 3}, r"target holds 3: class ids must be in \[0, 3\)"),
        ({"pairs": 2}, r"pairs holds 2: modes must be in \[0, 2\)"),
    ],
)
def test_wrong_ids_are_one_line(change: dict[str, int], message: str) -> None:
    problem = Problem(2, 4, 3)
    for name, value in change.items():
        getattr(problem, name)[1, 1] = value
    for backend in ("cpu", "reference"):
        with pytest.raises(InputError, match=message):
            problem.loss(backend)
        if "target" not in change:
            with pytest.raises(InputError, match=message):
                problem.scan(backend)


def test_wrong_lengths_and_dtypes_are_one_line() -> None:
    problem = Problem(2, 4, 3, tokens=False)
    wrong = problem.map(lambda t: t if t.is_floating_point() else t.to(torch.int8))
    for backend in ("cpu", "reference"):
        with pytest.raises(InputError, match="lengths holds 5"):
            problem.loss(backend, lengths=torch.tensor([1, 5, 2]))
        with pytest.raises(InputError, match="target has dtype int8: accepted is one of uint8, int16, int32, int64"):
            wrong.loss(backend)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck(tokens: bool, padded: bool) -> None:
    """Both ops through autograd, forward and backward of the reference, which is what its formulas are proved by."""
    problem = Problem(2, 5, 3, 3, tokens=tokens)
    lengths = torch.tensor([5, 1, 3]) if padded else None
    floats = [problem.x] * (not tokens) + [problem.re, problem.im, problem.z0] + [problem.table] * tokens
    floats = [t.clone().requires_grad_() for t in floats if t is not None]

    def scan(*given: Tensor, backend: str = "auto") -> Tensor:
        first = list(given)
        x = problem.x if tokens else first.pop(0)
        re, im, z0, *table = first
        return modal_scan(x, re, im, z0, table[0] if tokens else None, lengths=lengths, backend=backend)

    def loss(*given: Tensor, backend: str = "auto") -> Tensor:
        *first, readout, bias = given
        x = problem.x if tokens else first.pop(0)
        re, im, z0, *table = first
        return modal_cross_entropy(
            x, re, im, z0, table[0] if tokens else None, readout, bias, problem.target, lengths=lengths, backend=backend
        )[0]

    assert problem.bias is not None
    more = [problem.readout.clone().requires_grad_(), problem.bias.clone().requires_grad_()]
    for backend in ("cpu", "reference"):
        assert torch.autograd.gradcheck(lambda *a, b=backend: scan(*a, backend=b), floats)
        assert torch.autograd.gradcheck(lambda *a, b=backend: loss(*a, backend=b), [*floats, *more])


@pytest.mark.parametrize("padded", [False, True])
def test_formulas_of_the_reference(padded: bool) -> None:
    """The hand-derived gradients are those of autograd through the forward; pairs are the sums they name."""
    lengths = torch.tensor([7, 2, 5]) if padded else None
    problem = Problem(3, 7, 3)
    names = ("re", "im", "z0", "table", "readout", "bias")
    leaves = [getattr(problem, name).clone().requires_grad_() for name in names]
    re, im, z0, table, readout, bias = leaves
    loss, _ = modal_cross_entropy(
        problem.x, re, im, z0, table, readout, bias, problem.target, lengths=lengths, backend="reference"
    )
    found = problem.loss("reference", lengths=lengths)
    for name, grad in zip(names, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(found[f"grad_{name}"], grad)
    problem.pairs = torch.arange(3).repeat(2, 1).T.contiguous()
    sums = problem.loss("reference", lengths=lengths)["grad_pairs"]
    torch.testing.assert_close(sums[:, 0, 0] + sums[:, 1, 1], found["grad_re"])
    torch.testing.assert_close(sums[:, 1, 0] - sums[:, 0, 1], found["grad_im"])


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_opcheck(backend: str, tokens: bool) -> None:
    problem = Problem(3, 4, 2, tokens=tokens).map(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    lengths = torch.tensor([4, 2])
    first = (problem.x, problem.re.requires_grad_(), problem.im.requires_grad_(), problem.z0, problem.table)
    torch.library.opcheck(NAMESPACE.modal_scan_fwd.default, (*first, backend, lengths))
    torch.library.opcheck(
        NAMESPACE.modal_cross_entropy_fwd.default,
        (*first, problem.readout, problem.bias, problem.target, problem.pairs, "mean", True, backend, lengths),
    )
    x = problem.x if tokens else None
    grad_z, z = problem.grad_z.detach(), torch.randn(4, 2, 6, dtype=torch.float64)
    rest = [t if t is None else t.detach() for t in first[1:]]
    torch.library.opcheck(
        NAMESPACE.modal_scan_bwd.default, (grad_z, z, x, *rest, problem.pairs, True, backend, lengths)
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("T, B, message", [(0, 2, "T is 0: "), (3, 0, "every size of \\[B, 2M\\] must be at least 1")])
def test_an_empty_call_is_refused(backend: str, T: int, B: int, message: str) -> None:
    """The kernels have no task to add up gradients in."""
    re = torch.rand(2, dtype=torch.float64)
    x, z0 = torch.zeros(T, B, 4, dtype=torch.float64), torch.zeros(B, 4, dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        NAMESPACE.modal_scan_fwd(x, re, re, z0, None, backend)
    with pytest.raises(InputError, match=message):
        NAMESPACE.modal_scan_bwd(x, x, None, re, re, z0, backend=backend)


def test_under_compile() -> None:
    problem = Problem(3, 6, 2)
    table = problem.table.clone().requires_grad_()

    def loss(table: Tensor) -> Tensor:
        found, hits = modal_cross_entropy(
            problem.x, problem.re, problem.im, problem.z0, table, problem.readout, problem.bias, problem.target
        )
        z = modal_scan(problem.x, problem.re, problem.im, problem.z0, table)
        return found + hits.sum() + (z * problem.grad_z).sum()

    expected = torch.autograd.grad(loss(table), table)[0]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(table), table)[0], expected)


def test_a_second_derivative_is_refused() -> None:
    problem = Problem(2, 3, 2)
    readout = problem.readout.requires_grad_()
    arguments = (problem.x, problem.re, problem.im, problem.z0, problem.table, readout, None, problem.target)
    loss = modal_cross_entropy(*arguments, backend="cpu")[0]
    (grad,) = torch.autograd.grad(loss, readout, create_graph=True)
    with pytest.raises(RuntimeError, match="modal_cross_entropy has no second derivative"):
        grad.sum().backward()
    loss = modal_cross_entropy(*arguments, backend="reference")[0]
    (grad,) = torch.autograd.grad(loss, readout, create_graph=True)
    grad.square().sum().backward()
