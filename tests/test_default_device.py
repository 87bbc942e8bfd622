"""With another default device, as torch.set_default_device("cuda") sets it, modules on the CPU compute the same.

The default device here is "meta", whose tensors have no values, so that the tests need no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from orthokern import cpu
from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN, PeepholeLSTM
from orthokern.optim import optimizer_for

KINDS: dict[str, Any] = {
    "RNN": RNN,
    "FactorizedRNN": FactorizedRNN,
    "ExpRNN": ExpRNN,
    "NonNormalRNN": NonNormalRNN,
    "GRU": GRU,
    "PeepholeLSTM": PeepholeLSTM,
}
BACKENDS = ["reference", *(["cpu"] if cpu.AVAILABLE else [])]


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def data_of(value: Any) -> Tensor:
    found: Tensor = value.data if isinstance(value, PackedSequence) else value
    return found


def calls() -> dict[str, list[Any]]:
    """Inputs that are made on the CPU. The first is given often enough for what is prepared for repeated calls."""
    torch.manual_seed(1)
    rows = [torch.randn(n, 3, device="cpu") for n in (2, 30, 7)]
    return {
        "few rows": [torch.randn(2, 3, 3, device="cpu")] * 4,
        "many rows": [torch.randn(30, 4, 3, device="cpu")],
        "ids": [torch.randint(3, (30, 4), device="cpu"), torch.randint(3, (2, 2), device="cpu")],
        "packed": [pack_sequence(rows, enforce_sorted=False)],
        "no sequences": [torch.randn(5, 0, 3, device="cpu")],
    }


def results(kind: str, options: dict[str, Any], inputs: list[Any]) -> list[Tensor]:
    """Outputs, gradients and parameters after a training step for each input."""
    torch.manual_seed(0)
    module = KINDS[kind](3, 8, device="cpu", **options)
    options = {"geodesic_options": {"correct_every": 1}, "euclidean": torch.optim.SGD}
    optimizer = optimizer_for(module, lr=1e-3, geodesic_lr=1e-3, **options)
    found = []
    for x in inputs:
        with torch.no_grad():
            found.append(data_of(module(x)[0]))
        optimizer.zero_grad()
        output = data_of(module(x)[0])
        output.square().sum().backward()
        optimizer.step()
        found += [output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    optimizer.load_state_dict(optimizer.state_dict())
    module.load_state_dict(module.state_dict())
    module.reset_parameters()
    if hasattr(module, "orthogonality_error"):
        assert module.orthogonality_error() < 1e-5
    return [*found, *(p.detach() for p in module.parameters())]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("call", [name for name in calls() if name != "no sequences"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_steps(kind: str, call: str, options: dict[str, Any]) -> None:
    inputs = calls()[call]
    expected = results(kind, options, inputs)
    with elsewhere():
        found = results(kind, options, inputs)
    # not to the bit: torch sets a default device by a mode, under which few rows take the general path
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "PeepholeLSTM"])
def test_frozen_modules_and_empty_batches(kind: str) -> None:
    x, (nothing,) = torch.randn(4, 2, 3, device="cpu"), calls()["no sequences"]
    with elsewhere():
        module = KINDS[kind](3, 8, device="cpu")
        frozen = module.frozen()
        for _ in range(4):
            assert frozen.step(x[0])[0].device.type == "cpu"
        assert frozen(x)[0].device.type == module(nothing)[0].device.type == "cpu"


def losses(kind: str, backend: str, activation: str, algorithm: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = KINDS[kind](3, 8, device="cpu", nonlinearity=activation, backend=backend)
    readout = LinearCrossEntropy(8, 5, device="cpu", backend=backend)
    x, target = torch.randn(300, 4, 3, device="cpu"), torch.randint(5, (300, 4), device="cpu")
    lengths = torch.tensor([300, 300, 200, 100], device="cpu")
    found = []
    for input, steps in ((x, None), (x, lengths), (target % 3, lengths)):
        loss, hits = module.loss(input, readout, target, lengths=steps, algorithm=algorithm)
        loss.backward()
        found += [loss.detach(), hits]
    return [*found, *(p.grad for p in (*module.parameters(), *readout.parameters()) if p.grad is not None)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "activation", "algorithm"),
    [
        ("RNN", "tanh", "auto"),
        ("FactorizedRNN", "identity", "modal"),
        ("ExpRNN", "identity", "sequential"),
        ("NonNormalRNN", "identity", "auto"),
    ],
)
def test_losses(kind: str, activation: str, algorithm: str, backend: str) -> None:
    expected = losses(kind, backend, activation, algorithm)
    with elsewhere():
        found = losses(kind, backend, activation, algorithm)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
