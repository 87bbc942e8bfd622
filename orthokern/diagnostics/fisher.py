"""How long a linear network remembers its input through its own noise: the Fisher memory of Ganguli, Huh and
Sompolinsky 2008, "Memory traces in dynamical systems", as the nnRNN report uses it (Jahagirdar et al. 2019, section 3).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from orthokern.errors import InputError

__all__ = ["FisherMemory", "fisher_memory", "transient_norms"]

DOUBLINGS = 50  # steps 2^50: what has not died away by then does not


@dataclasses.dataclass(frozen=True)
class FisherMemory:
    """What `fisher_memory` finds, float64 on the CPU.

    Attributes:
        matrix: [T,T], J_kl, the Fisher memory matrix of the inputs k and l steps ago.
        curve: [T], J(k) = J_kk: the information about an input that is k steps old.
        total: the sum of the curve over all k, beyond T too.
        covariance: [N,N], of the states under noise alone.
    """

    matrix: Tensor
    curve: Tensor
    total: float
    covariance: Tensor


def fisher_memory(v: Tensor, u: Tensor, noise: float | Tensor = 1.0, *, steps: int | None = None) -> FisherMemory:
    """The Fisher memory of h_t = V h_{t-1} + u x_t + noise: J_kl = (V^k u)^T C^-1 V^l u (the report's eq. 12).

    C = sum_k V^k E V^kT is the covariance of the states for noise of covariance E, the solution of C = V C V^T + E. It
    is found by doubling, C <- C + V C V^T, V <- V^2, on a triangular factor L of C = L L^T (each step a QR
    factorisation), which keeps its small elements where C would lose them beside the large ones: a network with strong
    transients has a C of condition 1e20. The total is |L^-1 S|_F^2 with S S^T = sum_k V^k u u^T V^kT, found alike. For
    a normal V and E = e I the total is |u|^2 / e, whatever V is.

    Args:
        v: [N,N] float, applied to column vectors, stable: its powers die away.
        u: [N] float, where the input enters.
        noise: e > 0, the variance of independent noise at every unit, or its covariance E [N,N], symmetric and positive
            definite.
        steps: T at least 1, length of the curve; None for 2 N.

    Returns:
        See FisherMemory.

    Raises:
        InputError: wrong shapes, numbers that are not finite, noise that is no variance, a V that is not stable.

    Cost: a QR factorisation of [2N,N] and two products of N^3 for every doubling of the memory, some ten of them.
    """
    v, u = _inputs(v, u)
    n = len(v)
    steps = _steps(steps, 2 * n)
    factor, signal, power = _noise_factor(noise, n), u.unsqueeze(1), v
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
        raise InputError(
            "v is not stable: its powers do not die away; accepted: all eigenvalues inside the unit circle"
        )
    remembered = torch.linalg.solve_triangular(factor, _history(v, u, steps).mT, upper=False)
    matrix = remembered.mT @ remembered
    total = torch.linalg.solve_triangular(factor, signal, upper=False).square().sum()
    return FisherMemory(matrix, matrix.diagonal().clone(), float(total), factor @ factor.mT)


def transient_norms(v: Tensor, u: Tensor, *, steps: int | None = None) -> Tensor:
    """|h_k| = |V^k u| for k = 0 ... T-1: how a single input grows and fades (the report's Figure 1).

    A normal V only lets it fade; V need not be stable.

    Args:
        v: [N,N] float, applied to column vectors.
        u: [N] float, where the input enters; or [N,M], M such inputs side by side.
        steps: T at least 1; None for 2 N.

    Returns:
        [T] float64 on the CPU; [T,M] for M inputs.

    Raises:
        InputError: wrong shapes, numbers that are not finite, steps below 1.

    Example::

        >>> transient_norms(0.5 * torch.eye(2), torch.tensor([1.0, 0.0]), steps=3)
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    v, h = _inputs(v, u, several=True)
    norms = []
    for _ in range(_steps(steps, 2 * len(v))):
        norms.append(torch.linalg.vector_norm(h, dim=0))
        h = v @ h
    return torch.stack(norms)


def _inputs(v: Tensor, u: Tensor, several: bool = False) -> tuple[Tensor, Tensor]:
    for name, value, letters in (("v", v, "[N,N]"), ("u", u, "[N]")):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise InputError(f"{name} must be a floating point tensor {letters}, got {type(value).__name__}")
    if v.dim() != 2 or v.shape[0] != v.shape[1] or v.shape[0] < 1:
        raise InputError(f"v has shape {tuple(v.shape)}; accepted: [N,N] with N at least 1")
    if u.shape[:1] != v.shape[:1] or u.dim() > 1 + several:
        accepted = f"[N] = ({len(v)},)" + (f" or [N,M] = ({len(v)}, M)" if several else "")
        raise InputError(f"u has shape {tuple(u.shape)}; accepted: {accepted}")
    for name, value in (("v", v), ("u", u)):
        if not bool(value.isfinite().all()):
            raise InputError(f"{name} holds NaN or infinity; accepted: finite numbers")
    return v.detach().double().cpu(), u.detach().double().cpu()


def _steps(steps: int | None, default: int) -> int:
    if steps is None:
        return default
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be an integer of at least 1, got {steps!r}")
    return steps


def _noise_factor(noise: float | Tensor, n: int) -> Tensor:
    """L [N,N] with L L^T = E."""
    if isinstance(noise, Tensor) and noise.dim():
        if noise.shape != (n, n) or not noise.is_floating_point():
            raise InputError(f"noise has shape {tuple(noise.shape)}; accepted: a variance, or a covariance ({n}, {n})")
        e = noise.detach().double().cpu()
        factor, info = torch.linalg.cholesky_ex(e)
        if int(info) or not torch.allclose(e, e.mT) or not bool(factor.isfinite().all()):
            raise InputError("noise is no covariance; accepted: a symmetric positive definite matrix")
        return factor
    try:
        if isinstance(noise, (bool, str)):
            raise TypeError
        variance = float(noise)
    except (TypeError, ValueError):
        raise InputError(
            f"noise must be a finite variance above 0, or a covariance ({n}, {n}), got {noise!r}"
        ) from None
    if not (math.isfinite(variance) and variance > 0):
        raise InputError(f"noise must be a finite variance above 0, got {variance}")
    return math.sqrt(variance) * torch.eye(n, dtype=torch.float64)


def _compressed(wide: Tensor) -> Tensor:
    """Lower triangular [N,N] with the same product with its transpose as wide [N,M], M >= N."""
    return torch.linalg.qr(wide.mT, mode="r").R.mT


def _history(v: Tensor, u: Tensor, steps: int) -> Tensor:
    """V^k u [T,N], k = 0 ... T-1."""
    states = [u]
    for _ in range(steps - 1):
        states.append(v @ states[-1])
    return torch.stack(states)
