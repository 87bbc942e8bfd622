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
from orthokern.ops.modal import loss as scan_loss

KINDS = ("dense", "features", "tokens")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in make_dual
LENGTHS = torch.tensor([4, 2, 3])
RESETS = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 0]]).bool()


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

    def __call__(self, *leaves: Tensor, backend: str | None = None) -> Tensor:
        given = list(self.inputs)
        for i, leaf in zip(self.where, leaves, strict=True):
            given[i] = leaf
        return self.call(*given, backend=backend)

    def loss(self, *leaves: Tensor, backend: str | None = None) -> Tensor:
        return (self(*leaves, backend=backend) * self.cotangent).square().sum()


def scan_case(op: str, activation: str, inputs: str, **options: Any) -> Case:
    """T = 4, B = 3, N = 5 (oplu 6), K = 3; options: of the functional; with resets, from a state that is a leaf."""
    problem = scan_problem(op, B=3, T=4, N=5, K=3, D=2, activation=activation, inputs=inputs, gap=1e-3)
    fixed = problem.act_param if activation == "leaky_relu" else None  # which is not learned
    given = [None if t is fixed else t for t in problem.inputs()]
    if "resets" in options:
        given.append(torch.randn(problem.h0.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))

    def call(x: Tensor, *rest: Tensor | None, backend: str | None) -> Tensor:
        matrices, others = rest[: len(problem.matrices)], rest[len(problem.matrices) :]
        names = ("h0", "weight", "bias", "act_param", "reset_state")
        more = {name: t for name, t in zip(names, others, strict=False) if t is not None}
        if fixed is not None:
            more["act_param"] = fixed
        return getattr(functional, op)(x, *matrices, activation=activation, backend=backend, **more, **options)

    return Case(call, given, problem.grad_hs)


def gru_case(variant: str, lengths: Tensor | None = None, *, resets: bool = False, state: bool = True) -> Case:
    """resets: RESETS, from a state that is a leaf, or without `state` from zeros."""
    problem = GruProblem.random(variant, 4, 3, 3, bias=lengths is None)
    given = [problem.x, problem.w, problem.h0, problem.bias]
    options: dict[str, Any] = {"lengths": lengths, "resets": RESETS if resets else None, "variant": variant}
    if resets and state:
        given.append(problem.h0.flip(0) / 2)

    def call(x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *state: Tensor, backend: str | None) -> Tensor:
        reset_state = state[0] if state else torch.zeros_like(h0) if resets else None
        return functional.gru_scan(x, w, h0=h0, bias=bias, backend=backend, reset_state=reset_state, **options)

    return Case(call, given, problem.grad_hs)


