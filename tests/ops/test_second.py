"""Derivatives beyond the first reverse one: double backward, forward mode and torch.func, against finite differences
and against the reference, which is plain torch code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SCANS, GruProblem, act_param_for, run_scan, scan_problem
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from orthokern import functional
from orthokern.diagnostics import tap
from orthokern.nn import PeepholeLSTM
from orthokern.ops.activations import NAMES

KINDS = ("dense", "features", "tokens")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in make_dual


class Case:
    """A function of those inputs of a call that have a gradient.

    Attributes:
        leaves: their values, which require gradients.
        cotangent: of the result.
    """

    def __init__(self, call: Callable[..., Tensor], inputs: list[Tensor | None], cotangent: Tensor) -> None:
        self.call, self.inputs, self.cotangent = call, inputs, cotangent
        self.where = [i for i, t in enumerate(inputs) if t is not None and t.is_floating_point()]
        self.leaves = [inputs[i].detach().requires_grad_() for i in self.where]  # type: ignore[union-attr]
        self.plain = tuple(leaf.detach() for leaf in self.leaves)

    def __call__(self, *leaves: Tensor, backend: str | None = None) -> Tensor:
        given = list(self.inputs)
        for i, leaf in zip(self.where, leaves, strict=True):
            given[i] = leaf
        return self.call(*given, backend=backend)

    def loss(self, *leaves: Tensor) -> Tensor:
        return (self(*leaves) * self.cotangent).square().sum()

    def reference_loss(self, *leaves: Tensor) -> Tensor:
        return (self(*leaves, backend="reference") * self.cotangent).square().sum()


def scan_case(op: str, activation: str, inputs: str, *, gap: float = 1e-3, **options: Any) -> Case:
    """T = 4, B = 3, N = 5 (oplu 6), K = 3; options: of the functional; resets: RESETS, from a state that is a leaf."""
    K = {"K": 3} if op == "factored_scan" else {}
    N = 6 if activation == "oplu" else 5
    problem = scan_problem(op, B=3, T=4, N=N, D=2, activation=activation, inputs=inputs, gap=gap, **K)
    count = len(problem.matrices)
    if "resets" in options:
        options["resets"] = torch.tensor(RESETS).bool()

    def call(x: Tensor, *rest: Tensor | None, backend: str | None) -> Tensor:
        h0, weight, bias, act_param, *reset_state = rest[count:]
        kwargs = {"weight": weight, "bias": bias, "act_param": act_param, "backend": backend, **options}
        if reset_state:
            kwargs["reset_state"] = reset_state[0]
        if activation == "leaky_relu":
            kwargs["act_param"] = problem.act_param  # is not learned
        function = getattr(functional, op)
        if op == "factored_scan":
            return function(x, *rest[:count], h0=h0, activation=activation, **kwargs)
        return function(x, *rest[:count], h0, activation=activation, **kwargs)

    given = list(problem.inputs())
    if activation == "leaky_relu":
        given[-1] = None
    if "resets" in options:
        given.append(torch.randn(3, N, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    return Case(call, given, problem.grad_hs)


def gru_case(variant: str, lengths: Tensor | None, *, resets: bool = False, state: bool = True) -> Case:
    """resets: RESETS, from a state that is a leaf, or without `state` from zeros."""
    problem = GruProblem.random(variant, 4, 3, 3, bias=lengths is None)
    cuts = {"lengths": lengths, "resets": torch.tensor(RESETS).bool() if resets else None}
    given = [problem.x, problem.w, problem.h0, problem.bias]
    if resets and state:
        given.append(problem.h0.flip(0) / 2)

    def call(x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *state: Tensor, backend: str | None) -> Tensor:
        options: dict[str, Any] = {
            **cuts,
            "reset_state": state[0] if state else torch.zeros_like(h0) if resets else None,
        }
        return functional.gru_scan(x, w, h0=h0, bias=bias, variant=variant, backend=backend, **options)

    return Case(call, given, problem.grad_hs)


LENGTHS = torch.tensor([4, 2, 3])
RESETS = [[0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 0]]
SCAN_CASES = [
    pytest.param(op, activation, KINDS[(i + j) % 3], LENGTHS if (i + j) % 2 else None, id=f"{op}-{activation}")
    for i, op in enumerate(SCANS)
    for j, activation in enumerate(NAMES)
]


# ------------------------------------------------------------------------------------------------------ double backward


@pytest.mark.parametrize(("op", "activation", "inputs", "lengths"), SCAN_CASES)
def test_double_backward_and_forward_mode_of_the_scans(
    op: str, activation: str, inputs: str, lengths: Tensor | None
) -> None:
    case = scan_case(op, activation, inputs, lengths=lengths)
    assert gradcheck(case, case.leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(case, case.leaves, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("variant", ["kanai", "torch"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
def test_double_backward_and_forward_mode_of_the_gru(variant: str, lengths: Tensor | None) -> None:
    case = gru_case(variant, lengths)
    assert gradcheck(case, case.leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(case, case.leaves, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("variant", ["kanai", "torch"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "zeros"])
def test_resets_of_the_gru(variant: str, lengths: Tensor | None, state: bool) -> None:
    case = gru_case(variant, lengths, resets=True, state=state)
    assert gradcheck(case, case.leaves, check_forward_ad=True)
    assert gradgradcheck(case, case.leaves, check_fwd_over_rev=True)
    for actual, expected in zip(second_gradients(case, None), second_gradients(case, "reference"), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", ["tanh", "modrelu", "prelu"])
def test_resets(op: str, activation: str) -> None:
    """With lengths together, and with a message clip against the reference."""
    case = scan_case(op, activation, "features", resets=True, lengths=LENGTHS)
    assert gradcheck(case, case.leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(case, case.leaves, fast_mode=True, check_fwd_over_rev=True)
    case = scan_case(op, activation, "features", resets=True, message_clip=0.5)
    for actual, expected in zip(second_gradients(case, None), second_gradients(case, "reference"), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", ["tanh", "prelu"])
def test_double_backward_through_checkpoints(op: str, activation: str) -> None:
    case = scan_case(op, activation, "features", checkpoint_every=3)
    assert gradgradcheck(case, case.leaves, fast_mode=True)


def second_gradients(case: Case, backend: str | None) -> list[Tensor]:
    """Of a weighted sum of the first gradients; zeros where it does not depend on a leaf."""
    loss = (case(*case.leaves, backend=backend) * case.cotangent).sum()
    first = torch.autograd.grad(loss, case.leaves, create_graph=True)
    generator = torch.Generator().manual_seed(1)
    total = sum((g * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() for g in first)
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(total, case.leaves, materialize_grads=True, allow_unused=True)
    return [*(g.detach() for g in first), *found]


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", NAMES)
def test_message_clip(op: str, activation: str) -> None:
    """Reverse over reverse clips the messages of the second backward too, so finite differences are not the measure:
    the reference's autograd is. Some messages are clipped, some are not."""
    case = scan_case(op, activation, "features", message_clip=0.5, lengths=LENGTHS)
    expected = second_gradients(case, "reference")
    for actual, e in zip(second_gradients(case, None), expected, strict=True):
        torch.testing.assert_close(actual, e)
    free = second_gradients(scan_case(op, activation, "features", lengths=LENGTHS), "reference")
    assert not all(torch.equal(a, b) for a, b in zip(expected, free, strict=True))


