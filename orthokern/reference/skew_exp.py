"""The reference of the exponential of skew matrices.

Note [Exponential of a skew matrix]
    P = exp(A) with A = (X - X^T) / 2, the skew part of X, which is X itself if X is skew. P is orthogonal, det = +1.

    Scaling and squaring: P = (exp(A / 2^s))^(2^s). The angles of A are its eigenvalues +-i a, and max |a| = |A|_2.

    Taylor polynomial of degree 18 in five products (Bader, Blanes and Casas 2019, "Computing the matrix exponential
    with an optimized Taylor polynomial approximation"):

        A2 = A A,  A3 = A A2,  A6 = A3 A3,     B_i = c_i0 I + c_i1 A + c_i2 A2 + c_i3 A3 + c_i4 A6,  i = 1 ... 5,
        C = B1 B5 + B4,     T18(A) = B2 + (B3 + C) C.

    Its remainder is below |A|_2^19 / 19!, which is below half a unit in the last place for |A|_2 <= THETA. A test
    checks the coefficients.

    The number of squarings. A is normal, so |A|_2^6 = |A^6|_2 <= |A^6|_F, and A^6 is known before anything is scaled:
    with r = |A^6|_F^(1/6), s = max(0, ceil(log2(r / THETA))). r is above |A|_2 by a factor of N^(1/12) at most, 1.7 for
    N = 512, while the 1-norm, the usual choice for a general matrix, may be above it by sqrt(N). A is scaled only by
    powers of two, which is exact; a first factor makes its 1-norm at most 1, so that A^6 cannot overflow.

    s is a number on the device. On a CPU, where it can be read without a synchronisation, the number of squarings is
    the largest s of the batch; elsewhere it is always MAX_SQUARINGS, and a finished matrix keeps its value. A matrix
    that needs more (r above LARGEST = THETA 2^MAX_SQUARINGS) becomes NaN: such large angles have few correct digits.

    Every squaring doubles the error. One Newton-Schulz step, X + X (I - X^T X) / 2, removes the error orthogonal to the
    manifold. On the manifold its derivative is the projection to the tangent space, which contains the derivative of
    exp(A) along a skew direction. So the backward can omit this step, exactly.

Note [Backward of the exponential of a skew matrix]
    With G = dL/dP. Through a squaring X' = X X: G <- G X^T + X^T G.

    Through the polynomial, with D = B3 + C:

        dC = G C^T + D^T G,   dB1 = dC B5^T,  dB2 = G,  dB3 = G C^T,  dB4 = dC,  dB5 = B1^T dC,

    and dA, dA2, dA3, dA6 are the sums of c_ij dB_i. Only their components in the spaces of these matrices are needed: A
    and A3 are skew, A2 and A6 symmetric. With S = sym(M) = (M + M^T) / 2 and K = skew(M) = (M - M^T) / 2,

        A6 = A3 A3:   S6 = sym(dA6);  dA3 += S6 A3^T + A3^T S6 = -(Y - Y^T)  with Y = S6 A3, since (S6 A3)^T = -A3 S6;
        A3 = A A2:    K3 = skew(dA3);  dA += K3 A2,  dA2 += A^T K3, whose symmetric part is that of -A K3;
        A2 = A A:     S2 = sym(dA2);  dA += -(Y - Y^T)  with Y = S2 A.

    These are eight products; the derivative of five general products has ten. The gradient of X is skew(dA) / 2^s.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# largest |A|_2 of the polynomial: THETA^19 / 19! is below half a unit in the last place
THETA = {torch.float32: 3.0, torch.float64: 1.09}
MAX_SQUARINGS = 8
# largest r = |A^6|_F^(1/6) of a matrix whose exponential is not NaN
LARGEST = {dtype: theta * 2.0**MAX_SQUARINGS for dtype, theta in THETA.items()}

# c_ij of Note [Exponential of a skew matrix]: rows B1 ... B5, columns A, A2, A3, A6; and the coefficients of I
POWERS = (
    (-1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (3.97849749499645077844e-01, 1.36783778460411720168e00, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (1.68015813878906206114e00, 5.71779846478865511061e-02, -6.98210122488052056106e-03, 3.34975017086070470649e-05),
    (-6.76404519071381882256e-02, 6.75961301770459654925e-02, 2.95552570429315521194e-02, -1.39180257516060693404e-05),
    (0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)
IDENTITY = (0.0, 0.0, -1.09676396052962061844e01, -9.04316832390810593223e-02, 0.0)


def _skew(m: Tensor) -> Tensor:
    return (m - m.mT) / 2


def _symmetric(m: Tensor) -> Tensor:
    return (m + m.mT) / 2


def _scaled(m: Tensor, exponent: Tensor) -> Tensor:
    """m [..., N, N] times 2^exponent [...], exactly. (The derivative of torch.ldexp is zero for integers.)"""
    return m * torch.exp2(exponent.to(m.dtype))[..., None, None]


def _readable(squarings: Tensor) -> bool:
    """Whether the numbers are on the host. Under vmap and in traces (make_fx, torch.func.linearize) they cannot be
    read."""
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(squarings)
    return squarings.device.type == "cpu" and not traced and not wrapped


def _rounds(squarings: Tensor) -> int:
    """The number of squarings of the batch: on a CPU the largest, elsewhere MAX_SQUARINGS."""
    return int(squarings.max()) if _readable(squarings) else MAX_SQUARINGS


def _chosen(squarings: Tensor, k: int, yes: Tensor, no: Tensor) -> Tensor:
    """yes for the matrices that need squaring k, no for the others."""
    if _readable(squarings) and int(squarings.min()) > k:
        return yes
    return torch.where((squarings > k)[..., None, None], yes, no)


def skew_exp_fwd(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """exp of the skew part; see Note [Exponential of a skew matrix].

    Args:
        x: [..., N, N], float32 or float64.

    Returns:
        (p, powers, terms, c, root, squarings): p [..., N, N], orthogonal; powers [3, ..., N, N], A, A2, A3 of the
        scaled matrix; terms [3, ..., N, N], B1, B5 and B3 + C; c and root [..., N, N], C and exp(A / 2^s); squarings
        [...] int32, s.
    """
    a = _skew(x)
    with torch.no_grad():
        # |A|_1 <= 2^exponent, with a lower limit so that 2^-exponent does not overflow
        exponent = torch.frexp(a.abs().sum(-1).amax(-1)).exponent.clamp_min(-64)
    a = _scaled(a, -exponent)
    a2 = a @ a
    a3 = a @ a2
    a6 = a3 @ a3
    with torch.no_grad():
        radius = torch.linalg.matrix_norm(a6) ** (1 / 6)
        needed = (torch.log2(radius / THETA[x.dtype]) + exponent).ceil().clamp_min(0)
        squarings = needed.clamp_max(MAX_SQUARINGS).nan_to_num(0).to(torch.int32)
        shift = exponent - squarings
    powers = torch.stack([_scaled(m, k * shift) for k, m in ((1, a), (2, a2), (3, a3), (6, a6))])
    b1, b2, b3, b4, b5 = _combinations(powers)
    c = b1 @ b5 + b4
    d = b3 + c
    # in a product, so that the gradient of a matrix that is too large is NaN too
    root = (b2 + d @ c) * torch.where(needed > MAX_SQUARINGS, torch.nan, 1.0).to(x.dtype)[..., None, None]

    p = root
    for k in range(_rounds(squarings)):
        p = _chosen(squarings, k, p @ p, p)
    p = p + p @ (torch.eye(p.shape[-1], dtype=p.dtype, device=p.device) - p.mT @ p) / 2
    return p, powers[:3], torch.stack([b1, b5, d]), c, root, squarings


def _coefficients(dtype: torch.dtype, device: torch.device) -> Tensor:
    """POWERS [5, 4] on a device."""
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return torch.tensor(POWERS, dtype=dtype, device=device)  # a tensor of the transform, not to be kept
    return _kept_coefficients(dtype, device)


@functools.lru_cache(maxsize=64)
def _kept_coefficients(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, since a copy from the host synchronises and cannot be captured in a CUDA graph."""
    with torch.inference_mode(False):
        return torch.tensor(POWERS, dtype=dtype, device=device)


