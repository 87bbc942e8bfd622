"""`NonNormalRNN`: a recurrence in real Schur form, with learned moduli of the eigenvalues and a non-normal part."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from orthokern import _autocast
from orthokern.nn._checks import check_finite, draw, flag
from orthokern.nn.exprnn import INITS as _INITS
from orthokern.nn.exprnn import ExpOptions, _Exponential
from orthokern.ops._linear import linear

INITS = (*_INITS, "legacy")


def triangular_mask(n: int, device: torch.device | str | None = None) -> Tensor:
    """The mask of T [n,n], bool: true below the 2 x 2 blocks on the diagonal."""
    block = torch.arange(n, device=device) // 2
    return block.unsqueeze(1) > block


@_autocast.keeps_dtype
def schur_product(p: Tensor, gamma: Tensor, theta: Tensor, triangle: Tensor | None) -> Tensor:
    """V = P Theta P^T. The blocks of Theta are applied to pairs of rows of P^T in O(N^2), the triangle by a product.

    Args:
        p: [N,N], orthogonal; gamma: [ceil(N/2)]; theta: [floor(N/2)], radians.
        triangle: T [N,N], zero outside the mask, or None for a normal V.

    Returns:
        V [N,N].
    """
    n, pairs = p.shape[-1], len(theta)
    rows = p.mT
    even, odd = rows[0 : 2 * pairs : 2], rows[1 : 2 * pairs : 2]
    cosine = (gamma[:pairs] * theta.cos()).unsqueeze(-1)
    sine = (gamma[:pairs] * theta.sin()).unsqueeze(-1)
    turned = torch.stack([cosine * even - sine * odd, sine * even + cosine * odd], dim=1).flatten(0, 1)
    if n % 2:
        turned = torch.cat([turned, gamma[-1] * rows[-1:]])
    if triangle is not None:
        turned = turned + linear(triangle, rows.mT)
    return linear(p, turned.mT)


class NonNormalRNN(_Exponential):
    """An RNN whose recurrent matrix V = P Theta P^T is in real Schur form: h_t = phi(gain V h_{t-1} + W_ih x_t + b).

    P = B exp(A) is orthogonal, A skew. Theta has the 2 x 2 blocks gamma_i [[cos t_i, -sin t_i], [sin t_i, cos t_i]] on
    its diagonal (for odd N also a last real eigenvalue gamma) and a free part T below the blocks. The eigenvalues
    gamma_i exp(+-i t_i) do not depend on T. T makes V non-normal (nnRNN: Kerg, Goyette et al. 2019, "Non-normal
    Recurrent Neural Network (nnRNN)"; Jahagirdar et al., its reproducibility report of 2019, eq. 7 and 8). V is formed
    once per forward; the recurrence is orthokern.functional.dense_scan. The interface is that of orthokern.nn.RNN.

    Args:
        input_size, hidden_size, *args, **options: as in orthokern.nn.RNN; dtype is float32 or float64. The literature
            uses nonlinearity="modrelu".
        init: of A, and so of P, as in orthokern.nn.ExpRNN; or "legacy": A = 0, P = I. (In the last commit of the
            released code, A is uninitialised memory, mostly 0. Earlier commits draw A by name, as here.) Angles theta
            are U(0, 2 pi), moduli gamma 1, T 0, so that V is orthogonal initially.
        triangular: False omits T, for a normal V.
        max_angle, rebase_every, project_every, optimizer_state: of A and the base B, as in orthokern.nn.ExpRNN.

    The released code multiplies rows by its matrix, h_t = h_{t-1} R with R = V^T. Its T is upper triangular and also
    fills the blocks, so that the moduli differ from gamma there.

    Parameters, per recurrence l0, l0_reverse, l1, ...: weight_ih_l0 [N,D], bias_l0 [N], skew_l0 [N,N] (its strictly
    lower triangle is used), gamma_l0 [ceil(N/2)], theta_l0 [floor(N/2)] in radians, triangle_l0 [N,N] (only its mask is
    used); and slope_l0 [1], modrelu_bias_l0 [N], leak_logit_l0 [N], h0_l0 [N] as in orthokern.nn.RNN. Buffers: base_l0
    [N,N]. The published penalties are orthokern.penalties.modulus_penalty and triangular_decay.

    Raises InputError for a bad argument, and in forward on a CPU for a gamma or A that is not finite, or an A that is
    too large.

    Example::

        >>> states, last = NonNormalRNN(3, 8)(torch.randn(100, 4, 3))
        >>> states.shape, last.shape
        (torch.Size([100, 4, 8]), torch.Size([1, 4, 8]))
    """

    _inits = INITS
    _roles: ClassVar = {"skew": "skew", "gamma": "rotation", "theta": "rotation"}

    def __init__(
        self, input_size: int, hidden_size: int, *args: Any, triangular: bool = True, **options: Unpack[ExpOptions]
    ) -> None:
        self.triangular = flag("triangular", triangular)  # read by _build, in the constructor of the base class
        super().__init__(input_size, hidden_size, *args, **options)

    def _matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        N = self.hidden_size
        shapes = {**super()._matrix_shapes(), "gamma": (N - N // 2,), "theta": (N // 2,)}
        return {**shapes, "triangle": (N, N)} if self.triangular else shapes

    def _reset_matrix(self, suffix: str, generator: torch.Generator | None) -> None:
        super()._reset_matrix(suffix, generator)
        nn.init.ones_(self._tensor(f"gamma_{suffix}"))
        draw(nn.init.uniform_, self._tensor(f"theta_{suffix}"), 0.0, 2 * math.pi, generator=generator)
        if self.triangular:
            nn.init.zeros_(self._tensor(f"triangle_{suffix}"))

    def moduli(self) -> list[Tensor]:
        """gamma [ceil(N/2)] of every recurrence."""
        return [self._tensor(f"gamma_{suffix}") for suffix in self._suffixes()]

    def triangles(self) -> list[Tensor]:
        """T [N,N] of every recurrence, zero outside the mask; empty for triangular=False."""
        return [self._triangle(suffix) for suffix in self._suffixes() if self.triangular]

    def _triangle(self, suffix: str) -> Tensor:
        triangle = self._tensor(f"triangle_{suffix}")
        return triangle * triangular_mask(self.hidden_size, triangle.device)

    def _composed(self, suffix: str) -> Tensor:
        gamma = self._tensor(f"gamma_{suffix}")
        check_finite(f"gamma_{suffix}", gamma, "finite moduli")
        triangle = self._triangle(suffix) if self.triangular else None
        return schur_product(self._orthogonal(suffix), gamma, self._tensor(f"theta_{suffix}"), triangle)

    def _text(self, **usual: Any) -> str:
        return super()._text(triangular=True, **usual)
