"""A recurrence with the matrix W = U diag(s) V^T, U and V orthonormal."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern import _autocast, functional
from orthokern import init as init_
from orthokern._decompositions import polar
from orthokern.errors import InputError, integer, one_of, require
from orthokern.nn._checks import at_least_zero, largest_deviation, warn_unless_orthonormal
from orthokern.nn._margin import ModelMargin
from orthokern.nn._recurrent import Recurrent, RecurrentOptions
from orthokern.ops._checks import own_parameter
from orthokern.ops._dispatcher import no_dispatch_modes
from orthokern.ops._linear import linear

__all__ = ["APPLY", "FactorizedRNN"]

APPLY = ("factored", "composed")


class FactorizedRNN(ModelMargin, Recurrent):
    """An RNN whose recurrent matrix is W = U diag(s) V^T with orthonormal U and V [N,K] and a spectrum s near 1.

    h_t = phi(gain U (s * (V^T h_{t-1})) + W_ih x_t + b), s = 2 m (sigmoid(p) - 1/2) + 1 in (1 - m, 1 + m): eq. 10 of
    Vorontsov, Trabelsi, Kadoury and Pal, "On orthogonality and learning recurrent networks with long term
    dependencies", 2017. Arguments, layouts and shapes are those of torch.nn.RNN. U and V stay orthonormal only
    with an optimizer for them: orthokern.optim.optimizer_for(model) assigns them to GeodesicSGD.

    Args:
        input_size, hidden_size, *args, **options: as in orthokern.nn.RNN; dtype is float32 or float64, since 16-bit
            dtypes are too coarse for orthonormal U and V.
        margin: m >= 0, the largest |s - 1|; 0 fixes s = 1 (p exists, with a zero gradient). None: s itself is the
            parameter, without a bound.
        spectrum_map: "sigmoid" as above, or "tanh", s = m tanh(p) + 1; see orthokern.functional.spectrum. No effect
            for margin 0 or None.
        rank: K <= N, columns of U and V; None for N. For K < N, W = U diag(s) V^T depends on a state only through the K
            numbers V^T h.
        apply: "factored" applies V^T, s and U in turn without forming W: 4NK flops per step and sequence. "composed"
            forms W once per forward: 2N^2 flops per step and sequence, fewer for K > N/2. The results agree up to
            rounding. The attribute is `apply_mode`, because `apply` is a method of torch.nn.Module.
        init: of the recurrent matrix. "orthogonal": U and V Haar-distributed, s = 1. "henaff", "cayley", "identity",
            "learned": W is the named orthogonal matrix, s = 1. For K < N, U and V span the same random subspace,
            V = U Q with an orthogonal Q [K,K], and W is the named matrix of K units in it: its K eigenvalues that are
            not zero have modulus 1. "glorot", "glorot-uniform": the (truncated) singular value decomposition of such a
            matrix, for margin=None. See orthokern.init. Input weights are U(-1/sqrt(N), 1/sqrt(N)) as in torch, the
            bias is 0.
        max_angle: for init "henaff" and "cayley", the largest angle in radians by which W rotates per step, at most pi;
            None: pi and pi/2. Smaller angles suit inputs that change slowly from step to step.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N] (torch has two, of which only
    the sum has an effect), u_l0 [N,K], v_l0 [N,K], spectrum_l0 [K] (p, or s if margin is None); and slope_l0 [1],
    modrelu_bias_l0 [N], leak_logit_l0 [N], h0_l0 [N] as in orthokern.nn.RNN.

    Raises InputError with a message of one line for an invalid argument.

    Example::

        >>> rnn = FactorizedRNN(10, 8, nonlinearity="modrelu", margin=0.01)
        >>> states, last = rnn(torch.randint(0, 10, (100, 4)))  # token ids
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

    _roles: ClassVar = {"u": "geodesic", "v": "geodesic", "spectrum": "spectrum"}
    _bounded: ClassVar = ("spectrum", "singular values")
    _forwards = 0  # in training, see `_watch_bases`; -1 after the warning

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        margin: float | None = 0.1,
        spectrum_map: str = "sigmoid",
        rank: int | None = None,
        apply: str = "factored",
        init: str = "orthogonal",
        max_angle: float | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        self.margin = None if margin is None else at_least_zero("margin", margin)
        self.spectrum_map = one_of("spectrum_map", spectrum_map, functional.SPECTRUM_MAPS)
        self.rank = self.hidden_size if rank is None else integer("rank", rank)
        if self.rank > self.hidden_size:
            raise InputError(f"rank must be at most hidden_size = {self.hidden_size}, got {self.rank}")
        self.apply_mode = one_of("apply", apply, APPLY)
        self.init, self.max_angle = one_of("init", init, init_.INITS), max_angle  # factorized_ checks the latter
        if init in init_.UNCONSTRAINED and margin is not None:
            raise InputError(
                f"init {init!r} needs margin=None (its singular values are free in (0, 2)), got margin={margin}"
            )
        self._build()

    def _matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        N, K = self.hidden_size, self.rank
        return {"u": (N, K), "v": (N, K), "spectrum": (K,)}

    def _reset_matrix(self, suffix: str, generator: torch.Generator | None) -> None:
        u, spectrum, v = (self._tensor(f"{name}_{suffix}") for name in ("u", "spectrum", "v"))
        init_.factorized_(u, spectrum, v, self.init, generator, max_angle=self.max_angle)
        if self.margin is not None:  # s = 1 is p = 0
            nn.init.zeros_(spectrum)
        self._register_margin(spectrum)

    def spectrum(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """s [K] of one recurrence, in the order of the columns of U and V, without the gain; differentiable with
        respect to the parameter."""
        return self._spectrum(self._suffix(layer, reverse))

    def spectra(self) -> list[Tensor]:
        """`spectrum` of every recurrence, in the order l0, l0_reverse, l1, ..."""
        return [self._spectrum(suffix) for suffix in self._suffixes()]

    def singular_values(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """Singular values |s| [K] of W (without the gain), detached, in the order of the columns of U and V (not
        sorted), so that each can be followed through training.

        s itself (see `spectrum`) can be negative only for margin > 1 or None. |s| are the singular values of W as long
        as U and V are orthonormal (`orthogonality_error`). A torch optimizer that trains U and V like other parameters
        does not keep them orthonormal; on a CPU, the module then warns, unless torch.compile has compiled it.
        """
        return self.spectrum(layer, reverse).detach().abs()

    @_autocast.keeps_dtype
    def latent(self, states: Tensor, layer: int = 0, reverse: bool = False) -> Tensor:
        """kappa = V^T h [..., K] of states h [..., N] of one recurrence: the K numbers of a state that W reads.

        Example::

            >>> rnn = FactorizedRNN(3, 64, rank=2)
            >>> rnn.latent(rnn(torch.randn(100, 4, 3))[0]).shape
            torch.Size([100, 4, 2])
        """
        v = self._tensor(f"v_{self._suffix(layer, reverse)}")
        fits = isinstance(states, Tensor) and states.dim() > 0 and states.shape[-1] == self.hidden_size
        fits = fits and states.dtype == v.dtype
        shown = f"{list(states.shape)} {states.dtype}" if isinstance(states, Tensor) else type(states).__name__
        require(fits, "states", f"a Tensor [..., {self.hidden_size}] {v.dtype}", shown)
        return linear(states, v.mT)

    @_autocast.keeps_dtype
    def latent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """V^T U diag(s) [K,K] of one recurrence, without the gain, differentiable: the map of `latent` from one state
        to the next if the activation is the identity. Its eigenvalues are those of W except for N - K zeros."""
        suffix = self._suffix(layer, reverse)
        return linear(self._tensor(f"v_{suffix}").mT, (self._tensor(f"u_{suffix}") * self._spectrum(suffix)).mT)

    @_autocast.keeps_dtype
    def _composed(self, suffix: str) -> Tensor:
        return linear(self._tensor(f"u_{suffix}") * self._spectrum(suffix), self._tensor(f"v_{suffix}"))

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """The largest |M^T M - I| over the entries of all bases M (U and V of every recurrence), NaN included."""
        return largest_deviation(m for _, m in self._bases())

    def _bases(self) -> list[tuple[str, Tensor]]:
        """(name, U or V) of every recurrence."""
        return [(name, self._tensor(name)) for suffix in self._suffixes() for name in (f"u_{suffix}", f"v_{suffix}")]

    @torch.no_grad()
    def orthonormalize(self) -> None:
        """Replace U and V of every recurrence by the nearest matrices with orthonormal columns (their polar factors).

        Use it after a change of the bases by anything but an optimizer of this package, such as averaging over training
        steps (torch.optim.swa_utils.AveragedModel): the mean of orthonormal matrices is not orthonormal.

        Raises InputError for NaN or infinite entries, and for a basis that is computed from other parameters.

        Example::

            >>> rnn = FactorizedRNN(3, 8)
            >>> _ = rnn.u_l0.data.mul_(0.9)
            >>> rnn.orthonormalize()
            >>> rnn.orthogonality_error() < 1e-5
            True
        """
        for name, m in self._bases():
            if not bool(m.isfinite().all()):
                raise InputError(f"{name} has NaN or infinite entries; accepted: finite numbers")
        for name, m in self._bases():
            own_parameter(self, name).copy_(polar(m.double()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, _ in self._bases():
            warn_unless_orthonormal(
                f"{prefix}{name} is not",
                state_dict.get(prefix + name),
                "orthonormalize() of the module replaces it by the nearest basis",
            )

    def _meaning(self) -> str:
        return super()._meaning() + ("" if not self.margin else f", spectrum_map={self.spectrum_map!r}")

    def _spectrum(self, suffix: str) -> Tensor:
        p, m = self._tensor(f"spectrum_{suffix}"), self._stacked_margin()
        if m is not None:
            return torch.where(m.isnan(), p, 1 + m.nan_to_num() * (functional.spectrum(p, 1.0, self.spectrum_map) - 1))
        return functional.spectrum(p, self.margin, self.spectrum_map)

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        if suffix == "l0":
            self._watch_bases()
        u, v = self._tensor(f"u_{suffix}"), self._tensor(f"v_{suffix}")
        s = self._gained(self._spectrum(suffix))
        return (linear(u * s, v),) if self.apply_mode == "composed" else (u, s, v)

    def _watch_bases(self) -> None:
        """Warns once if training makes the bases on a CPU lose their orthonormality, which happens if a torch optimizer
        trains them like other parameters.

        They are measured at the 1st, 2nd, 4th, 8th, ... forward, so that the cost does not depend on the length of
        training. On a GPU they are not measured: the host would wait for the device.
        """
        if torch.compiler.is_compiling():  # a graph would depend on the count
            return
        if self._forwards < 0 or not (self.training and torch.is_grad_enabled() and self._tensor("u_l0").is_cpu):
            return
        if not no_dispatch_modes():
            return
        self._forwards += 1
        if self._forwards & (self._forwards - 1):
            return
        advice = (
            "U and V need an optimizer of orthokern.optim, such as optimizer_for(model, lr=1e-3, geodesic_lr=1e-4); "
            "after a re-initialization call orthonormalize()"
        )
        if any(warn_unless_orthonormal(f"{name} is no longer", m, advice) for name, m in self._bases()):
            self._forwards = -1

    def extra_repr(self) -> str:
        usual = {"margin": 0.1, "spectrum_map": "sigmoid", "rank": self.hidden_size, "apply_mode": "factored"}
        return self._text(**usual, init="orthogonal", max_angle=None).replace("apply_mode=", "apply=")
