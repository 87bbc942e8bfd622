"""A moving average of the parameters, which evaluations and the best checkpoint use instead of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from orthokern.nn import FactorizedRNN

__all__ = ["Average"]


class Average:
    """The exponential moving average of the parameters of a model (Polyak and Juditsky 1992), starting from their
    current values.

    Update k = 0, 1, ... computes average = d average + (1 - d) parameters with d = min(decay, (1 + k) / (10 + k)), so
    that the average spans at most about a ninth of the iterations so far.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        """Called after an optimizer step."""
        share = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in self.model.parameters()], 1.0 - share)
        self.updates += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model with the averages in place of its parameters. The averages of the bases of a FactorizedRNN are not
        orthonormal; the nearest orthonormal matrices are used."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        own = [parameter.clone() for parameter in parameters]
        try:
            torch._foreach_copy_(parameters, self.values)
            for module in self.model.modules():
                if isinstance(module, FactorizedRNN):
                    module.orthonormalize()
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        torch._foreach_copy_(self.values, state["values"])
