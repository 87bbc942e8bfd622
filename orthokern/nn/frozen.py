"""Modules for inference: everything that depends on parameters only is computed once; `step` computes single steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from orthokern import _autocast
from orthokern._activations import ACTIVATIONS
from orthokern.errors import InputError
from orthokern.nn._recurrent import Recurrent
from orthokern.nn.gru import GRU

__all__ = ["FrozenGRU", "FrozenRNN", "frozen"]


class _Frozen(Recurrent):
    """The common base class: buffers instead of parameters, no gradients, and `step`."""

    def forward(self, input: Any, hx: Tensor | None = None, **options: Any) -> Any:
        """As the forward of the module that this one was made from, without gradients."""
        if torch.compiler.is_compiling():  # no_grad would add regions of another grad mode to the program
            return super().forward(_detached(input), _detached(hx), **options)
        with torch.no_grad():
            return super().forward(input, hx, **options)

    def step(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One time step, for streams::

            h = None
            for x in stream:
                output, h = frozen.step(x, h)

        Args:
            x: float [B, D], float [D] for one sequence without a batch, or token ids, int64 or int32, [B] or [].
            h: [num_layers, B, N] states before the step, without B for one sequence; None: the learned initial states
                if there are any, else zeros.

        Returns:
            (output, h): output [B, N], the state of the last layer, and h [num_layers, B, N], those of all layers; both
            without B for one sequence.

        Raises:
            InputError: as forward; or the module is bidirectional, and needs the whole sequence.
        """
        if self.bidirectional:
            raise InputError("step is for one direction; accepted for a bidirectional module: forward")
        if not isinstance(x, Tensor):
            raise InputError(f"x must be a Tensor, got {type(x).__name__}")
        most = 2 if x.is_floating_point() else 1
        if x.dim() not in (most - 1, most):
            accepted = "[B, D], or [D] for one sequence" if most == 2 else "token ids [B], or [] for one sequence"
            raise InputError(f"x has shape {tuple(x.shape)}; accepted: {accepted}")
        time = 1 if self.batch_first and x.dim() == most else 0
        output, h = self.forward(x.unsqueeze(time), h)
        return output.squeeze(time), h

    def frozen(self) -> Recurrent:
        """The module itself."""
        return self

    def parameter_roles(self) -> dict[str, str]:
        """Empty: there are no parameters."""
        return {}

    def extra_repr(self) -> str:
        return self._repr_common()


class FrozenRNN(_Frozen):
    """The result of ``frozen()`` of RNN, FactorizedRNN, ExpRNN and NonNormalRNN: a recurrence with fixed matrices.

        h_t = phi(W h_{t-1} + W_ih x_t + b)

    Gains are part of W, W_ih and b, and b is the sum of all biases. The interface is that of the module it was made
    from: layouts, layers, directions, packed input, initial states. There are no parameters and no gradients.

    Buffers, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N], and either weight_hh_l0 [N,N], or
    u_l0 [N,K], s_l0 [K] and v_l0 [N,K] for W = U diag(s) V^T of a rank K of at most N / 2, where the factors take fewer
    operations than W; and the activation's parameter and h0_l0 [N] if the module has them. They form the state_dict.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> rnn = FactorizedRNN(3, 8).frozen()
        >>> output, h = rnn.step(torch.randn(1, 3))
        >>> output, h = rnn.step(torch.randn(1, 3), h)
    """

    def __init__(self, source: Recurrent) -> None:
        super().__init__(
            source.input_size, source.hidden_size, source.num_layers, source.nonlinearity, source.bias,
            source.batch_first, 0.0, source.bidirectional, negative_slope=source.negative_slope,
            learned_h0=source.learned_h0, backend=source.backend, precision=source.precision,
        )  # fmt: skip
        self._half_ok = source._half_ok
        self.rank: int | None = None  # of the factors; None for a dense W
        learned = ACTIVATIONS[self.nonlinearity].learned
        for suffix in self._suffixes():
            matrix, bias = source._factors(suffix)
            if len(matrix) == 3 and 2 * matrix[0].shape[1] > self.hidden_size:
                u, s, v = matrix
                matrix = ((u * s) @ v.mT,)
            if len(matrix) == 3:
                self.rank = matrix[0].shape[1]
            names = ("weight_hh",) if len(matrix) == 1 else ("u", "s", "v")
            for name, value in zip(names, matrix, strict=True):
                self._keep(f"{name}_{suffix}", value)
            self._keep(f"weight_ih_{suffix}", source._gained(source._tensor(f"weight_ih_{suffix}")))
            if bias is not None:
                self._keep(f"bias_{suffix}", bias)
            if learned is not None:
                self._keep(f"{learned.stem}_{suffix}", source._tensor(f"{learned.stem}_{suffix}"))
            if self.learned_h0:
                self._keep(f"h0_{suffix}", source._tensor(f"h0_{suffix}"))
        self.eval()

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
        self._shapes[name] = tuple(value.shape)

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W [N,N] of one recurrence, with the gain."""
        matrix = self._matrix(self._suffix(layer, reverse))
        return matrix[0] if len(matrix) == 1 else (matrix[0] * matrix[1]) @ matrix[2].mT

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        if self.rank is None:
            return (self._tensor(f"weight_hh_{suffix}"),)
        return self._tensor(f"u_{suffix}"), self._tensor(f"s_{suffix}"), self._tensor(f"v_{suffix}")

    def _op(self) -> tuple[str, dict[str, Any]]:
        if self.rank is None:
            return "dense_scan", {"N": self.hidden_size}
        return "factored_scan", {"N": self.hidden_size, "K": self.rank}


class FrozenGRU(_Frozen, GRU):
    """The result of ``GRU.frozen()``: the GRU with buffers of the same names instead of parameters, without gradients,
    and with ``step``."""

    def __init__(self, source: GRU) -> None:
        torch.nn.Module.__init__(self)
        for name, value in vars(source).items():
            # the settings, but no attributes of nn.Module, and no weights that are attributes, as after pruning
            if name not in vars(self) and name not in source._shapes:
                setattr(self, name, copy.copy(value))
        self.dropout = 0.0
        for name in self._shapes:
            self.register_buffer(name, source._tensor(name).detach().clone(memory_format=torch.contiguous_format))
        self.eval()


@torch.no_grad()
def frozen(source: Recurrent) -> Recurrent:
    """The inference module of a recurrence, on its device; see ``Recurrent.frozen``."""
    with _autocast.off():
        return FrozenGRU(source) if isinstance(source, GRU) else FrozenRNN(source)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
