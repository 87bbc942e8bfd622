"""Recurrences that stand in for torch.nn.RNN: `RNN` with a dense matrix, `FactorizedRNN` with W = U diag(s) V^T.

Letters: B batch, T time, N hidden_size, K rank of U and V, D input_size (features, or the number of token ids).

Both share everything but the recurrent matrix: layers, directions, layouts, PackedSequence, dropout between layers,
initial states. They add to torch.nn.RNN: more activations, integer token input, learned initial states, a backend.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from orthokern import _autocast, dispatch, functional
from orthokern import init as init_
from orthokern._activations import ACTIVATIONS
from orthokern.errors import InputError, unknown_name
from orthokern.nn import _loss
from orthokern.nn._checks import (
    check_backend,
    check_device,
    check_held,
    check_input,
    check_packed,
    finite,
    flag,
    new_parameter,
    number,
    parameter_dtype,
    positive_int,
    share,
)
from orthokern.nn.activations import draw_start

__all__ = ["NONLINEARITIES", "RNN", "FactorizedRNN"]

NONLINEARITIES = tuple(ACTIVATIONS)
APPLY = ("factored", "composed")

# torch 2.6 has no is_exporting: a program that it compiles keeps all states, as one that is exported
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

# (x [T,B,D] or ids [T,B], h0 [B,N] or None, lengths [B] or None) -> states [T,B,N]
Scan = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]


class _Layout(Protocol):
    """How a batch of sequences is laid out for one scan, and its states read back."""

    batch: int

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """One recurrence in one direction: data in the layout's form -> (output in that form, last states [B,N])."""
        ...