def second_gradients(case: Case, backend: str | None) -> list[Tensor]:
    """The first gradients, and those of a weighted sum of them; zeros where it does not depend on a leaf."""
    loss = (case(*case.leaves, backend=backend) * case.cotangent).sum()
    first = torch.autograd.grad(loss, case.leaves, create_graph=True)
    generator = torch.Generator().manual_seed(1)
    total = sum((g * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() for g in first)
    assert isinstance(total, Tensor)
    second = torch.autograd.grad(total, case.leaves, materialize_grads=True, allow_unused=True)
    return [*(g.detach() for g in first), *second]


def scan_cases() -> dict[str, Case]:
    """Both scans with every activation; every kind of input, with lengths and checkpoints, and without."""
    cases = {}
    for i, op in enumerate(SCANS):
        for j, activation in enumerate(NAMES):
            options = {"lengths": LENGTHS, "checkpoint_every": 3} if (i + j) % 2 else {}
            cases[f"{op}-{activation}"] = scan_case(op, activation, KINDS[(i + j) % 3], **options)
        for activation in ("tanh", "modrelu", "prelu"):
            options = {"resets": RESETS, "lengths": LENGTHS}
            cases[f"{op}-{activation}-resets"] = scan_case(op, activation, "features", **options)
    return cases


def gru_cases() -> dict[str, Case]:
    return {
        f"gru-{variant}-{'lengths' if lengths is not None else 'whole'}-{resets}": gru_case(variant, lengths, **options)
        for variant in ("kanai", "torch")
        for lengths in (None, LENGTHS)
        for resets, options in {
            "no resets": {},
            "resets": {"resets": True},
            "resets to zeros": {"resets": True, "state": False},
        }.items()
    }


SCAN_CASES, GRU_CASES = scan_cases(), gru_cases()


@pytest.mark.parametrize("name", [*SCAN_CASES, *GRU_CASES])
def test_double_backward_and_forward_mode(name: str) -> None:
    """Along random directions; every element: test_torch_func."""
    case = {**SCAN_CASES, **GRU_CASES}[name]
    assert gradcheck(case, case.leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(case, case.leaves, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.parametrize("activation", NAMES)
def test_message_clip(op: str, activation: str) -> None:
    """Reverse over reverse clips the messages of the second backward too, so finite differences are not the measure:
    the reference's autograd is. Some messages are clipped, some are not."""
    for options in ({"lengths": LENGTHS}, {"resets": RESETS}):
        case = scan_case(op, activation, "features", message_clip=0.5, **options)
        expected = second_gradients(case, "reference")
        torch.testing.assert_close(second_gradients(case, None), expected)
        free = second_gradients(scan_case(op, activation, "features", **options), "reference")
        assert not all(torch.equal(a, b) for a, b in zip(expected, free, strict=True))


@pytest.mark.parametrize("op", SCANS)
def test_padding_is_not_read(op: str) -> None:
    """NaN in x and in the cotangent there reaches neither a second derivative nor a tangent."""
    case, poisoned = (scan_case(op, "tanh", "features", lengths=LENGTHS) for _ in range(2))
    padding = torch.arange(4)[:, None] >= LENGTHS
    with torch.no_grad():
        poisoned.leaves[0][padding] = float("nan")
        poisoned.cotangent[padding] = float("nan")
    results = second_gradients(poisoned, None)
    torch.testing.assert_close(results, second_gradients(case, None))
    assert not results[0][padding].any() and not results[len(case.leaves)][padding].any()
    directions = tuple(map(torch.ones_like, case.leaves))
    tangent, expected = (torch.func.jvp(each, tuple(each.leaves), directions)[1] for each in (poisoned, case))
    torch.testing.assert_close(tangent, expected)


def test_other_ops() -> None:
    """What is differentiated by the reference's formulas: no kernel is called for a second derivative."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    target = torch.tensor([0, 2, 4, 1])

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        reduction = "sum" if bias is None else "mean"
        return functional.linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction=reduction)

    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (loss, [normal(4, 3), normal(5, 3), normal(5)]),
        (loss, [normal(4, 3), normal(5, 3)]),
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


TRANSFORMED = {
    "dense_scan-tanh": scan_case("dense_scan", "tanh", "tokens", lengths=LENGTHS),
    "factored_scan-prelu": scan_case("factored_scan", "prelu", "dense", resets=RESETS),
    "gru-kanai-resets": gru_case("kanai", resets=True),
    "gru-torch-resets": gru_case("torch", LENGTHS, resets=True),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func(name: str) -> None:
    """Hessians in every mixture of the two modes, and vmap inside and outside."""
    case = TRANSFORMED[name]
    plain = tuple(leaf.detach() for leaf in case.leaves)
    every = tuple(range(len(plain)))

    def reference(*leaves: Tensor) -> Tensor:
        return case.loss(*leaves, backend="reference")

    expected = torch.func.hessian(reference, every)(*plain)
    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    for outer, inner in ((fwd, rev), (rev, rev), (rev, fwd), (fwd, fwd)):
        torch.testing.assert_close(outer(inner(case.loss, every), every)(*plain), expected)

    several = [torch.stack([leaf, 1.1 * leaf]) for leaf in plain]
    for dims in ((0,) * len(every), (0,) + (None,) * (len(every) - 1)):
        given = [many if dim == 0 else one for many, one, dim in zip(several, plain, dims, strict=True)]
        actual, wanted = (torch.func.vmap(torch.func.grad(f, every), dims)(*given) for f in (case.loss, reference))
        torch.testing.assert_close(actual, wanted)

    with torch.no_grad():  # outside; derivatives are taken inside all the same
        torch.testing.assert_close(torch.func.hessian(case.loss)(*plain), expected[0][0])
    actual = torch.func.grad(lambda *leaves: torch.func.vmap(case.loss)(*leaves).sum(), every)(*several)
    torch.testing.assert_close(actual, torch.func.vmap(torch.func.grad(reference, every))(*several))


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


def test_what_has_no_second_derivative_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "has no second derivative through its kernels: pass "
    problem = scan_problem("dense_scan", B=2, T=3, N=4)
    grads = run_scan(problem.map(lambda t: t.requires_grad_()), "cpu")
    with pytest.raises(RuntimeError, match=f"dense_scan {line}"):
        grads["grad_w"].sum().backward()

    x, w = torch.randn(6, 2, 4), torch.randn(4, 4).requires_grad_()
    readout, target = torch.randn(3, 4), torch.zeros(6, 2, dtype=torch.int64)

    def loss(algorithm: str) -> Tensor:
        options: dict[str, Any] = {"activation": "identity", "algorithm": algorithm}
        return functional.scan_cross_entropy(x, (w,), readout, target, **options).loss

    with pytest.raises(RuntimeError, match=f"the modal form {line}algorithm='sequential'"):
        torch.autograd.grad(loss("modal"), w, create_graph=True)
    (first,) = torch.autograd.grad(loss("sequential"), w, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), w)[0].any()
    monkeypatch.setattr(scan_loss, "kept_states", lambda device: 0)
    with pytest.raises(RuntimeError, match="the loss in chunks of states has no second derivative"):
        torch.autograd.grad(loss("sequential"), w, create_graph=True)

    lstm = PeepholeLSTM(4, 3)
    out = lstm(x)[0].square().sum()
    (first,) = torch.autograd.grad(out, next(iter(lstm.parameters())), create_graph=True)
    with pytest.raises(RuntimeError, match="peephole_scan. has no second .* kernels: set ORTHOKERN_BACKEND=reference"):
        first.sum().backward()
