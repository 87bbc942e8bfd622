"""A margin that torch.func can stack: of several models, each keeps its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ModelMargin(nn.Module):
    """Keeps the attribute `margin` in a buffer too, NaN for None: torch.func stacks the buffers of several models, but
    not their attributes."""

    margin: float | None

    def _register_margin(self, like: Tensor) -> None:
        """like: a parameter of the module."""
        value = torch.nan if self.margin is None else self.margin
        self.register_buffer("margin_of_model", like.detach().new_full((), value), persistent=False)

    def _stacked_margin(self) -> Tensor | None:
        """The buffer under a transform of torch.func, which may have another value for each model; else None."""
        return self._buffers.get("margin_of_model") if torch._C._are_functorch_transforms_active() else None

    def _apply(self, *args: Any, **options: Any) -> ModelMargin:
        super()._apply(*args, **options)
        margin = self._buffers.get("margin_of_model")
        if margin is not None:  # a change of the dtype rounds it, and `to_empty` leaves it without a value
            margin.fill_(torch.nan if self.margin is None else self.margin)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._register_margin(next(self.parameters()))  # still on the meta device after a load with assign=True
