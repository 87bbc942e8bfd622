"""Every module in torch's program transformations: torch.compile, torch.export, vmap, inside and outside of
autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import EVERY, D, N
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from orthokern import parametrize, penalties
from orthokern.errors import InputError
from orthokern.nn import (
    GRU,
    OPLU,
    RNN,
    ExpRNN,
    FactorizedRNN,
    LinearCrossEntropy,
    ModReLU,
)

KINDS: dict[str, Callable[..., nn.Module]] = {
    **EVERY,
    "low rank, checkpoints": lambda *args, **options: FactorizedRNN(*args, rank=2, checkpoint_every=3, **options),
    "checkpoints": lambda *args, **options: RNN(*args, checkpoint_every=3, **options),
    "torch's gru": lambda *args, **options: GRU(*args, bias=True, variant="torch", **options),
    "rebased": lambda *args, **options: ExpRNN(*args, rebase_every=2, **options),
}
OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}]
OPS = ("factorized", "exponential", "gru", "peephole", "rotation")  # one kind for each op of the modules


def made(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](D, N, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of loops in the place of batching rules
def test_vmap(kind: str) -> None:
    """Over inputs, with and without gradients."""
    module, x = made(kind, bidirectional=True), torch.randn(3, 5, 2, D)
    expected = torch.stack([module(one)[0] for one in x])
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, list(module.parameters()), cotangent)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            actual = torch.vmap(lambda one: module(one)[0])(x)
        torch.testing.assert_close(actual, expected)
    assert actual.requires_grad
    actual_gradients = torch.autograd.grad(actual, list(module.parameters()), cotangent)
    torch.testing.assert_close(actual_gradients, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["low rank", "non-normal", "gru"])
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize(kind: str) -> None:
    module, (x, direction) = made(kind), torch.randn(2, 2, 2, D)
    output, tangent = torch.func.linearize(lambda given: module(given)[0], x)
    expected = torch.func.jvp(lambda given: module(given)[0], (x,), (direction,))
    torch.testing.assert_close((output, tangent(direction)), expected)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_parameters(kind: str, tracked: bool) -> None:
    """An ensemble, and the gradients of each member, also of parameters that an outer autograd tracks."""
    models, x = [EVERY[kind](D, N, dtype=torch.float64) for _ in range(3)], torch.randn(5, 2, D, dtype=torch.float64)
    parameters, buffers = torch.func.stack_module_state(models)
    if not tracked:
        parameters = {name: value.detach() for name, value in parameters.items()}

    def loss(*state: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(models[0], state, (x,))[0]
        return result.square().sum()

    actual = torch.vmap(torch.func.grad_and_value(loss))(parameters, buffers)
    if tracked and kind in OPS:
        torch._dynamo.reset()  # the limit of compilations of one function
        compiled = torch.compile(torch.vmap(loss), backend="aot_eager", fullgraph=True)
        grads = torch.autograd.grad(compiled(parameters, buffers).sum(), list(parameters.values()))
        torch.testing.assert_close(dict(zip(parameters, grads, strict=True)), actual[0])
    for index, model in enumerate(models):
        value = model(x)[0].square().sum()
        torch.testing.assert_close(actual[1][index], value)
        expected = torch.autograd.grad(value, list(model.parameters()))
        torch.testing.assert_close([actual[0][name][index] for name, _ in model.named_parameters()], [*expected])


@pytest.mark.parametrize(
    ("margins", "spectrum_map"),
    [((0.0, 0.1, 0.5), "tanh"), ((None, 0.3, 2.0), "sigmoid"), ((0.3, None, 0.3), "tanh")],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_margins(margins: Any, spectrum_map: str) -> None:
    """Each model has its own margin, also after a load into memory without values, and in a compiled program."""
    x = torch.randn(5, 2, D, dtype=torch.float64)
    models = [made("factorized", margin=m, spectrum_map=spectrum_map, dtype=torch.float64) for m in margins]
    empty = made("factorized", margin=margins[0], spectrum_map=spectrum_map, dtype=torch.float64, device="meta")
    empty.to_empty(device="cpu").load_state_dict(models[0].state_dict())

    def loss(*state: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(models[0], state, (x,))[0]
        return result.square().sum()

    expected = [model(x)[0].square().sum() for model in models]
    parameters, buffers = torch.func.stack_module_state([empty, *models[1:]])
    parameters = {name: value.detach() for name, value in parameters.items()}
    gradients, losses = torch.vmap(torch.func.grad_and_value(loss))(parameters, buffers)
    torch.testing.assert_close(losses, torch.stack(expected))
    compiled = torch.compile(torch.vmap(loss), backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, buffers), torch.stack(expected))
    for index, (model, value) in enumerate(zip(models, expected, strict=True)):
        torch.testing.assert_close(gradients["u_l0"][index], torch.autograd.grad(value, [model.u_l0])[0])


def test_margin_after_a_change_of_dtype() -> None:
    model = made("factorized", margin=0.1, dtype=torch.float32).double()
    p, x = model.spectrum_l0.detach().fill_(3.0), torch.randn(5, 2, D, dtype=torch.float64)
    mapped = torch.vmap(lambda values: torch.func.functional_call(model, {"spectrum_l0": values}, (x,)))
    torch.testing.assert_close(mapped(p.unsqueeze(0))[0][0], model(x)[0].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 6])], ids=["", "lengths"])
@pytest.mark.parametrize("kind", ["peephole", "low rank, checkpoints", "non-normal", "rotation"])
def test_compile(kind: str, lengths: Tensor | None) -> None:
    """In one graph, with the gradients of an ordinary call."""
    module, x = made(kind), torch.randn(6, 2, D)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = gradients_of(module, lambda: module(x, lengths=lengths)[0].square().sum())
    actual = gradients_of(module, lambda: compiled(x, lengths=lengths)[0].square().sum())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # of few rows, other sums: measured 4e-6


def test_forwards_outside_of_a_compiled_module() -> None:
    """They count, and a graph must not depend on the count."""
    graphs, module, x = CompileCounter(), FactorizedRNN(3, 8), torch.randn(5, 2, 3)
    compiled = torch.compile(module, backend=graphs)
    for _ in range(4):
        compiled(x)
        module(x)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("nonlinearity", ["tanh", "identity"])
def test_compile_of_a_loss(nonlinearity: str) -> None:
    """In one graph, step by step: the modal form has none."""
    module, readout = made("factorized", nonlinearity=nonlinearity), nn.Linear(N, 2)
    x, target = torch.randn(6, 2, D), torch.randint(2, (6, 2))
    torch._dynamo.reset()
    compiled = torch.compile(module.loss, backend="aot_eager", fullgraph=True)
    expected = gradients_of(module, lambda: module.loss(x, readout, target)[0])
    actual = gradients_of(module, lambda: compiled(x, readout, target)[0])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("orthokern.") or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("kind", ["rnn", "gru", "peephole", ModReLU(N), OPLU(), LinearCrossEntropy(N, 3)], ids=str)
def test_symbolic_trace(kind: Any) -> None:
    """With the modules as leaves."""
    recurrent = isinstance(kind, str)
    model, x = nn.Sequential(made(kind) if recurrent else kind), torch.randn(*((6, 2, D) if recurrent else (2, N)))
    actual, expected = fx.GraphModule(model, Leaves().trace(model))(x), model(x)
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("kind", ["rnn", "factorized"])
def test_fake_tensors_of_a_loss(kind: str) -> None:
    """Of sizes for which the modal form would pay: its eigenvalues cannot be read."""
    with FakeTensorMode():
        module, readout = made(kind, nonlinearity="identity"), nn.Linear(N, 2)
        x, target = torch.zeros(20_000, 50, dtype=torch.int64), torch.zeros(20_000, 50, dtype=torch.int64)
        loss, hits = module.loss(x, readout, target)
        assert loss.shape == () and hits.shape == (20_000,) and loss.requires_grad
        with pytest.raises(InputError, match="^algorithm is 'modal': its tensors have no values.*'sequential'"):
            module.loss(x, readout, target, algorithm="modal")


def gradients_of(
    module: nn.Module, loss: Callable[[], Tensor], forward: bool = False, backward: bool = False
) -> list[Tensor]:
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
        value = loss()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
        value.backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_no_bit(kind: str, options: dict[str, Any], backend: str | None) -> None:
    if backend is not None:
        if kind == "peephole":
            pytest.skip("has no backends")
        options = {**options, "backend": backend}
    module, x = made(kind, **options), torch.randn(6, 2, D)

    def loss() -> Tensor:
        return module(x)[0].square().sum()

    expected = gradients_of(module, loss)
    by_ops = backend is None and kind in ("rnn", "factorized", "low rank")
    for backward in (False, True) if by_ops else (False,):
        actual = gradients_of(module, loss, True, backward)
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


CONSTRAINTS = [getattr(parametrize, name) for name in parametrize.__all__]


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, penalties.orthogonal_penalty, penalties.spectrum_prior])
def test_autocast_leaves_constraints_alone(constraint: Any) -> None:
    """Of a layer's constrained weight, and in penalties."""
    module = nn.Linear(6, 6) if constraint is not penalties.spectrum_prior else RNN(3, 6)
    if constraint in CONSTRAINTS:
        nn.utils.parametrize.register_parametrization(module, "weight", constraint(module.weight))

    def loss() -> Tensor:
        if constraint in CONSTRAINTS:
            return (module.weight * torch.arange(6.0)).sum()
        return constraint(module.weight if constraint is penalties.orthogonal_penalty else module)

    expected = gradients_of(module, loss)
    assert expected
    torch.testing.assert_close(gradients_of(module, loss, True), expected, rtol=0, atol=0)
