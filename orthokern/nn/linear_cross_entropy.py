"""A linear readout whose cross-entropy never stores the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern._autocast import widened_inside
from orthokern.errors import InputError, integer, one_of, require
from orthokern.nn._checks import check_backend, compute_weights, draw, flag, new_parameter
from orthokern.ops.linear_cross_entropy import REDUCTIONS


class LinearCrossEntropy(nn.Module):
    """torch.nn.Linear(hidden, classes) and torch.nn.functional.cross_entropy in one: y = hidden W^T + b, loss = -log
    softmax(y)[target].

    `loss` processes chunks of rows and computes the gradients in the same pass, so that the logits of a long sequence
    are not stored. There is no ignore_index. Leave out rows of padding by `rnn.loss(..., lengths=lengths)` or
    `readout.loss(hidden[mask], target[mask])`.

    Args:
        hidden: N, size of the last dimension of the input.
        classes: C.
        bias: learn b [C].
        device, dtype: of the parameters.
        reduction: "mean" over all rows, or "sum".
        backend: None or "auto", "reference", "cpu", "triton", "cuda".

    Parameters: weight [C,N] and bias [C], both U(-1/sqrt(N), 1/sqrt(N)) initially. Their names, and for the same seed
    their initial values, are those of torch.nn.Linear. Raises InputError for sizes below 1 and unknown names.

    Example::

        >>> readout = LinearCrossEntropy(8, 5)
        >>> readout.loss(torch.randn(100, 4, 8), torch.zeros(100, 4, dtype=torch.int64)).shape
        torch.Size([])
    """

    def __init__(
        self,
        hidden: int,
        classes: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.hidden = integer("hidden", hidden)
        self.classes = integer("classes", classes)
        self.reduction = one_of("reduction", reduction, REDUCTIONS)
        self.backend = check_backend("backend", backend)
        self.weight = new_parameter("weight", (self.classes, self.hidden), device, dtype)
        self.bias = new_parameter("bias", (self.classes,), device, dtype) if flag("bias", bias) else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weight and bias from U(-1/sqrt(N), 1/sqrt(N)), as torch.nn.Linear does; `generator` as in
        RNN.reset_parameters."""
        bound = 1.0 / math.sqrt(self.hidden)
        # a = sqrt(5): the bound, with Linear's rounding
        draw(nn.init.kaiming_uniform_, self.weight, math.sqrt(5), generator=generator)
        if self.bias is not None:
            draw(nn.init.uniform_, self.bias, -bound, bound, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., N] -> logits [..., C], in plain torch (for predictions; for training use `loss`)."""
        require(isinstance(hidden, Tensor), "hidden", "a Tensor", type(hidden).__name__)
        if hidden.dim() < 1 or hidden.shape[-1] != self.hidden:
            raise InputError(f"hidden has shape {tuple(hidden.shape)}; accepted: [..., {self.hidden}]")
        return nn.functional.linear(hidden, self.weight, self.bias)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """hidden [..., N] float, target [...] int64 in [0, C) -> the loss, a 0-dim tensor in nats. Raises InputError
        for shapes that do not match. Under autocast, a 16-bit hidden is converted to the dtype of the weight."""
        compute_weights(self)
        return functional.linear_cross_entropy(
            widened_inside(hidden, self.weight),
            self.weight,
            target,
            linear_bias=self.bias,
            reduction=self.reduction,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.classes}" + ("" if self.bias is not None else ", bias=False")
