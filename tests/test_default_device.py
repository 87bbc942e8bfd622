"""With another default device, as torch.set_default_device("cuda") sets it, modules on the CPU compute the same.

The default device here is "meta", whose tensors have no values, so that the tests need no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_kinds import EVERY, KINDS, D, N
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from orthokern.optim import optimizer_for


def inputs() -> list[Any]:
    """On the CPU: features, token ids, a packed batch, no sequences."""
    torch.manual_seed(1)
    rows = [torch.randn(n, D, device="cpu") for n in (2, 30, 7)]
    dense = [torch.randn(steps, batch, D, device="cpu") for steps, batch in ((2, 3), (30, 4), (5, 0))]
    return [*dense, torch.randint(D, (30, 4), device="cpu"), pack_sequence(rows, enforce_sorted=False)]


def results(kind: str, options: dict[str, Any], data: list[Any]) -> list[Tensor]:
    """Outputs, gradients and parameters after a training step for each input."""
    torch.manual_seed(0)
    module = EVERY[kind](D, N, device="cpu", **options)
    settings: dict[str, Any] = {"geodesic_options": {"correct_every": 1}, "euclidean": torch.optim.SGD}
    optimizer = optimizer_for(module, lr=1e-3, geodesic_lr=1e-3, **settings)
    tensors = []
    for x in data:
        optimizer.zero_grad()
        output = module(x)[0]
        output = output.data if isinstance(output, PackedSequence) else output
        output.square().sum().backward()
        optimizer.step()
        tensors += [output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    optimizer.load_state_dict(optimizer.state_dict())
    module.load_state_dict(module.state_dict())
    module.reset_parameters()
    if hasattr(module, "orthogonality_error"):
        assert module.orthogonality_error() < 1e-5
    if kind in KINDS and not options:
        assert module.frozen().step(data[0][0])[0].device.type == "cpu"
    return [*tensors, *(p.detach() for p in module.parameters())]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", EVERY)
def test_training_steps(kind: str, options: dict[str, Any]) -> None:
    data = inputs()
    expected = results(kind, options, data)
    with torch.device("meta"):
        actual = results(kind, options, data)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