@pytest.mark.parametrize("op", SCANS)
def test_padding_is_not_read(op: str) -> None:
    """NaN in x and in the cotangent there reaches neither a second derivative nor a tangent."""
    case = scan_case(op, "tanh", "features", lengths=LENGTHS)
    padding = torch.arange(4)[:, None] >= LENGTHS
    poisoned = scan_case(op, "tanh", "features", lengths=LENGTHS)
    with torch.no_grad():
        poisoned.leaves[0][padding] = float("nan")
        poisoned.cotangent[padding] = float("nan")
    expected = second_gradients(case, None)
    x_at = (0, len(case.leaves))  # the first and the second gradient of x
    for i, (a, e) in enumerate(zip(second_gradients(poisoned, None), expected, strict=True)):
        if i in x_at:
            assert not a[padding].any()
        torch.testing.assert_close(a, e)
    directions = tuple(torch.ones_like(leaf) for leaf in case.plain)
    tangent = torch.func.jvp(poisoned, tuple(leaf.detach() for leaf in poisoned.leaves), directions)[1]
    torch.testing.assert_close(tangent, torch.func.jvp(case, case.plain, directions)[1])


def test_third_derivative() -> None:
    case = scan_case("factored_scan", "tanh", "dense")
    w = case.leaves[1]

    def third(backend: str | None) -> Tensor:
        found = (case(*case.leaves, backend=backend) * case.cotangent).sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found.square().sum(), w, create_graph=True)
        return found

    torch.testing.assert_close(third(None), third("reference"))


