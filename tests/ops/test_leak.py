"""The leak of factored_scan and dense_scan: h_t = (1 - l) h_{t-1} + l phi(a_t)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orthokern import functional
from orthokern.errors import InputError
from orthokern.ops.activations import NAMES, PARAMETER
from orthokern.reference.activations import activation_fwd

B, N, K, D = 5, 10, 4, 3


class Problem:
    """Random tensors of a scan with a leak; ``calls`` are the options of the op besides the matrices."""

    def __init__(
        self, op: str, T: int, *, activation: str = "tanh", units: int = N, kind: str = "features", seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).div(2).requires_grad_()

        self.op, self.T, self.activation = op, T, activation
        self.matrices = [draw(N, N)] if op == "dense_scan" else [draw(N, K), draw(K), draw(N, K)]
        shape = {"term": (T, B, N), "features": (T, B, D), "tokens": (0,)}[kind]
        self.x = torch.randint(0, D, (T, B), generator=generator) if kind == "tokens" else draw(*shape)
        leak = torch.rand(units, dtype=torch.float64, generator=generator) * 0.8 + 0.1
        self.calls: dict[str, Any] = {"h0": draw(B, N), "leak": leak.requires_grad_(), "activation": activation}
        if kind != "term":
            self.calls |= {"weight": draw(N, D), "bias": draw(N)}
        if activation in PARAMETER:
            self.calls["act_param"] = draw(N)
        self.lengths = torch.randint(1, T + 1, (B,), generator=generator)
        self.resets = torch.rand(T, B, generator=generator) < 0.4
        self.reset_state = draw(B, N)
        self.cotangent = torch.randn(T, B, N, dtype=torch.float64, generator=generator)

    def leaves(self) -> list[Tensor]:
        tensors = [*self.matrices, self.x, *self.calls.values()]
        return [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]

    def run(self, backend: str, **options: Any) -> list[Tensor]:
        """hs and the gradients of all tensors."""
        calls = {**self.calls, "backend": backend, **options}
        hs = getattr(functional, self.op)(self.x, *self.matrices, **calls)
        return [hs.detach(), *self.gradients(hs, options.get("reset_state"))]

    def gradients(self, hs: Tensor, *more: Tensor | None) -> list[Tensor]:
        leaves = [*self.leaves(), *(t for t in more if t is not None)]
        return list(torch.autograd.grad((hs * self.cotangent).sum(), leaves, retain_graph=True))

    def by_hand(self) -> Tensor:
        """hs [T, B, N] in plain torch."""
        w = self.matrices[0]
        if len(self.matrices) == 3:
            w = w @ torch.diag(self.matrices[1]) @ self.matrices[2].mT
        h, leak, states = self.calls["h0"], self.calls["leak"], []
        for x_t in self.x:
            e = x_t @ self.calls["weight"].mT + self.calls["bias"] if "weight" in self.calls else x_t
            a = h @ w.mT + e
            h = (1 - leak) * h + leak * activation_fwd(a, self.calls.get("act_param"), activation=self.activation)
            states.append(h)
        return torch.stack(states)


@pytest.mark.parametrize("op", ["dense_scan", "factored_scan"])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("units", [1, N])
def test_the_values_and_gradients_are_those_of_a_loop(op: str, activation: str, units: int) -> None:
    problem = Problem(op, 6, activation=activation, units=units)
    hs = problem.by_hand()
    for backend in ("reference", "cpu"):
        torch.testing.assert_close(problem.run(backend), [hs.detach(), *problem.gradients(hs)], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("op", ["dense_scan", "factored_scan"])
@pytest.mark.parametrize("kind", ["term", "features", "tokens"])
@pytest.mark.parametrize("activation", ["tanh", "modrelu", "oplu"])
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("every", [0, 3])
def test_the_kernel_agrees_with_the_reference(op: str, kind: str, activation: str, T: int, every: int) -> None:
    problem = Problem(op, T, activation=activation, units=1 if every else N, kind=kind)
    cases: list[dict[str, Any]] = [
        {"lengths": problem.lengths},
        {"resets": problem.resets, "reset_state": problem.reset_state},
        {"lengths": problem.lengths, "resets": problem.resets, "reset_state": problem.reset_state, "message_clip": 0.1},
    ]
    for case in cases:
        expected = problem.run("reference", **case)
        torch.testing.assert_close(problem.run("cpu", checkpoint_every=every, **case), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("op", ["dense_scan", "factored_scan"])
def test_float32_is_as_exact_as_a_loop_in_torch(op: str) -> None:
    exact, rounded = Problem(op, 200), Problem(op, 200)
    for tensor in [*rounded.leaves(), rounded.cotangent]:
        tensor.data = tensor.data.float()
    hs = rounded.by_hand()
    loop = [hs.detach(), *rounded.gradients(hs)]
    for result, plain, true in zip(rounded.run("cpu"), loop, exact.run("reference"), strict=True):
        floor = 1e-6 * true.abs().max()
        assert (result.double() - true).norm() <= 2 * (plain.double() - true).norm() + floor


@pytest.mark.parametrize("op", ["dense_scan", "factored_scan"])
def test_a_leak_of_one_changes_no_bit_of_the_states(op: str) -> None:
    problem = Problem(op, 9)
    problem.calls["leak"] = torch.ones(1, dtype=torch.float64)
    with_one = problem.run("cpu")
    problem.calls["leak"] = None
    without = problem.run("cpu")
    assert torch.equal(with_one[0], without[0])
    torch.testing.assert_close(with_one, without, rtol=1e-12, atol=1e-13)


def test_second_derivatives_vmap_compile_and_opcheck() -> None:
    problem = Problem("factored_scan", 3, activation="modrelu")
    u, s, v = problem.matrices

    def scan(leak: Tensor, s: Tensor) -> Tensor:
        return functional.factored_scan(problem.x, u, s, v, **{**problem.calls, "leak": leak})

    leak = problem.calls["leak"]
    assert torch.autograd.gradgradcheck(scan, (leak, s))
    several = torch.stack([leak.detach(), leak.detach() / 2])
    expected = torch.stack([scan(row, s.detach()) for row in several])
    torch.testing.assert_close(torch.func.vmap(scan, (0, None))(several, s.detach()), expected)
    torch.testing.assert_close(torch.compile(scan, backend="aot_eager")(leak, s), scan(leak, s))
    calls = {name: t.detach() for name, t in problem.calls.items() if isinstance(t, Tensor)}
    arguments = (problem.x.detach(), v.detach(), s.detach(), u.detach(), calls["h0"], calls["weight"], calls["bias"])
    leaves = tuple(t.requires_grad_() for t in arguments)
    torch.library.opcheck(
        torch.ops.orthokern.factored_scan_fwd, (*leaves, calls["act_param"], "modrelu"), {"leak": calls["leak"]}
    )


def test_the_loss_is_that_of_the_states() -> None:
    problem = Problem("factored_scan", 8, kind="tokens", activation="identity")
    readout = torch.randn(4, N, dtype=torch.float64)
    target = torch.randint(0, 4, (8, B))
    result = functional.scan_cross_entropy(problem.x, problem.matrices, readout, target, **problem.calls)
    hs = functional.factored_scan(problem.x, *problem.matrices, **problem.calls)
    expected = torch.nn.functional.cross_entropy((hs @ readout.mT).flatten(0, 1), target.flatten())
    torch.testing.assert_close(result.loss, expected)
    assert "leak" in result.refused
    torch.testing.assert_close(
        torch.autograd.grad(result.loss, problem.leaves()), torch.autograd.grad(expected, problem.leaves())
    )


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (0.5, "leak must be a torch.Tensor, got 0.5"),
        (torch.ones(3).double(), r"leak has shape \[3\]: accepted is \[1\] or \[N\] = \[10\]"),
        (torch.ones(1), "leak has dtype float32"),
        (torch.zeros(1).double(), r"leak holds values from 0 to 0: accepted are values in \(0, 1\]"),
        (torch.full((N,), 1.5).double(), "leak holds values from 1.5"),
        (torch.full((1,), float("nan")).double(), "leak holds values from nan"),
    ],
)
def test_a_wrong_leak_is_refused(leak: Any, message: str) -> None:
    problem = Problem("dense_scan", 2)
    problem.calls["leak"] = leak
    with pytest.raises(InputError, match=message):
        functional.dense_scan(problem.x, *problem.matrices, **problem.calls)
