"""A margin that torch.func can stack: of several models, each keeps its own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class ModelMargin(nn.Module):
    """Keeps the attribute `margin` in a buffer too, NaN for None: torch.func stacks the buffers of several models, but
    not their attributes."""

    margin: float | None
    _bounded: ClassVar[tuple[str, str]]  # the parameter that the margin bounds, and what it bounds

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "margin":
            value = None if value is None else float(value)
        super().__setattr__(name, value)
        if name == "margin" and (buffer := vars(self).get("_buffers", {}).get("margin_of_model")) is not None:
            buffer.fill_(torch.nan if value is None else value)

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

    def _meaning(self) -> str:
        """How singular values, or radii, follow from their parameter."""
        return f"margin={self.margin}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Records the meaning of the parameter in the metadata of the state_dict, where torch has the version."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if isinstance(metadata, dict):
            metadata["spectrum"] = self._meaning()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        local_metadata, *_, errors = args
        saved = local_metadata.get("spectrum")
        if saved is not None and saved != self._meaning():
            name, values = self._bounded
            errors.append(
                f"{prefix}{name}_l0 belongs to {saved}, and would give other {values} with {self._meaning()}; "
                "accepted: a module of the same margin and map, or dict(state_dict) to load the numbers as they are"
            )
        if "margin_of_model" in self._buffers:  # still on the meta device after a load with assign=True
            self._register_margin(next(self.parameters()))
