"""The GRU of torch, and the variant of Kanai et al. 2017."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern import init as init_
from orthokern._gru_parameters import constrained_weights
from orthokern._scan_contract import GruArgs
from orthokern.errors import InputError, one_of
from orthokern.nn._base import LayerOptions, Layers
from orthokern.nn._checks import above_zero, check_backend, draw, flag
from orthokern.nn._layouts import Resets
from orthokern.ops._checks import own_parameter
from orthokern.ops.gru_scan import VARIANTS, scan

__all__ = ["GRU"]

INITS = ("kanai", "torch")


class GRU(Layers):
    """torch.nn.GRU on orthokern's scan, and the GRU of Kanai et al. 2017.

        r_t = s(W_ir x_t + W_hr h_{t-1} + b),    z_t = s(W_iz x_t + W_hz h_{t-1} + b)
        n_t = tanh(W_in x_t + b_in + W_hn (r_t * h_{t-1}) + b_hn)      variant "kanai" (Kanai et al. 2017, eq. 1 to 4)
        n_t = tanh(W_in x_t + b_in + r_t * (W_hn h_{t-1} + b_hn))      variant "torch" (torch.nn.GRU, cuDNN)
        h_t = z_t * h_{t-1} + (1 - z_t) * n_t

    with s the logistic function and * elementwise. z = 1 keeps the state, here as in the paper (eq. 3) and in torch.

    Without input and biases h = 0 is a fixed point of both variants, where the map's Jacobian is J = W_hn / 4 + I / 2
    (the paper's lemma 2; ``jacobian_at_zero``). If the largest singular value of W_hn is below 2, the spectral radius
    of J is below 1 (lemma 3), and small states decay to 0 (theorem 1). ``orthokern.optim.SpectralNormProjection``
    maintains this bound.

    Constructor, parameter names, layouts, outputs, gradients and, for the same seed, initial parameters are those of
    torch.nn.GRU, whose state_dict can be loaded. ``variant="kanai"`` is another cell. As in the paper, it has no biases
    unless they are requested, because h = 0 is not a fixed point with biases. The input may also be token ids.

    Args:
        input_size, hidden_size, *args, **options: num_layers, bias (default True for variant "torch"), batch_first,
            dropout, bidirectional, device, dtype, learned_h0 and backend, as in orthokern.nn.RNN; dtype is float32 or
            float64.
        variant: "torch" or "kanai", see above.
        init: "kanai": every weight N(0, init_std^2) except W_hn, which is orthogonal (Haar), and biases 0 (section 4.1
            of the paper); "torch": all U(-1/sqrt(N), 1/sqrt(N)), for the same seed the values of torch.nn.GRU. None:
            the initialisation with the name of the variant.
        init_std: standard deviation for init "kanai"; None for 1/sqrt(N), as in the paper's language model. Its music
            models use 0.01/sqrt(N).

    The cpu backend skips the padding of a PackedSequence.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [3N, D], weight_hh_l0 [3N, N], bias_ih_l0 [3N],
    bias_hh_l0 [3N], blocks in the order r, z, n; and h0_l0 [N] with learned_h0.

    Raises InputError with a message of one line for an invalid argument.

    Example::

        >>> states, last = GRU(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

    mode = "GRU"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        variant: str = "torch",
        init: str | None = None,
        init_std: float | None = None,
        learned_h0: bool = False,
        backend: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        variant = one_of("variant", variant, VARIANTS)
        if len(args) < 2:  # num_layers, bias
            options.setdefault("bias", variant == "torch")
        super().__init__(input_size, hidden_size, *args, **options)
        self.learned_h0, self.backend = flag("learned_h0", learned_h0), check_backend("backend", backend)
        self.variant = variant
        self.init = variant if init is None else one_of("init", init, INITS)
        if init_std is not None and self.init != "kanai":
            raise InputError(f"init_std is {init_std!r}, but init is {self.init!r}: accepted with init 'kanai' only")
        self.init_std = self.hidden_size**-0.5 if init_std is None else above_zero("init_std", init_std)
        self._build()

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        shapes = self._torch_shapes(suffix, 3)
        return {**shapes, "h0": (self.hidden_size,)} if self.learned_h0 else shapes

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            for name in (f"{stem}_{suffix}" for stem in self._torch_shapes(suffix, 3)):
                if self.init == "torch":
                    self._draw_uniform(generator, name)
                elif name.startswith("bias"):
                    nn.init.zeros_(self._tensor(name))
                else:
                    draw(nn.init.normal_, self._tensor(name), 0.0, self.init_std, generator=generator)
        for suffix in self._suffixes():
            if self.init == "kanai":
                init_.initialize_(self._candidate(f"weight_hh_{suffix}").detach(), "orthogonal", generator)
            if self.learned_h0:
                nn.init.zeros_(self._tensor(f"h0_{suffix}"))

    def _candidate(self, name: str) -> Tensor:
        """The candidate's block of a weight: rows [2N, 3N)."""
        return self._tensor(name)[2 * self.hidden_size :]

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W_hn [N, N] of one recurrence, the constrained matrix (a view of weight_hh)."""
        return self._candidate(f"weight_hh_{self._suffix(layer, reverse)}")

    def recurrent_matrices(self) -> list[Tensor]:
        """`recurrent_matrix` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._candidate(f"weight_hh_{suffix}") for suffix in self._suffixes()]

    def jacobian_at_zero(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """J = W_hn / 4 + I / 2 [N, N]: dh_t/dh_{t-1} at h = 0 without input and biases (Kanai et al., lemma 2)."""
        w = self.recurrent_matrix(layer, reverse)
        return w / 4 + torch.eye(self.hidden_size, dtype=w.dtype, device=w.device) / 2

    def spectral_constraints(self, inputs: str = "upper") -> list[tuple[nn.Parameter, slice]]:
        """The matrices that Kanai et al. 2017 constrain, as (parameter, its rows), see SpectralNormProjection.

        Args:
            inputs: the input matrices W_in in addition to all W_hn: of the layers above the first ("upper"), of all
                layers ("all"), or "none".

        Returns:
            (parameter [3N, D] or [3N, N], slice of N rows) of each; none of a frozen GRU, which has no parameters.

        Raises:
            InputError: an unknown `inputs`, or a weight that is computed from others (pruned, parametrized).
        """
        names = constrained_weights(self._suffixes(), inputs)
        rows = slice(2 * self.hidden_size, 3 * self.hidden_size)
        result = [own_parameter(self, name) for name in names if name not in self._buffers]
        # torch.func.functional_call replaces parameters by other tensors
        return [(parameter, rows) for parameter in result if isinstance(parameter, nn.Parameter)]

    def _factors(self, suffix: str) -> tuple[Tensor, Tensor | None]:
        return self._tensor(f"weight_hh_{suffix}"), self._tensor(f"bias_hh_{suffix}") if self.bias else None

    def _scan(self, suffix: str, *args: Any) -> Tensor:
        return scan(self._args(suffix, *args))

    def _args(
        self,
        suffix: str,
        factors: tuple[Tensor, Tensor | None],
        cuts: Resets | None,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
    ) -> GruArgs:
        w, bias = factors
        return GruArgs(
            self._input_term(x, suffix, self._tensor(f"bias_ih_{suffix}") if self.bias else None),
            w,
            w.new_zeros(x.shape[1], self.hidden_size) if h0 is None else h0,
            bias,
            self.variant,
            self.backend,
            lengths,
            None if cuts is None else cuts.resets,
            None if cuts is None else h0 if cuts.reset_state is None else cuts.reset_state,
        )

    def extra_repr(self) -> str:
        usual = {
            "bias": self.variant == "torch",
            "variant": "torch",
            "init": self.variant,
            "init_std": self.hidden_size**-0.5,
        }
        return self._text(**usual, learned_h0=False, backend=None)
