"""Modules on a device: the compiler, autocast, graphs, and a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_bits

from orthokern import nn, optim

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def test_a_compiled_module() -> None:
    """Forward and backward through the compiler, whose contractions round other singular values."""
    module = nn.FactorizedRNN(9, 33).cuda()
    with torch.no_grad():
        module.spectrum_l0.normal_()
    ids, cotangent = torch.randint(0, 9, (20, 5), device="cuda"), torch.randn(20, 5, 33, device="cuda")
    parameters = list(module.parameters())
    expected = module(ids)[0]
    grads = torch.autograd.grad(expected, parameters, cotangent)
    actual = torch.compile(module, fullgraph=True)(ids)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(torch.autograd.grad(actual, parameters, cotangent), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit_of_what_modules_give(dtype: torch.dtype) -> None:
    x, cotangent = torch.randn(6, 5, 7, device="cuda"), torch.randn(6, 5, 32, device="cuda")
    for module in (nn.FactorizedRNN(7, 32), nn.RNN(7, 32), nn.GRU(7, 32), nn.LSTM(7, 32), nn.ExpRNN(7, 32)):
        module = module.cuda()
        parameters = [p for p in module.parameters() if p.requires_grad]
        results = []
        for enabled in (False, True):
            with torch.autocast("cuda", dtype, enabled=enabled):
                out = module(x)[0]
                grads = torch.autograd.grad(out, parameters, cotangent.to(out), allow_unused=True)
            results.append([out, *grads])
        assert torch.equal(results[0][0], results[1][0]), type(module)
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None), type(module)
            if one is not None:  # torch's own products around the scan are in 16 bits in a backward inside autocast
                assert one.dtype == other.dtype == torch.float32
                assert (one - other).norm() <= 2e-2 * one.norm(), type(module)


@pytest.mark.parametrize("kind", [nn.FactorizedRNN, nn.RNN, nn.GRU, nn.LSTM])
def test_lengths_of_a_padded_batch(kind: Any) -> None:
    module, x, lengths = kind(7, 32, 2, bidirectional=True), torch.randn(20, 3, 7), torch.tensor([20, 1, 9])
    expected = module(x, lengths=lengths)[0]
    states = module.cuda()(x.cuda(), lengths=lengths.cuda())[0]
    torch.testing.assert_close(states.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert not states[9:, 2].any()


@pytest.mark.parametrize("kind", [nn.FactorizedRNN, nn.RNN, nn.GRU, nn.LSTM])
def test_graphed_module(kind: Any) -> None:
    """Outputs and gradients of ``make_graphed_callables`` are the eager ones, also after steps of an optimizer."""
    eager, graphed = kind(7, 128).cuda(), kind(7, 128).cuda()
    graphed.load_state_dict(eager.state_dict())
    shape = (28, 5, 7)
    graphed = torch.cuda.make_graphed_callables(graphed, (torch.randn(shape, device="cuda", requires_grad=True),))
    optimizers = [optim.optimizer_for(module, lr=1e-2, geodesic_lr=1e-3) for module in (eager, graphed)]
    for _ in range(3):
        x, results = torch.randn(shape, device="cuda"), []
        for module, optimizer in zip((eager, graphed), optimizers, strict=True):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            output, last = module(inputs)
            (output.square().sum() + sum(part.sum() for part in last)).backward()
            grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            results.append({"output": output.detach().clone(), "x": inputs.grad, **grads})
        assert set(results[0]) == set(results[1])
        assert_same_bits(*results)
        for optimizer in optimizers:
            optimizer.step()
