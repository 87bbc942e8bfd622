"""LSTMs: torch's, and one with peepholes, the baseline that orthogonal recurrences are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern import init as init_
from orthokern._autocast import widened_inside
from orthokern.errors import InputError, number, require
from orthokern.nn._base import LayerOptions, Layers, Sequences
from orthokern.nn._layouts import Resets, zero_padding
from orthokern.ops._common import needs_grad
from orthokern.ops.peephole_scan import peephole_scan

State = tuple[Tensor, Tensor]  # (h, c)
Pair = State | list[Tensor]  # as an argument


_INPUT_BYTES = 16 << 20  # of input terms in inference: half of the largest block that malloc keeps


class LSTM(Layers):
    """torch.nn.LSTM on orthokern's scan.

    Constructor, parameter names, layouts, outputs and gradients are those of torch.nn.LSTM without projections, and so
    are the initial parameters for the same seed. State_dicts load in both directions. The input may also be token ids.

    Args:
        input_size, hidden_size, *args, **options: num_layers, bias, batch_first, dropout, bidirectional, device and
            dtype, as in orthokern.nn.RNN; dtype is float32 or float64.
        proj_size: must be 0; projections are not supported.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [4N, D], weight_hh_l0 [4N, N], bias_ih_l0 [4N],
    bias_hh_l0 [4N], gates in the order input, forget, cell, output, all initially U(-1/sqrt(N), 1/sqrt(N)).

    Raises InputError, one line, for a bad argument. Warns about dropout with one layer, which has no effect.

    Example::

        >>> states, (h, c) = LSTM(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, h.shape, c.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]), torch.Size([1, 4, 8]))
    """

    mode = "LSTM"

    def __init__(
        self, input_size: int, hidden_size: int, *args: Any, proj_size: int = 0, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        require(proj_size == 0, "proj_size", "0 (projections have no kernel)", repr(proj_size))
        self._build()

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        return self._torch_shapes(suffix, 4)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters as torch does; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            self._draw_uniform(generator, *(f"{stem}_{suffix}" for stem in self._torch_shapes(suffix, 4)))

    def forward(  # type: ignore[override]
        self, input: Sequences, hx: Pair | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Sequences, State]:
        """Run all layers over a batch of sequences.

        Args:
            input: as in orthokern.nn.RNN.
            hx: (h, c), a tuple or a list, each as hx of orthokern.nn.RNN; zeros if None.
            lengths: as in orthokern.nn.RNN; the padding is computed, too.

        Returns:
            (output, (h_n, c_n)): output as in orthokern.nn.RNN, the h of the last layer; h_n and c_n as hx, after the
            last step of each sequence. A second derivative is available with ORTHOKERN_BACKEND=reference only.

        Raises:
            InputError: as orthokern.nn.RNN.
        """
        if isinstance(hx, (tuple, list)):
            weight = self._tensor("weight_ih_l0")
            hx = [widened_inside(part, weight) for part in hx]
        output, state = self._forward(input, hx, None, None, lengths)
        # no views of the same tensor, which could not be changed in place
        h_n, c_n = (part.clone(memory_format=torch.contiguous_format) for part in state.chunk(2, -1))
        return output, (h_n, c_n)

    def _checked_hx(self, hx: Any, batch: int | None, device: torch.device, name: str = "hx") -> Tensor | None:
        """[h, c] [recurrences, B, 2N], the form of the state in the layers, or None."""
        if hx is None:
            return None
        if not isinstance(hx, (tuple, list)) or [isinstance(part, Tensor) for part in hx] != [True, True]:
            items = hx if isinstance(hx, (tuple, list)) else [hx]
            got = f"{len(items)} parts" if len(items) > 2 else " and ".join(type(part).__name__ for part in items)
            raise InputError(f"hx must be a pair of tensors (h, c) or None, got {got}")
        check = super()._checked_hx
        parts: Any = [check(part, batch, device, f"{of} of hx") for part, of in zip(hx, "hc", strict=True)]
        return torch.cat(parts, -1)

    def _state_size(self) -> int:
        return 2 * self.hidden_size

    def _peephole(self, suffix: str) -> Tensor:
        return self._tensor(f"weight_hh_{suffix}").new_zeros(3, self.hidden_size)

    def _factors(self, suffix: str) -> tuple[Tensor, Tensor, Tensor | None]:
        bias = self._tensor(f"bias_ih_{suffix}") + self._tensor(f"bias_hh_{suffix}") if self.bias else None
        return self._tensor(f"weight_hh_{suffix}"), self._peephole(suffix), bias

    def _scan(
        self, suffix: str, factors: Any, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        w, peephole, bias = factors
        h, c = (w.new_zeros(x.shape[1], 2 * self.hidden_size) if h0 is None else h0).chunk(2, -1)
        pieces: list[tuple[Tensor, Tensor]] = []
        steps = _steps_at_once(x, w, self._tensor(f"weight_ih_{suffix}"), peephole, bias, h, c)
        for part in (x,) if steps is None else x.split(steps):
            if pieces:
                h, c = (states[-1] for states in pieces[-1])
            pieces.append(peephole_scan(self._input_term(part, suffix, bias), w, peephole, h, c))
        hs, cs = pieces[0] if len(pieces) == 1 else map(torch.cat, zip(*pieces, strict=True))
        return zero_padding(hs, lengths), cs


def _steps_at_once(x: Tensor, w: Tensor, *tensors: Tensor | None) -> int | None:
    """The steps of one scan, None for all. Without gradients, input terms need not be kept; for a long sequence they
    would need new memory in every call, whose first use takes half as long as the product."""
    if not x.is_cpu or torch.compiler.is_compiling() or needs_grad(x, w, *tensors):
        return None
    return max(_INPUT_BYTES // (x.shape[1] * w.shape[0] * w.element_size()), 1)


class PeepholeLSTM(LSTM):
    """torch.nn.LSTM with peepholes (Gers & Schmidhuber 2000), diagonal as in Graves 2013.

    The input and the forget gate also read the previous cell state, and the output gate the new one; with zero
    peepholes it is torch.nn.LSTM. The equations are in ``orthokern/ops/peephole_scan.py``. Constructor names, layouts,
    outputs and parameter names are those of torch.nn.LSTM (without proj_size), whose state_dict loads with
    strict=False. The input may also be token ids. The baseline of Vorontsov et al. 2017, section 3, has N = 128.

    Args:
        input_size, hidden_size, *args, **options: as in LSTM.
        forget_bias: initial bias of the forget gate; no effect without bias.

    Parameters: those of LSTM, and weight_peephole_l0 [3, N], in the order input, forget, output. Initially weight_ih is
    U(-1/sqrt(N), 1/sqrt(N)) as in torch, the four N x N matrices in weight_hh are orthogonal (Haar), and biases and
    peepholes are 0 except the bias of the forget gate.

    Example::

        >>> states, (h, c) = PeepholeLSTM(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, h.shape, c.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]), torch.Size([1, 4, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        forget_bias: float = 1.0,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.forget_bias = number("forget_bias", forget_bias)  # before the constructor, which draws the parameters
        super().__init__(input_size, hidden_size, *args, **options)

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        return {**self._torch_shapes(suffix, 4), "weight_peephole": (3, self.hidden_size)}

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        N = self.hidden_size
        for suffix in self._suffixes():
            self._draw_uniform(generator, f"weight_ih_{suffix}")
            for block in self._tensor(f"weight_hh_{suffix}").detach().chunk(4):
                init_.initialize_(block, "orthogonal", generator)
            nn.init.zeros_(self._tensor(f"weight_peephole_{suffix}"))
            if self.bias:
                nn.init.zeros_(self._tensor(f"bias_ih_{suffix}"))
                nn.init.zeros_(self._tensor(f"bias_hh_{suffix}"))
                nn.init.constant_(self._tensor(f"bias_ih_{suffix}").detach()[N : 2 * N], self.forget_bias)

    def _peephole(self, suffix: str) -> Tensor:
        return self._tensor(f"weight_peephole_{suffix}")

    def extra_repr(self) -> str:
        return self._text(forget_bias=1.0)
