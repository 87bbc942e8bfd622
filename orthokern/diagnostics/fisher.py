"""Fisher memory: the information that the noisy state of a linear network holds about past inputs (Ganguli, Huh and
Sompolinsky 2008, "Memory traces in dynamical systems"), as used in section 3 of the nnRNN report (Jahagirdar et al.
2019).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from orthokern.diagnostics.spectrum import exact, square
from orthokern.errors import InputError, integer, is_number, require

DOUBLINGS = 50  # 2^50 steps: powers of V that have not decayed by then do not decay


@dataclasses.dataclass(frozen=True)
class FisherMemory:
    """The result of `fisher_memory`. Tensors are float64 on the CPU.

    Attributes:
        matrix: [T,T], J_kl, the Fisher memory matrix of the inputs k and l steps ago.
        curve: [T], J(k) = J_kk: the information about the input k steps ago.
        total: the sum of J(k) over all k, including k >= T.
        covariance: [N,N], covariance of the states if the input is noise alone.
    """

    matrix: Tensor
    curve: Tensor
    total: float
    covariance: Tensor


def fisher_memory(v: Tensor, u: Tensor, noise: float = 1.0, *, steps: int | None = None) -> FisherMemory:
    """The Fisher memory of h_t = V h_{t-1} + u x_t + noise: J_kl = (V^k u)^T C^-1 V^l u (Jahagirdar et al. 2019, eq.
    12, which has V^k twice).

    C = e sum_k V^k V^kT is the covariance of the states for noise of variance e, the solution of C = V C V^T + e I. It
    is computed by doubling, C <- C + V C V^T, V <- V^2, on the triangular factor L of C = L L^T (each step is a QR
    factorisation). The factor keeps small elements that rounding would remove from C: for a network with strong
    transients the condition number of C is about 1e20. The total is |L^-1 S|_F^2 with S S^T = sum_k V^k u u^T V^kT. For
    a normal V it is |u|^2 / e.

    Args:
        v: [N,N] float, applied to column vectors. It must be stable: all eigenvalues inside the unit circle.
        u: [N] float, the input vector.
        noise: e > 0, the variance of independent noise at every unit.
        steps: T at least 1, length of the curve; None for 2 N.

    Example::

        >>> memory = fisher_memory(0.5 * torch.eye(2), torch.tensor([1.0, 0.0]), 1.0, steps=3)
        >>> memory.curve  # 0.75 * 0.25 ** k
        tensor([0.7500, 0.1875, 0.0469], dtype=torch.float64)
    """
    v, u = _inputs(v, u)
    n = len(v)
    steps = 2 * n if steps is None else integer("steps", steps)
    require(is_number(noise) and 0 < noise < math.inf, "noise", "a finite variance above 0", repr(noise))
    factor, signal, power = math.sqrt(noise) * torch.eye(n, dtype=torch.float64, device="cpu"), u.unsqueeze(1), v
    for _ in range(DOUBLINGS):
        factor = _compressed(torch.cat([factor, power @ factor], 1))
        signal = torch.cat([signal, power @ signal], 1)
        if signal.shape[1] > n:
            signal = _compressed(signal)
        power = power @ power
        size = float(torch.linalg.matrix_norm(power))
        if not math.isfinite(size) or size < 1e-40:
            break
    if not size < 1e-20 or not bool(factor.isfinite().all()):
        raise InputError("v is not stable: all its eigenvalues must be inside the unit circle")
    remembered = torch.linalg.solve_triangular(factor, _history(v, u, steps).mT, upper=False)
    matrix = remembered.mT @ remembered
    total = torch.linalg.solve_triangular(factor, signal, upper=False).square().sum()
    return FisherMemory(matrix, matrix.diagonal().clone(), float(total), factor @ factor.mT)


def transient_norms(v: Tensor, u: Tensor, *, steps: int | None = None) -> Tensor:
    """|h_k| = |V^k u| for k = 0 ... T-1: the response to a single input over time (Figure 1 of the report), [T] float64
    on the CPU. For a stable normal V the norms decrease; for a non-normal V they may grow first. V need not be stable.

    Args:
        v: [N,N] float, applied to column vectors.
        u: [N] float, the input vector; or [N,M], M input vectors as columns, with a result [T,M].
        steps: T at least 1; None for 2 N.

    Example::

        >>> transient_norms(0.5 * torch.eye(2), torch.tensor([1.0, 0.0]), steps=3)
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    v, h = _inputs(v, u, several=True)
    return torch.linalg.vector_norm(_history(v, h, 2 * len(v) if steps is None else integer("steps", steps)), dim=1)


def _inputs(v: Tensor, u: Tensor, several: bool = False) -> tuple[Tensor, Tensor]:
    v = square("v", v)
    n, shape = len(v), tuple(getattr(u, "shape", ()))
    accepted = f"a tensor [N] = [{n}]" + (f" or [N, M] = [{n}, M]" if several else "")
    u = exact("u", u, accepted, shape[:1] == (n,) and len(shape) <= 1 + several)
    for name, value in (("v", v), ("u", u)):
        require(bool(value.isfinite().all()), name, "finite", "NaN or infinity")
    return v, u


def _compressed(wide: Tensor) -> Tensor:
    """The lower triangular L [N,N] with L L^T = A A^T for a wide A [N,M], M >= N."""
    return torch.linalg.qr(wide.mT, mode="r").R.mT


def _history(v: Tensor, u: Tensor, steps: int) -> Tensor:
    """V^k u [T,N] or [T,N,M], k = 0 ... T-1."""
    states = [u]
    for _ in range(steps - 1):
        states.append(v @ states[-1])
    return torch.stack(states)
