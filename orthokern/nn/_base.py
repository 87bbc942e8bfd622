"""The parameters of a recurrent module, and the checks of its arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from orthokern import functional
from orthokern._activations import ACTIVATIONS
from orthokern.errors import InputError, unknown_name
from orthokern.nn._checks import (
    check_backend,
    check_held,
    check_input,
    check_resets,
    finite,
    flag,
    new_parameter,
    positive_int,
    recurrent_settings,
    settings_text,
)
from orthokern.nn._draws import draw
from orthokern.nn._layouts import Resets
from orthokern.nn.activations import draw_start
from orthokern.ops._checks import strided

NONLINEARITIES = tuple(ACTIVATIONS)


class RecurrentOptions(TypedDict, total=False):
    """The options that all modules with a scan of one matrix share; see orthokern.nn.RNN."""

    negative_slope: float
    learned_h0: bool
    checkpoint_every: int
    backend: str | None
    precision: str
    message_clip: float
    gain: float


class Layers(nn.Module):
    """The parameters and settings of layers and directions, and checks of the arguments of a forward."""

    _half_ok = True

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
        negative_slope: float = 0.01,
        learned_h0: bool = False,
        checkpoint_every: int = 0,
        backend: str | None = None,
        precision: str = "ieee",
        message_clip: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters, by name
        given = recurrent_settings(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, stacklevel=4
        )
        self.input_size, self.hidden_size, self.num_layers = given[:3]
        self.bias, self.batch_first, self.dropout, self.bidirectional = given[3:]
        if nonlinearity not in NONLINEARITIES:
            raise unknown_name("nonlinearity", nonlinearity, list(NONLINEARITIES))
        if ACTIVATIONS[nonlinearity].pairs and self.hidden_size % 2:
            raise InputError(
                f"hidden_size must be even for nonlinearity {nonlinearity!r} (it works on pairs of units), "
                f"got {hidden_size}"
            )
        self.nonlinearity = nonlinearity
        self.negative_slope = finite("negative_slope", negative_slope)
        self.learned_h0 = flag("learned_h0", learned_h0)
        self.checkpoint_every = positive_int("checkpoint_every", checkpoint_every, minimum=0)
        self.backend = check_backend(backend)
        if precision not in functional.PRECISIONS:
            raise unknown_name("precision", precision, functional.PRECISIONS)
        self.precision = precision
        self.message_clip = finite("message_clip", message_clip, ", 0 or more")
        self.gain = finite("gain", gain, " above 0")

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
        """Registers the parameter of the activation and the initial state of one recurrence."""
        learned = ACTIVATIONS[self.nonlinearity].learned
        if learned is not None:
            size = self.hidden_size if learned.per_unit else 1
            self._register(f"{learned.stem}_{suffix}", (size,), device, dtype)
        if self.learned_h0:
            self._register(f"h0_{suffix}", (self.hidden_size,), device, dtype)

    def _register_input(self, suffix: str, device: Any, dtype: torch.dtype) -> None:
        """Registers the input weight and the bias, for a recurrence with a single bias."""
        self._register(f"weight_ih_{suffix}", (self.hidden_size, self._inputs(suffix)), device, dtype)
        if self.bias:
            self._register(f"bias_{suffix}", (self.hidden_size,), device, dtype)

    def _reset_input(self, suffix: str, generator: torch.Generator | None) -> None:
        """Initialises the input weight with U(-1/sqrt(N), 1/sqrt(N)), as torch does, and the bias with 0."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        draw(nn.init.uniform_, self._tensor(f"weight_ih_{suffix}"), -bound, bound, generator=generator)
        if self.bias:
            nn.init.zeros_(self._tensor(f"bias_{suffix}"))

    def _reset_common(self, suffix: str, generator: torch.Generator | None) -> None:
        learned = ACTIVATIONS[self.nonlinearity].learned
        if learned is not None:
            draw_start(self._tensor(f"{learned.stem}_{suffix}"), learned, generator)
        if self.learned_h0:
            nn.init.zeros_(self._tensor(f"h0_{suffix}"))

    def _tensor(self, name: str) -> Tensor:
        tensor: Any = self._parameters.get(name)
        if tensor is None:  # a buffer, or an attribute that replaces a parameter
            tensor = self._buffers.get(name)
            tensor = getattr(self, name) if tensor is None else tensor
        check_held(name, tensor, self._shapes.get(name))
        checked: Tensor = tensor
        return checked

    def _act_param(self, suffix: str) -> Tensor | None:
        parameter = ACTIVATIONS[self.nonlinearity].parameter
        if parameter is None:
            return None
        if parameter.stem is None:
            # not a buffer: state_dicts of torch have no such key, and a non-persistent one is lost by Module.to_empty
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
        """Does nothing. It exists for code written for torch.nn.RNN, where it serves cuDNN."""

    def parameter_roles(self) -> dict[str, str]:
        """Parameter name -> "other", since there are no orthonormal bases and no spectrum."""
        return {name: "other" for name, _ in self.named_parameters(recurse=False)}

    def _gained(self, tensor: Tensor) -> Tensor:
        """A term of the pre-activation, times the gain."""
        return tensor if self.gain == 1.0 else tensor * self.gain

    def _time_first(self, tensor: Tensor, batched: bool) -> Tensor:
        """[T,B,...] from the layout of an input."""
        if not batched:
            return tensor.unsqueeze(1)
        return tensor.transpose(0, 1) if self.batch_first else tensor

    def _checked_hx(self, hx: Tensor | None, data: Tensor, batched: bool) -> Tensor | None:
        """hx with a batch, or None."""
        if hx is None:
            return None
        self._check_hx(hx, data.shape[1] if batched else None, data.device)
        return hx if batched else hx.unsqueeze(1)

    def _cuts(
        self,
        resets: Tensor | None,
        reset_state: Tensor | None,
        shape: Sequence[int],
        device: torch.device,
        batched: bool,
    ) -> Resets | None:
        """resets and reset_state of a call of shape (T, B), checked and with a batch."""
        (T, B), ways = shape, 2 if self.bidirectional else 1
        if resets is None:
            if reset_state is not None:
                raise InputError("reset_state is given without resets; accepted: with resets only")
            return None
        order = ((B, T), "B, T") if self.batch_first else ((T, B), "T, B")
        wanted, letters = order if batched else ((T,), "T")
        check_resets(resets, wanted, letters, device, ways)
        if reset_state is not None:
            self._check_hx(reset_state, B if batched else None, device, "reset_state")
            reset_state = reset_state if batched else reset_state.unsqueeze(1)
        return Resets(self._time_first(resets, batched), reset_state)

    def _check_input(self, input: Tensor, *, packed: bool = False, small_ids: bool = False) -> bool:
        """Checks the input except T and B; True for token ids."""
        weight = self._tensor("weight_ih_l0")
        if weight.dtype in (torch.bfloat16, torch.float16) and not self._half_ok:
            raise InputError(
                f"parameters have dtype {weight.dtype}, in which orthogonality is lost; "
                "accepted: torch.float32, torch.float64"
            )
        return check_input(
            input, weight, self.input_size, batch_first=self.batch_first, packed=packed, small_ids=small_ids
        )

    def _check_hx(self, hx: Tensor, batch: int | None, device: torch.device, name: str = "hx") -> None:
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

    def _repr_init(self, usual: bool, init: str | None, max_angle: float | None) -> str:
        """The text of both arguments in extra_repr; usual: init is the default."""
        text = "" if usual else f", init={init!r}"
        return text if max_angle is None else f"{text}, max_angle={max_angle}"

    def _repr_common(self) -> str:
        text = settings_text(
            self,
            num_layers=1,
            nonlinearity="tanh",
            bias=True,
            batch_first=False,
            dropout=0.0,
            bidirectional=False,
            learned_h0=False,
            checkpoint_every=0,
            backend=None,
            precision="ieee",
            message_clip=0.0,
            gain=1.0,
        )
        row = ACTIVATIONS[self.nonlinearity]
        if row.parameter is not None and row.learned is None:
            text += f", negative_slope={self.negative_slope}"
        return text
