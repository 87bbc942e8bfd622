"""Golden values of every module of ``orthokern.nn``, and the public names of the package.

tests/data/golden.json holds the sum, the norm and one projection of the parameters, outputs and gradients of each case,
in float64 and float32. After an intended change, ``python tests/test_golden.py --write`` writes it anew.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from orthokern.nn import (
    GRU,
    OPLU,
    RNN,
    EpisodeRNN,
    ExpRNN,
    FactorizedRNN,
    LinearCrossEntropy,
    ModReLU,
    NonNormalRNN,
    PeepholeLSTM,
)

GOLDEN = Path(__file__).parent / "data" / "golden.json"
PACKAGES = ("orthokern", "orthokern.nn", "orthokern.functional", "orthokern.optim")
SEEDS = (0, 1, 2)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}  # times norm * sqrt(elements), the largest possible sum
T, B, D, N, C = 11, 3, 5, 12, 7

Call = Callable[[nn.Module, Tensor], Any]


def _with_resets(module: nn.Module, x: Tensor) -> Any:
    resets = torch.rand(T, B, generator=torch.Generator().manual_seed(9)) < 0.2
    return module(x, resets=resets)


def _packed(module: nn.Module, x: Tensor) -> Any:
    return module(pack_padded_sequence(x, torch.tensor([4, T, 7]), enforce_sorted=False))


def _tokens(module: nn.Module, x: Tensor) -> Any:
    return module(x.detach().argmax(-1))


def _episodes(module: nn.Module, x: Tensor) -> Any:
    starts = torch.rand(B, T, 1, generator=torch.Generator().manual_seed(9)) < 0.2
    return module(x.transpose(0, 1), None, starts)


def _target(x: Tensor) -> Tensor:
    return torch.arange(T * B).reshape(T, B) * 5 % C


def _loss(module: nn.Module, x: Tensor) -> Any:
    return module.rnn.loss(x, module.readout, _target(x))


def _linear_loss(module: nn.Module, x: Tensor) -> Any:
    return module(x), module.loss(x, _target(x))


def _with_readout(rnn: nn.Module, dtype: torch.dtype) -> nn.Module:
    return nn.ModuleDict({"rnn": rnn, "readout": LinearCrossEntropy(N, C, dtype=dtype)})


# name: the module for a dtype, and its call with a random x [T, B, D]
CASES: dict[str, tuple[Callable[[torch.dtype], nn.Module], Call]] = {
    "RNN": (lambda dtype: RNN(D, N, 2, "relu", init="orthogonal", dtype=dtype), nn.Module.__call__),
    "RNN bidirectional packed": (lambda dtype: RNN(D, N, bidirectional=True, dtype=dtype), _packed),
    "RNN loss": (lambda dtype: _with_readout(RNN(D, N, dtype=dtype), dtype), _loss),
    "FactorizedRNN": (
        lambda dtype: FactorizedRNN(D, N, 2, "modrelu", learned_h0=True, margin=0.2, dtype=dtype),
        nn.Module.__call__,
    ),
    "FactorizedRNN N=128": (lambda dtype: FactorizedRNN(D, 128, dtype=dtype), nn.Module.__call__),
    "FactorizedRNN resets": (lambda dtype: FactorizedRNN(D, N, nonlinearity="oplu", dtype=dtype), _with_resets),
    "FactorizedRNN tokens": (lambda dtype: FactorizedRNN(D, N, rank=5, margin=None, dtype=dtype), _tokens),
    "FactorizedRNN composed": (
        lambda dtype: FactorizedRNN(D, N, apply="composed", nonlinearity="prelu", message_clip=0.5, dtype=dtype),
        nn.Module.__call__,
    ),
    "FactorizedRNN loss": (
        lambda dtype: _with_readout(FactorizedRNN(D, N, nonlinearity="identity", dtype=dtype), dtype),
        _loss,
    ),
    "ExpRNN": (lambda dtype: ExpRNN(D, N, nonlinearity="modrelu", dtype=dtype), nn.Module.__call__),
    "NonNormalRNN": (lambda dtype: NonNormalRNN(D, N, dtype=dtype), nn.Module.__call__),
    "GRU": (lambda dtype: GRU(D, N, variant="kanai", dtype=dtype), _with_resets),
    "GRU torch": (lambda dtype: GRU(D, N, 2, True, bidirectional=True, variant="torch", dtype=dtype), _packed),
    "PeepholeLSTM": (lambda dtype: PeepholeLSTM(D, N, bidirectional=True, dtype=dtype), _packed),
    "EpisodeRNN": (lambda dtype: EpisodeRNN(FactorizedRNN(D, N, batch_first=True, dtype=dtype), True), _episodes),
    "LinearCrossEntropy": (lambda dtype: LinearCrossEntropy(D, C, dtype=dtype), _linear_loss),
    "ModReLU": (lambda dtype: ModReLU(D, dtype=dtype), nn.Module.__call__),
    "OPLU": (lambda dtype: OPLU(), lambda module, x: module(x[..., :4])),
}


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in an output, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for element in value:
            yield from _floats(element)


def _direction(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1, dtype=torch.float64).cos().reshape(tensor.shape)


def _summary(tensor: Tensor) -> list[float]:
    """Sum, norm and projection on cos(1), cos(2), ...; in float64."""
    values = tensor.detach().double()
    return [float(values.sum()), float(values.norm()), float((values * _direction(values)).sum())]


def results(name: str, dtype: str, seed: int) -> dict[str, Tensor]:
    """The parameters of a case, its outputs, and the gradients of a projection of the outputs."""
    make, call = CASES[name]
    torch.manual_seed(seed)
    module = make(DTYPES[dtype])
    with torch.no_grad():
        for p in module.parameters():  # some start at zero
            p += 0.01 * _direction(p).to(p.dtype) if p.ndim == 1 else 0
    x = torch.randn(T, B, D, dtype=DTYPES[dtype]).requires_grad_()
    outputs = list(_floats(call(module, x)))
    sum((output * _direction(output).to(output.dtype)).sum() for output in outputs if output.requires_grad).backward()
    tensors = {key: p for key, p in module.named_parameters()}
    tensors |= {f"output {i}": output for i, output in enumerate(outputs)}
    tensors |= {f"grad {key}": p.grad for key, p in module.named_parameters() if p.grad is not None}
    return tensors | ({"grad x": x.grad} if x.grad is not None else {})


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_modules_have_the_golden_values(name: str, dtype: str) -> None:
    for seed, expected in zip(SEEDS, golden()["values"][name][dtype], strict=True):
        tensors = results(name, dtype, seed)
        assert list(tensors) == list(expected)
        for key, tensor in tensors.items():
            largest = max(expected[key][1], 1e-3) * tensor.numel() ** 0.5
            actual = pytest.approx(_summary(tensor), rel=0, abs=TOLERANCE[dtype] * largest)
            assert expected[key] == actual, f"{key}, seed {seed}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == golden()["names"][package]
    for name in module.__all__:
        getattr(module, name)


def _write() -> None:
    def rounded(values: list[float], digits: int) -> list[float]:
        return [float(f"{value:.{digits}g}") for value in values]

    names = {package: sorted(importlib.import_module(package).__all__) for package in PACKAGES}
    values = {
        name: {
            dtype: [
                {
                    key: rounded(_summary(t), 12 if dtype == "float64" else 8)
                    for key, t in results(name, dtype, s).items()
                }
                for s in SEEDS
            ]
            for dtype in DTYPES
        }
        for name in CASES
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in values.items()]
    text = f'{{"names": {json.dumps(names)},\n "values": {{\n' + ",\n".join(lines) + "}}\n"
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/test_golden.py --write")
    _write()
