"""Modules for inference: everything that depends on parameters only is computed once; `step` computes single steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.cpu._scan import prepared_step
from orthokern.cpu.gru_scan import prepared_step as prepared_gru_step
from orthokern.errors import InputError
from orthokern.nn._base import Layers
from orthokern.nn._recurrent import NOT_FROZEN, OPTIONS, Recurrent
from orthokern.nn.gru import GRU
from orthokern.nn.rotation import RotationRNN
from orthokern.ops import _taps
from orthokern.ops._dispatcher import no_dispatch_modes
from orthokern.ops._linear import linear
from orthokern.reference.rotation_scan import turn

__all__ = ["FrozenGRU", "FrozenRNN", "FrozenRotationRNN"]

# of one layer in one step, see ``_Frozen._prepared``
Call = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


_SETTINGS = ("leak", "negative_slope", "backend", "nonlinearity", "precision", "variant")  # that prepared calls hold


class _Frozen(Layers):
    """The common base class: buffers instead of parameters, no gradients, and `step`."""

    def __init__(self, source: Layers, tensors: dict[str, Tensor]) -> None:
        nn.Module.__init__(self)
        for name, value in vars(source).items():
            # the settings, but no attributes of nn.Module, such as a compiled or replaced forward, and no tensor
            # attributes, such as weights after pruning
            if name not in vars(self) and not hasattr(nn.Module, name) and not isinstance(value, Tensor):
                setattr(self, name, copy.copy(value))
        self.dropout = 0.0
        # by batch size, dtype, numbers and addresses of the buffers; a change of a buffer's values needs no new call
        self._calls: dict[tuple[Any, ...], list[Call]] = {}
        self._sizes = {name: tensor.shape for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))
        self.eval()

    def forward(self, input: Any, hx: Tensor | None = None, **options: Any) -> Any:
        """Like the forward of the original module, without gradients."""
        if torch.compiler.is_compiling():  # no_grad would add regions of another grad mode to the program
            options = {name: _detached(value) for name, value in options.items()}
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
        if x.dim() not in (most - 1, most) or (most == 2 and x.shape[-1] != self.input_size):
            features = f"[B, {self.input_size}], or [{self.input_size}] for one sequence"
            accepted = features if most == 2 else "token ids [B], or [] for one sequence"
            raise InputError(f"x has shape {tuple(x.shape)}; accepted: {accepted}")
        batched = x.dim() == most
        if isinstance(resets, Tensor) and resets.shape != x.shape[: int(batched)]:
            accepted = "[B]" if batched else "[], for one sequence"
            raise InputError(f"resets has shape {tuple(resets.shape)}; accepted: {accepted}")
        if resets is not None and reset_state is None:
            reset_state = self._first_state(x.shape[0]) if batched else self._first_state(1).squeeze(1)
        if batched and (result := self._prepared_step(x, h, resets, reset_state)) is not None:
            return result
        time = 1 if self.batch_first and batched else 0
        cuts = resets.unsqueeze(time) if isinstance(resets, Tensor) else resets
        more = {} if resets is None and reset_state is None else {"resets": cuts, "reset_state": reset_state}
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
        if weight is None or _taps.SINKS or not no_dispatch_modes() or (resets is None and reset_state is not None):
            return None
        B, dtype = x.shape[0], weight.dtype
        own = self.__dict__
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self._buffers.values()]
        key = (B, dtype, *[own.get(name) for name in _SETTINGS], *addresses)
        calls = self._calls.get(key)
        if calls is None and (calls := self._prepare(x, key)) is None:
            return None
        h = self._first_state(B) if h is None else h
        state = (self.num_layers, B, self.hidden_size)
        expected = ((x, (B, self.input_size), dtype), (h, state, dtype), (reset_state, state, dtype))
        for tensor, shape, kind in (*expected, (resets, (B,), torch.bool)):
            if tensor is None:
                continue
            if type(tensor) is not Tensor or tensor.shape != shape or tensor.dtype is not kind or not tensor.is_cpu:
                return None
        output = torch.empty(state, dtype=dtype, device="cpu")
        for index, call in enumerate(calls):
            x = call(x, h[index], output[index], resets, None if reset_state is None else reset_state[index])
        return x.clone(), output

    def _prepare(self, x: Tensor, key: tuple[Any, ...]) -> list[Call] | None:
        """The prepared calls of all layers for the batch size of x, if the cpu backend serves them."""
        weight = self._tensor("weight_ih_l0")
        for name, size in self._sizes.items():
            if self._tensor(name).shape != size:
                raise InputError(f"{name} must have shape {list(size)}, got {list(self._tensor(name).shape)}")
        if not x.is_floating_point() or not weight.is_cpu or weight.dtype not in (torch.float32, torch.float64):
            return None
        op, sizes = self._op()
        leaf = dispatch.resolve(op, self.backend, device=weight.device, dtype=weight.dtype, **sizes)
        if dispatch.backend_of(leaf) != "cpu":
            return None
        if len(self._calls) >= 16:
            self._calls.clear()
        self._calls[key] = [self._prepared(suffix, x.shape[0]) for suffix in self._suffixes()]
        return self._calls[key]

    def _op(self) -> tuple[str, dict[str, Any]]:
        """The op of a step, and the sizes that a backend may limit."""
        args = self._example("l0", 1)
        return args.op, args.sizes

    def _prepared(self, suffix: str, B: int) -> Call:
        """A call (x [B, D], h [B, N], result [B, N], resets [B] or None, reset_state [B, N] or None) -> result."""
        raise NotImplementedError

    def _example(self, suffix: str, B: int) -> Any:
        """The arguments of a scan of one step."""
        weight = self._tensor(f"weight_ih_{suffix}")
        x, h = weight.new_zeros(1, B, self._inputs(suffix)), weight.new_zeros(B, self.hidden_size)
        return self._args(suffix, self._factors(suffix), None, x, h, None)  # type: ignore[operator]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Not for a frozen module, which has no parameters: InputError."""
        raise InputError("a frozen module has no parameters; accepted: reset_parameters of its source, then frozen()")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_calls": {}}

    def frozen(self) -> Layers:
        """The module itself."""
        return self