def _combinations(powers: Tensor) -> tuple[Tensor, ...]:
    """B1 ... B5 [..., N, N] from A, A2, A3, A6 as [4, ..., N, N]."""
    b = torch.tensordot(_coefficients(powers.dtype, powers.device), powers, dims=1)
    eye = torch.eye(powers.shape[-1], dtype=powers.dtype, device=powers.device)
    return tuple(one if weight == 0.0 else one + weight * eye for one, weight in zip(b, IDENTITY, strict=True))


def skew_exp_bwd(grad_p: Tensor, powers: Tensor, terms: Tensor, c: Tensor, root: Tensor, squarings: Tensor) -> Tensor:
    """grad_x [..., N, N], skew, from what `skew_exp_fwd` returns; see Note [Backward of the exponential of a skew
    matrix]."""
    rounds = _rounds(squarings)
    stages = [root]
    for k in range(rounds - 1):
        stages.append(_chosen(squarings, k, stages[-1] @ stages[-1], stages[-1]))
    g = grad_p
    for k in reversed(range(rounds)):
        stage = stages[k].mT
        g = _chosen(squarings, k, g @ stage + stage @ g, g)

    b1, b5, d = terms
    grad_b3 = g @ c.mT
    grad_c = grad_b3 + d.mT @ g
    grad_b = torch.stack([grad_c @ b5.mT, g, grad_b3, grad_c, b1.mT @ grad_c])
    grad_a, grad_a2, grad_a3, grad_a6 = torch.tensordot(_coefficients(g.dtype, g.device).T, grad_b, dims=1)

    a, a2, a3 = powers
    y = _symmetric(grad_a6) @ a3
    k3 = _skew(grad_a3) - (y - y.mT)
    y = _symmetric(grad_a2 - a @ k3) @ a
    grad_a = _skew(grad_a + k3 @ a2) - (y - y.mT)
    return _scaled(grad_a, -squarings)
