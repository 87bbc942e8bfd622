"""The arguments of native functions: a missing or misspelt one is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GruProblem, run_scan, scan_problem

from orthokern import cpu, functional
from orthokern.cpu import _call
from orthokern.nn import GRU, RNN, ExpRNN, PeepholeLSTM

LIST = Path(__file__).resolve().parents[1] / "csrc" / "cpu" / "select.h"

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)


class Listening:
    """The native module; keeps the arguments of the last call of every function."""

    def __init__(self, native: Any) -> None:
        self.native, self.calls = native, {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if arguments and isinstance(arguments[0], dict):
                self.calls[name] = dict(arguments[0])
            return getattr(self.native, name)(*arguments)

        return call


def every_call() -> dict[str, dict[str, Any]]:
    """The arguments of one call of every kernel. The addresses are not to be used again."""
    with pytest.MonkeyPatch.context() as patch:
        listening = Listening(_call._C)
        patch.setattr(_call, "_C", listening)
        for op in ("factored_scan", "dense_scan"):
            run_scan(scan_problem(op, B=2, T=3, N=4), "cpu")
        GruProblem.random("torch", 3, 2, 4).run("cpu")
        for rnn in (GRU(2, 4, variant="torch"), RNN(2, 4)):
            slope = torch.autograd.grad(rnn(torch.randn(3, 2, 2))[0].sum(), list(rnn.parameters()), create_graph=True)
            slope[0].sum().backward()
        for module in (RNN(2, 4), ExpRNN(2, 4), GRU(2, 4)):  # the backwards of a few steps
            module(torch.randn(1, 1, 2))[0].sum().backward()
        PeepholeLSTM(2, 4)(torch.randn(3, 2, 2))[0].sum().backward()
        linear: dict[str, Any] = {"activation": "identity", "algorithm": "modal"}
        recurrent = torch.linalg.qr(torch.randn(4, 4))[0].requires_grad_()
        functional.dense_scan(torch.randn(3, 2, 4), recurrent, **linear).sum().backward()
        target = torch.randint(0, 5, (3, 2))
        functional.scan_cross_entropy(torch.randn(3, 2, 4), recurrent, torch.randn(5, 4), target, **linear)
        x, w = torch.randn(4, 3), torch.randn(6, 3)
        torch.ops.orthokern.activation_bwd(
            x, torch.ops.orthokern.activation_fwd(x, None, "relu", "cpu"), None, "relu", "cpu"
        )
        torch.ops.orthokern.linear_cross_entropy_fwd(x, w, None, torch.tensor([0, 1, 2, 5]), "mean", True, "cpu")
        torch.ops.orthokern.cayley(torch.eye(3), torch.randn(3, 3), torch.tensor(0.1), "cpu")
    return listening.calls


@pytest.mark.skipif(not LIST.exists(), reason="not a source tree with kernels")
def test_every_kernel_is_called() -> None:
    kernels = re.findall(r"^ *kernel\((\w+), \w+, \w+\)", LIST.read_text(), flags=re.MULTILINE)
    assert len(kernels) > 10 and set(every_call()) == set(kernels)


def test_a_missing_or_misspelt_argument_is_an_error() -> None:
    calls = every_call()
    for name, arguments in calls.items():
        function = getattr(_call._C, name)
        for key in arguments:
            others = {other: value for other, value in arguments.items() if other != key}
            with pytest.raises(TypeError, match=f"^{name}: missing argument '{key}'$"):
                function(others)
            with pytest.raises(TypeError, match=f"^{name}: missing argument '{key}'$"):
                function({**others, f"{key}s": arguments[key]})
        with pytest.raises(TypeError, match=f"^{name}: unknown argument 'wieght'$"):
            function({**arguments, "wieght": None})
