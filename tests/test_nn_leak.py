"""Leak and noise of the modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from orthokern import nn

MODULES = [nn.RNN, nn.FactorizedRNN, nn.ExpRNN, nn.NonNormalRNN]


def by_hand(rnn: Any, x: Tensor, leak: Tensor | float) -> Tensor:
    """The states [T, B, N] of a module of one layer without biases, step by step."""
    w, weight, h = rnn.recurrent_matrix(), rnn.weight_ih_l0, torch.zeros(x.shape[1], rnn.hidden_size).to(x)
    states = []
    for x_t in x:
        h = (1 - leak) * h + leak * torch.tanh(h @ w.mT + x_t @ weight.mT)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("learned", [False, True])
def test_values_and_gradients_are_those_of_a_loop(kind: Any, learned: bool) -> None:
    rnn = kind(3, 8, bias=False, leak=0.2, learned_leak=learned, nonlinearity="tanh", dtype=torch.float64)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    assert ("leak_logit_l0" in rnn.state_dict()) == learned
    leak = torch.sigmoid(rnn.leak_logit_l0) if learned else 0.2
    if learned:
        torch.testing.assert_close(leak, torch.full((8,), 0.2, dtype=torch.float64))
    expected, states = by_hand(rnn, x, leak), rnn(x)[0]
    torch.testing.assert_close(states, expected)
    cotangent = torch.randn_like(states)
    parameters = [p for p in rnn.parameters() if p.requires_grad]
    ours, loop = (torch.autograd.grad((s * cotangent).sum(), parameters, allow_unused=True) for s in (states, expected))
    torch.testing.assert_close(ours, loop)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("learned", [False, True])
def test_the_frozen_module_leaks(kind: Any, learned: bool) -> None:
    rnn = kind(3, 8, num_layers=2, leak=0.3, learned_leak=learned, noise=0.5)
    frozen, x, h = rnn.frozen(), torch.randn(5, 2, 3), None
    expected = rnn.eval()(x)[0]
    torch.testing.assert_close(frozen(x)[0], expected)
    for x_t, of_step in zip(x, expected, strict=True):
        output, h = frozen.step(x_t, h)
        torch.testing.assert_close(output, of_step)


def test_noise_is_added_to_the_input_term_in_training() -> None:
    rnn = nn.FactorizedRNN(3, 8, noise=0.5, leak=0.2)
    quiet = nn.FactorizedRNN(8, 8, leak=0.2, bias=False)
    quiet.load_state_dict({**rnn.state_dict(), "weight_ih_l0": torch.eye(8)}, strict=False)
    x = torch.randn(6, 2, 3)
    torch.manual_seed(5)
    states = rnn(x)[0]
    torch.manual_seed(5)
    term = x @ rnn.weight_ih_l0.mT + rnn.bias_l0
    torch.testing.assert_close(states, quiet(term + 0.5 * torch.randn(6, 2, 8))[0])
    rnn.noise_generator = torch.Generator().manual_seed(5)
    globally, copied = torch.get_rng_state(), copy.deepcopy(rnn)
    torch.testing.assert_close(rnn(x)[0], states)
    assert torch.equal(copied(x)[0], states) and torch.equal(torch.get_rng_state(), globally)
    assert torch.equal(rnn.eval()(x)[0], rnn(x)[0])


def test_the_loss_has_the_leak_and_the_noise() -> None:
    rnn, readout = nn.FactorizedRNN(5, 8, nonlinearity="identity", leak=0.4, noise=0.1), torch.nn.Linear(8, 3)
    tokens, target = torch.randint(0, 5, (9, 4)), torch.randint(0, 3, (9, 4))
    torch.manual_seed(1)
    loss, _ = rnn.loss(tokens, readout, target)
    torch.manual_seed(1)
    expected = torch.nn.functional.cross_entropy(readout(rnn(tokens)[0]).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    assert "leak" in rnn.explain_loss(1000, 4, 3)[1]
