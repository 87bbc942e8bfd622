"""A recurrent module between the tensors of a TensorDict, with TorchRL's conventions."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor, nn

from orthokern.errors import InputError, require


class EpisodeRNN(nn.Module):
    """A recurrent module that takes ``(value, recurrent_state, is_init)`` as TorchRL's GRUModule does.

    It is meant to be wrapped by ``tensordict.nn.TensorDictModule``, and imports neither tensordict nor torchrl::

        policy_core = TensorDictModule(
            EpisodeRNN(orthokern.nn.FactorizedRNN(64, 128)),
            in_keys=["embed", "recurrent_state", "is_init"],
            out_keys=["embed_out", ("next", "recurrent_state")],
        )

    Where is_init is true, a step starts from zeros. A sequence that begins in the middle of an episode starts from its
    recurrent_state.

    Args:
        rnn: a module of one direction, whose forward takes ``resets`` and ``reset_state``, such as RNN, FactorizedRNN,
            GRU, ExpRNN, NonNormalRNN and RotationRNN; batch_first or not.
        recurrent: True: value holds sequences; False: single steps; None: the mode of
            ``torchrl.modules.set_recurrent_mode``, and without one, sequences if value has at least three dimensions.

    Example::

        >>> core = EpisodeRNN(orthokern.nn.RNN(3, 8))
        >>> is_init = torch.zeros(4, 100, 1, dtype=torch.bool)
        >>> states, last = core(torch.randn(4, 100, 3), None, is_init)
        >>> states.shape, last.shape
        (torch.Size([4, 100, 8]), torch.Size([4, 100, 1, 8]))
    """

    def __init__(self, rnn: nn.Module, recurrent: bool | None = None) -> None:
        super().__init__()
        missing = [name for name in ("num_layers", "hidden_size", "batch_first") if not hasattr(rnn, name)]
        if missing or getattr(rnn, "bidirectional", False):
            why = f"without {missing[0]}" if missing else "and bidirectional, which resets exclude"
            raise InputError(
                f"rnn is of type {type(rnn).__name__} {why}; "
                "accepted: a module such as orthokern.nn.RNN, of one direction"
            )
        accepted = inspect.signature(rnn.forward).parameters
        if "resets" not in accepted and all(p.kind is not p.VAR_KEYWORD for p in accepted.values()):
            name = f"{type(rnn).__module__.partition('.')[0]}'s {type(rnn).__name__}"
            raise InputError(
                f"rnn is {name}, whose forward takes no resets; accepted: a module such as orthokern.nn.RNN or GRU"
            )
        if recurrent not in (None, True, False):
            raise InputError(f"recurrent must be True, False or None, got {recurrent!r}")
        self.rnn = rnn
        self.recurrent = recurrent

    def forward(self, value: Tensor, recurrent_state: Tensor | None, is_init: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step, or sequences.

        Args:
            value: [..., D] for single steps, [..., T, D] for sequences; any number of leading dimensions.
            recurrent_state: [..., L, N], or for sequences [..., T, L, N], of which only the first step is read; L
                layers. None: zeros.
            is_init: bool [..., 1], or for sequences [..., T, 1].

        Returns:
            (states, recurrent_state): states [..., N] or [..., T, N] of the last layer; recurrent_state in its shape.
            For sequences it holds the last states at the last step, and zeros before.

        Raises:
            InputError: an argument has another type, shape or dtype; or as forward of the module.
        """
        require(isinstance(value, Tensor), "value", "a Tensor", type(value).__name__)
        state = recurrent_state
        require(state is None or isinstance(state, Tensor), "recurrent_state", "a Tensor or None", type(state).__name__)
        sequences = self._has_sequences(value)
        if value.dim() < (2 if sequences else 1) or 0 in value.shape:
            accepted = ("[..., T, D]" if sequences else "[..., D]") + ", nothing empty"
            raise InputError(f"value has shape {tuple(value.shape)}; accepted: {accepted}")
        shape = (*value.shape[:-1], 1)
        if not isinstance(is_init, Tensor) or is_init.dtype != torch.bool or tuple(is_init.shape) != shape:
            got = f"{is_init.dtype} {tuple(is_init.shape)}" if isinstance(is_init, Tensor) else type(is_init).__name__
            raise InputError(f"is_init is {got}; accepted: torch.bool {shape}, the shape of value with one feature")
        lead, T = value.shape[:-2] if sequences else value.shape[:-1], value.shape[-2] if sequences else 1
        x, resets = value.reshape(-1, T, value.shape[-1]), is_init.reshape(-1, T)
        layers, hidden = self.rnn.num_layers, self.rnn.hidden_size
        assert isinstance(layers, int) and isinstance(hidden, int)
        zeros = x.new_zeros(layers, x.shape[0], hidden)
        hx = zeros
        if recurrent_state is not None:
            held = (*lead, *((T,) if sequences else ()), layers, hidden)
            if tuple(recurrent_state.shape) != held:
                raise InputError(f"recurrent_state has shape {tuple(recurrent_state.shape)}; accepted: {held}")
            hx = recurrent_state.reshape(-1, T, layers, hidden)[:, 0].transpose(0, 1)
        if not self.rnn.batch_first:
            x, resets = x.transpose(0, 1), resets.mT
        states, last = self.rnn(x, hx, resets=resets, reset_state=zeros)
        states, last = states if self.rnn.batch_first else states.transpose(0, 1), last.transpose(0, 1)
        if not sequences:
            return states.reshape(*lead, hidden), last.reshape(*lead, layers, hidden)
        padding = last.new_zeros(x.numel() // (T * x.shape[-1]), T - 1, layers, hidden)
        full = torch.cat([padding, last.unsqueeze(1)], 1)
        return states.reshape(*lead, T, hidden), full.reshape(*lead, T, layers, hidden)

    def _has_sequences(self, value: Tensor) -> bool:
        if self.recurrent is not None:
            return self.recurrent
        torchrl = sys.modules.get("torchrl.modules")  # its mode can only be set if it has been imported
        mode = None if torchrl is None else torchrl.recurrent_mode()
        return value.dim() >= 3 if mode is None else bool(mode)

    def extra_repr(self) -> str:
        return "" if self.recurrent is None else f"recurrent={self.recurrent}"
