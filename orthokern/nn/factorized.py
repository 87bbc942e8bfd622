"""A recurrence with the matrix W = U diag(s) V^T, U and V orthonormal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern import _autocast, functional
from orthokern import init as init_
from orthokern._decompositions import robust_svd
from orthokern.errors import InputError, unknown_name
from orthokern.nn._base import RecurrentOptions
from orthokern.nn._checks import (
    check_device,
    largest_deviation,
    number,
    parameter_dtype,
    positive_int,
    warn_unless_orthonormal,
    watch_bases,
)
from orthokern.nn._recurrent import Recurrent
from orthokern.ops._linear import linear

__all__ = ["APPLY", "FactorizedRNN"]

APPLY = ("factored", "composed")


class FactorizedRNN(Recurrent):
    """An RNN whose recurrent matrix is W = U diag(s) V^T with orthonormal U and V [N,K] and a spectrum s near 1.

    h_t = phi(gain (U (s * (V^T h_{t-1})) + W_ih x_t + b)), s = 2 m (sigmoid(p) - 1/2) + 1 in (1 - m, 1 + m): eq. 10 of
    Vorontsov, Trabelsi, Kadoury and Pal, "On orthogonality and learning recurrent networks with long term
    dependencies", 2017. Constructor names, layouts and results are those of torch.nn.RNN. U and V stay orthonormal only
    with an optimizer for them: orthokern.optim.optimizer_for(model) assigns them to GeodesicSGD.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device: as in
            orthokern.nn.RNN.
        dtype: float32 or float64; 16-bit dtypes are too coarse for orthonormal U and V.
        margin: m >= 0, the largest |s - 1|; 0 fixes s = 1 (p exists, with a zero gradient). None: s itself is the
            parameter, without a bound.
        spectrum_map: "sigmoid" as above, or "tanh", s = m tanh(p) + 1; see orthokern.functional.spectrum. No effect
            for margin 0 or None.
        rank: K <= N, columns of U and V; None for N. For K < N, W = U diag(s) V^T keeps the K numbers V^T h of a
            state and drops the rest.
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
        negative_slope, learned_h0, checkpoint_every, backend, precision, message_clip, gain: as in orthokern.nn.RNN.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N] (torch has two, of which only
    the sum has an effect), u_l0 [N,K], v_l0 [N,K], spectrum_l0 [K] (p, or s if margin is None); and slope_l0 [1],
    modrelu_bias_l0 [N], h0_l0 [N] as in orthokern.nn.RNN.

    Raises InputError, one line, for a bad argument.

    Example::

        >>> rnn = FactorizedRNN(10, 8, nonlinearity="modrelu", margin=0.01)
        >>> states, last = rnn(torch.randint(0, 10, (100, 4)))  # token ids
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
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
        max_angle: float | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, **options
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
        self.init, self.max_angle = init, max_angle  # factorized_ checks the latter
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
        """Reinitialize the parameters, as the class documentation says; `generator` as in RNN.reset_parameters."""
        for suffix in self._suffixes():
            self._reset_input(suffix, generator)
            spectrum = self._tensor(f"spectrum_{suffix}")
            init_.factorized_(
                self._tensor(f"u_{suffix}"),
                spectrum,
                self._tensor(f"v_{suffix}"),
                self.init,
                generator,
                max_angle=self.max_angle,
            )
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
        sorted), so that each can be followed through training.

        s itself (see `spectrum`) can be negative only for margin > 1 or None. |s| are the singular values of W as long
        as U and V are orthonormal (`orthogonality_error`). An optimizer of torch that trains U and V like other
        parameters does not keep them so. On a CPU, training with more than 16 rows (time steps times sequences) in
        a call then gives a warning.
        """
        return self.spectrum(layer, reverse).detach().abs()

    @_autocast.keeps_dtype
    def recurrent_matrix(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """W = U diag(s) V^T [N,N] of one recurrence (without the gain), differentiable. Forward forms it only with
        apply="composed"."""
        suffix = self._suffix(layer, reverse)
        return (self._tensor(f"u_{suffix}") * self.spectrum(layer, reverse)) @ self._tensor(f"v_{suffix}").mT

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """The largest |M^T M - I| over the entries of all bases M (U and V of every recurrence), NaN included."""
        bases = [name for name, role in self.parameter_roles().items() if role == "geodesic"]
        return largest_deviation(self._tensor(name) for name in bases)

    @torch.no_grad()
    def orthonormalize(self) -> None:
        """Replace U and V of every recurrence by the nearest matrices with orthonormal columns (their polar factors).

        For bases that something else than an optimizer of this package has changed, as an average of several states of
        a training (torch.optim.swa_utils.AveragedModel): the mean of orthonormal matrices is not orthonormal.

        Raises InputError for NaN or infinite entries.

        Example::

            >>> rnn = FactorizedRNN(3, 8)
            >>> _ = rnn.u_l0.data.mul_(0.9)
            >>> rnn.orthonormalize()
            >>> rnn.orthogonality_error() < 1e-5
            True
        """
        bases = [(name, self._tensor(name)) for name, role in self.parameter_roles().items() if role == "geodesic"]
        for name, m in bases:
            if not bool(m.isfinite().all()):
                raise InputError(f"{name} has NaN or infinite entries; accepted: finite numbers")
        for _, m in bases:
            u, _, vh = robust_svd(m.double())
            m.copy_(u @ vh)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Notes what a spectrum parameter means in the metadata of the state_dict, where torch has the version."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if isinstance(metadata, dict):
            metadata["spectrum"] = self._meaning()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        local_metadata, *_, errors = args
        saved = local_metadata.get("spectrum")
        if saved is not None and saved != self._meaning():
            errors.append(
                f"{prefix}spectrum_l0 belongs to {saved}, and would give other singular values with {self._meaning()}; "
                "accepted: a module of the same margin and map, or dict(state_dict) to load the numbers as they are"
            )
        for name, role in self.parameter_roles().items():
            if role == "geodesic" and prefix + name in state_dict:
                warn_unless_orthonormal(prefix + name, state_dict[prefix + name])

    def _meaning(self) -> str:
        """How singular values follow from the spectrum parameter."""
        return f"margin={self.margin}" + ("" if not self.margin else f", spectrum_map={self.spectrum_map!r}")

    def parameter_roles(self) -> dict[str, str]:
        """Parameter name -> "geodesic" (U and V), "spectrum" (p, or s for margin=None) or "other"."""
        roles = {}
        for name, _ in self.named_parameters(recurse=False):
            kind = name.split("_l", 1)[0]
            roles[name] = "geodesic" if kind in ("u", "v") else "spectrum" if kind == "spectrum" else "other"
        return roles

    def _spectrum(self, suffix: str) -> Tensor:
        return functional.spectrum(self._tensor(f"spectrum_{suffix}"), self.margin, self.spectrum_map)

    def _matrix(self, suffix: str) -> tuple[Tensor, ...]:
        u, p, v = (self._tensor(f"{name}_{suffix}") for name in ("u", "spectrum", "v"))
        if torch.is_grad_enabled():
            watch_bases(self, suffix, u, v)
        s = self._gained(functional.spectrum(p, self.margin, self.spectrum_map))
        return (_composed(u, s, v),) if self.apply_mode == "composed" else (u, s, v)

    def _op(self) -> tuple[str, dict[str, Any]]:
        if self.apply_mode == "composed":
            return "dense_scan", {"N": self.hidden_size}
        return "factored_scan", {"N": self.hidden_size, "K": self.rank}

    def extra_repr(self) -> str:
        text = f"{self._repr_common()}, margin={self.margin}"
        if self.spectrum_map != "sigmoid":
            text += f", spectrum_map={self.spectrum_map!r}"
        if self.rank != self.hidden_size:
            text += f", rank={self.rank}"
        if self.apply_mode != "factored":
            text += f", apply={self.apply_mode!r}"
        return text + self._repr_init(self.init == "orthogonal", self.init, self.max_angle)


@_autocast.keeps_dtype
def _composed(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """W = U diag(s) V^T [N, N]."""
    return linear(u * s, v)
