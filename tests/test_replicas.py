"""Modules and functionals for R models at once, by torch.func.vmap: equal to a loop over the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from orthokern import functional, nn
from orthokern.errors import InputError
from orthokern.optim import GeodesicSGD

R, T, B, D, N = 3, 6, 4, 5, 8

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "RNN": lambda: nn.RNN(D, N, num_layers=2),
    "bidirectional": lambda: nn.RNN(D, N, nonlinearity="relu", bidirectional=True),
    "FactorizedRNN": lambda: nn.FactorizedRNN(D, N, nonlinearity="modrelu", learned_h0=True, checkpoint_every=4),
    "composed": lambda: nn.FactorizedRNN(D, N, rank=3, apply="composed"),
    "ExpRNN": lambda: nn.ExpRNN(D, N),
    "NonNormalRNN": lambda: nn.NonNormalRNN(D, N),
    "GRU": lambda: nn.GRU(D, N),
    "PeepholeLSTM": lambda: nn.PeepholeLSTM(D, N),
}

FEATURES = ("PeepholeLSTM",)  # modules that take no token ids


def each(count: int, make: Callable[[], torch.nn.Module]) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(count)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, tokens) for name in MODULES for tokens in (False, True) if not (tokens and name in FEATURES)],
)
def test_stacked_modules_are_a_loop(name: str, shared: bool, tokens: bool) -> None:
    models = each(R, MODULES[name])
    x = torch.randint(0, D, (R, T, B)) if tokens else torch.randn(R, T, B, D)
    place, given = (None, x[0]) if shared else (0, x)
    parameters, buffers = stack_module_state(models)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = functional_call(models[0], (parameters, buffers), (x,))[0]
        return output.square().mean()

    losses = vmap(loss, (0, 0, place))(parameters, buffers, given)
    losses.sum().backward()
    constants = {name: value.detach() for name, value in parameters.items()}
    gradients = vmap(grad(loss), (0, 0, place))(constants, buffers, given)
    for r, model in enumerate(models):
        alone = model(given if shared else given[r])[0].square().mean()
        alone.backward()
        torch.testing.assert_close(losses[r], alone)
        for key, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            torch.testing.assert_close(parameters[key].grad[r], parameter.grad)
            torch.testing.assert_close(gradients[key][r], parameter.grad)


@pytest.mark.parametrize("nonlinearity", ["tanh", "identity"])
def test_loss_goes_step_by_step_under_vmap(nonlinearity: str) -> None:
    """rnn.loss: its modal form looks at the eigenvectors of one matrix, which vmap does not allow."""
    models = each(R, lambda: nn.FactorizedRNN(D, N, nonlinearity=nonlinearity))
    readout, x, target = torch.nn.Linear(N, 3), torch.randint(0, D, (T, B)), torch.randint(0, 3, (T, B))
    parameters, _ = stack_module_state(models)

    def loss(parameters: dict[str, Tensor], algorithm: str) -> Tensor:
        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = models[0]

            def forward(self) -> Tensor:
                found: Tensor = self.rnn.loss(x, readout, target, algorithm=algorithm)[0]  # type: ignore[operator]
                return found

        return functional_call(Loss(), {f"rnn.{key}": value for key, value in parameters.items()}, ())

    losses = vmap(loss, (0, None))(parameters, "auto")
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()))
    for r, model in enumerate(models):
        alone = model.loss(x, readout, target, algorithm="sequential")[0]  # type: ignore[operator]
        torch.testing.assert_close(losses[r], alone)
        for found, wanted in zip(gradients, torch.autograd.grad(alone, list(model.parameters())), strict=True):
            torch.testing.assert_close(found[r], wanted)
    if nonlinearity == "identity":
        with pytest.raises(InputError, match=r"algorithm is 'modal': torch.func transforms the call"):
            vmap(loss, (0, None))(parameters, "modal")


def test_a_compiled_training_step_of_stacked_modules() -> None:
    models = each(R, lambda: nn.FactorizedRNN(D, N))
    parameters, buffers = stack_module_state(models)
    x = torch.randn(T, B, D)

    def step(parameters: dict[str, Tensor]) -> Tensor:
        def one(parameters: dict[str, Tensor]) -> Tensor:
            output: Tensor = functional_call(models[0], (parameters, buffers), (x,))[0]
            return output.square().mean()

        return vmap(one)(parameters)

    torch._dynamo.reset()
    losses = torch.compile(step, fullgraph=True, backend="aot_eager")(parameters)
    expected = step(parameters)
    torch.testing.assert_close(losses, expected)
    wanted = torch.autograd.grad(expected.sum(), list(parameters.values()))
    for found, one in zip(torch.autograd.grad(losses.sum(), list(parameters.values())), wanted, strict=True):
        torch.testing.assert_close(found, one)


def test_the_base_of_stacked_modules_does_not_move() -> None:
    models = each(R, lambda: nn.ExpRNN(D, N, rebase_every=1))
    parameters, buffers = stack_module_state(models)
    start, skew = buffers["base_l0"].clone(), parameters["skew_l0"].detach().clone()
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    x = torch.randn(T, B, D)
    for _ in range(2):
        optimizer.zero_grad()
        states = vmap(lambda p, b: functional_call(models[0], (p, b), (x,))[0])(parameters, buffers)
        states[:, -1, :, 0].sum().backward()
        optimizer.step()
    assert torch.equal(buffers["base_l0"], start)
    assert not torch.equal(parameters["skew_l0"], skew) and parameters["skew_l0"].abs().max() > 0


def test_stacked_bases_take_one_geodesic_step() -> None:
    """What trains R models: one optimizer, whose groups hold the stacked parameters."""
    models = each(R, lambda: nn.FactorizedRNN(D, N))
    x = torch.randn(T, B, D)
    parameters, buffers = stack_module_state(models)
    bases = [parameters[name] for name in ("u_l0", "v_l0")]

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(models[0], (parameters, buffers), (x,))[0]
        return output.square().mean()

    vmap(loss)(parameters).sum().backward()
    GeodesicSGD(bases, lr=0.1).step()
    for r, model in enumerate(models):
        model(x)[0].square().mean().backward()
        GeodesicSGD([model.get_parameter(name) for name in ("u_l0", "v_l0")], lr=0.1).step()
        for name in ("u_l0", "v_l0"):
            torch.testing.assert_close(parameters[name][r], model.get_parameter(name))


@pytest.mark.parametrize("lr", [0.1, torch.tensor([0.1, 0.2, 0.0])])
def test_cayley(lr: float | Tensor) -> None:
    m, g = torch.linalg.qr(torch.randn(R, 2, 6, 4))[0], torch.randn(R, 2, 6, 4)
    each_lr = lr if isinstance(lr, Tensor) else [lr] * R
    place = 0 if isinstance(lr, Tensor) else None
    for backend in (None, "reference"):
        alone = torch.stack([functional.cayley(m[r, 0], g[r, 0], each_lr[r], backend=backend) for r in range(R)])

        def step(m: Tensor, g: Tensor, lr: Any, backend: str | None = backend) -> Tensor:
            return functional.cayley(m, g, lr, backend=backend)

        torch.testing.assert_close(vmap(step, (0, 0, place))(m[:, 0], g[:, 0], lr), alone)
    if place is None:
        torch.testing.assert_close(
            vmap(lambda m: functional.cayley(m, g[0], lr))(m), functional.cayley(m, g[:1].expand_as(g), lr)
        )
    bad = m[:, 0].clone()
    bad[1, 0, 0] = float("nan")
    with pytest.raises(InputError, match="m holds 1 NaN or infinite values"):
        vmap(lambda m: functional.cayley(m, g[0, 0], 0.1))(bad)


@pytest.mark.parametrize("places", [(0, 0, 0), (1, None, 0), (0, None, None)])
def test_other_ops_are_a_loop(places: tuple[int | None, ...]) -> None:
    """skew_exp in one call, activations and the readout's loss by a loop; R in any place."""

    def run(x: Tensor, bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = functional.activation(x, "modrelu", bias)
        target = torch.zeros(x.shape[0], dtype=torch.int64)
        return functional.skew_exp(w), y, functional.linear_cross_entropy(y, w, bias, target)

    def total(*given: Tensor) -> Tensor:
        return sum((one.square().sum() for one in run(*given)), torch.zeros(()))

    given = [
        torch.randn(shape).unsqueeze(0).repeat(R, *(1,) * len(shape)) + torch.arange(R).view(-1, *(1,) * len(shape)) / 5
        for shape in ((2, 4), (4,), (4, 4))
    ]
    given = [t[0] if place is None else t.movedim(0, place) for t, place in zip(given, places, strict=True)]

    def of(r: int) -> list[Tensor]:
        return [t if place is None else t.select(place, r) for t, place in zip(given, places, strict=True)]

    for found, wanted in zip(
        vmap(run, places)(*given), zip(*(run(*of(r)) for r in range(R)), strict=True), strict=True
    ):
        torch.testing.assert_close(found, torch.stack(wanted))
    gradients = vmap(grad(total, (0, 1, 2)), places)(*given)
    alone = [grad(total, (0, 1, 2))(*of(r)) for r in range(R)]
    for found, wanted in zip(gradients, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))


def test_modules_of_unequal_shapes_are_refused() -> None:
    unequal = [nn.RNN(D, N), nn.RNN(D, N + 1)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        stack_module_state(unequal)
    assert "\n" not in str(caught.value)
