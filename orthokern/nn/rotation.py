"""A linear recurrence in its own modes: rotations of pairs of units, as in linear recurrent units (LRU) and S5."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern._autocast import keeps_dtype
from orthokern._scan_contract import running, without_padding
from orthokern.errors import InputError, integer, number, require
from orthokern.nn._base import LayerOptions, Layers
from orthokern.nn._checks import check_backend, draw, flag
from orthokern.nn._layouts import Resets, zero_padding
from orthokern.nn._margin import ModelMargin
from orthokern.ops.rotation_scan import scan

__all__ = ["RotationRNN"]

Factors = tuple[Tensor, Tensor | None, Tensor, Tensor]  # weight [N,D] and bias [N] times g, re and im of lambda


class RotationRNN(ModelMargin, Layers):
    """A linear RNN whose recurrent matrix consists of N/2 scaled rotations of pairs of units: O(N) per step.

        h_t = lambda * h_{t-1} + g * (W_ih x_t + b),  lambda_j = r_j exp(i theta_j),  * elementwise

    A state of N/2 complex numbers is stored as N real ones, the real parts first. This is the recurrence of a linear
    recurrent unit (Orvieto et al., "Resurrecting recurrent neural networks for long sequences", 2023) and of a diagonal
    S5 layer. Every linear recurrence with a diagonalisable matrix has this form, in which a real
    eigenvalue takes a pair of units. The module returns the states. Apply nonlinearities and mixing of units in later
    layers, such as a torch.nn.Linear with an activation and a residual connection. Layouts, layers, directions, resets
    and lengths are those of orthokern.nn.RNN.

    The factor g normalises the input, so that the variance of a state does not depend on its radius. For an input of
    independent steps this variance is that of W_ih x_t + b::

        g_j = (1 + r_j^2 + r_j^4 + ... + r_j^(2 (horizon - 1)))^(-1/2), without a horizon (1 - r_j^2)^(1/2)

    Args:
        input_size: as in orthokern.nn.RNN.
        hidden_size: N, even.
        *args, **options: num_layers, bias, batch_first, dropout, bidirectional, device, dtype, learned_h0 and backend,
            as in orthokern.nn.RNN; dtype is float32 or float64.
        margin: None: radii are below 1, r = exp(-exp(p)), and the effect of old inputs decays. A number m in [0, 1): r
            = 2 m (sigmoid(p) - 1/2) + 1 in (1 - m, 1 + m), initially 1, as the singular values of FactorizedRNN: states
            decay or grow slowly, and with a margin of 0 their norm is constant without input.
        horizon: the number of steps over which g normalises, usually the length of the sequences; it is required with
            a margin. None: infinite.
        radii: (low, high), 0 <= low < high < 1, the range from which r is drawn without a margin, uniformly over the
            area of the ring. The state of a unit of radius r decays in about 1 / (1 - r) steps.
        max_angle: theta is initially U(0, max_angle), in radians. Small angles suit inputs that change slowly.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], initially normal with the variance 1 / D;
    bias_l0 [N], initially 0; radius_l0 [N/2] (p) and angle_l0 [N/2] (theta), which optimizer_for trains without weight
    decay; and h0_l0 [N] with learned_h0.

    Raises InputError with a message of one line for an invalid argument.

    Example::

        >>> states, last = RotationRNN(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

    _bounded: ClassVar = ("radius", "radii")
    _roles: ClassVar = {"radius": "rotation", "angle": "rotation"}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        margin: float | None = None,
        horizon: int | None = None,
        radii: tuple[float, float] = (0.9, 0.999),
        max_angle: float = math.pi,
        learned_h0: bool = False,
        backend: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        require(self.hidden_size % 2 == 0, "hidden_size", "even (pairs of units)", repr(hidden_size))
        self.learned_h0, self.backend = flag("learned_h0", learned_h0), check_backend("backend", backend)
        self.margin = None
        if margin is not None:
            self.margin = number("margin", margin, "a number in [0, 1), or None", lambda m: 0.0 <= m < 1.0)
            require(horizon is not None, "horizon", "an integer of at least 1 if margin is given", "None")
        self.horizon = None if horizon is None else integer("horizon", horizon)
        try:
            low, high = (float(r) for r in radii)
        except (TypeError, ValueError):
            raise InputError(f"radii must be two numbers (low, high), got {radii!r}") from None
        require(0.0 <= low < high < 1.0, "radii", "(low, high) with 0 <= low < high < 1", repr(radii))
        self.radii = (low, high)
        self.max_angle = number("max_angle", max_angle, "in (0, pi]", lambda angle: 0.0 < angle <= math.pi)
        self._build()

    def _shapes_of(self, suffix: str) -> dict[str, tuple[int, ...]]:
        N = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (N, self._inputs(suffix))}
        if self.bias:
            shapes["bias"] = (N,)
        shapes |= {"radius": (N // 2,), "angle": (N // 2,)}
        return {**shapes, "h0": (N,)} if self.learned_h0 else shapes

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            weight, radius = self._tensor(f"weight_ih_{suffix}"), self._tensor(f"radius_{suffix}")
            draw(nn.init.normal_, weight, 0.0, weight.shape[1] ** -0.5, generator=generator)
            draw(nn.init.uniform_, self._tensor(f"angle_{suffix}"), 0.0, self.max_angle, generator=generator)
            if self.margin is None:
                draw(nn.init.uniform_, radius, self.radii[0] ** 2, self.radii[1] ** 2, generator=generator)
                radius.copy_((-0.5 * radius.double().clamp_min(1e-12).log()).log())
            else:
                nn.init.zeros_(radius)
            for name in ("bias", "h0"):
                if f"{name}_{suffix}" in self._parameters:
                    nn.init.zeros_(self._tensor(f"{name}_{suffix}"))
        self._register_margin(self._tensor("radius_l0"))

    def eigenvalues(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """lambda [N/2] of one recurrence, complex128, differentiable."""
        return torch.complex(*self._lambda(self._suffix(layer, reverse)))

    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """The matrix [N,N] of one recurrence in real numbers, float64, differentiable."""
        re, im = (part.diag() for part in self._lambda(self._suffix(layer, reverse)))
        return torch.cat([torch.cat([re, -im], 1), torch.cat([im, re], 1)])

    def _radius(self, suffix: str) -> Tensor:
        p, stacked = self._tensor(f"radius_{suffix}").double(), self._stacked_margin()
        if stacked is None:
            return (-p.exp()).exp() if self.margin is None else 2 * self.margin * (p.sigmoid() - 0.5) + 1
        bounded = 2 * stacked.nan_to_num().double() * (p.sigmoid() - 0.5) + 1
        return torch.where(stacked.isnan(), (-p.exp()).exp(), bounded)

    def _lambda(self, suffix: str) -> tuple[Tensor, Tensor]:
        radius, angle = self._radius(suffix), self._tensor(f"angle_{suffix}").double()
        return radius * angle.cos(), radius * angle.sin()

    @keeps_dtype
    def _factors(self, suffix: str) -> Factors:
        weight = self._tensor(f"weight_ih_{suffix}")
        g = input_scale(self._radius(suffix), self.horizon).to(weight.dtype).repeat(2)
        bias = self._tensor(f"bias_{suffix}") * g if self.bias else None
        return weight * g.unsqueeze(1), bias, *self._lambda(suffix)

    def _scan(
        self, suffix: str, factors: Factors, cuts: Resets | None, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        weight, bias, re, im = factors
        resets, state = (None, None) if cuts is None else (cuts.resets, cuts.reset_state)
        if (alive := running(x.shape[0], lengths)) is not None:  # states of padding stay finite, also for radii above 1
            x, resets = without_padding(x, alive), ~alive if resets is None else resets | ~alive
        rest = (resets, h0 if state is None else state, self.backend)
        if x.is_floating_point():
            states = scan(x, re, im, h0, weight, bias, *rest)
        else:
            states = scan(self._weighted(x, weight, bias), re, im, h0, None, None, *rest)
        return zero_padding(states, lengths)

    def extra_repr(self) -> str:
        usual = {"margin": None, "horizon": None, "radii": (0.9, 0.999), "max_angle": math.pi}
        return self._text(**usual, learned_h0=False, backend=None)


def input_scale(radius: Tensor, horizon: int | None) -> Tensor:
    """g of radii, see RotationRNN; float64.

    With a = 2 log r and n the horizon, the sum of the powers is exp((n - 1) a / 2) sinh(n a / 2) / sinh(a / 2). The
    quotient is even in a. Computed from max(|a|, a small number), it has neither an overflow nor 0 / 0.
    """
    a = 2 * radius.clamp_min(1e-300).log()
    if horizon is None:
        # a radius may round to 1, where the derivative of the root is infinite
        return (-torch.expm1(a.clamp_max(-torch.finfo(a.dtype).eps))).sqrt()
    b = a.abs().clamp_min(1e-8)
    log_sum = (horizon - 1) * (a + b) / 2 + torch.expm1(-horizon * b).neg().log() - torch.expm1(-b).neg().log()
    return (-0.5 * log_sum).exp()
