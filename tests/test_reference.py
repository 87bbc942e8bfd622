"""The reference against autograd, gradcheck and textbook forms: everything else is compared with the reference."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from helpers import ClipGradient, ScanProblem, scan_cases, scan_problem, some_lengths, with_poisoned_padding
from torch import Tensor

from orthokern._scan_contract import Map, ScanInputs, ScanOptions
from orthokern.ops.activations import NAMES, PARAMETER
from orthokern.reference import activations, linear_cross_entropy
from orthokern.reference.cayley import cayley

OPS = ("factored_scan", "dense_scan")
SIZES = [{"B": 2, "T": 5, "N": 5}, {"B": 1, "T": 1, "N": 1}, {"B": 3, "T": 4, "N": 6, "K": 2}]
CASES = [(f"{op}-{name}", op, case) for op in OPS for name, case in scan_cases(SIZES)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other over tiny tensors cost more than they bring."""
    torch.set_num_threads(1)


def problem_for(op: str, case: dict[str, Any]) -> ScanProblem:
    case = {key: value for key, value in case.items() if op == "factored_scan" or key != "K"}
    return scan_problem(op, gap=1e-3, D=4, **case)


def forward_of(op: str) -> Any:
    """The forward as plain torch code, from the arguments of the op; an empty tensor for what does not apply."""
    leaf = importlib.import_module(f"orthokern.reference.{op}")

    def forward(x: Tensor, *others: Any, **options: Any) -> tuple[Tensor, ...]:
        *matrices, h0, weight, bias, act_param = others
        map_ = Map(*reversed(matrices)) if op == "factored_scan" else Map(None, None, *matrices)
        inputs = ScanInputs(x, h0, weight, bias, act_param)
        found = getattr(leaf, f"{op}_fwd")(map_, inputs, ScanOptions(**options))
        return tuple(h0.new_empty(0) if result is None else result for result in found)

    return forward


def backward_of(op: str) -> Any:
    return functools.partial(getattr(torch.ops.orthokern, f"{op}_bwd"), backend="reference")


def leaves(problem: ScanProblem) -> list[Tensor | None]:
    """The inputs, fresh, with requires_grad on the floating ones."""
    return [None if t is None else t.clone().requires_grad_() if t.is_floating_point() else t for t in problem.inputs()]


def by_hand(
    problem: ScanProblem,
    checkpoint_every: int,
    lengths: Tensor | None = None,
    message_clip: float = 0.0,
    **needs: bool,
) -> tuple[Tensor, ...]:
    hs, ckpt, pre = forward_of(problem.op)(
        *problem.inputs(), activation=problem.activation, checkpoint_every=checkpoint_every, lengths=lengths
    )
    return backward_of(problem.op)(
        problem.grad_hs, ckpt if checkpoint_every else hs, pre, *problem.inputs(), activation=problem.activation,
        checkpoint_every=checkpoint_every, lengths=lengths, message_clip=message_clip, **needs,
    )  # fmt: skip


