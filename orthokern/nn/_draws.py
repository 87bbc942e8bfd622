"""Random initial values of parameters, with torch's global generators or with a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern.errors import cpu_generator


def draw(fill: Callable[..., Any], tensor: Tensor, *args: float, generator: torch.Generator | None) -> None:
    """fill(tensor, *args, generator=generator), where fill is a function of torch.nn.init.

    None draws with the global generator of the tensor's device. Numbers of a given generator are drawn on the CPU and
    copied to the tensor, so that a seed gives the same values on every device. Tensors on the meta device then do not
    change, and nothing is drawn.

    Raises:
        InputError: for a generator that is not on the CPU, or an object that is no generator.
    """
    if generator is None:
        fill(tensor, *args, generator=None)
        return
    cpu_generator(generator)
    if tensor.is_meta:
        return
    drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill(drawn, *args, generator=generator)
    with torch.no_grad():
        tensor.copy_(drawn)