class FrozenRNN(_Frozen, Recurrent):
    """The result of ``frozen()`` of RNN, FactorizedRNN, ExpRNN and NonNormalRNN: a recurrence with fixed matrices.

        h_t = phi(W h_{t-1} + W_ih x_t + b)

    Gains are part of W, and b is the sum of all biases. A leak is kept, as in orthokern.nn.RNN; noise is not, even with
    `noise_in_eval`. The interface is that of the original module: layouts, layers, directions, packed input, initial
    states. There are no parameters and no gradients.

    Buffers, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N], and either weight_hh_l0 [N,N], or
    u_l0 [N,K], s_l0 [K] and v_l0 [N,K] for W = U diag(s) V^T of a rank K of at most N / 2 and apply="factored", for
    which the factors take fewer operations than W; and the activation's parameter, leak_logit_l0 [N] and h0_l0 [N]
    if the module has them. They form the state_dict.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> rnn = FactorizedRNN(3, 8).frozen()
        >>> output, h = rnn.step(torch.randn(1, 3))
        >>> output, h = rnn.step(torch.randn(1, 3), h)
    """

    def __init__(self, source: Recurrent) -> None:
        tensors: dict[str, Tensor] = {}
        rank = None
        for suffix in source._suffixes():
            matrix, bias = source._factors(suffix)
            if len(matrix) == 3 and 2 * matrix[0].shape[1] > source.hidden_size:
                u, s, v = matrix
                matrix = (linear(u * s, v),)
            if len(matrix) == 3:
                rank = matrix[0].shape[1]
            names = ("weight_hh",) if len(matrix) == 1 else ("u", "s", "v")
            tensors |= {f"{name}_{suffix}": value for name, value in zip(names, matrix, strict=True)}
            tensors[f"weight_ih_{suffix}"] = source._tensor(f"weight_ih_{suffix}")
            if bias is not None:
                tensors[f"bias_{suffix}"] = bias
            tensors |= {f"{stem}_{suffix}": source._tensor(f"{stem}_{suffix}") for stem in source._common_shapes()}
        super().__init__(source, tensors)
        for name in ("gain", *NOT_FROZEN):  # W has the gain
            setattr(self, name, OPTIONS[name][0])
        self._half_ok = source._half_ok
        self.rank: int | None = rank  # of the factors; None for a dense W

    def _composed(self, suffix: str) -> Tensor:
        u, *factors = self._matrix(suffix)
        return linear(u * factors[0], factors[1]) if factors else u

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        if self.rank is None:
            return (self._tensor(f"weight_hh_{suffix}"),)
        return self._tensor(f"u_{suffix}"), self._tensor(f"s_{suffix}"), self._tensor(f"v_{suffix}")

    def _prepared(self, suffix: str, B: int) -> Call:
        run = prepared_step(self._example(suffix, B))

        def call(x: Tensor, h: Tensor, result: Tensor, resets: Tensor | None, state: Tensor | None) -> Tensor:
            own = {"leak": self._leak(suffix)} if self.learned_leak else {}  # a function of a buffer
            run({"x": x, "h0": h, "hs": result, "resets": resets, "reset_state": state, **own})
            return result

        return call


