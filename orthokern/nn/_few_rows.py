"""The gradient of A in exp(A), A skew, from a cotangent of low rank.

Note [Gradient of an exponential from few rows]
    With P = exp(A) and K = P^T dL/dP = sum_r k_r h_r^T, the gradient of A is the skew part of

        Gamma = int_0^1 exp(sA) K exp(-sA) ds = sum_r int_0^1 (exp(sA) k_r) (exp(sA) h_r)^T ds.

    With X = A / rho and |X|_2 <= 1, exp(sA) = sum_j c_j(s) U_j(X), where U_j are the Chebyshev polynomials of a skew
    matrix, U_0 = I, U_1 = X, U_{j+1} = 2 X U_j + U_{j-1}, |U_j|_2 <= 1, and c_0 = J_0(s rho), c_j = 2 J_j(s rho) are
    Bessel functions. So

        Gamma = sum_ij C_ij sum_r (U_i k_r) (U_j h_r)^T,      C_ij = int_0^1 c_i(s) c_j(s) ds.

    U_{j+2} = S U_j - U_{j-2} with S = 4 X^2 + 2 I, so that the even and the odd ones together need one product with S
    for every two degrees. The degree is about rho + 10: O(rho R N^2) instead of O(N^3) for the gradient from a full K.
    |A|_2 <= |A^6|_F^(1/6), which is rho, rounded up to a multiple of 1/4.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def _weights(rho: float, dtype: torch.dtype) -> Tensor:
    """C [m+1, m+1] for an even number m + 1 of terms. The truncation error is below a unit in the last place."""
    terms, bound = 4, (rho / 2) ** 4 / math.factorial(4)  # |J_j(z)| <= (z / 2)^j / j!
    while terms % 2 or bound > torch.finfo(dtype).eps / 4:
        terms += 1
        bound *= rho / 2 / terms
    k = torch.arange(1, terms + 8, dtype=torch.float64, device="cpu")
    jacobi = torch.diag(k / (4 * k * k - 1).sqrt(), 1)  # its eigenvalues are the Gauss-Legendre nodes
    nodes, vectors = torch.linalg.eigh(jacobi + jacobi.mT)
    points = 2 * terms + int(2 * rho) + 32
    angles = torch.arange(points, dtype=torch.float64, device="cpu") * (2 * math.pi / points)
    z = rho * (nodes + 1) / 2
    wave = z.unsqueeze(-1) * angles.sin()  # exp(i z sin(angle)) has the Fourier coefficients J_j(z)
    bessel = torch.fft.fft(torch.complex(wave.cos(), wave.sin())).real[:, :terms] / points  # [nodes, terms]
    bessel[:, 1:] *= 2
    return ((bessel.mT * vectors[0] ** 2) @ bessel).to(dtype)


def series(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(X^T, S, C) of Note [Gradient of an exponential from few rows] for a skew A [N,N], the arguments of the kernel
    besides the rows."""
    square = a @ a
    cube = square @ a
    rho = max(math.ceil(float(torch.linalg.matrix_norm(cube @ cube)) ** (1 / 6) * 4), 1) / 4
    s = square * (4 / (rho * rho))
    s.diagonal().add_(2)
    return a / -rho, s, _weights(rho, a.dtype)