def one_by_one(
    problem: ScanProblem, inputs: list[Tensor | None], lengths: Tensor, message_clip: float
) -> tuple[Tensor, list[list[Tensor]]]:
    """The scan in plain torch: every sequence on its own, for the steps it has, and an identity that clips at every
    pre-activation. hs [T, B, N], and the states [1, N] of each sequence."""
    x, *matrices, h0, weight, bias, act_param = inputs
    assert x is not None and h0 is not None
    w = matrices[0] if problem.op == "dense_scan" else matrices[0] @ torch.diag(matrices[1]) @ matrices[2].mT
    T, N = x.shape[0], h0.shape[1]
    sequences = []
    for b, length in enumerate(lengths.tolist()):
        h, states = h0[b : b + 1], []
        for t in range(length):
            e = x[t, b] if weight is None else weight @ x[t, b] if x.is_floating_point() else weight[:, x[t, b]]
            a = h @ w.mT + (e if bias is None else e + bias)
            if message_clip:
                a = ClipGradient.apply(a, message_clip)
            h = activations.activation_fwd(a, act_param, activation=problem.activation)
            h.retain_grad()
            states.append(h)
        sequences.append(states)
    rows = [torch.cat([*states, h0.new_zeros(T - len(states), N)]) for states in sequences]
    return torch.stack(rows, 1), sequences


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("message_clip", [0.0, 0.3])
def test_lengths_and_clip_are_those_of_single_sequences(op: str, activation: str, message_clip: float) -> None:
    T, B = 6, 4
    for kind, order in (("dense", "any"), ("features", "falling"), ("tokens", "rising")):
        problem = scan_problem(op, B=B, T=T, N=6, D=4, activation=activation, inputs=kind, gap=1e-3)
        lengths = some_lengths(B, T, order)
        padding = torch.arange(T).unsqueeze(1) >= lengths
        assert padding.any()
        inputs = leaves(problem)
        hs, sequences = one_by_one(problem, inputs, lengths, message_clip)
        hs.backward(problem.grad_hs)
        expected = [t.grad if t is not None and t.requires_grad else None for t in inputs]
        norms = torch.zeros(T, dtype=torch.float64)
        for states in sequences:
            norms[: len(states)] += torch.stack([h.grad.square().sum() for h in states])  # type: ignore[union-attr]

        poisoned = with_poisoned_padding(problem, lengths)
        names = problem.grad_names()
        unclipped = by_hand(problem, 0, lengths)
        for every in (0, 1, 4, 9):
            ours, _, pre = forward_of(op)(
                *poisoned.inputs(), activation=activation, checkpoint_every=every, lengths=lengths
            )
            torch.testing.assert_close(ours, hs.detach(), rtol=1e-12, atol=1e-13)
            assert not ours[padding].any() and (not pre.numel() or not pre[padding].any())
            grads = by_hand(poisoned, every, lengths, message_clip)
            for name, grad, want in zip(names, grads, [*expected, norms.sqrt()], strict=True):
                if want is None:
                    assert grad.numel() == 0, name
                else:
                    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            if grads[0].numel():
                assert not grads[0][padding].any()
        if message_clip:
            assert any(not torch.allclose(a, b) for a, b in zip(grads, unclipped, strict=True)), "nothing was clipped"

        # the forward as plain torch code, which an explicit backend="reference" differentiates
        again = leaves(poisoned)
        plain = forward_of(op)(*again, activation=activation, lengths=lengths, message_clip=message_clip)[0]
        plain.backward(poisoned.grad_hs)
        for name, tensor, want in zip(names, again, expected, strict=False):
            if want is not None:
                torch.testing.assert_close(tensor.grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("op", "case"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_hand_written_backward_is_autograd(op: str, case: dict[str, Any]) -> None:
    problem = problem_for(op, case)
    inputs = leaves(problem)
    hs, _, _ = forward_of(op)(*inputs, activation=problem.activation)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    expected = iter(torch.autograd.grad(hs, wanted, problem.grad_hs))
    actual = by_hand(problem, 0)
    for name, tensor, grad in zip(problem.grad_names(), inputs, actual[:-1], strict=False):
        if tensor is not None and tensor.requires_grad:
            torch.testing.assert_close(grad, next(expected), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert grad.numel() == 0, name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("lengths", [None, [1, 3]], ids=["full", "lengths"])
def test_gradcheck_of_the_pair(op: str, activation: str, lengths: list[int] | None) -> None:
    """Finite differences know nothing of either derivation."""
    given = None if lengths is None else torch.tensor(lengths)

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            hs, _, pre = forward_of(op)(*inputs, activation=activation, lengths=given)
            ctx.save_for_backward(hs, pre, *inputs)
            return hs

        @staticmethod
        def backward(ctx: Any, grad_hs: Tensor) -> Any:
            hs, pre, *inputs = ctx.saved_tensors
            grads = backward_of(op)(grad_hs, hs, pre, *inputs, activation=activation, lengths=given)
            return tuple(grad if grad.numel() else None for grad in grads[:-1])

    for kind in ("features", "tokens"):
        problem = scan_problem(op, B=2, T=3, N=4, D=3, activation=activation, inputs=kind, gap=1e-3)
        assert torch.autograd.gradcheck(Pair.apply, leaves(problem))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["tanh", "prelu", "modrelu", "oplu"])
def test_forward_has_second_derivatives(op: str, activation: str) -> None:
    problem = scan_problem(op, B=1, T=2, N=2, D=2, activation=activation, inputs="features", gap=1e-2)
    forward = forward_of(op)
    for options in ({}, {"lengths": torch.tensor([1])}, {"message_clip": 5.0}):
        run = lambda *inputs, o=options: forward(*inputs, activation=activation, **o)[0]  # noqa: E731
        assert torch.autograd.gradgradcheck(run, leaves(problem))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("checkpoint_every", [1, 3, 7, 20])
def test_checkpoints_change_nothing(op: str, activation: str, checkpoint_every: int) -> None:
    for kind in ("dense", "features", "tokens"):
        problem = scan_problem(op, B=2, T=7, N=4, activation=activation, inputs=kind, gap=1e-3)
        hs, ckpt, pre = forward_of(op)(*problem.inputs(), activation=activation, checkpoint_every=checkpoint_every)
        assert pre.numel() == 0
        assert len(ckpt) == -(-7 // checkpoint_every)
        entering = torch.cat([problem.h0.unsqueeze(0), hs])[0:7:checkpoint_every]
        torch.testing.assert_close(ckpt, entering, rtol=0, atol=0)
        for name, plain, recomputed in zip(
            problem.grad_names(), by_hand(problem, 0), by_hand(problem, checkpoint_every), strict=True
        ):
            torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_needed_is_empty(op: str) -> None:
    problem = scan_problem(op, B=2, T=3, N=4, activation="prelu", inputs="features")
    names = problem.grad_names()
    full = dict(zip(names, by_hand(problem, 0), strict=True))
    without_x = dict(zip(names, by_hand(problem, 0, need_x=False), strict=True))
    without_params = dict(zip(names, by_hand(problem, 0, need_params=False), strict=True))
    for name in names:
        assert (without_x[name].numel() == 0) == (name == "grad_x")
        kept = name in ("grad_x", "grad_h0", "grad_norm")
        assert (without_params[name].numel() == 0) == (not kept)
        if kept:
            torch.testing.assert_close(without_params[name], full[name], rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_grad_norm_is_that_of_every_state(op: str) -> None:
    """Each dL/dh_t on its own: cut the sequence after t and differentiate the rest."""
    problem = scan_problem(op, B=3, T=4, N=3)
    norms = by_hand(problem, 0)[-1]
    forward = forward_of(op)
    hs, _, _ = forward(*problem.inputs(), activation="tanh")
    for t in range(4):
        h_t = hs[t].clone().requires_grad_()
        loss = (h_t * problem.grad_hs[t]).sum()
        if t < 3:
            rest, _, _ = forward(problem.x[t + 1 :], *problem.matrices, h_t, None, None, None, activation="tanh")
            loss = loss + (rest * problem.grad_hs[t + 1 :]).sum()
        (grad,) = torch.autograd.grad(loss, h_t)
        torch.testing.assert_close(norms[t], grad.norm())


def test_tokens_are_one_hot_features() -> None:
    for op in OPS:
        problem = scan_problem(op, B=3, T=5, N=4, D=6, inputs="tokens")
        one_hot = torch.nn.functional.one_hot(problem.x, 6).double()
        kwargs = {"activation": "tanh"}
        from_tokens = forward_of(op)(*problem.inputs(), **kwargs)[0]
        torch.testing.assert_close(from_tokens, forward_of(op)(one_hot, *problem.inputs()[1:], **kwargs)[0])


def test_factored_is_dense_of_the_composed_matrix() -> None:
    problem = scan_problem("factored_scan", B=3, T=6, N=7, K=3, activation="modrelu")
    u, s, v = problem.matrices
    hs = forward_of("factored_scan")(*problem.inputs(), activation="modrelu")[0]
    w = u @ torch.diag(s) @ v.mT
    dense = forward_of("dense_scan")(problem.x, w, *problem.inputs()[4:], activation="modrelu")[0]
    torch.testing.assert_close(hs, dense)


def test_dense_is_torch_rnn() -> None:
    rnn = torch.nn.RNN(5, 7, dtype=torch.float64)
    x, h0 = torch.randn(6, 3, 5, dtype=torch.float64), torch.randn(1, 3, 7, dtype=torch.float64)
    hs = forward_of("dense_scan")(
        x, rnn.weight_hh_l0, h0[0], rnn.weight_ih_l0, rnn.bias_ih_l0 + rnn.bias_hh_l0, None, activation="tanh"
    )[0]
    torch.testing.assert_close(hs, rnn(x, h0)[0])


# ---------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("size", [1, 6])
def test_activation_backward(activation: str, size: int) -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    param = 0.3 * torch.randn(size, dtype=torch.float64) if activation in PARAMETER else None
    inputs = [t.clone().requires_grad_() for t in (x, param) if t is not None]

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, param: Tensor | None = None) -> Tensor:
            ctx.save_for_backward(x, param)
            return activations.activation_fwd(x, param, activation=activation).clone()

        @staticmethod
        def backward(ctx: Any, grad_y: Tensor) -> Any:
            x, param = ctx.saved_tensors
            grad_x, grad_param = activations.activation_bwd(grad_y, x, param, activation=activation)
            return (grad_x,) if param is None else (grad_x, grad_param)

    assert torch.autograd.gradcheck(Pair.apply, inputs)
    y = activations.activation_fwd(*inputs, *([] if param is not None else [None]), activation=activation)
    grad_y = torch.randn_like(x)
    expected = torch.autograd.grad(y, inputs, grad_y) if activation != "identity" else (grad_y,)
    actual = activations.activation_bwd(grad_y, x, param, activation=activation)
    for a, e in zip(actual, expected, strict=False):
        torch.testing.assert_close(a, e)


def test_activations_at_their_kinks() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    slope, bias = torch.tensor([0.25], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)

    def derivative(name: str, x: Tensor, param: Tensor | None = None) -> list[float]:
        return activations.activation_bwd(torch.tensor([1.0, 2.0]).double(), x, param, activation=name)[0].tolist()

    assert derivative("relu", zero) == [0, 0]
    assert derivative("prelu", zero, slope) == [0.25, 0.5]
    assert derivative("modrelu", zero, bias) == [0, 0]
    assert activations.activation_fwd(zero, bias, activation="modrelu").tolist() == [0, 0]
    assert derivative("modrelu", bias.expand(2), -bias) == [0, 0]  # |x| + b = 0 does not pass
    assert derivative("oplu", one) == [1, 2]  # a tie is not swapped
    assert activations.activation_fwd(torch.tensor([1.0, 3.0, 3.0, 1.0]), None, activation="oplu").tolist() == [
        3,
        1,
        3,
        1,
    ]


def test_oplu_keeps_the_norm_and_is_not_the_identity() -> None:
    """A released implementation of OPLU was the identity by mistake; results with it say nothing about OPLU."""
    x = torch.randn(50, 8, dtype=torch.float64)
    y = activations.activation_fwd(x, None, activation="oplu")
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert bool((y[:, 0::2] >= y[:, 1::2]).all())
    assert not torch.equal(x, y)


# --------------------------------------------------------------------------------------------------------------- cayley


def basis(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64, generator=generator))[0]


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 3), (9, 2), (6, 1), (3, 5, 4), (2, 3, 4, 4)], ids=str)
@pytest.mark.parametrize("lr", [1e-3, 1.0, -0.5])
def test_cayley_is_the_textbook_form_and_orthogonal(shape: tuple[int, ...], lr: float) -> None:
    m, g = basis(*shape), torch.randn(*shape, dtype=torch.float64)
    a = g @ m.mT - m @ g.mT
    eye = torch.eye(shape[-2], dtype=torch.float64)
    expected = torch.linalg.inv(eye + lr / 2 * a) @ (eye - lr / 2 * a) @ m
    actual = cayley(m, g, lr)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    gram = torch.eye(shape[-1], dtype=torch.float64).expand(*shape[:-2], -1, -1)
    torch.testing.assert_close(actual.mT @ actual, gram, rtol=0, atol=1e-12)
    torch.testing.assert_close(cayley(m, torch.zeros_like(g), lr), m, rtol=0, atol=0)


