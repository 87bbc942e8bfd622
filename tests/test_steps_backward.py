"""The backward of a few steps, one native call: every gradient at odd sizes, and what is not asked for is not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orthokern import cpu
from orthokern.cpu import _steps
from orthokern.diagnostics import tap
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, NonNormalRNN

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)

D = 3
SHAPES = [(1, 1), (3, 1), (2, 3), (1, 10), (4, 4)]  # T, B
KINDS: dict[str, Callable[..., Any]] = {
    "rnn": RNN,
    "rnn of a learned activation": lambda *args, **options: RNN(*args, nonlinearity="modrelu", **options),
    "rnn that keeps its input": lambda *args, **options: RNN(*args, nonlinearity="prelu", bias=False, **options),
    "factorized": FactorizedRNN,
    "free spectrum": lambda *args, **options: FactorizedRNN(*args, margin=None, init="glorot", **options),
    "low rank": lambda D, N, **options: FactorizedRNN(D, N, rank=(N + 1) // 2, **options),
    "composed": lambda *args, **options: FactorizedRNN(*args, apply="composed", spectrum_map="tanh", **options),
    "exponential": ExpRNN,
    "non-normal": NonNormalRNN,
    "normal": lambda *args, **options: NonNormalRNN(*args, triangular=False, **options),
    "gru": lambda *args, **options: GRU(*args, bias=True, variant="torch", **options),
    "gru of Kanai": GRU,
}


def made(kind: str, n: int, **options: Any) -> Any:
    torch.manual_seed(n)
    module = KINDS[kind](D, n, **options)
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) / n**0.5
    return module


def gradients(module: nn.Module, x: Tensor, h: Tensor | None, *more: Tensor) -> list[Tensor]:
    output, last = module(x, h)
    wanted = [*module.parameters(), *more]
    return list(torch.autograd.grad(output.square().sum() + last.sin().sum(), wanted))


@pytest.mark.parametrize("n", [1, 34, 71])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient(isa: Any, kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the float64 reference, in calls that make everything anew and in repeated ones."""
    calls: list[str] = []
    run = _steps.Backward.__call__
    monkeypatch.setattr(
        _steps.Backward, "__call__", lambda self, *a: (calls.append(self._plan.kernel), run(self, *a))[1]
    )
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-11)):  # of the RMS; measured: 4e-5
        module = made(kind, n, dtype=dtype)
        options = {} if isinstance(module, GRU) else {"checkpoint_every": 1}
        exact = made(kind, n, dtype=torch.float64, backend="reference", **options)
        exact.load_state_dict(module.state_dict())
        for T, B in SHAPES:
            for _ in range(4):
                x, h = torch.randn(T, B, D, dtype=dtype), torch.randn(1, B, n, dtype=dtype)
                given = x.requires_grad_(), h.requires_grad_()
                copies = [t.detach().double().requires_grad_() for t in given]
                calls.clear()
                found = gradients(module, *given, *given)
                assert len(calls) == 1
                for one, other in zip(found, gradients(exact, *copies, *copies), strict=True):
                    assert one.dtype is dtype and one.is_contiguous()
                    scale = float(other.norm()) / max(other.numel(), 1) ** 0.5 + 1e-3
                    torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_asked_for_changes_no_other_bit(kind: str, shape: tuple[int, int]) -> None:
    """The gradients of x and h, and of single parameters."""
    module, (T, B) = made(kind, 20), shape
    for _ in range(4):
        x, h = torch.randn(T, B, D), torch.randn(1, B, 20)
        plain = gradients(module, x, h)
        with_x = gradients(module, x.requires_grad_(), h, x)
        with_h = gradients(module, x.detach(), h.requires_grad_(), h)
        with_both = gradients(module, x, h, x, h)
        count = len(plain)
        for found in (with_x, with_h, with_both):
            torch.testing.assert_close(found[:count], plain, rtol=0, atol=0)
        torch.testing.assert_close(with_both[count:], [with_x[-1], with_h[-1]], rtol=0, atol=0)
        for one, (name, parameter) in zip(plain, list(module.named_parameters()), strict=True):
            output, last = module(x.detach(), h.detach())
            (alone,) = torch.autograd.grad(output.square().sum() + last.sin().sum(), parameter)
            torch.testing.assert_close(alone, one, rtol=0, atol=0, msg=name)


def test_parameters_that_are_held_fixed() -> None:
    for kind in KINDS:
        module, x = made(kind, 6), torch.randn(2, 2, D)
        wanted = dict(zip(dict(module.named_parameters()), gradients(module, x, None), strict=True))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("weight"))
        for _ in range(4):
            module.zero_grad()
            output, last = module(x)
            (output.square().sum() + last.sin().sum()).backward()
            for name, parameter in module.named_parameters():
                assert (parameter.grad is None) == (not name.startswith("weight"))
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_learned_states_that_are_not_used(kind: str) -> None:
    module, x = made(kind, 6, learned_h0=True), torch.randn(1, 3, D)
    for h in (None, torch.randn(1, 3, 6)):
        for _ in range(3):
            module.zero_grad()
            module(x, h)[0].square().sum().backward()
            assert (module.h0_l0.grad is None) == (h is not None)


@pytest.mark.parametrize("kind", ["rnn", "low rank", "exponential", "non-normal", "gru", "gru of Kanai"])
def test_threads_change_no_bit(kind: str) -> None:
    """Of weights of more than 256 KiB; and more threads than there are processors."""
    module, threads = made(kind, 330), torch.get_num_threads()
    try:
        for T, B in ((1, 1), (2, 3)):
            x, h, found = torch.randn(T, B, D), torch.randn(1, B, 330, requires_grad=True), []
            for count in (1, 2, 3, 5):
                torch.set_num_threads(1)  # torch's product of a GRU's input has other bits
                output, last = module(x, h)
                torch.set_num_threads(count)
                loss = output.square().sum() + last.sin().sum()
                found.append(torch.autograd.grad(loss, [*module.parameters(), h]))
            for other in found[1:]:
                torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_of_gradients(kind: str) -> None:
    """Of a backward inside a tap whose forward was outside, also in a repeated call."""
    module, x = made(kind, 6), torch.randn(3, 2, D)
    for _ in range(4):
        output, _ = module(x)
        with tap() as found:
            output.square().sum().backward()
        with tap() as wanted:
            module(x)[0].square().sum().backward()
        assert found.ops == wanted.ops
        torch.testing.assert_close(found.grad_norms, wanted.grad_norms)