class _Dense:
    """data [T,B,D] or ids [T,B]: all sequences have T steps."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        if not reverse:
            hs = scan(data, h0, None)
            return hs, hs[-1]
        hs = scan(data.flip(0), h0, None)
        return hs.flip(0), hs[-1]


class _Packed:
    """data [P,D] or ids [P], the packed form of B sequences sorted by falling length (PackedSequence.data).

    One scan over the rectangle [T,B]: row p of data goes to place[p] = t*B + b, and data[mirror] is each sequence
    reversed. With `by_lengths` the scan is given the lengths and does nothing on padding.

    Otherwise (a backend that knows no lengths) the states after a sequence's end are computed and never read, so their
    cotangents are exact zeros and add exact zeros to every gradient, as long as the states are finite: 0 * inf is not
    0. An overflow on padding is the one way for padding to reach a result, so it is looked for, and such a batch is run
    again without padding, one scan per stretch of steps in which the same sequences are alive.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device, by_lengths: bool) -> None:
        sizes = batch_sizes.to("cpu", torch.int64)
        self.sizes: list[int] = sizes.tolist()
        self.steps, self.batch = len(self.sizes), self.sizes[0]
        ragged = self.sizes[-1] != self.batch
        step = torch.repeat_interleave(torch.arange(self.steps, device="cpu"), sizes)
        first = torch.cumsum(sizes, 0) - sizes  # position in data of the first row of step t
        row = torch.arange(len(step), device="cpu") - first[step]
        lengths = (sizes.unsqueeze(1) > torch.arange(self.batch, device="cpu")).sum(0)
        last = lengths[row] - 1
        place = step * self.batch + row
        self.lengths = lengths.to(device) if by_lengths and ragged else None
        self.overflow = ragged and not by_lengths  # whether it may happen, and has to be looked for
        if self.overflow:
            padding = torch.ones(self.steps * self.batch, dtype=torch.bool, device="cpu").index_fill_(0, place, False)
            self.padding = padding.to(device)
        self.place = place.to(device)
        self.mirror = (first[last - step] + row).to(device)
        end = first[lengths - 1] + torch.arange(self.batch, device="cpu")
        self.end = end.to(device)  # where each sequence's last row is in data

    def run(self, scan: Scan, data: Tensor, h0: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        ordered = data.index_select(0, self.mirror) if reverse else data
        x = ordered.new_zeros((self.steps * self.batch, *data.shape[1:])).index_copy(0, self.place, ordered)
        x = x.unflatten(0, (self.steps, self.batch))
        states = scan(x, h0, self.lengths).flatten(0, 1)
        if self.overflow and states.requires_grad and not states.detach()[self.padding].isfinite().all():
            states = self._by_stretches(scan, x, h0)
        else:
            states = states.index_select(0, self.place)
        last = states.index_select(0, self.end)
        return (states.index_select(0, self.mirror) if reverse else states), last

    def _by_stretches(self, scan: Scan, x: Tensor, h0: Tensor | None) -> Tensor:
        pieces, start, h = [], 0, h0
        while start < self.steps:
            alive = self.sizes[start]
            stop = start
            while stop < self.steps and self.sizes[stop] == alive:
                stop += 1
            hs = scan(x[start:stop, :alive], None if h is None else h[:alive], None)
            pieces.append(hs.flatten(0, 1))
            start, h = stop, hs[-1]
        return torch.cat(pieces)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """A tensor or packed sequence of 16-bit floats in ``dtype``; anything else as it is."""
    floats = value.data if isinstance(value, PackedSequence) else value
    if isinstance(floats, Tensor) and floats.dtype in (torch.bfloat16, torch.float16):
        return value.to(dtype)
    return value


class _Recurrent(nn.Module):
    """Layers, directions, layouts, initial states; a subclass has the recurrent matrix and runs one scan with it."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        nonlinearity: str,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        *,
        negative_slope: float,
        learned_h0: bool,
        checkpoint_every: int,
        backend: str | None,
        precision: str,
        message_clip: float,
        gain: float,
    ) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters, by name
        self.input_size = positive_int("input_size", input_size)
        self.hidden_size = positive_int("hidden_size", hidden_size)
        self.num_layers = positive_int("num_layers", num_layers)
        if nonlinearity not in NONLINEARITIES:
            raise unknown_name("nonlinearity", nonlinearity, list(NONLINEARITIES))
        if ACTIVATIONS[nonlinearity].pairs and self.hidden_size % 2:
            raise InputError(
                f"hidden_size must be even for nonlinearity {nonlinearity!r} (it works on pairs of units), "
                f"got {hidden_size}"
            )
        self.nonlinearity = nonlinearity
        self.bias = flag("bias", bias)
        self.batch_first = flag("batch_first", batch_first)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.dropout = share("dropout", dropout)
        if self.dropout > 0.0 and self.num_layers == 1:
            warnings.warn(f"dropout={dropout} has no effect: it acts between layers, and num_layers is 1", stacklevel=3)
        self.negative_slope = number("negative_slope", negative_slope, "a finite number")
        if not math.isfinite(self.negative_slope):
            raise InputError(f"negative_slope must be a finite number, got {negative_slope!r}")
        self.learned_h0 = flag("learned_h0", learned_h0)
        self.checkpoint_every = positive_int("checkpoint_every", checkpoint_every, minimum=0)
        self.backend = check_backend(backend)
        if precision not in functional.PRECISIONS:
            raise unknown_name("precision", precision, functional.PRECISIONS)
        self.precision = precision
        self.message_clip = finite("message_clip", message_clip, above_zero=False)
        self.gain = finite("gain", gain, above_zero=True)
        self._bases: dict[str, Tensor] = {}  # Note [The basis that a module keeps]

    # -- parameters

    def _suffixes(self) -> list[str]:
        """Names of the recurrences in torch's order: l0, l0_reverse, l1, ..."""
        return [
            f"l{layer}{way}"
            for layer in range(self.num_layers)
            for way in (("", "_reverse") if self.bidirectional else ("",))
        ]

    def _inputs(self, suffix: str) -> int:
        """Number of input features of the layer."""
        first = suffix in ("l0", "l0_reverse")
        return self.input_size if first else self.hidden_size * (2 if self.bidirectional else 1)

    def _register(self, name: str, shape: tuple[int, ...], device: Any, dtype: torch.dtype) -> None:
        self.register_parameter(name, new_parameter(name, shape, device, dtype))
        self._shapes[name] = shape

    def _register_common(self, suffix: str, device: Any, dtype: torch.dtype) -> None:
        """Parameters of one recurrence besides its weights: of the activation, and the initial state."""
        learned = ACTIVATIONS[self.nonlinearity].learned
        if learned is not None:
            size = self.hidden_size if learned.per_unit else 1
            self._register(f"{learned.stem}_{suffix}", (size,), device, dtype)
        if self.learned_h0:
            self._register(f"h0_{suffix}", (self.hidden_size,), device, dtype)

    def _register_input(self, suffix: str, device: Any, dtype: torch.dtype) -> None:
        """Input weight and the one bias, of a recurrence whose matrix is made of other parameters."""
        self._register(f"weight_ih_{suffix}", (self.hidden_size, self._inputs(suffix)), device, dtype)
        if self.bias:
            self._register(f"bias_{suffix}", (self.hidden_size,), device, dtype)

    def _reset_input(self, suffix: str, generator: torch.Generator | None) -> None:
        """U(-1/sqrt(N), 1/sqrt(N)) as torch's, bias 0."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self._tensor(f"weight_ih_{suffix}"), -bound, bound, generator=generator)
        if self.bias:
            nn.init.zeros_(self._tensor(f"bias_{suffix}"))

    def _reset_common(self, suffix: str, generator: torch.Generator | None) -> None:
        learned = ACTIVATIONS[self.nonlinearity].learned
        if learned is not None:
            draw_start(self._tensor(f"{learned.stem}_{suffix}"), learned, generator)
        if self.learned_h0:
            nn.init.zeros_(self._tensor(f"h0_{suffix}"))

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, name)
        check_held(name, tensor, self.__dict__.get("_shapes", {}).get(name))
        return tensor

    def _act_param(self, suffix: str) -> Tensor | None:
        parameter = ACTIVATIONS[self.nonlinearity].parameter
        if parameter is None:
            return None
        if parameter.stem is None:
            # no buffer: torch's state_dicts have no such key, and without one it would not survive Module.to_empty
            return self._tensor("weight_ih_l0").new_full((1,), self.negative_slope)
        return self._tensor(f"{parameter.stem}_{suffix}")

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

    def flatten_parameters(self) -> None:
        """Does nothing; torch.nn.RNN has it (for cuDNN), so code written for that may call it."""

    # -- forward

    def _scan(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, suffix: str, matrix: tuple[Tensor, ...]
    ) -> Tensor:
        raise NotImplementedError

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        """What `_scan` needs of the recurrent matrix, made once per forward however many scans follow."""
        raise NotImplementedError

    def _op(self) -> tuple[str, dict[str, Any]]:
        """The op that `_scan` runs, and the sizes that a backend may limit."""
        raise NotImplementedError

    def _gained(self, tensor: Tensor) -> Tensor:
        """One of the terms that make up a pre-activation, times the gain."""
        return tensor if self.gain == 1.0 else tensor * self.gain

    def _serves_lengths(self) -> bool:
        """Whether the backend that runs this module's scans takes lengths. `auto` is not to look for another one that
        does: a GPU's kernel over padding is faster than the reference without it."""
        op, sizes = self._op()
        weight = self._tensor("weight_ih_l0")
        features = ("message_clip",) if self.message_clip > 0 else ()
        chosen = dispatch.choose(op, self.backend, device=weight.device, dtype=weight.dtype, features=features, **sizes)
        return dispatch.has_feature(op, chosen, "lengths")

    def _scan_options(self, suffix: str, lengths: Tensor | None) -> dict[str, Any]:
        """What both scans take besides matrices and bias."""
        return {
            "weight": self._gained(self._tensor(f"weight_ih_{suffix}")),
            "lengths": lengths,
            "message_clip": self.message_clip,
            "activation": self.nonlinearity,
            "act_param": self._act_param(suffix),
            # the number of checkpoints, ceil(T / k), would bind an exported program to a T above k
            "checkpoint_every": 0 if _is_exporting() else self.checkpoint_every,
            "backend": self.backend,
            "precision": self.precision,
        }

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run all layers over a batch of sequences.

        Args:
            input: float [T,B,D] ([B,T,D] if batch_first), float [T,D] for one sequence without a batch, or token
                ids, int64 or int32, in [0, input_size): [T,B] ([B,T] if batch_first) or [T]. Ids select columns of
                the input weight, as a one-hot input would; the one-hot tensor is never made. Or a PackedSequence of
                any of these. Floats have the dtype of the parameters; under autocast, 16-bit floats are widened to it:
                a recurrence over thousands of steps keeps its states in float32.
            hx: [num_layers * directions, B, N] initial states in torch's order (layer, then direction), without B
                for one sequence; never batch_first. None: the learned states if the module has them, else zeros.
                With an hx, learned states take no part.

        Returns:
            (output, h_n): output [T,B,N * directions] ([B,T,..] if batch_first; no B for one sequence; packed for
            packed input), the states of the last layer; h_n [num_layers * directions, B, N], the last state of every
            recurrence (for the reverse direction the one at t = 0).

        Raises:
            InputError: wrong dimensions, sizes, dtype or device; ids out of range; T or B of zero.
        """
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            with torch.autocast(device, enabled=False):
                return self.forward(_widened(input, weight.dtype), _widened(hx, weight.dtype))
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        tokens = self._check_input(input)
        batched = input.dim() == (2 if tokens else 3)
        if batched:
            data = input.transpose(0, 1) if self.batch_first else input
        else:
            data = input.unsqueeze(1)
        if data.shape[0] < 1 or data.shape[1] < 1:
            raise InputError(
                f"input has T={data.shape[0]} and B={data.shape[1]}; accepted: at least 1 time step and 1 sequence"
            )
        if hx is not None:
            self._check_hx(hx, data.shape[1] if batched else None, input.device)
            hx = hx if batched else hx.unsqueeze(1)
        output, h_n = self._run(data, hx, _Dense(data.shape[1]))
        if not batched:
            return output.squeeze(1), h_n.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), h_n

    def _forward_packed(self, input: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        self._check_input(input.data, packed=True)
        check_packed(input)
        layout = _Packed(input.batch_sizes, input.data.device, self._serves_lengths())
        if hx is not None:
            self._check_hx(hx, layout.batch, input.data.device)
            if input.sorted_indices is not None:  # the caller's order -> order by falling length
                hx = hx.index_select(1, input.sorted_indices)
        output, h_n = self._run(input.data, hx, layout)
        if input.unsorted_indices is not None:
            h_n = h_n.index_select(1, input.unsorted_indices)
        return PackedSequence(output, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n

    def loss(
        self,
        input: Tensor,
        readout: nn.Module,
        target: Tensor,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        reduction: str = "mean",
        algorithm: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a linear readout of the last layer's states, which are never made for all steps::

            loss, hits = rnn.loss(tokens, readout, targets)

        is ``readout.loss(rnn(tokens)[0], targets)`` with less memory. With nonlinearity "identity" it is also much
        faster: the recurrence then runs in the eigenbasis of its matrix, at O(N) a step, with the full gradient of
        every parameter (``orthokern.functional.scan_cross_entropy``; docs/modal.md). The eigenvectors found are kept
        for the next call, and are part of the state_dict.

        Args:
            input: as in forward, no PackedSequence; token ids may also be uint8 or int16.
            readout: a torch.nn.Linear or orthokern.nn.LinearCrossEntropy, N inputs, C classes.
            target: uint8, int16, int32 or int64, the shape of input without features, class ids in [0, C).
            hx: as in forward.
            lengths: int64 [B] in [1, T], the steps that each sequence has; None: all. Those behind count nothing.
            reduction: "mean" over the steps that count, or "sum".
            algorithm: "auto", "modal", "sequential" or "chunked", of the last layer.

        Returns:
            (loss, hits): the loss, 0-dim, in nats; int64 [T], at how many sequences the largest logit of a step is that
            of the target.

        Raises:
            InputError: as forward; a bidirectional module; "modal" where it cannot serve.
        """
        weight = self._tensor("weight_ih_l0")
        device = weight.device.type
        if _autocast.is_on(device):
            with torch.autocast(device, enabled=False):
                return self.loss(
                    _widened(input, weight.dtype), readout, target, _widened(hx, weight.dtype),
                    lengths=lengths, reduction=reduction, algorithm=algorithm,
                )  # fmt: skip
        if self.bidirectional:
            raise InputError(
                "loss serves one direction; accepted for a bidirectional module: forward, then LinearCrossEntropy.loss"
            )
        tokens = self._check_input(input, small_ids=True)
        data, batched = input, input.dim() == (2 if tokens else 3)
        if not isinstance(target, Tensor) or target.shape != input.shape[: input.dim() - (not tokens)]:
            got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise InputError(f"target is {got}; accepted: a tensor of the shape of input without features")
        if not batched:
            data, target = data.unsqueeze(1), target.unsqueeze(1)
        elif self.batch_first:
            data, target = data.transpose(0, 1), target.transpose(0, 1)
        if hx is not None:
            self._check_hx(hx, data.shape[1] if batched else None, input.device)
            hx = hx if batched else hx.unsqueeze(1)
        layout = _Dense(data.shape[1])
        self._begin()
        if self.num_layers > 1:
            if tokens and data.dtype not in (torch.int64, torch.int32):
                data = data.to(torch.int64)
            data = self._layers(data, hx, layout, self.num_layers - 1)[0]
        suffix = self._suffix(-1, False)
        h0 = self._initial_state(suffix, hx, self.num_layers - 1, layout)
        found = _loss.loss(self, data, h0, suffix, readout, target, lengths, reduction, algorithm)
        return found.loss, found.hits

    def explain_loss(
        self, T: int, B: int, classes: int, *, ids: bool = True, lengths: bool = False, algorithm: str = "auto"
    ) -> tuple[str, str]:
        """Which algorithm `loss` takes with the parameters as they are, and why.

        Args:
            T, B: time steps and sequences; classes: of the readout.
            ids: the input is token ids.
            lengths: the call gives lengths.
            algorithm: what it asks for.

        Returns:
            ("modal", the condition of the eigenvectors) or ("sequential", why not modal), each as a phrase; with
            algorithm="chunked", that.

        Raises:
            InputError: algorithm="modal" cannot serve.
        """
        return _loss.explain(self, T, B, classes, ids=ids, lengths=lengths, algorithm=algorithm)

    def _factors(self, suffix: str) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The matrix as functional.scan_cross_entropy takes it, and the bias, both with the gain."""
        bias = self._gained(self._tensor(f"bias_{suffix}")) if self.bias else None
        return self._matrix(suffix), bias

    def _begin(self) -> None:
        """Called at the beginning of everything that runs all layers."""

    def _initial_state(self, suffix: str, hx: Tensor | None, index: int, layout: _Layout) -> Tensor | None:
        """h0 [B,N] of one recurrence, the index-th of hx."""
        if hx is not None:
            return hx[index]
        return self._tensor(f"h0_{suffix}").expand(layout.batch, self.hidden_size) if self.learned_h0 else None

    def _run(self, data: Tensor, hx: Tensor | None, layout: _Layout) -> tuple[Tensor, Tensor]:
        self._begin()
        data, last = self._layers(data, hx, layout, self.num_layers)
        return data, torch.stack(last)

    def _layers(self, data: Tensor, hx: Tensor | None, layout: _Layout, count: int) -> tuple[Tensor, list[Tensor]]:
        """The first `count` layers: what the next one is fed with, and the last states."""
        last: list[Tensor] = []
        ways = (False, True) if self.bidirectional else (False,)
        for layer in range(count):
            outputs = []
            for reverse in ways:
                suffix = self._suffix(layer, reverse)
                h0 = self._initial_state(suffix, hx, len(last), layout)
                matrix = self._matrix(suffix)

                def scan(
                    x: Tensor,
                    h: Tensor | None,
                    lengths: Tensor | None,
                    suffix: str = suffix,
                    matrix: tuple[Tensor, ...] = matrix,
                ) -> Tensor:
                    return self._scan(x, h, lengths, suffix, matrix)

                output, end = layout.run(scan, data, h0, reverse)
                outputs.append(output)
                last.append(end)
            data = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout > 0.0 and self.training and layer + 1 < self.num_layers:
                data = nn.functional.dropout(data, self.dropout, training=True)
        return data, last

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _loss.save(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        *_, unexpected, errors = args
        _loss.load(self, state_dict, prefix, unexpected, errors)

    def _check_input(self, input: Tensor, *, packed: bool = False, small_ids: bool = False) -> bool:
        """Check everything but T and B; True for token ids."""
        weight = self._tensor("weight_ih_l0")
        if weight.dtype in (torch.bfloat16, torch.float16) and not self._half_ok:
            raise InputError(
                f"parameters have dtype {weight.dtype}, in which orthogonality is lost; "
                "accepted: torch.float32, torch.float64"
            )
        return check_input(
            input, weight, self.input_size, batch_first=self.batch_first, packed=packed, small_ids=small_ids
        )

    def _check_hx(self, hx: Tensor, batch: int | None, device: torch.device) -> None:
        if not isinstance(hx, Tensor):
            raise InputError(f"hx must be a Tensor or None, got {type(hx).__name__}")
        if hx.layout is not torch.strided or hx.is_nested:
            kind = "nested" if hx.is_nested else str(hx.layout).removeprefix("torch.")
            raise InputError(f"hx is a {kind} tensor; accepted: a strided (dense) one")
        rows = self.num_layers * (2 if self.bidirectional else 1)
        shape = (rows, self.hidden_size) if batch is None else (rows, batch, self.hidden_size)
        if tuple(hx.shape) != shape:
            letters = "layers * directions, N" if batch is None else "layers * directions, B, N"
            raise InputError(f"hx has shape {tuple(hx.shape)}; accepted: {shape} ({letters})")
        weight = self._tensor("weight_ih_l0")
        if hx.dtype != weight.dtype or hx.device != device:
            raise InputError(f"hx is {hx.dtype} on {hx.device}; accepted: {weight.dtype} on {device}, like the input")

    _half_ok = True

    def _repr_common(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {
            "num_layers": 1,
            "nonlinearity": "tanh",
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        defaults |= {"learned_h0": False, "checkpoint_every": 0, "backend": None, "precision": "ieee"}
        defaults |= {"message_clip": 0.0, "gain": 1.0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value!r}"
        row = ACTIVATIONS[self.nonlinearity]
        if row.parameter is not None and row.learned is None:
            text += f", negative_slope={self.negative_slope}"
        return text


class RNN(_Recurrent):
    """torch.nn.RNN on orthokern's scan: h_t = phi(gain (W_hh h_{t-1} + b_hh + W_ih x_t + b_ih)), with a gain of 1.

    Constructor, parameter names, layouts, outputs and gradients are those of torch.nn.RNN, and so are the first
    parameters for the same seed. Its state_dict loads here, and ours there unless the module has parameters that
    torch's has not (a slope, a modReLU bias, a learned state).

    Args:
        input_size: D, features of the input, or the number of token ids for integer input.
        hidden_size: N.
        num_layers: stacked recurrences, each fed by the states of the one below.
        nonlinearity: one of orthokern.functional.ACTIVATIONS; orthokern.ops.activations.activation has the equations.
            "prelu" learns a slope, one per recurrence, 0.25 at first; "modrelu" learns a bias [N], U(-0.01, 0.01) at
            first; "oplu" works on pairs of units, so N must be even.
        bias: learn bias_ih and bias_hh (two, as torch has them; only their sum acts).
        batch_first: input and output are [B,T,..]; hx and h_n are not affected.
        dropout: in [0, 1], on the output of every layer but the last, when training.
        bidirectional: a second recurrence per layer that runs from T-1 to 0; outputs are concatenated.
        device, dtype: of the parameters.
        init: initialisation of every W_hh: None (torch's U(-1/sqrt(N), 1/sqrt(N))), "orthogonal", "henaff",
            "cayley", "identity", "glorot", "glorot-uniform", "learned"; see orthokern.init. Everything
            else is initialised as in torch.
        negative_slope: the fixed slope of "leaky_relu".
        learned_h0: learn the initial state of each recurrence (parameters h0_l0 [N], ..., zero at first), used when
            forward gets no hx.
        checkpoint_every: 0 stores all states for backward; k stores every k-th and recomputes the rest, with the
            same bits as result.
        backend: None or "auto", "reference", "cpu", "triton", "cuda"; see orthokern.dispatch.
        precision: of float32 products on a GPU: "ieee" (exact), or at your wish "3xtf32", "tf32" or "bf16"; states and
            sums stay float32. The CPU computes exact products whatever it says.
        message_clip: c > 0 clips the gradient of every pre-activation to [-c, c], element by element and in every step
            of the backward, before it goes on; 0 does not. See orthokern.functional.factored_scan.
        gain: factor > 0 of the pre-activations (1.05 in section 3.1.3 of Vorontsov et al. 2017). No parameter changes
            its meaning: recurrent_matrix() and state_dict() are without it.

    The cpu backend does no work on the padding of a PackedSequence.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], weight_hh_l0 [N,N], bias_ih_l0 [N],
    bias_hh_l0 [N]; and slope_l0 [1], modrelu_bias_l0 [N], h0_l0 [N] where asked for.

    Raises InputError, one line, for a bad argument.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: str | None = None,
        negative_slope: float = 0.01,
        learned_h0: bool = False,
        checkpoint_every: int = 0,
        backend: str | None = None,
        precision: str = "ieee",
        message_clip: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            nonlinearity,
            bias,
            batch_first,
            dropout,
            bidirectional,
            negative_slope=negative_slope,
            learned_h0=learned_h0,
            checkpoint_every=checkpoint_every,
            backend=backend,
            precision=precision,
            message_clip=message_clip,
            gain=gain,
        )
        if init is not None and init not in init_.INITS:
            raise unknown_name("init", init, list(init_.INITS))
        self.init = init
        dtype, device = parameter_dtype(dtype, half=True), check_device(device)
        n = self.hidden_size
        for suffix in self._suffixes():
            self._register(f"weight_ih_{suffix}", (n, self._inputs(suffix)), device, dtype)
            self._register(f"weight_hh_{suffix}", (n, n), device, dtype)
            if self.bias:
                self._register(f"bias_ih_{suffix}", (n,), device, dtype)
                self._register(f"bias_hh_{suffix}", (n,), device, dtype)
            self._register_common(suffix, device, dtype)
        self.reset_parameters()

    def _dense_names(self, suffix: str) -> list[str]:
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"] if self.bias else ["weight_ih", "weight_hh"]
        return [f"{name}_{suffix}" for name in names]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew: U(-1/sqrt(N), 1/sqrt(N)) in torch's order, then W_hh by `init`, then the others.

        Args:
            generator: where the numbers come from; None for torch's global generator.
        """
        bound = 1.0 / math.sqrt(self.hidden_size)
        for suffix in self._suffixes():
            for name in self._dense_names(suffix):
                nn.init.uniform_(self._tensor(name), -bound, bound, generator=generator)
        for suffix in self._suffixes():
            if self.init is not None:
                init_.initialize_(self._tensor(f"weight_hh_{suffix}"), self.init, generator)
            self._reset_common(suffix, generator)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters that torch.nn.RNN also has, one list per recurrence, as torch.nn.RNN.all_weights."""
        return [[self._tensor(name) for name in self._dense_names(suffix)] for suffix in self._suffixes()]

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W_hh [N,N] of one recurrence (the parameter itself, without the gain)."""
        return self._tensor(f"weight_hh_{self._suffix(layer, reverse)}")

    def recurrent_matrices(self) -> list[Tensor]:
        """`recurrent_matrix` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._tensor(f"weight_hh_{suffix}") for suffix in self._suffixes()]

    def parameter_roles(self) -> dict[str, str]:
        """Parameter name -> "other": a dense recurrence has neither orthonormal bases nor a spectrum."""
        return {name: "other" for name, _ in self.named_parameters(recurse=False)}

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        weight = self._gained(self._tensor(f"weight_hh_{suffix}"))
        if not self.bias:
            return (weight,)
        return weight, self._gained(self._tensor(f"bias_ih_{suffix}") + self._tensor(f"bias_hh_{suffix}"))

    def _factors(self, suffix: str) -> tuple[tuple[Tensor, ...], Tensor | None]:
        matrix = self._matrix(suffix)
        return matrix[:1], matrix[1] if self.bias else None

    def _op(self) -> tuple[str, dict[str, Any]]:
        return "dense_scan", {"N": self.hidden_size}

    def _scan(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, suffix: str, matrix: tuple[Tensor, ...]
    ) -> Tensor:
        bias = matrix[1] if self.bias else None
        return functional.dense_scan(x, matrix[0], h0, bias=bias, **self._scan_options(suffix, lengths))

    def extra_repr(self) -> str:
        return self._repr_common() + ("" if self.init is None else f", init={self.init!r}")


