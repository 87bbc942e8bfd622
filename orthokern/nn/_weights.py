"""The base class of the modules with the parameters of torch.nn.RNN and torch.nn.GRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern.nn._recurrent import Recurrent


class TorchRecurrent(Recurrent):
    """Parameters weight_ih and weight_hh and, with bias, bias_ih and bias_hh, per recurrence."""

    def _weight_names(self, suffix: str) -> list[str]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [f"{name}_{suffix}" for name in names[: 4 if self.bias else 2]]

    def _register_weights(self, rows: int, device: Any, dtype: torch.dtype) -> None:
        """Registers all parameters; those of torch have this number of rows."""
        for suffix in self._suffixes():
            shapes = ((rows, self._inputs(suffix)), (rows, self.hidden_size), (rows,), (rows,))
            for name, shape in zip(self._weight_names(suffix), shapes, strict=False):
                self._register(name, shape, device, dtype)
            self._register_common(suffix, device, dtype)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters that torch's module also has, one list per recurrence, as in torch."""
        return [[self._tensor(name) for name in self._weight_names(suffix)] for suffix in self._suffixes()]
