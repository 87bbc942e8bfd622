"""A recurrence with a dense matrix, with the interface of torch.nn.RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from orthokern import init as init_
from orthokern.errors import one_of
from orthokern.nn._recurrent import NONLINEARITIES, Recurrent, RecurrentOptions

__all__ = ["NONLINEARITIES", "RNN"]


class RNN(Recurrent):
    """torch.nn.RNN on orthokern's scan: h_t = phi(gain W_hh h_{t-1} + b_hh + W_ih x_t + b_ih), with a gain of 1.

    Constructor, parameter names, layouts, outputs and gradients are those of torch.nn.RNN, and so are the initial
    parameters for the same seed. A state_dict of torch.nn.RNN can be loaded, and torch.nn.RNN can load that of this
    module unless it has further parameters (a slope, a modReLU bias, a learned state).

    Args:
        input_size: D, features of the input, or the number of token ids for integer input.
        hidden_size: N.
        num_layers: stacked recurrences, 1 by default; the input of each is the states of the one below. The arguments
            from here to bidirectional may be positional, in this order.
        nonlinearity: one of orthokern.functional.ACTIVATIONS, "tanh" by default; orthokern.ops.activations.activation
            has the equations. "prelu" learns one slope per recurrence, initially 0.25; "modrelu" learns a bias [N],
            initially U(-0.01, 0.01); "oplu" works on pairs of units, so N must be even.
        bias: learn bias_ih and bias_hh (two, as in torch; only their sum has an effect); True by default.
        batch_first: input and output are [B,T,..]; hx and h_n are not affected.
        dropout: in [0, 1], on the output of every layer but the last, when training.
        bidirectional: a second recurrence per layer that runs from T-1 to 0; outputs are concatenated.
        device, dtype: of the parameters, by keyword. float32 or float64; this class also has bfloat16 and float16, by
            the reference backend.
        init: initialisation of every W_hh: None (torch's U(-1/sqrt(N), 1/sqrt(N))), "orthogonal", "henaff",
            "cayley", "identity", "glorot", "glorot-uniform", "learned"; see orthokern.init. Everything
            else is initialised as in torch.
        max_angle: for init "henaff" and "cayley", as in orthokern.nn.FactorizedRNN.
        negative_slope: the fixed slope of "leaky_relu", 0.01 by default.
        learned_h0: learn the initial state of each recurrence (parameters h0_l0 [N], ..., initially zero), used if
            forward gets no hx.
        checkpoint_every: 0 (the default) stores all states for backward; k stores every k-th and recomputes the others.
            The results are bitwise the same.
        backend: None or "auto", "reference", "cpu", "triton", "cuda"; see orthokern.dispatch.
        precision: the lowest precision of float32 products that a kernel may use: "ieee" (exact, the default),
            "3xtf32", "tf32" or "bf16"; states and sums stay float32. Of these the CPU has "ieee" and, with AVX512_BF16,
            "bf16". See orthokern.functional.factored_scan.
        message_clip: c > 0 clips the gradient of every pre-activation to [-c, c], element by element and in every step
            of the backward; 0 (the default) does not clip. See orthokern.functional.factored_scan.
        gain: factor > 0 that multiplies the recurrent matrix only. With an orthogonal W it is the spectral radius. The
            parameters, recurrent_matrix() and state_dict() do not include it. (The factor 1.05 in section 3.1.3 of
            Vorontsov et al. 2017 also multiplies the input and the bias, whose parameters can contain it.)
        leak: l in (0, 1], the share of phi in a step: h_t = (1 - l) h_{t-1} + l phi(...). In a network of leaky units
            it is dt / tau, the time step divided by the time constant. 1 (the default) is no leak.
        learned_leak: learn one leak per unit, the logistic function of the parameter leak_logit_l0 [N]. Its initial
            value is ``leak``, below 1. For a fixed leak of each unit, set this parameter, and set its requires_grad to
            False.
        noise: standard deviation of the Gaussian noise that is added to every pre-activation in every step of training.
            0 by default. The attribute ``noise_generator`` is the torch.Generator, on the device of the module; None
            for torch's global one. torch.utils.checkpoint restores only the global one. With another generator, use
            ``checkpoint_every`` instead. For a leaky network with noise of intensity sigma in continuous time, the
            standard deviation is sigma sqrt(2 / leak).
        noise_in_eval: add the noise after ``eval()`` too.

    The cpu backend skips the padding of a PackedSequence.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], weight_hh_l0 [N,N], bias_ih_l0 [N],
    bias_hh_l0 [N]; and slope_l0 [1], modrelu_bias_l0 [N], leak_logit_l0 [N], h0_l0 [N] if the arguments select them.

    Raises InputError with a message of one line for an invalid argument.

    Example::

        >>> states, last = RNN(3, 8, num_layers=2)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([2, 4, 8]))
    """

    _half_ok = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        init: str | None = None,
        max_angle: float | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        if init is not None:
            one_of("init", init, init_.INITS)
        if max_angle is not None:
            init_.check_rotations(init, max_angle)
        self.init, self.max_angle = init, max_angle
        self.mode = f"RNN_{self.nonlinearity.upper()}"
        self._build()

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        return {**self._torch_shapes(suffix, 1), **self._common_shapes()}

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters: U(-1/sqrt(N), 1/sqrt(N)) in torch's order, then W_hh by `init`, then the others.

        Args:
            generator: a CPU generator, whatever the device of the module; None for torch's global generators.

        Raises:
            InputError: for a generator that is not on the CPU.
        """
        for suffix in self._suffixes():
            self._draw_uniform(generator, *(f"{stem}_{suffix}" for stem in self._torch_shapes(suffix, 1)))
        for suffix in self._suffixes():
            if self.init is not None:
                weight = self._tensor(f"weight_hh_{suffix}")
                init_.initialize_(weight, self.init, generator, max_angle=self.max_angle)
            self._reset_common(suffix, generator)

    def _composed(self, suffix: str) -> Tensor:
        return self._tensor(f"weight_hh_{suffix}")

    def _bias(self, suffix: str) -> Tensor | None:
        if not self.bias:
            return None
        return self._tensor(f"bias_ih_{suffix}") + self._tensor(f"bias_hh_{suffix}")

    def extra_repr(self) -> str:
        return self._text(init=None, max_angle=None)
