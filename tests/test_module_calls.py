"""Derivatives of modules: twice, of many cotangents, in threads; calls that hooks, modes and vmap observe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_kinds import KINDS, D, N, made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orthokern import cpu

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
@pytest.mark.parametrize("options", [{}, {"learned_h0": True, "nonlinearity": "modrelu", "batch_first": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_a_few_steps(kind: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    """First and second derivatives against finite differences."""
    if kind == "gru":
        options = {name: value for name, value in options.items() if name != "nonlinearity"}
    module = made(kind, dtype=torch.float64, **options)
    values = {name: value.detach().requires_grad_() for name, value in module.named_parameters()}
    x = torch.randn(*shape, D, dtype=torch.float64, requires_grad=True)
    hx = None if options else torch.randn(1, shape[1], N, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(values, rest, strict=False))
        found: tuple[Tensor, Tensor] = torch.func.functional_call(
            module, given, (x, rest[-1] if hx is not None else None)
        )
        return found

    arguments = (x, *values.values()) if hx is None else (x, *values.values(), hx)
    assert torch.autograd.gradcheck(call, arguments)
    assert torch.autograd.gradgradcheck(lambda *a: call(*a)[0].sin() * call(*a)[1].sum(), arguments, fast_mode=True)


@pytest.mark.parametrize("result", [0, 1], ids=["output", "h_n"])
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_many_cotangents_at_once(kind: str, steps: int, result: int) -> None:
    """By torch.autograd, whose vmap is not that of torch.func."""
    module, x = made(kind, dtype=torch.float64), torch.randn(steps, 1, D, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    for _ in range(3):
        output = module(x)[result]
        cotangents = torch.randn(3, *output.shape, dtype=output.dtype)
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(output, wanted, cotangents, is_grads_batched=True, **options)
        single = [torch.autograd.grad(output, wanted, cotangent, **options) for cotangent in cotangents]
        for one, others in zip(found, zip(*single, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(others))


class Names(TorchDispatchMode):
    """Keeps the names of the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_whoever_listens_sees_the_op(grad: bool) -> None:
    """Modes, the profiler and fake tensors."""
    module, x = made("low rank"), torch.randn(1, 1, D)
    with torch.set_grad_enabled(grad):
        expected = module(x)[0]
        with Names() as seen:
            torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)
        assert "orthokern.factored_scan_fwd.default" in seen.names
        with torch.profiler.profile() as profiler:
            module(x)
        assert any("orthokern::factored_scan_fwd" in event.key for event in profiler.key_averages())
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            assert type(module(torch.randn(1, 1, D))[0]) is torch._subclasses.FakeTensor
