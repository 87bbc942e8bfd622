"""The activations and their derivatives as device functions, for every kernel of this folder.

They follow ``orthokern/reference/activations.py`` (Note [Activation derivatives]) and ``csrc/common/activations.h``,
NaN and signed zeros included. Every phi maps 0 to 0, so padding stays 0 whatever the activation.

Tiles are [rows, BLOCK_N] with BLOCK_N even; ``b_param`` is [1, BLOCK_N], or 0.0 for an activation without one.
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# tanh on [-CUT, CUT] is x + x^3 R(x^2), beyond it 1 - 2 / (exp(2 |x|) + 1) with the sign of x: neither cancels. The
# coefficients are those of the Cephes library. No libm call, so the interpreter runs the same formula as the GPU.
TANH_CUT = tl.constexpr(0.625)
F32_0 = tl.constexpr(-5.70498872745e-3)
F32_1 = tl.constexpr(2.06390887954e-2)
F32_2 = tl.constexpr(-5.37397155531e-2)
F32_3 = tl.constexpr(1.33314422036e-1)
F32_4 = tl.constexpr(-3.33332819422e-1)
F64_P0 = tl.constexpr(-9.64399179425052238628e-1)
F64_P1 = tl.constexpr(-9.92877231001918586564e1)
F64_P2 = tl.constexpr(-1.61468768441708447952e3)
F64_Q0 = tl.constexpr(1.12811678491632931402e2)
F64_Q1 = tl.constexpr(2.23548839060100448583e3)
F64_Q2 = tl.constexpr(4.84406305325125486048e3)


@triton.jit
def tanh(b_x):
    """tanh of a float32 or float64 tile, to a few ulp at any argument."""
    b_size = tl.abs(b_x)
    b_z = b_x * b_x
    if b_x.dtype == tl.float64:
        b_p = (F64_P0 * b_z + F64_P1) * b_z + F64_P2
        b_q = ((b_z + F64_Q0) * b_z + F64_Q1) * b_z + F64_Q2
        b_small = b_x + b_x * (b_z * (b_p / b_q))
    else:
        b_r = (((F32_0 * b_z + F32_1) * b_z + F32_2) * b_z + F32_3) * b_z + F32_4
        b_small = b_x + b_x * (b_z * b_r)
    b_large = 1.0 - 2.0 / (tl.exp(2.0 * b_size) + 1.0)
    b_large = tl.where(b_x < 0, -b_large, b_large)
    return tl.where(b_size < TANH_CUT, b_small, b_large)  # a NaN takes b_large, which is NaN


@triton.jit
def swap_pairs(b_x, b_by, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """Exchange the members of the pairs of b_x [BLOCK_B, BLOCK_N] where those of b_by are in ascending order."""
    b_even, b_odd = tl.split(tl.reshape(b_x, [BLOCK_B, BLOCK_N // 2, 2]))
    b_by_even, b_by_odd = tl.split(tl.reshape(b_by, [BLOCK_B, BLOCK_N // 2, 2]))
    m_swap = b_by_odd > b_by_even  # a tie, and a NaN, stay where they are
    b_pairs = tl.join(tl.where(m_swap, b_odd, b_even), tl.where(m_swap, b_even, b_odd))
    return tl.reshape(b_pairs, [BLOCK_B, BLOCK_N])


@triton.jit
def apply(b_a, b_param, ACTIVATION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """phi(a) of b_a [BLOCK_B, BLOCK_N]."""
    if ACTIVATION == "tanh":
        b_h = tanh(b_a)
    elif ACTIVATION == "relu":
        b_h = tl.where(b_a < 0, 0.0, b_a)  # in this order a NaN stays a NaN
    elif ACTIVATION == "prelu" or ACTIVATION == "leaky_relu":
        b_h = tl.where(b_a > 0, b_a, b_param * b_a)
    elif ACTIVATION == "modrelu":
        b_magnitude = tl.abs(b_a) + b_param
        b_signed = tl.where(b_a < 0, -b_magnitude, b_magnitude)
        b_h = tl.where((b_magnitude <= 0) | (b_a == 0), 0.0, b_signed)
    elif ACTIVATION == "oplu":
        b_h = swap_pairs(b_a, b_a, BLOCK_B, BLOCK_N)
    elif ACTIVATION == "softsign":
        b_h = b_a / (1.0 + tl.abs(b_a))
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a formula")
        b_h = b_a
    return b_h


@triton.jit
def chain(b_grad, b_h, b_a, b_param, ACTIVATION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """phi'(a) times b_grad, and the gradient of the parameter before any sum (0.0 without one), [BLOCK_B, BLOCK_N].

    Which of b_h = phi(a) and b_a a formula reads is its row's ``reads`` in ``orthokern/_activations.py``.
    """
    b_elementwise = 0.0
    if ACTIVATION == "tanh":
        b_delta = b_grad * (1.0 - b_h * b_h)
    elif ACTIVATION == "relu":
        b_delta = tl.where(b_h <= 0, 0.0, b_grad)  # in this order a NaN stays a NaN
    elif ACTIVATION == "prelu" or ACTIVATION == "leaky_relu":
        b_delta = tl.where(b_a > 0, b_grad, b_param * b_grad)
        b_elementwise = tl.where(b_a > 0, 0.0, b_grad * b_a)
    elif ACTIVATION == "modrelu":
        b_delta = tl.where(b_h == 0, 0.0, b_grad)
        b_elementwise = tl.where(b_h < 0, -b_delta, b_delta)
    elif ACTIVATION == "oplu":
        b_delta = swap_pairs(b_grad, b_a, BLOCK_B, BLOCK_N)
    elif ACTIVATION == "softsign":
        b_left = 1.0 - tl.abs(b_h)
        b_delta = b_grad * b_left * b_left
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a derivative")
        b_delta = b_grad
    return b_delta, b_elementwise