class FactorizedRNN(_Recurrent):
    """An RNN whose recurrent matrix is W = U diag(s) V^T with orthonormal U and V [N,K] and a spectrum s held near 1.

    h_t = phi(gain (U (s * (V^T h_{t-1})) + W_ih x_t + b)), s = 2 m (sigmoid(p) - 1/2) + 1 in (1 - m, 1 + m): eq. 10 of
    Vorontsov, Trabelsi, Kadoury and Pal, "On orthogonality and learning recurrent networks with long term
    dependencies", 2017. A drop-in for torch.nn.RNN in constructor names, layouts and (output, h_n). U and V stay
    orthonormal only under an optimizer that keeps them so: orthokern.optim.optimizer_for(model) splits the parameters
    and gives GeodesicSGD the bases.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device: as in
            orthokern.nn.RNN.
        dtype: float32 or float64; 16-bit types are refused, orthogonality does not survive in them.
        margin: m >= 0, how far s may go from 1; 0 fixes s = 1 (p is kept and its gradient is zero). None: s itself
            is the parameter, free.
        spectrum_map: "sigmoid" as above, or "tanh", s = m tanh(p) + 1; see orthokern.functional.spectrum. Of no effect
            for margin 0 or None.
        rank: K <= N, columns of U and V; None for N.
        apply: "factored" applies V^T, s and U one after the other and never forms W: 4NK flops per step and
            sequence. "composed" forms W once per forward: 2N^2 per step and sequence, fewer for K > N/2; the same
            function up to rounding. Kept as the attribute `apply_mode`: `module.apply(fn)` is torch.nn.Module's.
        init: of the recurrent matrix. "orthogonal": U and V Haar-distributed, s = 1. "henaff", "cayley", "identity",
            "learned": W is the named orthogonal matrix, s = 1, for K = N. "glorot", "glorot-uniform": the (truncated)
            singular value decomposition of such a matrix, for margin=None. See orthokern.init. Input weights
            U(-1/sqrt(N), 1/sqrt(N)) as torch's, bias 0.
        negative_slope, learned_h0, checkpoint_every, backend, precision, message_clip, gain: as in orthokern.nn.RNN.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N] (one: the second of torch
    adds nothing), u_l0 [N,K], v_l0 [N,K], spectrum_l0 [K] (p, or s if margin is None); and slope_l0 [1],
    modrelu_bias_l0 [N], h0_l0 [N] where asked for.

    Raises InputError, one line, for a bad argument.
    """

    _half_ok = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        margin: float | None = 0.1,
        spectrum_map: str = "sigmoid",
        rank: int | None = None,
        apply: str = "factored",
        init: str = "orthogonal",
        negative_slope: float = 0.01,
        learned_h0: bool = False,
        checkpoint_every: int = 0,
        backend: str | None = None,
        precision: str = "ieee",
        message_clip: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            nonlinearity,
            bias,
            batch_first,
            dropout,
            bidirectional,
            negative_slope=negative_slope,
            learned_h0=learned_h0,
            checkpoint_every=checkpoint_every,
            backend=backend,
            precision=precision,
            message_clip=message_clip,
            gain=gain,
        )
        if margin is not None:
            accepted = "a finite number >= 0, or None for a free spectrum"
            margin = number("margin", margin, accepted)
            if not (math.isfinite(margin) and margin >= 0.0):
                raise InputError(f"margin must be {accepted}, got {margin}")
        self.margin = margin
        if spectrum_map not in functional.SPECTRUM_MAPS:
            raise unknown_name("spectrum_map", spectrum_map, functional.SPECTRUM_MAPS)
        self.spectrum_map = spectrum_map
        self.rank = self.hidden_size if rank is None else positive_int("rank", rank)
        if self.rank > self.hidden_size:
            raise InputError(f"rank must be at most hidden_size = {self.hidden_size}, got {self.rank}")
        if apply not in APPLY:
            raise unknown_name("apply", apply, list(APPLY))
        self.apply_mode = apply
        if init not in init_.INITS:
            raise unknown_name("init", init, list(init_.INITS))
        if init in init_.UNCONSTRAINED and margin is not None:
            raise InputError(
                f"init {init!r} needs margin=None (its singular values are free in (0, 2)), got margin={margin}"
            )
        if self.rank < self.hidden_size and init not in init_.LOWER_RANK:
            raise InputError(
                f"init {init!r} needs rank = hidden_size = {self.hidden_size}, got rank={self.rank}; "
                f"accepted for a lower rank: {', '.join(map(repr, init_.LOWER_RANK))}"
            )
        self.init = init
        dtype, device = parameter_dtype(dtype, half=False), check_device(device)
        n, k = self.hidden_size, self.rank
        for suffix in self._suffixes():
            self._register_input(suffix, device, dtype)
            self._register(f"u_{suffix}", (n, k), device, dtype)
            self._register(f"v_{suffix}", (n, k), device, dtype)
            self._register(f"spectrum_{suffix}", (k,), device, dtype)
            self._register_common(suffix, device, dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew, as the class documentation says; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            self._reset_input(suffix, generator)
            spectrum = self._tensor(f"spectrum_{suffix}")
            init_.factorized_(self._tensor(f"u_{suffix}"), spectrum, self._tensor(f"v_{suffix}"), self.init, generator)
            if self.margin is not None:  # s = 1 is p = 0
                nn.init.zeros_(spectrum)
            self._reset_common(suffix, generator)

    def spectrum(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """s [K] of one recurrence, in the order of the columns of U and V, without the gain; differentiable with
        respect to the parameter."""
        return self._spectrum(self._suffix(layer, reverse))

    def spectra(self) -> list[Tensor]:
        """`spectrum` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._spectrum(suffix) for suffix in self._suffixes()]

    def singular_values(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """Singular values |s| [K] of W (without the gain), detached, in the order of the columns of U and V (not
        sorted), so that each can be followed in time.

        They are |s| because U and V are orthonormal. s itself (see `spectrum`) can be negative only for margin > 1
        or None.
        """
        return self.spectrum(layer, reverse).detach().abs()

    @_autocast.keeps_dtype
    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W = U diag(s) V^T [N,N] of one recurrence (without the gain), composed for inspection; differentiable.
        Forward forms it only with apply="composed"."""
        suffix = self._suffix(layer, reverse)
        return (self._tensor(f"u_{suffix}") * self.spectrum(layer, reverse)) @ self._tensor(f"v_{suffix}").mT

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """The largest |M^T M - I| over the entries of all bases M (U and V of every recurrence)."""
        worst = 0.0
        for name, role in self.parameter_roles().items():
            if role == "geodesic":
                m = self._tensor(name)
                worst = max(worst, float((m.mT @ m - torch.eye(self.rank, dtype=m.dtype, device=m.device)).abs().max()))
        return worst

    def parameter_roles(self) -> dict[str, str]:
        """Parameter name -> "geodesic" (U and V, kept orthonormal), "spectrum" (p or s; `margin` tells which) or
        "other"."""
        roles = {}
        for name, _ in self.named_parameters(recurse=False):
            kind = name.split("_l", 1)[0]
            roles[name] = "geodesic" if kind in ("u", "v") else "spectrum" if kind == "spectrum" else "other"
        return roles

    def _spectrum(self, suffix: str) -> Tensor:
        return functional.spectrum(self._tensor(f"spectrum_{suffix}"), self.margin, self.spectrum_map)

    @_autocast.keeps_dtype
    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        u, v = self._tensor(f"u_{suffix}"), self._tensor(f"v_{suffix}")
        s = self._gained(self._spectrum(suffix))
        return ((u * s) @ v.mT,) if self.apply_mode == "composed" else (u, s, v)

    def _op(self) -> tuple[str, dict[str, Any]]:
        if self.apply_mode == "composed":
            return "dense_scan", {"N": self.hidden_size}
        return "factored_scan", {"N": self.hidden_size, "K": self.rank}

    def _scan(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, suffix: str, matrix: tuple[Tensor, ...]
    ) -> Tensor:
        bias = self._gained(self._tensor(f"bias_{suffix}")) if self.bias else None
        if self.apply_mode == "composed":
            return functional.dense_scan(x, matrix[0], h0, bias=bias, **self._scan_options(suffix, lengths))
        u, s, v = matrix
        return functional.factored_scan(x, u, s, v, h0, bias=bias, **self._scan_options(suffix, lengths))

    def extra_repr(self) -> str:
        text = f"{self._repr_common()}, margin={self.margin}"
        if self.spectrum_map != "sigmoid":
            text += f", spectrum_map={self.spectrum_map!r}"
        if self.rank != self.hidden_size:
            text += f", rank={self.rank}"
        if self.apply_mode != "factored":
            text += f", apply={self.apply_mode!r}"
        return text + ("" if self.init == "orthogonal" else f", init={self.init!r}")
