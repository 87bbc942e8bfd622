"""A small recurrent module of every kind: `KINDS`, which can be frozen, and `EVERY`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from orthokern.nn import GRU, RNN, ExpRNN, FactorizedRNN, NonNormalRNN, PeepholeLSTM, RotationRNN

D, N = 3, 6
KINDS: dict[str, Callable[..., nn.Module]] = {
    "rnn": RNN,
    "factorized": FactorizedRNN,
    "composed": lambda *args, **options: FactorizedRNN(*args, apply="composed", **options),
    "low rank": lambda *args, **options: FactorizedRNN(*args, rank=2, **options),
    "exponential": ExpRNN,
    "non-normal": NonNormalRNN,
    "gru": lambda *args, **options: GRU(*args, bias=True, **options),
    "rotation": RotationRNN,
}
EVERY = {**KINDS, "peephole": PeepholeLSTM}


def made(kind: str, **options: Any) -> nn.Module:
    """D inputs, N units; every parameter differs from its initial value."""
    torch.manual_seed(0)
    module = EVERY[kind](D, N, **options)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module
