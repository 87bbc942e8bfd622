"""The arguments of native functions: a missing or misspelt one is an error, and so is a tensor of another size."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GruProblem, run_scan, scan_problem, with_resets
from torch import Tensor

from orthokern import cpu, functional
from orthokern.cpu import _call
from orthokern.diagnostics import tap
from orthokern.errors import InputError
from orthokern.nn import PeepholeLSTM

LIST = Path(__file__).resolve().parents[1] / "csrc" / "cpu" / "select.h"

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason=cpu.REASON)

# name, dtype, sizes, tensors, and the arguments of the native function, whose addresses are not to be used again
Call = tuple[str, torch.dtype, dict[str, Any], dict[str, Tensor | None], dict[str, Any]]


def call_scans() -> None:
    """Forward and backward of every scan, with every optional argument."""
    lengths = torch.tensor([3, 2])
    for op, inputs in itertools.product(("factored_scan", "dense_scan"), ("dense", "features", "tokens")):
        problem = scan_problem(op, B=2, T=3, N=4, K=3, inputs=inputs, activation="prelu")
        for every in (0, 2):
            run_scan(with_resets(problem), "cpu", checkpoint_every=every, lengths=lengths)
        scan = getattr(functional, op)
        leaks = [torch.full((size,), 0.5, requires_grad=True) for size in (1, 4)]
        for leak in leaks:
            matrices = [t.float() for t in problem.matrices]
            scan(torch.randn(3, 2, 4), *matrices, leak=leak).sum().backward()
    for variant in ("torch", "kanai"):
        GruProblem.random(variant, 3, 2, 4).with_resets().run("cpu", lengths=lengths)
    output, (_, cell) = PeepholeLSTM(2, 4)(torch.randn(3, 2, 2))
    (output.sum() + cell.sum()).backward()


def call_other_ops() -> None:
    linear: dict[str, Any] = {"activation": "identity", "algorithm": "modal"}
    recurrent = torch.linalg.qr(torch.randn(4, 4))[0].requires_grad_()
    functional.dense_scan(torch.randn(3, 2, 4), recurrent, **linear).sum().backward()
    target = torch.randint(0, 5, (3, 2))
    with tap(sparse=True):  # which asks for states and adjoints
        functional.scan_cross_entropy(torch.randn(3, 2, 4), recurrent, torch.randn(5, 4), target, **linear)
    ops, x, w, slope = torch.ops.orthokern, torch.randn(4, 3), torch.randn(6, 3), torch.ones(3)
    ops.activation_bwd(x, ops.activation_fwd(x, slope, "prelu", "cpu"), slope, "prelu", "cpu")
    ops.linear_cross_entropy_fwd(x, w, torch.zeros(6), torch.tensor([0, 1, 2, 5]), "mean", True, "cpu")
    ops.cayley(torch.eye(3), torch.randn(3, 3), torch.tensor(0.1), "cpu")


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Calls of every kernel."""
    recorded: list[Call] = []
    native, real_call = _call._C, _call.call

    class Recording:
        def __getattr__(self, name: str) -> Any:
            def function(*arguments: Any) -> Any:
                last.update(arguments[0] if arguments and isinstance(arguments[0], dict) else {})
                return getattr(native, name)(*arguments)

            return function

    last: dict[str, Any] = {}

    def record(name: str, dtype: torch.dtype, sizes: Any, tensors: Any) -> None:
        last.clear()
        real_call(name, dtype, sizes, tensors)
        recorded.append((name, dtype, dict(sizes), dict(tensors), dict(last)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_call, "_C", Recording())
        for module in [sys.modules[name] for name in sys.modules if name.startswith("orthokern.")]:
            if getattr(module, "call", None) is real_call:
                patch.setattr(module, "call", record)
        call_scans()
        call_other_ops()
    return recorded


@pytest.mark.skipif(not LIST.exists(), reason="not a source tree with kernels")
def test_every_kernel_is_called_with_every_tensor(calls: list[Call]) -> None:
    kernels = re.findall(r"^ *kernel\((\w+), \w+, \w+\)", LIST.read_text(), flags=re.MULTILINE)
    assert len(kernels) > 10 and {name for name, *_ in calls} == set(kernels)
    unused = {
        (name, key)
        for name, _, _, tensors, _ in calls
        for key in tensors
        if all(other[3][key] is None for other in calls if other[0] == name)
    }
    dense = {(f"dense_scan_{way}", factor) for way in ("fwd", "bwd") for factor in ("first", "scale")}
    unused = {(name, key) for name, key in unused if not name.startswith("modal")}
    assert unused == dense


def test_a_missing_or_misspelt_argument_is_an_error(calls: list[Call]) -> None:
    for name, *_, arguments in calls:
        function = getattr(_call._C, name)
        for key in arguments:
            others = {other: value for other, value in arguments.items() if other != key}
            with pytest.raises(TypeError, match=f"^{name}: missing argument '{key}'$"):
                function(others)
            with pytest.raises(TypeError, match=f"^{name}: missing argument '{key}'$"):
                function({**others, f"{key}s": arguments[key]})
        with pytest.raises(TypeError, match=f"^{name}: unknown argument 'wieght'$"):
            function({**arguments, "wieght": None})


def test_a_tensor_of_another_size_dtype_or_device_is_an_error(calls: list[Call]) -> None:
    for name, dtype, sizes, tensors, _ in calls:
        for key, tensor in tensors.items():
            if tensor is None:
                continue
            rows = tensor.reshape(-1) if tensor.ndim < 2 else tensor
            other = torch.float16 if tensor.is_floating_point() else torch.int32
            for changed, message in (
                (rows[:-1], f"must have {tensor.numel()} elements, got {rows[:-1].numel()} of shape .*"),
                (torch.cat([rows, rows[-1:]]), f"must have {tensor.numel()} elements, got .*"),
                (tensor.to(other), f"must be {tensor.dtype}, got {other}"),
                (tensor.to("meta"), "must be on a cpu device, got meta"),
            ):
                with pytest.raises(InputError, match=f"^{name}: {key} {message}$"):
                    _call.call(name, dtype, sizes, {**tensors, key: changed})


@pytest.mark.parametrize("op", ["dense_scan", "gru_scan"])
def test_data_exchanged_between_forward_and_backward_is_an_error(op: str) -> None:
    """autograd does not notice it: the tensor keeps its version."""
    w = torch.randn(12 if op == "gru_scan" else 4, 4, requires_grad=True)
    hs = getattr(functional, op)(torch.randn(3, 2, len(w)), w)
    w.data = w.data[:-1].clone()
    with pytest.raises(InputError, match=f"^{op}_bwd: (w|second) must have {4 * len(w) + 4} elements, got "):
        hs.sum().backward()
