"""An LSTM with peepholes: the baseline that orthogonal recurrences are compared with."""

from __future__ import annotations

import math
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from orthokern import _autocast
from orthokern import init as init_
from orthokern._autocast import widened
from orthokern.errors import InputError
from orthokern.nn._checks import (
    check_device,
    check_held,
    check_ids,
    check_input,
    check_packed,
    finite,
    new_parameter,
    parameter_dtype,
    recurrent_settings,
    settings_text,
)
from orthokern.nn._draws import draw
from orthokern.ops._checks import strided
from orthokern.ops._linear import linear
from orthokern.ops.peephole_scan import peephole_scan

State = tuple[Tensor, Tensor]  # (h, c)
Pair = State | list[Tensor]  # as an argument


class PeepholeLSTM(nn.Module):
    """torch.nn.LSTM with peepholes (Gers & Schmidhuber 2000), diagonal as in Graves 2013.

    The input and the forget gate also read the previous cell state, and the output gate the new one; with peepholes of
    zero it is torch.nn.LSTM. The equations are in ``orthokern/ops/peephole_scan.py``. Constructor names, layouts,
    outputs and parameter names are those of torch.nn.LSTM (without proj_size), whose state_dict loads with
    strict=False. The input may also be token ids. The baseline of Vorontsov et al. 2017, section 3, has N = 128.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as in
            orthokern.nn.RNN; dtype is float32 or float64.
        forget_bias: initial bias of the forget gate; no effect without bias.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [4N, D], weight_hh_l0 [4N, N], bias_ih_l0 [4N],
    bias_hh_l0 [4N], gates in the order input, forget, cell, output; weight_peephole_l0 [3, N], in the order input,
    forget, output. Initially weight_ih is U(-1/sqrt(N), 1/sqrt(N)) as in torch, the four N x N matrices in weight_hh
    are orthogonal (Haar), and biases and peepholes are 0 except the bias of the forget gate.

    Raises InputError, one line, for a bad argument. Warns of a dropout with one layer, which has no effect.

    Example::

        >>> states, (h, c) = PeepholeLSTM(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, h.shape, c.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]), torch.Size([1, 4, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        forget_bias: float = 1.0,
    ) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters, by name
        given = recurrent_settings(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, stacklevel=3
        )
        self.input_size, self.hidden_size, self.num_layers = given[:3]
        self.bias, self.batch_first, self.dropout, self.bidirectional = given[3:]
        self.forget_bias = finite("forget_bias", forget_bias)
        dtype, device = parameter_dtype(dtype, half=False), check_device(device)
        n, ways = self.hidden_size, 2 if self.bidirectional else 1
        for layer, suffix in self._recurrences():
            shapes: dict[str, tuple[int, ...]] = {
                "weight_ih": (4 * n, ways * n if layer else self.input_size),
                "weight_hh": (4 * n, n),
            }
            if self.bias:
                shapes |= {"bias_ih": (4 * n,), "bias_hh": (4 * n,)}
            shapes["weight_peephole"] = (3, n)
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_{suffix}", new_parameter(f"{name}_{suffix}", shape, device, dtype))
                self._shapes[f"{name}_{suffix}"] = shape
        self.reset_parameters()

    def _recurrences(self) -> list[tuple[int, str]]:
        """(layer, suffix of the parameters' names) in torch's order."""
        ways = ("", "_reverse") if self.bidirectional else ("",)
        return [(layer, f"l{layer}{way}") for layer in range(self.num_layers) for way in ways]

    def _tensor(self, name: str) -> Tensor:
        tensor = cast(Tensor, getattr(self, name))
        check_held(name, tensor, self._shapes.get(name))
        return tensor

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        n = self.hidden_size
        for _, suffix in self._recurrences():
            bound = 1.0 / math.sqrt(n)
            draw(nn.init.uniform_, self._tensor(f"weight_ih_{suffix}"), -bound, bound, generator=generator)
            for block in self._tensor(f"weight_hh_{suffix}").detach().chunk(4):
                init_.initialize_(block, "orthogonal", generator)
            nn.init.zeros_(self._tensor(f"weight_peephole_{suffix}"))
            if self.bias:
                nn.init.zeros_(self._tensor(f"bias_ih_{suffix}"))
                nn.init.zeros_(self._tensor(f"bias_hh_{suffix}"))
                nn.init.constant_(self._tensor(f"bias_ih_{suffix}").detach()[n : 2 * n], self.forget_bias)

    def flatten_parameters(self) -> None:
        """Does nothing. It exists for code written for torch.nn.LSTM, where it serves cuDNN."""

    @overload
    def forward(self, input: Tensor, hx: Pair | None = None) -> tuple[Tensor, State]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Pair | None = None) -> tuple[PackedSequence, State]: ...

    def forward(self, input: Tensor | PackedSequence, hx: Pair | None = None) -> tuple[Tensor | PackedSequence, State]:
        """Run all layers over a batch of sequences.

        Args:
            input: as in orthokern.nn.RNN.
            hx: (h, c), a tuple or a list, each as hx of orthokern.nn.RNN; zeros if None.

        Returns:
            (output, (h_n, c_n)): output as in orthokern.nn.RNN, the h of the last layer; h_n and c_n as hx, after the
            last step of each sequence. A second derivative is available with ORTHOKERN_BACKEND=reference only.

        Raises:
            InputError: as orthokern.nn.RNN.
        """
        kind = self._tensor("weight_ih_l0").device.type
        if _autocast.is_on(kind):
            with torch.autocast(kind, enabled=False):
                dtype = self._tensor("weight_ih_l0").dtype
                state: Any = tuple(widened(one, dtype) for one in hx) if isinstance(hx, (tuple, list)) else hx
                return self.forward(widened(input, dtype), state)
        if isinstance(input, PackedSequence):
            self._check_input(input.data, packed=True)
            check_packed(input)
            data, lengths = pad_packed_sequence(input)  # [T, B, ..] in the caller's order
            output, state = self._run(data, self._states(hx, data.shape[1], data), lengths.to(data.device))
            if input.sorted_indices is not None:
                output, lengths = output.index_select(1, input.sorted_indices), lengths[input.sorted_indices.cpu()]
            alive = torch.arange(len(output), device=lengths.device).unsqueeze(1) < lengths
            packed = output[alive.to(output.device)]
            return PackedSequence(packed, input.batch_sizes, input.sorted_indices, input.unsorted_indices), state
        tokens = self._check_input(input)
        batched = input.dim() == (2 if tokens else 3)
        data = (input.transpose(0, 1) if self.batch_first else input) if batched else input.unsqueeze(1)
        if data.shape[0] < 1 or data.shape[1] < 1:
            raise InputError(
                f"input has T={data.shape[0]} and B={data.shape[1]}; accepted: at least 1 time step and 1 sequence"
            )
        output, (h_n, c_n) = self._run(data, self._states(hx, data.shape[1] if batched else None, data), None)
        if not batched:
            return output.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        return (output.transpose(0, 1) if self.batch_first else output), (h_n, c_n)

    def _run(self, data: Tensor, states: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        """data [T, B, ..], states [recurrences, B, N] each, lengths [B] or None for T. Steps after the end of a
        sequence are computed but not used."""
        outputs: list[Tensor] = []
        ends: list[State] = []
        for (layer, suffix), h0, c0 in zip(self._recurrences(), *states, strict=True):
            if layer and suffix == f"l{layer}":  # the first recurrence of a layer: the outputs so far are its input
                data, outputs = _beside(outputs), []
                if self.dropout > 0.0 and self.training:
                    data = nn.functional.dropout(data, self.dropout, training=True)
            reverse = suffix.endswith("_reverse")
            x = _reversed(data, lengths) if reverse else data
            hs, cs = peephole_scan(
                self._input_term(x, suffix),
                self._tensor(f"weight_hh_{suffix}"),
                self._tensor(f"weight_peephole_{suffix}"),
                h0,
                c0,
            )
            if lengths is None:
                ends.append((hs[-1], cs[-1]))
            else:
                last = (lengths - 1, torch.arange(len(lengths), device=lengths.device))
                ends.append((hs[last], cs[last]))
            outputs.append(_reversed(hs, lengths) if reverse else hs)
        h_n, c_n = (torch.stack(end) for end in zip(*ends, strict=True))
        return _beside(outputs), (h_n, c_n)

    def _input_term(self, x: Tensor, suffix: str) -> Tensor:
        """W_ih x + b of all steps [T, B, 4N], by one product, or by one look-up for token ids."""
        weight = self._tensor(f"weight_ih_{suffix}")
        bias = self._tensor(f"bias_ih_{suffix}") + self._tensor(f"bias_hh_{suffix}") if self.bias else None
        if x.is_floating_point():
            return linear(x, weight, bias)
        table = weight.mT if bias is None else weight.mT + bias
        return nn.functional.embedding(x, table)

    def _check_input(self, input: Tensor, *, packed: bool = False) -> bool:
        """Checks the input except T and B; True for token ids."""
        weight = self._tensor("weight_ih_l0")
        tokens = check_input(input, weight, self.input_size, batch_first=self.batch_first, packed=packed)
        if tokens and input.numel():
            check_ids(input, self.input_size)
        return tokens

    def _states(self, hx: Pair | None, batch: int | None, data: Tensor) -> State:
        """(h, c) [recurrences, B, N], zeros for None. batch is None for one sequence, with data [T, 1, ..]."""
        n, rows = self.hidden_size, self.num_layers * (2 if self.bidirectional else 1)
        weight = self._tensor("weight_ih_l0")
        if hx is None:
            zeros = weight.new_zeros(rows, data.shape[1], n)
            return zeros, zeros
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise InputError(f"hx must be a pair of tensors (h, c) or None, got {type(hx).__name__}")
        shape = (rows, n) if batch is None else (rows, batch, n)
        for name, state in zip("hc", hx, strict=True):
            if not isinstance(state, Tensor) or tuple(state.shape) != shape:
                result = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
                raise InputError(f"{name} of hx is {result}; accepted: {shape}")
            strided(f"{name} of hx", state)
            if state.dtype != weight.dtype or state.device != weight.device:
                raise InputError(
                    f"{name} of hx is {state.dtype} on {state.device}; accepted: {weight.dtype} on {weight.device}"
                )
        h, c = hx
        return (h.unsqueeze(1), c.unsqueeze(1)) if batch is None else (h, c)

    def extra_repr(self) -> str:
        return settings_text(
            self, num_layers=1, bias=True, batch_first=False, dropout=0.0, bidirectional=False, forget_bias=1.0
        )


def _beside(outputs: list[Tensor]) -> Tensor:
    """The outputs of both directions of a layer side by side; without a copy where there is one."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x [T, B, ..] with the steps of each sequence in reverse order; padding stays in place."""
    if lengths is None:
        return x.flip(0)
    step = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[torch.where(step < lengths, lengths - 1 - step, step), torch.arange(x.shape[1], device=x.device)]