def test_other_ops() -> None:
    """What is differentiated by the reference's formulas: no kernel is called for a second derivative."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    target = torch.tensor([0, 2, 4, 1])
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (lambda h, w, b: functional.linear_cross_entropy(h, w, b, target), [normal(4, 3), normal(5, 3), normal(5)]),
        (
            lambda h, w: functional.linear_cross_entropy(h, w, None, target, reduction="sum"),
            [normal(4, 3), normal(5, 3)],
        ),
        (functional.skew_exp, [normal(3, 3)]),
    ]
    for name in NAMES:
        param = act_param_for(name, 4, generator)
        learned = [] if param is None or name == "leaky_relu" else [param.requires_grad_()]

        def activation(x: Tensor, *given: Tensor, name: str = name, fixed: Tensor | None = param) -> Tensor:
            return functional.activation(x, name, given[0] if given else fixed)

        cases.append((activation, [normal(3, 4), *learned]))
    for function, leaves in cases:
        assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)
        if function(*leaves).grad_fn is not None:
            assert gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)


# ------------------------------------------------------------------------------------------ forward mode and torch.func


KINDS_OF_CALLS = [
    pytest.param(lambda: scan_case("dense_scan", "tanh", "tokens", lengths=LENGTHS), id="dense_scan-tanh"),
    pytest.param(lambda: scan_case("factored_scan", "prelu", "dense", resets=True), id="factored_scan-prelu"),
    pytest.param(lambda: scan_case("dense_scan", "oplu", "features", lengths=LENGTHS), id="dense_scan-oplu"),
    pytest.param(lambda: gru_case("kanai", LENGTHS), id="gru-kanai"),
    pytest.param(lambda: gru_case("torch", None), id="gru-torch"),
    pytest.param(lambda: gru_case("kanai", None, resets=True), id="gru-kanai-resets"),
    pytest.param(lambda: gru_case("torch", LENGTHS, resets=True), id="gru-torch-resets"),
]


@pytest.mark.parametrize("make", KINDS_OF_CALLS)
def test_torch_func(make: Callable[[], Case]) -> None:
    """Hessians in every mixture of the two modes, and vmap inside and outside."""
    case = make()
    every = tuple(range(len(case.plain)))
    expected = torch.func.hessian(case.reference_loss, every)(*case.plain)
    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    for outer, inner in ((fwd, rev), (rev, rev), (rev, fwd), (fwd, fwd)):
        found = outer(inner(case.loss, every), every)(*case.plain)
        torch.testing.assert_close(found, expected, msg=lambda m, o=outer, i=inner: f"{o.__name__} {i.__name__}: {m}")

    several = [torch.stack([leaf, 1.1 * leaf]) for leaf in case.plain]
    for dims in ((0,) * len(every), (0,) + (None,) * (len(every) - 1)):
        given = [many if dim == 0 else one for many, one, dim in zip(several, case.plain, dims, strict=True)]
        found = torch.func.vmap(torch.func.grad(case.loss, every), dims)(*given)
        wanted = torch.func.vmap(torch.func.grad(case.reference_loss, every), dims)(*given)
        torch.testing.assert_close(found, wanted)

    with torch.no_grad():  # outside; derivatives are taken inside all the same
        found = torch.func.hessian(case.loss)(*case.plain)
    torch.testing.assert_close(found, expected[0][0])

    def total(*leaves: Tensor) -> Tensor:
        return torch.func.vmap(case.loss)(*leaves).sum()

    found = torch.func.grad(total, every)(*several)
    for i, many in enumerate(found):
        for r in range(2):
            at = [leaf[r] for leaf in several]
            torch.testing.assert_close(many[r], torch.func.grad(case.reference_loss, i)(*at))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("op", SCANS)
def test_forward_over_reverse_is_the_derivative_of_the_clipped_gradient(op: str, backend: str | None) -> None:
    """Reverse over reverse is not, since the second backward clips too (docs/derivatives.md)."""
    case = scan_case(op, "tanh", "features", message_clip=0.5)

    def gradient(*leaves: Tensor) -> tuple[Tensor, ...]:
        def loss(*leaves: Tensor) -> Tensor:
            return (case(*leaves, backend=backend) * case.cotangent).square().sum()

        found: tuple[Tensor, ...] = torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)
        return found

    directions, step = tuple(torch.ones_like(t) for t in case.plain), 1e-6
    ends = [gradient(*(t + sign * step * d for t, d in zip(case.plain, directions, strict=True))) for sign in (1, -1)]
    expected = [(above - below) / (2 * step) for above, below in zip(*ends, strict=True)]
    found = torch.func.jvp(gradient, case.plain, directions)[1]
    torch.testing.assert_close(list(found), expected, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------------------------------- what stays as it was


def test_a_tap_sees_one_backward() -> None:
    case = scan_case("dense_scan", "tanh", "features")
    with tap() as plain:
        case.loss(*case.leaves).backward()
    with tap() as taken:
        loss = case.loss(*case.leaves)
        first = torch.autograd.grad(loss, case.leaves, create_graph=True)
    assert len(taken.grad_norms) == len(taken.state_norms) == 1
    torch.testing.assert_close(taken.grad_norms[0], plain.grad_norms[0])
    with tap() as second:
        torch.autograd.grad([g.square().sum() for g in first], case.leaves)
    assert len(second.grad_norms) == 1  # of the first backward, which runs again; not of the adjoint's own derivative


def test_what_has_no_second_derivative_says_so() -> None:
    line = "has no second derivative through its kernels: pass "
    problem = scan_problem("dense_scan", B=2, T=3, N=4)
    grads = run_scan(problem.map(lambda t: t.requires_grad_()), "cpu")
    with pytest.raises(RuntimeError, match=f"dense_scan {line}"):
        grads["grad_w"].sum().backward()

    x, w = torch.randn(6, 2, 4), torch.randn(4, 4).requires_grad_()
    readout, target = torch.randn(3, 4), torch.zeros(6, 2, dtype=torch.int64)
    loss = functional.scan_cross_entropy(x, (w,), readout, target, activation="identity", algorithm="modal")[0]
    with pytest.raises(RuntimeError, match=f"the modal form {line}algorithm='sequential'"):
        torch.autograd.grad(loss, w, create_graph=True)
    torch.autograd.grad(loss, w)
    loss = functional.scan_cross_entropy(x, (w,), readout, target, activation="identity", algorithm="sequential")[0]
    (first,) = torch.autograd.grad(loss, w, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), w)[0].any()

    lstm = PeepholeLSTM(4, 3)
    out = lstm(x)[0].square().sum()
    (first,) = torch.autograd.grad(out, next(iter(lstm.parameters())), create_graph=True)
    with pytest.raises(RuntimeError, match="peephole_scan has no second .* kernels: set ORTHOKERN_BACKEND=reference"):
        first.sum().backward()
