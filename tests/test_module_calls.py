"""Calls of modules that modes and the profiler observe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_kinds import D, made
from torch.utils._python_dispatch import TorchDispatchMode

from orthokern import cpu

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)


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