class FrozenGRU(_Frozen, GRU):
    """The result of ``GRU.frozen()``: a GRU whose parameters are buffers of the same names. It has ``step`` and no
    gradients."""

    def __init__(self, source: GRU) -> None:
        names = [f"{stem}_{suffix}" for suffix in source._suffixes() for stem in source._shapes_of(suffix)]
        super().__init__(source, {name: source._tensor(name) for name in names})

    def _prepared(self, suffix: str, B: int) -> Call:
        N, args = self.hidden_size, self._example(suffix, B)
        run, dtype = prepared_gru_step(args), args.w.dtype
        bias = self._tensor(f"bias_ih_{suffix}") if self.bias else None

        def call(x: Tensor, h: Tensor, result: Tensor, resets: Tensor | None, state: Tensor | None) -> Tensor:
            gates = torch.empty(B, 3 * N, dtype=dtype, device="cpu")
            pre = None if args.kanai else torch.empty(B, N, dtype=dtype, device="cpu")
            tensors = {"x": self._input_term(x, suffix, bias), "h0": h, "hs": result, "gates": gates, "pre": pre}
            run({**tensors, "resets": resets, "reset_state": state})
            return result

        return call


class FrozenRotationRNN(_Frozen, RotationRNN):
    """The result of ``RotationRNN.frozen()``, with ``step``. The buffers weight_ih_l0 [N,D] and bias_l0 [N] include the
    factor g, and lambda_l0 [2,N/2] holds the real and the imaginary parts of the eigenvalues."""

    def __init__(self, source: RotationRNN) -> None:
        tensors: dict[str, Tensor] = {}
        for suffix in source._suffixes():
            weight, bias, re, im = source._factors(suffix)
            tensors |= {f"weight_ih_{suffix}": weight, f"lambda_{suffix}": torch.stack([re, im])}
            if bias is not None:
                tensors[f"bias_{suffix}"] = bias
            if source.learned_h0:
                tensors[f"h0_{suffix}"] = source._tensor(f"h0_{suffix}")
        super().__init__(source, tensors)

    def _meaning(self) -> str:
        """That of lambda does not depend on the margin."""
        return "lambda"

    def _lambda(self, suffix: str) -> tuple[Tensor, Tensor]:
        re, im = self._tensor(f"lambda_{suffix}").double()
        return re, im

    def _op(self) -> tuple[str, dict[str, Any]]:
        return "rotation_scan", {}

    def _factors(self, suffix: str) -> Any:
        bias = self._tensor(f"bias_{suffix}") if self.bias else None
        return self._tensor(f"weight_ih_{suffix}"), bias, *self._lambda(suffix)

    def _prepared(self, suffix: str, B: int) -> Call:
        def call(x: Tensor, h: Tensor, result: Tensor, resets: Tensor | None, state: Tensor | None) -> Tensor:
            weight, bias, re, im = self._factors(suffix)
            if resets is not None and state is not None:
                h = torch.where(resets.unsqueeze(1), state, h)
            turned = turn(h.detach().double(), re, im)
            return torch.add(turned, self._weighted(x.detach(), weight, bias), out=result)

        return call


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# not by an import there: these classes are subclasses
Recurrent._frozen_kind, GRU._frozen_kind, RotationRNN._frozen_kind = FrozenRNN, FrozenGRU, FrozenRotationRNN
