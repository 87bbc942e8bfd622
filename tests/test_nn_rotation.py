"""RotationRNN: values against its matrix, the normalisation of the input, initial values, and errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from orthokern import nn
from orthokern.errors import InputError
from orthokern.nn.rotation import input_scale
from orthokern.optim import optimizer_for

OPTIONS: list[dict[str, Any]] = [{}, {"margin": 0.1, "horizon": 20}, {"margin": 0, "horizon": 20}, {"horizon": 7}]


@pytest.mark.parametrize("options", OPTIONS)
def test_states_and_gradients(options: dict[str, Any]) -> None:
    """Against a loop over h W^T, with g as a sum of powers."""
    rnn = nn.RotationRNN(3, 8, **options, dtype=torch.float64)
    torch.nn.init.normal_(rnn.bias_l0)
    with torch.no_grad():
        rnn.radius_l0 += torch.linspace(-0.5, 0.5, 4)
    x, h = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True), torch.zeros(2, 8, dtype=torch.float64)
    states, last = rnn(x)
    powers = 2 * torch.arange(options.get("horizon", 300_000), dtype=torch.float64)
    g = (rnn.eigenvalues().abs().unsqueeze(1) ** powers).sum(1).rsqrt().repeat(2)
    steps = []
    for x_t in x:
        h = h @ rnn.recurrent_matrix().mT + g * (x_t @ rnn.weight_ih_l0.mT + rnn.bias_l0)
        steps.append(h)
    torch.testing.assert_close(states, torch.stack(steps))
    assert torch.equal(last[0], states[-1])
    leaves, cotangent = [x, *rnn.parameters()], torch.randn_like(states)
    expected = torch.autograd.grad(torch.stack(steps), leaves, cotangent)
    torch.testing.assert_close(torch.autograd.grad(states, leaves, cotangent), expected)
    if options.get("margin") is not None:
        assert (rnn.eigenvalues().abs() - 1).abs().max() <= options["margin"] + 1e-12


def test_padding_has_no_effect() -> None:
    """Radii above 1 would make its states infinite, and NaN is not read."""
    rnn = nn.RotationRNN(3, 8, margin=0.5, horizon=10)
    torch.nn.init.constant_(rnn.radius_l0, 4.0)
    x, lengths = torch.randn(400, 2, 3), torch.tensor([5, 7])
    gradients = []
    for steps in (7, 400):
        states, last = rnn(x[:steps], lengths=lengths)
        gradients.append(torch.autograd.grad((states.sum(), last.sum()), list(rnn.parameters())))
        x[7:] = torch.nan
    torch.testing.assert_close(*gradients)


def test_the_scale_of_the_input() -> None:
    """At, around and far from a radius of 1, and its derivative."""
    radius = torch.tensor([0.5, 0.999, 1 - 1e-10, 1.0, 1.001, 1.9], dtype=torch.float64, requires_grad=True)
    powers = 2 * torch.arange(300, dtype=torch.float64)
    sums = (radius.unsqueeze(1) ** powers).sum(1).rsqrt()
    actual = input_scale(radius, 300)
    torch.testing.assert_close(actual, sums, rtol=1e-9, atol=0)
    slopes = [torch.autograd.grad(value.sum(), radius)[0] for value in (actual, sums)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-12)


def test_states_of_noise_have_the_variance_of_their_input() -> None:
    for options in ({"radii": (0.5, 0.99)}, {"margin": 0.0, "horizon": 1000}):
        rnn = nn.RotationRNN(16, 64, **options)
        states, _ = rnn(torch.randn(1000, 8, 16))
        assert 0.7 < float(states[-1].detach().square().mean()) < 1.4


def test_initial_values() -> None:
    rnn = nn.RotationRNN(4, 4000, radii=(0.5, 0.7), max_angle=0.1)
    radius = rnn.eigenvalues().detach().abs()
    assert 0.5 <= radius.min() < 0.51 and 0.69 < radius.max() <= 0.7
    assert float(radius.square().mean()) == pytest.approx((0.25 + 0.49) / 2, abs=0.01)  # uniform over the ring
    angle = rnn.eigenvalues().detach().angle()
    assert 0 <= angle.min() and 0.09 < angle.max() <= 0.1 + 1e-6
    assert float(rnn.weight_ih_l0.detach().std()) == pytest.approx(0.5, rel=0.05)
    assert nn.RotationRNN(3, 8, margin=0.1, horizon=5).eigenvalues().detach().abs().eq(1).all()


def test_training() -> None:
    rnn, readout = nn.RotationRNN(2, 16), torch.nn.Linear(16, 1)
    model = torch.nn.ModuleList([rnn, readout])
    optimizer = optimizer_for(model, lr=1e-2, rotation_lr=5e-3, euclidean=torch.optim.AdamW, weight_decay=0.1)
    groups = {group["role"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert groups == {"other": (1e-2, 0.1), "rotation": (5e-3, 0.0)}
    x = torch.randn(20, 8, 2)
    losses = []
    for _ in range(60):
        loss = (readout(rnn(x)[0][-1]) - x[5, :, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_text() -> None:
    assert repr(nn.RotationRNN(3, 8)) == "RotationRNN(3, 8)"
    assert repr(nn.RotationRNN(3, 8, margin=0, horizon=9)) == "RotationRNN(3, 8, margin=0.0, horizon=9)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 7}, r"hidden_size must be even \(pairs of units\), got 7"),
        ({"margin": 1}, r"margin must be a number in \[0, 1\), or None, got 1"),
        ({"margin": 0.1}, "horizon must be an integer of at least 1 if margin is given, got None"),
        ({"horizon": 0}, "horizon must be an integer of at least 1"),
        ({"radii": (0.9, 1)}, r"radii must be \(low, high\) with 0 <= low < high < 1, got \(0.9, 1\)"),
        ({"radii": 0.9}, r"radii must be two numbers \(low, high\), got 0.9"),
        ({"max_angle": 4}, r"max_angle must be in \(0, pi\], got 4"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nn.RotationRNN(**{"input_size": 3, "hidden_size": 8, **options})


def test_a_period_is_an_angle() -> None:
    """A single rotation by 2 pi / P repeats its impulse response every P steps."""
    rnn = nn.RotationRNN(1, 2, margin=0, horizon=12, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(rnn.angle_l0, 2 * math.pi / 6)
    states, _ = rnn(torch.eye(12, 1, dtype=torch.float64))
    torch.testing.assert_close(states[:6], states[6:])


@pytest.mark.parametrize("model", [nn.RotationRNN(3, 8, horizon=6), nn.FactorizedRNN(3, 8)])
def test_a_margin_that_is_set_later(model: Any) -> None:
    """torch.func reads it from a buffer."""
    torch.nn.init.normal_(model.radius_l0 if isinstance(model, nn.RotationRNN) else model.spectrum_l0)
    x = torch.randn(6, 2, 3)
    for margin in (1, None, 0.2):
        model.margin = margin
        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,))[0].sum())(parameters)
        expected = torch.autograd.grad(model(x)[0].sum(), list(parameters.values()))
        torch.testing.assert_close(tuple(gradients.values()), expected)
        model.load_state_dict(copy.deepcopy(model).state_dict())
        assert model.margin is None or type(model.margin) is float


def test_a_radius_that_rounds_to_one_has_finite_gradients() -> None:
    rnn = nn.RotationRNN(3, 8)
    torch.nn.init.constant_(rnn.radius_l0, -60.0)
    rnn(torch.randn(5, 2, 3))[0].sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in rnn.parameters())
