"""The base class of all recurrent modules: parameters of layers and directions, layouts, resets and the forward."""

from __future__ import annotations

import functools
import math
import operator
import sys
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from orthokern import _autocast
from orthokern._autocast import widened
from orthokern._scan_contract import running, without_padding
from orthokern.errors import InputError, integer, number, require
from orthokern.nn._checks import check_dtype, check_ids, compute_weights, draw, flag, new_parameter
from orthokern.nn._layouts import Dense, Layout, Packed, Resets, States
from orthokern.ops._checks import has_lengths, strided
from orthokern.ops._linear import linear

Sequences = TypeVar("Sequences", Tensor, PackedSequence)


class LayerOptions(TypedDict, total=False):
    """The arguments that all recurrent modules share with torch's, besides the sizes; see orthokern.nn.RNN."""

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Layers(nn.Module):
    """Layers, directions, layouts and initial states.

    A subclass defines its parameters (`_shapes_of`) and their initial values (`reset_parameters`), and one recurrence
    in one direction (`_factors` and `_scan`). Its constructor ends with `_build`.
    """

    mode: str  # as in torch, of the cells with its names: "RNN_TANH", "RNN_RELU" and so on, "GRU", "LSTM"
    proj_size = 0
    backend: str | None = None
    learned_h0 = False
    _half_ok = False  # whether parameters may have 16 bits
    _frozen_kind: ClassVar[Any] = None  # the class of the results of `frozen`, which ``orthokern.nn.frozen`` sets
    _roles: ClassVar[dict[str, str]] = {}  # of parameters, by name without the recurrence; the others are "other"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:  # as Python says it, but with the name of the subclass
            name = type(self).__name__
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {min(unknown)!r}")
        self.input_size = integer("input_size", input_size)
        self.hidden_size = integer("hidden_size", hidden_size)
        self.num_layers = integer("num_layers", num_layers)
        self.bias = flag("bias", bias)
        self.batch_first = flag("batch_first", batch_first)
        self.dropout = number("dropout", dropout, "a number in [0, 1]", lambda value: 0.0 <= value <= 1.0)
        self.bidirectional = flag("bidirectional", bidirectional)
        self._placement = {"device": device, "dtype": torch.get_default_dtype() if dtype is None else dtype}
        check_dtype(self._placement["dtype"], half=self._half_ok)
        if self.dropout > 0.0 and self.num_layers == 1:
            text = f"dropout={dropout} has no effect: it acts between layers, and num_layers is 1"
            level = 1  # the line that calls the constructor of the outermost class
            while sys._getframe(level).f_globals.get("__name__", "").startswith(f"{__package__}."):
                level += 1
            warnings.warn(text, stacklevel=level + 1)

    # -- parameters

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of one recurrence, by name without the suffix."""
        raise NotImplementedError

    def _torch_shapes(self, suffix: str, blocks: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that torch.nn.RNN (1 block of N rows), GRU (3) and LSTM (4) have."""
        rows, biases = blocks * self.hidden_size, ("bias_ih", "bias_hh") if self.bias else ()
        weights = {"weight_ih": (rows, self._inputs(suffix)), "weight_hh": (rows, self.hidden_size)}
        return {**weights, **{name: (rows,) for name in biases}}

    def _build(self) -> None:
        """Registers the parameters of all recurrences and initialises them."""
        placement = vars(self).pop("_placement")
        for suffix in self._suffixes():
            for stem, shape in self._shapes_of(suffix).items():
                name = f"{stem}_{suffix}"
                self.register_parameter(name, new_parameter(name, shape, **placement))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        raise NotImplementedError

    def _draw_uniform(self, generator: torch.Generator | None, *names: str) -> None:
        """Initialises weights and biases with U(-1/sqrt(N), 1/sqrt(N)), as torch does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name in names:
            draw(nn.init.uniform_, self._tensor(name), -bound, bound, generator=generator)

    def _suffixes(self) -> list[str]:
        """Names of the recurrences in torch's order: l0, l0_reverse, l1, ..."""
        ways = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{way}" for layer in range(self.num_layers) for way in ways]

    def _suffix(self, layer: int, reverse: bool) -> str:
        """Name of one recurrence, checked; a negative layer counts from the last."""
        try:
            index = range(self.num_layers)[operator.index(layer)]
        except (TypeError, IndexError):
            raise InputError(
                f"layer must be an integer in [{-self.num_layers}, {self.num_layers}), got {layer!r}"
            ) from None
        if reverse and not self.bidirectional:
            raise InputError("reverse=True needs a bidirectional module; accepted: reverse=False")
        return f"l{index}{'_reverse' if reverse else ''}"

    def _inputs(self, suffix: str) -> int:
        """Number of input features of the layer."""
        first = suffix in ("l0", "l0_reverse")
        return self.input_size if first else self.hidden_size * (2 if self.bidirectional else 1)

    def _tensor(self, name: str) -> Tensor:
        """A parameter or buffer, or the attribute in its place, as after pruning."""
        tensor: Tensor = getattr(self, name)
        return tensor

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights and biases, one list per recurrence, as in torch."""
        stems = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        names = [[f"{stem}_{suffix}" for stem in stems] for suffix in self._suffixes()]
        return [[self._tensor(name) for name in own if hasattr(self, name)] for own in names]

    def flatten_parameters(self) -> None:
        """Does nothing. It exists for code written for torch's modules, where it serves cuDNN."""

    def parameter_roles(self) -> dict[str, str]:
        """Parameter name -> role, by which ``orthokern.optim.optimizer_for`` groups them: "geodesic" (U and V of a
        FactorizedRNN), "spectrum" (its singular values), "skew" (A of an ExpRNN or NonNormalRNN), "rotation" (gamma and
        theta of a NonNormalRNN, radius and angle of a RotationRNN) or "other"."""
        names = [name for name, _ in self.named_parameters(recurse=False)]
        return {name: self._roles.get(name.rpartition("_l")[0], "other") for name in names}

    def frozen(self) -> Layers:
        """A copy for inference, in which values that depend only on parameters are precomputed where this saves
        operations.

        W is composed, except at a low rank (the exponential of an ExpRNN or NonNormalRNN, the spectrum of a
        FactorizedRNN, the eigenvalues of a RotationRNN), biases are summed, except in a GRU, and gains and input scales
        are multiplied in. Later changes of this module's parameters have no effect on the copy.

        Returns:
            An ``orthokern.nn.frozen.FrozenRNN`` (``FrozenGRU`` for a GRU, ``FrozenRotationRNN`` for a RotationRNN):
            ``forward`` with the same arguments and results, and ``step(x, h)`` for one time step of a stream. Its
            tensors are buffers, without gradients, on the same device; dropout is off.

        Raises:
            orthokern.errors.OutOfRange, an InputError: on a CPU, A or gamma of an ExpRNN or NonNormalRNN is not finite,
                or A is too large for an exponential. Other parameters are not checked.
            InputError: the module is an LSTM or a PeepholeLSTM.

        Example::

            >>> rnn = orthokern.nn.ExpRNN(3, 8).frozen()
            >>> output, h = rnn.step(torch.randn(1, 3))  # [1, 8], [1, 1, 8]
        """
        if self._frozen_kind is None:
            raise InputError(f"frozen is not for {type(self).__name__} modules; accepted: eval() and torch.no_grad()")
        with torch.no_grad(), _autocast.off():
            compute_weights(self)
            result: Layers = self._frozen_kind(self)
            return result

    def _text(self, **usual: Any) -> str:
        """The sizes, and the settings that differ from the usual ones."""
        usual = {
            "num_layers": 1,
            "nonlinearity": "tanh",
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
            **usual,
        }
        values = {name: getattr(self, name, value) for name, value in usual.items()}
        settings = [f"{name}={value!r}" for name, value in values.items() if value != usual[name]]
        return ", ".join([str(self.input_size), str(self.hidden_size), *settings])

    def extra_repr(self) -> str:
        return self._text()

    # -- one recurrence

    def _factors(self, suffix: str) -> Any:
        """The values that `_scan` needs from the parameters, computed once per forward."""
        raise NotImplementedError

    def _scan(
        self, suffix: str, factors: Any, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> States:
        """The states of one recurrence."""
        raise NotImplementedError

    def _state_size(self) -> int:
        """S."""
        return self.hidden_size

    def _input_term(self, x: Tensor, suffix: str, bias: Tensor | None) -> Tensor:
        """W_ih x_t + b [T,B,..] of features, by one product, or of token ids, by a look-up."""
        return self._weighted(x, self._tensor(f"weight_ih_{suffix}"), bias)

    def _weighted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_floating_point():
            return linear(x, weight, bias)
        check_ids(x, self.input_size)
        # fewer sums with a small vocabulary; a graph, which fuses the sum, would hold for these sizes only
        if bias is not None and not torch.compiler.is_compiling() and x.numel() >= weight.shape[1]:
            return nn.functional.embedding(x, weight.mT + bias)
        rows = nn.functional.embedding(x, weight.mT)
        return rows if bias is None else rows + bias

    def _initial_state(self, suffix: str, hx: Tensor | None, index: int, layout: Layout) -> Tensor | None:
        """h0 [B,S] of one recurrence, the index-th of hx."""
        if hx is not None:
            return hx[index]
        return self._tensor(f"h0_{suffix}").expand(layout.batch, self.hidden_size) if self.learned_h0 else None

    # -- the forward

    def forward(
        self,
        input: Sequences,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Sequences, Tensor]:
        """Run all layers over a batch of sequences.

        Args:
            input: float [T,B,D] ([B,T,D] if batch_first), float [T,D] for one sequence without a batch, or token
                ids, int64 or int32, in [0, input_size): [T,B] ([B,T] if batch_first) or [T]. Ids select columns of
                the input weight, like a one-hot input, which is not materialised. Or a PackedSequence of any of these.
                Floats have the dtype of the parameters; under autocast, 16-bit floats are converted to it, so that a
                recurrence over thousands of steps keeps its states in float32.
            hx: [num_layers * directions, B, N] initial states in torch's order (layer, then direction), without B
                for one sequence; batch_first does not apply. None: the learned states if the module has them, else
                zeros. Learned states are not used if hx is given.
            resets: bool [T,B] ([B,T] if batch_first; [T] for one sequence), or None. Where it is true, every layer
                starts the step from its reset state instead of its previous state, as at the beginning of a new episode
                or document. No gradient flows from there to earlier steps. For a PackedSequence, resets has the shape
                of the padded batch, in the order in which the sequences were packed. Not for a bidirectional module.
            reset_state: the states that a reset sets, of the shape of hx; None: the initial states, which are hx,
                learned states or zeros. Pass zeros if hx is carried over from an earlier part of the sequences.
            lengths: int64 [B] in [1, T], the number of steps of each sequence, for an input with a batch that is not
                packed; None: T for all. Later steps have no effect (in a GRU or LSTM their inputs must be finite), and
                their states are zeros; h_n has the states after the last step of each sequence. A call with lengths can
                be exported, unlike one with a PackedSequence.

        Returns:
            (output, h_n): output [T,B,N * directions] ([B,T,..] if batch_first; no B for one sequence; packed for
            packed input), the states of the last layer; h_n [num_layers * directions, B, N], the last state of every
            recurrence (for the reverse direction the one at t = 0).

        Raises:
            InputError: wrong dimensions, sizes, dtype or device; an id out of range (on a CPU); T is 0.
            BackendUnavailable: the requested backend does not support the call.

        Example::

            >>> x, resets = torch.randn(100, 4, 3), torch.rand(100, 4) < 0.01  # True where a new episode begins
            >>> states, last = orthokern.nn.RNN(3, 8)(x, resets=resets)
        """
        result: tuple[Sequences, Tensor] = self._forward(input, hx, resets, reset_state, lengths)
        return result

    def _forward(
        self, input: Any, hx: Any, resets: Tensor | None, reset_state: Tensor | None, lengths: Tensor | None = None
    ) -> Any:
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            input, hx, reset_state = (widened(value, weight.dtype) for value in (input, hx, reset_state))
            with torch.autocast(device, enabled=False):
                return self._forward(input, hx, resets, reset_state, lengths)
        if isinstance(input, PackedSequence):
            require(lengths is None, "lengths", "None for a PackedSequence, which has them", "a tensor")
            return self._forward_packed(input, hx, resets, reset_state)
        data, batched = self._time_first(input)
        if data.shape[0] < 1:
            raise InputError(f"input has T={data.shape[0]} and B={data.shape[1]}; accepted: at least 1 time step")
        hx, cuts = self._checked_states(data, batched, hx, resets, reset_state)
        lengths = self._checked_lengths(lengths, data, batched)
        if data.shape[1] == 0:
            output, h_n = self._run_empty(data, hx)
        else:
            if lengths is not None and not data.is_floating_point():  # the padding may hold any ids
                data = without_padding(data, running(len(data), lengths))
            output, h_n = self._run(data, hx, Dense(data.shape[1], lengths), cuts)
        if not batched:
            return output.squeeze(1), h_n.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), h_n

    def _forward_packed(
        self, input: PackedSequence, hx: Any, resets: Tensor | None, reset_state: Tensor | None
    ) -> tuple[PackedSequence, Tensor]:
        self._check_input(input.data, packed=True)
        layout, order = Packed(input.batch_sizes, input.data.device), input.sorted_indices
        hx = self._checked_hx(hx, layout.batch, input.data.device)
        cuts = self._cuts(resets, reset_state, (layout.steps, layout.batch), input.data.device, True)
        if order is not None:  # the caller's order -> order by decreasing length
            hx = None if hx is None else hx.index_select(1, order)
            cuts = None if cuts is None else cuts.rows(order)
        output, h_n = self._run(input.data, hx, layout, cuts)
        if input.unsorted_indices is not None:
            h_n = h_n.index_select(1, input.unsorted_indices)
        return PackedSequence(output, input.batch_sizes, order, input.unsorted_indices), h_n

    def _run(self, data: Tensor, hx: Tensor | None, layout: Layout, cuts: Resets | None) -> tuple[Tensor, Tensor]:
        data, last = self._layers(data, hx, layout, self.num_layers, cuts)
        return data, torch.stack(last) if len(last) > 1 else last[0].unsqueeze(0).clone()

    def _run_empty(self, data: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_run` of no sequences: empty results, whose gradients are zeros, as torch's are."""
        ways = 2 if self.bidirectional else 1
        read = [
            t
            for t in (data, hx, self._tensor("weight_ih_l0"), *self.parameters())
            if t is not None and t.is_floating_point()
        ]
        nothing = torch.stack([t.flatten()[:0].sum() for t in read]).sum()  # 0, with a gradient of zeros for all
        output = nothing.expand(len(data), 0, ways * self.hidden_size)
        return output, nothing.expand(self.num_layers * ways, 0, self._state_size())

    def _layers(
        self, data: Tensor, hx: Tensor | None, layout: Layout, count: int, cuts: Resets | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the first `count` layers. Returns the input of the next one, and the last states."""
        last: list[Tensor] = []
        ways = (False, True) if self.bidirectional else (False,)
        for layer in range(count):
            outputs: list[Tensor] = []
            for reverse in ways:
                suffix = self._suffix(layer, reverse)
                h0 = self._initial_state(suffix, hx, len(last), layout)
                own = None if cuts is None else cuts.of(len(last))
                scan = functools.partial(self._scan, suffix, self._factors(suffix), own)
                states, end = layout.run(scan, data, h0, reverse)
                outputs.append(states)
                last.append(end)
            data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout > 0.0 and self.training and layer + 1 < self.num_layers:
                data = nn.functional.dropout(data, self.dropout, training=True)
        return data, last

    # -- arguments of a forward

    def _check_input(self, input: Any, *, packed: bool = False, small_ids: bool = False) -> bool:
        """Checks the input except T and B; True for token ids.

        input: [T,B,D], [T,D] or token ids without D ([B,T,..] if batch_first); the data of a PackedSequence if packed.
        It must have the device of the input weight and, if it is floating, its dtype. small_ids: ids may also be uint8
        or int16.
        """
        if not isinstance(input, Tensor):
            raise InputError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
        strided("input", input)
        weight = self._tensor("weight_ih_l0")
        if input.device != weight.device:
            raise InputError(f"input is on {input.device}; accepted: {weight.device}, like the parameters")
        if weight.dtype is not torch.float32:
            check_dtype(weight.dtype, half=self._half_ok)
        ids = (torch.int64, torch.int32, *((torch.int16, torch.uint8) if small_ids else ()))
        tokens = input.dtype in ids
        if not tokens and input.dtype != weight.dtype:
            raise InputError(
                f"input has dtype {input.dtype}; accepted: {weight.dtype} like the parameters, "
                f"or token ids in {', '.join(map(str, ids))}"
            )
        dims = input.dim() + tokens
        if dims not in ((2,) if packed else (2, 3)) or (not tokens and input.shape[-1] != self.input_size):
            kind, more = ("token ids", "") if tokens else ("floats", ", D")
            order = "B, T" if self.batch_first else "T, B"
            accepted = f"[rows{more}]" if packed else f"[{order}{more}] or, for one sequence, [T{more}]"
            size = "" if tokens else f" with D = input_size = {self.input_size}"
            raise InputError(f"input ({kind}) has shape {tuple(input.shape)}; accepted: {accepted}{size}")
        return tokens

    def _time_first(self, input: Tensor, small_ids: bool = False) -> tuple[Tensor, bool]:
        """([T,B,...], whether the input has a batch) of an input, checked except T and B."""
        tokens = self._check_input(input, small_ids=small_ids)
        batched = input.dim() == (2 if tokens else 3)
        return self._transposed(input, batched), batched

    def _transposed(self, tensor: Tensor, batched: bool) -> Tensor:
        """[T,B,...] from the layout of an input, and back."""
        if not batched:
            return tensor.unsqueeze(1)
        return tensor.transpose(0, 1) if self.batch_first else tensor

    def _checked_states(
        self, data: Tensor, batched: bool, hx: Any, resets: Tensor | None, reset_state: Tensor | None
    ) -> tuple[Tensor | None, Resets | None]:
        """hx and the resets of a call with data [T,B,...], with a batch."""
        checked = self._checked_hx(hx, data.shape[1] if batched else None, data.device)
        return checked, self._cuts(resets, reset_state, data.shape[:2], data.device, batched)

    def _checked_lengths(self, lengths: Tensor | None, data: Tensor, batched: bool) -> Tensor | None:
        if lengths is not None:
            require(batched, "lengths", "None for one sequence without a batch", "a tensor")
            has_lengths(lengths, data)
        return lengths

    def _checked_hx(self, hx: Any, batch: int | None, device: torch.device, name: str = "hx") -> Tensor | None:
        """hx with a batch, or None. batch: None for one sequence without."""
        if hx is None:
            return None
        if not isinstance(hx, Tensor):
            raise InputError(f"{name} must be a Tensor or None, got {type(hx).__name__}")
        strided(name, hx)
        rows = self.num_layers * (2 if self.bidirectional else 1)
        shape = (rows, self.hidden_size) if batch is None else (rows, batch, self.hidden_size)
        if tuple(hx.shape) != shape:
            letters = "layers * directions, N" if batch is None else "layers * directions, B, N"
            raise InputError(f"{name} has shape {tuple(hx.shape)}; accepted: {shape} ({letters})")
        weight = self._tensor("weight_ih_l0")
        if hx.dtype != weight.dtype or hx.device != device:
            raise InputError(
                f"{name} is {hx.dtype} on {hx.device}; accepted: {weight.dtype} on {device}, like the input"
            )
        return hx.unsqueeze(1) if batch is None else hx

    def _cuts(
        self,
        resets: Tensor | None,
        reset_state: Tensor | None,
        shape: Sequence[int],
        device: torch.device,
        batched: bool,
    ) -> Resets | None:
        """resets and reset_state of a call of shape (T, B), checked and with a batch."""
        if resets is None:
            if reset_state is not None:
                raise InputError("reset_state is given without resets; accepted: with resets only")
            return None
        if not isinstance(resets, Tensor):
            raise InputError(f"resets must be a Tensor or None, got {type(resets).__name__}")
        if self.bidirectional:
            raise InputError("resets are given to a bidirectional module; accepted: bidirectional=False")
        T, B = shape
        accepted, letters = ((T,), "T") if not batched else ((B, T), "B, T") if self.batch_first else ((T, B), "T, B")
        if resets.dtype != torch.bool or tuple(resets.shape) != accepted or resets.device != device:
            raise InputError(
                f"resets is {resets.dtype} {tuple(resets.shape)} on {resets.device}; accepted: torch.bool {accepted} "
                f"([{letters}]) on {device}, like the input"
            )
        state = self._checked_hx(reset_state, B if batched else None, device, "reset_state")
        return Resets(self._transposed(resets, batched), state)