def test_cayley_with_a_rate_for_each_matrix() -> None:
    m, g = basis(2, 3, 5, 4), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    rates = torch.rand(2, 3, dtype=torch.float64)
    stepped = cayley(m, g, rates)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(stepped[i, j], cayley(m[i, j], g[i, j], float(rates[i, j])))


@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 3)])
def test_cayley_lowers_the_loss_to_first_order(N: int, K: int) -> None:
    """Note [Cayley step]: the loss changes by -lr/2 |A|_F^2."""
    for seed in range(5):
        m, target = basis(N, K, seed=seed), basis(N, K, seed=100 + seed)
        g = m - target  # of 1/2 |m - target|^2
        a = g @ m.mT - m @ g.mT
        lr = 1e-6
        change = 0.5 * (cayley(m, g, lr) - target).square().sum() - 0.5 * g.square().sum()
        torch.testing.assert_close(change, -lr / 2 * a.square().sum(), rtol=1e-4, atol=0)
        assert change < 0


# ------------------------------------------------------------------------------------------------- linear cross-entropy


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_linear_cross_entropy(reduction: str, with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 4)
    hidden = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, 6, (rows,))

    loss, *grads = linear_cross_entropy.linear_cross_entropy_fwd(hidden, weight, bias, target, reduction=reduction)
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
        assert grads[2].numel() == 0

    def loss_of(*inputs: Tensor) -> Tensor:
        return linear_cross_entropy.linear_cross_entropy_fwd(
            inputs[0], inputs[1], inputs[2] if with_bias else None, target, reduction=reduction, need_grad=False
        )[0]

    assert torch.autograd.gradcheck(loss_of, inputs)
    assert torch.autograd.gradgradcheck(loss_of, inputs)
