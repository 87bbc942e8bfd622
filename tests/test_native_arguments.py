"""The arguments of native functions: a missing or misspelt one is an error, and so is a tensor of another size."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCANS, GruProblem, run_scan, scan_problem, with_resets
from module_kinds import made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    for op, inputs in itertools.product(SCANS, ("dense", "features", "tokens")):
        problem = scan_problem(op, B=2, T=3, N=4, K=3, inputs=inputs, activation="prelu")
        for every in (0, 2):
            run_scan(with_resets(problem), "cpu", checkpoint_every=every, lengths=lengths)
            if op == "factored_scan":  # of a low rank
                run_scan(scan_problem(op, B=2, T=3, N=64, K=8, inputs=inputs), "cpu", checkpoint_every=every)
        for leak in (1, 4):
            run_scan(scan_problem(op, B=2, T=3, N=4, K=3, inputs=inputs, leak=leak).to(torch.float32), "cpu")
    for variant in ("torch", "kanai"):
        GruProblem.random(variant, 3, 2, 4).with_resets().run("cpu", lengths=lengths)
    output, (_, cell) = PeepholeLSTM(2, 4)(torch.randn(3, 2, 2))
    (output.sum() + cell.sum()).backward()


def call_other_ops() -> None:
    linear: dict[str, Any] = {"activation": "identity", "algorithm": "modal"}
    recurrent = torch.linalg.qr(torch.randn(4, 4))[0].requires_grad_()
    functional.dense_scan(torch.randn(3, 2, 4), recurrent, **linear).sum().backward()
    eigenvalues = torch.randn(2, dtype=torch.complex64, requires_grad=True)
    features, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 5), (4, 5), (4,)))
    for x, options in (
        (torch.randn(3, 2, 4), {"resets": torch.zeros(3, 2, dtype=torch.bool)}),
        (features, {"weight": weight, "bias": bias}),
    ):
        functional.rotation_scan(x, eigenvalues, torch.randn(2, 4), **options).sum().backward()
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
    dense |= {("dense_scan_bwd", f"grad_{factor}") for factor in ("first", "scale", "second")}
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


def exchanges(tensor: Tensor) -> list[Tensor]:
    """Tensors of other shapes, and one of another dtype."""
    t = tensor.detach()
    whole = t if t.ndim else t.reshape(1)
    shapes = [whole[: len(whole) // 2], whole[..., : whole.shape[-1] // 2], torch.cat([whole, whole]), whole[..., :1]]
    shapes += [torch.cat([whole, whole], -1), whole.reshape(-1), whole.reshape(1, -1), whole[None], whole[:0]]
    if whole.ndim > 1:
        shapes.append(whole.mT)
    other = torch.float64 if t.dtype is torch.float32 else torch.float32 if t.is_floating_point() else torch.int32
    return [*(shape.clone() for shape in shapes), t.mT if t.ndim > 1 else whole.new_zeros(()), t.to(other)]


class Recorder(TorchDispatchMode):
    """Records the calls of ops of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "orthokern":
            self.calls.append((func, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_every_op_survives_tensors_of_other_shapes() -> None:
    """Each tensor of each op in turn, as after an exchange of its ``data``: an error or a result, also with the address
    sanitizer (CONTRIBUTING.md)."""
    torch.set_num_threads(1)  # those of many small calls would wait for each other
    with Recorder() as recorder, torch.enable_grad():
        call_scans()
        call_other_ops()
        functional.skew_exp(torch.randn(2, 4, 4, requires_grad=True)).sum().backward()
        functional.linear_cross_entropy(torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 5]))
        functional.cayley(torch.randn(3, 6, 2), torch.randn(3, 6, 2), torch.rand(3))
    names = {func.name().removeprefix("orthokern::") for func, _ in recorder.calls}
    defined = {
        name.removeprefix("orthokern::") for name in torch._C._dispatch_get_all_op_names() if "orthokern::" in name
    }
    assert names == defined
    alike = {(func, *(type(a) for a in args)): (func, args) for func, args in recorder.calls}
    for func, args in alike.values():
        for index, argument in enumerate(args):
            optional = str(func._schema.arguments[index].type) == "Optional[Tensor]"
            if not optional and not isinstance(argument, Tensor):
                continue
            others = exchanges(argument) if isinstance(argument, Tensor) else [torch.ones(4), torch.ones(4, 4)]
            for other in (*others, None):
                with contextlib.suppress(RuntimeError, InputError, ZeroDivisionError):  # those of torch, and our own
                    func(*args[:index], other, *args[index + 1 :])


@pytest.mark.parametrize("kind", ["rnn", "low rank", "gru"])
def test_buffers_of_a_frozen_module_are_exchanged_between_steps(kind: str) -> None:
    frozen: Any = made(kind).frozen()
    x = torch.randn(2, 3)
    expected = frozen.step(x)[0]
    for buffer in frozen.buffers():
        kept = buffer.data
        for other in exchanges(buffer):
            buffer.data = other
            with contextlib.suppress(RuntimeError, InputError):
                frozen.step(x)
        buffer.data = kept
    assert torch.equal(frozen.step(x)[0], expected)


def test_a_tensor_whose_storage_was_freed_is_an_error() -> None:
    bias = torch.ones(4)
    bias.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="dense_scan_fwd: bias has no memory: its storage was freed"):
        functional.dense_scan(torch.ones(2, 1, 3), torch.eye(4), weight=torch.ones(4, 3), bias=bias)


@pytest.mark.parametrize("op", SCANS)
def test_features_without_columns_are_an_error(op: str) -> None:
    """Their tensors have the address 0, which would stand for None."""
    problem = scan_problem(op, B=2, T=5, N=4, D=3, inputs="features").to(torch.float32)
    x, weight = problem.x, problem.weight
    assert weight is not None
    message = rf"^{op}: weight has shape \[4, 0\]: accepted is \[N, D\] with D >= 1$"
    with pytest.raises(InputError, match=message):
        run_scan(dataclasses.replace(problem, x=x[..., :0], weight=weight[:, :0]), "cpu")
    weight.requires_grad_()
    scan = getattr(functional, op)
    output = scan(x, *problem.matrices, problem.h0, weight=weight, checkpoint_every=2, backend="cpu")
    x.data, weight.data = x[..., :0], weight.detach()[:, :0]
    with pytest.raises(InputError, match=message):
        output.sum().backward()


def test_sizes_that_only_an_op_can_be_given_are_errors() -> None:
    ops, of_double = torch.ops.orthokern, {"dtype": torch.float64}
    eigenvalues = torch.ones(2, **of_double), torch.zeros(2, **of_double)
    inputs = torch.ones(3, 2, 0), *eigenvalues, torch.ones(2, 4), torch.ones(4, 0)
    with pytest.raises(InputError, match=r"^rotation_scan: the input has shape \[3, 2, 0\]: accepted is .* D >= 1$"):
        ops.rotation_scan_fwd(*inputs, None, None, "cpu")
    for m, g in ((torch.ones(4, 3), torch.ones(3, 4)), (torch.ones(0, 0), torch.ones(0, 0))):
        with pytest.raises(InputError, match="^cayley: m and g have shapes .*: accepted is one shape"):
            ops.cayley(m, g, torch.tensor(0.1), "cpu")
    with pytest.raises(InputError, match="^N is 3: activation 'oplu' works on pairs and needs an even N$"):
        ops.activation_fwd(torch.ones(2, 3), None, "oplu", "cpu")
