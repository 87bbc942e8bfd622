"""Modules for inference: everything that depends on parameters only is computed once; `step` computes single steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthokern import _autocast, dispatch
from orthokern._activations import ACTIVATIONS
from orthokern.cpu._scan import prepared_step
from orthokern.cpu.gru_scan import prepared_step as prepared_gru_step
from orthokern.errors import InputError
from orthokern.nn._recurrent import Recurrent
from orthokern.nn.gru import GRU
from orthokern.ops import _taps
from orthokern.ops._dispatcher import no_dispatch_modes

__all__ = ["FrozenGRU", "FrozenRNN", "frozen"]


# of one layer in one step, see ``_Frozen._prepared``
Call = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


class _Frozen(Recurrent):
    """The common base class: buffers instead of parameters, no gradients, and `step`."""

    # by batch size, dtype and addresses of the buffers; a change of a buffer's values needs no new call
    _calls: dict[tuple[Any, ...], list[Call]]

    def forward(self, input: Any, hx: Tensor | None = None, **options: Any) -> Any:
        """As the forward of the module that this one was made from, without gradients."""
        if torch.compiler.is_compiling():  # no_grad would add regions of another grad mode to the program
            return super().forward(_detached(input), _detached(hx), **options)
        with torch.no_grad():
            return super().forward(input, hx, **options)

    def step(
        self, x: Tensor, h: Tensor | None = None, *, resets: Tensor | None = None, reset_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One time step, for streams::

            h = None
            for x in stream:
                output, h = frozen.step(x, h)

        Args:
            x: float [B, D], float [D] for one sequence without a batch, or token ids, int64 or int32, [B] or [].
            h: [num_layers, B, N] states before the step, without B for one sequence; None: the learned initial states
                if there are any, else zeros.
            resets: bool [B], or [] for one sequence: sequences that start the step from `reset_state` instead of h.
            reset_state: of the shape of h; None: the learned initial states if there are any, else zeros.

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
        batched = x.dim() == most
        if resets is not None and reset_state is None:
            reset_state = self._first_state(x.shape[0]) if batched else self._first_state(1).squeeze(1)
        if batched and (result := self._prepared_step(x, h, resets, reset_state)) is not None:
            return result
        time = 1 if self.batch_first and batched else 0
        more = {} if resets is None else {"resets": resets.unsqueeze(time), "reset_state": reset_state}
        output, h = self.forward(x.unsqueeze(time), h, **more)
        return output.squeeze(time), h

    def _first_state(self, B: int) -> Tensor:
        """The initial states [num_layers, B, N]."""
        if self.learned_h0:
            states = [self._tensor(f"h0_{suffix}").expand(B, self.hidden_size) for suffix in self._suffixes()]
            return torch.stack(states)
        return self._tensor("weight_ih_l0").new_zeros(self.num_layers, B, self.hidden_size)

    def _prepared_step(
        self, x: Tensor, h: Tensor | None, resets: Tensor | None, reset_state: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """`step` by kernel calls that are prepared at the first call of a batch size. None if a tensor is not a plain
        float tensor of the right shape on the CPU, or torch observes the call: then `forward` runs."""
        weight = self._buffers["weight_ih_l0"]
        if weight is None or _taps.SINKS or not no_dispatch_modes():
            return None
        B, N, layers, dtype = x.shape[0], self.hidden_size, self.num_layers, weight.dtype
        key = (B, dtype, *(0 if tensor is None else tensor.data_ptr() for tensor in self._buffers.values()))
        calls = self._calls.get(key)
        if calls is None and (calls := self._prepare(x, key)) is None:
            return None
        if h is None:
            h = self._first_state(B)
        states, flags = (h,) if reset_state is None else (h, reset_state), (B,)
        for tensor, shape in ((x, (B, self.input_size)), *((state, (layers, B, N)) for state in states)):
            if type(tensor) is not Tensor or tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
                return None
        if resets is not None and (type(resets) is not Tensor or resets.shape != flags or not resets.is_cpu):
            return None
        if resets is not None and resets.dtype is not torch.bool:
            return None
        output = torch.empty(layers, B, N, dtype=dtype, device="cpu")
        for index, call in enumerate(calls):
            x = call(x, h[index], output[index], resets, None if reset_state is None else reset_state[index])
        return x.clone(), output

    def _prepare(self, x: Tensor, key: tuple[Any, ...]) -> list[Call] | None:
        """The prepared calls of all layers for the batch size of x, if the cpu backend serves them."""
        weight = self._tensor("weight_ih_l0")
        op, sizes = self._op()
        if not x.is_floating_point() or not weight.is_cpu or weight.dtype not in (torch.float32, torch.float64):
            return None
        if dispatch.cpu_leaf(op, self.backend, weight.dtype, **sizes) is None:
            return None
        if len(self._calls) >= 16:
            self._calls.clear()
        self._calls[key] = [self._prepared(suffix, x.shape[0]) for suffix in self._suffixes()]
        return self._calls[key]

    def _prepared(self, suffix: str, B: int) -> Call:
        """A call (x [B, D], h [B, N], result [B, N], resets [B] or None, reset_state [B, N] or None) -> result."""
        weight = self._tensor(f"weight_ih_{suffix}")
        x, h = weight.new_zeros(1, B, weight.shape[1]), weight.new_zeros(B, self.hidden_size)
        run = prepared_step(self._args(suffix, self._factors(suffix), None, x, h, None))

        def call(x: Tensor, h: Tensor, result: Tensor, resets: Tensor | None, state: Tensor | None) -> Tensor:
            run({"x": x, "h0": h, "hs": result, "resets": resets, "reset_state": state})
            return result

        return call

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_calls": {}}

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
            source.input_size,
            source.hidden_size,
            source.num_layers,
            source.nonlinearity,
            source.bias,
            source.batch_first,
            0.0,
            source.bidirectional,
            negative_slope=source.negative_slope,
            learned_h0=source.learned_h0,
            backend=source.backend,
            precision=source.precision,
        )
        self._half_ok = source._half_ok
        self._calls = {}
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
        self._calls = {}
        for name in self._shapes:
            self.register_buffer(name, source._tensor(name).detach().clone(memory_format=torch.contiguous_format))
        self.eval()

    def _prepared(self, suffix: str, B: int) -> Call:
        N, weight = self.hidden_size, self._tensor(f"weight_ih_{suffix}")
        x, h, dtype = weight.new_zeros(1, B, weight.shape[1]), weight.new_zeros(B, N), weight.dtype
        run = prepared_gru_step(self._args(suffix, self._factors(suffix), None, x, h, None))
        kanai = self.variant == "kanai"

        def call(x: Tensor, h: Tensor, result: Tensor, resets: Tensor | None, state: Tensor | None) -> Tensor:
            gates = torch.empty(B, 3 * N, dtype=dtype, device="cpu")
            pre = None if kanai else torch.empty(B, N, dtype=dtype, device="cpu")
            tensors = {"x": self._input_term(x, suffix), "h0": h, "hs": result, "gates": gates, "pre": pre}
            run({**tensors, "resets": resets, "reset_state": state})
            return result

        return call


@torch.no_grad()
def frozen(source: Recurrent) -> Recurrent:
    """The inference module of a recurrence, on its device; see ``Recurrent.frozen``."""
    with _autocast.off():
        return FrozenGRU(source) if isinstance(source, GRU) else FrozenRNN(source)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
