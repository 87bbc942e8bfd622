"""Activations of orthogonal recurrent networks as modules.

Inside a recurrence use its `nonlinearity` instead, which the scan computes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern._activations import ACTIVATIONS, Parameter
from orthokern._autocast import widened_inside
from orthokern.errors import InputError, integer, require
from orthokern.nn._checks import check_backend, draw, new_parameter


def draw_start(tensor: Tensor, parameter: Parameter, generator: torch.Generator | None = None) -> None:
    """Fill the tensor of a learned parameter with its initial values."""
    if isinstance(parameter.start, tuple):
        draw(nn.init.uniform_, tensor, *parameter.start, generator=generator)
    else:
        nn.init.constant_(tensor, parameter.start)


class ModReLU(nn.Module):
    """modReLU for real numbers: sign(x) * relu(|x| + b) with a learned bias b (Arjovsky, Shah and Bengio 2016;
    Lezcano-Casado and Martinez-Rubio 2019).

    sign(0) is 0, so 0 maps to 0. For b > 0 the function jumps at 0, for b < 0 it is 0 on [b, -b].

    Args:
        features: N, size of the last dimension of the input; the bias is [N]. None for one bias [1] for all units.
        device, dtype: of the bias.
        backend: None or "auto", "reference", "cpu", "triton", "cuda".

    Shapes: x [..., N] to y [..., N]. Parameter: bias [N] or [1], initially U(-0.01, 0.01). Raises InputError for
    features below 1 and for an x whose last dimension is not N.

    Example::

        >>> ModReLU(8)(torch.randn(100, 8)).shape
        torch.Size([100, 8])
    """

    def __init__(
        self,
        features: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.features = None if features is None else integer("features", features)
        self.backend = check_backend("backend", backend)
        self.bias = new_parameter("bias", (self.features or 1,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the bias from U(-0.01, 0.01); `generator` as in RNN.reset_parameters."""
        learned = ACTIVATIONS["modrelu"].learned
        assert learned is not None
        draw_start(self.bias, learned, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N] float, of the bias's dtype -> [..., N]. Under autocast, a 16-bit x is converted to that dtype."""
        require(isinstance(x, Tensor), "x", "a Tensor", type(x).__name__)
        if self.features is not None and (x.dim() < 1 or x.shape[-1] != self.features):
            raise InputError(f"x has shape {tuple(x.shape)}; accepted: [..., {self.features}] (features)")
        return functional.modrelu(widened_inside(x, self.bias), self.bias, backend=self.backend)

    def extra_repr(self) -> str:
        return "" if self.features is None else str(self.features)


class OPLU(nn.Module):
    """Orthogonal permutation linear unit: adjacent pairs (x_2i, x_2i+1) -> (max, min) (Chernodub and Nowicki 2016).

    It is a permutation of the units that depends on the input, so it preserves norms, forward and backward; equal
    entries are not swapped. Input and output are [..., N] with an even N. Raises InputError for an odd N.

    Example::

        >>> OPLU()(torch.tensor([1.0, 2.0]))
        tensor([2., 1.])
    """

    def __init__(self, *, backend: str | None = None) -> None:
        super().__init__()
        self.backend = check_backend("backend", backend)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N] float, N even -> [..., N]."""
        return functional.oplu(x, backend=self.backend)
