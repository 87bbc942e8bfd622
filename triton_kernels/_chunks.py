"""Scans with the identity as activation, in chunks of time that run in parallel."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from orthokern._gpu_scans import composed, power
from orthokern._scan_contract import ScanArgs
from orthokern.triton_kernels._launch import launch_backward, launch_forward

# Note [Chunks of time]
#     With the identity, h_t = W h_{t-1} + e_t is linear. A chunk of C steps maps its initial state h to W^C h + r,
#     where r is its last state if it starts from zero. Three launches over P = ceil(T / C) chunks as virtual sequences:
#         1. every chunk from zero (the first from h0), storing its last state only;
#         2. the initial states of the chunks: a scan of P steps with the dense map W^C over those last states;
#         3. every chunk again, from its initial state, storing all states.
#     Backward is the same with W^T, from the end. The arithmetic doubles, and 2 C + P sequential steps replace T.
#     W^C is computed by repeated squaring in float64, at negligible cost, and rounded once. Its norm is at most
#     max(s)^C, the growth of the state over C steps, so the product with W^C loses no more digits than those steps. C
#     is near sqrt(T), where 2 C + P is smallest up to a constant factor, and at most CHUNK_LIMIT: for a spectral margin
#     of 0.1 the growth is at most 1.1^128 = 2e5, which neither float32 nor a squared norm overflows. A bound from the
#     values of s would be sharper, but reading them needs a device synchronization.
#     Sequences of different lengths: a chunk in which a sequence has ended gives zeros for any initial state, forward
#     and backward. A message clip makes the backward nonlinear, so chunks are not used with one.
CHUNK_LIMIT = 128
# Chunks are used where they reduce the number of sequential steps, times waves of programs, at least to this fraction.
CHUNK_GAIN = 0.7
# Shorter scans are bound by launches.
CHUNK_MIN_T = 512


def chunk_length(T: int) -> int:
    """C for T steps, see Note [Chunks of time]."""
    return max(1, min(CHUNK_LIMIT, math.isqrt(T)))


def wants_chunks(args: ScanArgs, T: int) -> bool:
    """Whether to scan T steps in chunks. "auto" decides from shapes and the number of SMs."""
    if args.activation != "identity" or args.message_clip > 0 or args.algorithm == "sequential":
        return False
    if args.resets is not None:
        return False
    if args.algorithm == "chunked":
        return True
    if T < CHUNK_MIN_T:
        return False
    B, device = args.h0.shape[0], args.h0.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    chunk = chunk_length(T)
    chunks = triton.cdiv(T, chunk)
    sequential = T * triton.cdiv(B, processors) * (1 if args.first is None else 2)  # two products a step
    chunked = 2 * chunk * triton.cdiv(chunks * B, processors) + chunks  # one product
    return chunked < CHUNK_GAIN * sequential


def forward_in_chunks(args: ScanArgs, x: Tensor, table: Tensor | None, h0: Tensor, hs: Tensor) -> None:
    """Note [Chunks of time], forward: fills hs [T, B, N] from h0 and the inputs of ``launch_forward``."""
    (T, B, N), C = hs.shape, chunk_length(len(hs))
    P = triton.cdiv(T, C)
    w = composed(args)
    dense = None, None, w.to(h0.dtype)
    entering = h0.new_zeros(P, B, N)
    entering[0] = h0
    starts = entering.view(P * B, N)
    if P > 1:
        last = torch.empty_like(entering)
        launch_forward(args, dense, x, table, starts, chunk=C, last=last.view(P * B, N))
        # last[0] includes h0, so the scan over chunks 1 ... starts from zero
        carried = None, None, power(w, C).to(h0.dtype)
        zeros = torch.zeros_like(h0)
        launch_forward(args._replace(lengths=None), carried, last[: P - 1], None, zeros, hs=entering[1:])
    launch_forward(args, dense, x, table, starts, chunk=C, hs=hs)


def backward_in_chunks(args: ScanArgs, grad_hs: Tensor, *, delta: Tensor, left: Tensor, square: Tensor) -> None:
    """Note [Chunks of time], backward: fills delta [T, B, N], left [B, N] and square [T, B]."""
    T, B, N = grad_hs.shape
    C = chunk_length(T)
    P = triton.cdiv(T, C)
    w = composed(args).mT.contiguous()
    dense = None, None, w.to(grad_hs.dtype)
    carry = grad_hs.new_zeros(P, B, N)  # of each chunk, from the chunk after it
    carries = carry.view(P * B, N)
    if P > 1:
        alone = torch.empty_like(carry)  # what each chunk passes on if its carry is zero
        launch_backward(
            args, dense, grad_hs, None, None, carries, chunk=C, delta=None, left=alone.view(P * B, N), square=None
        )
        # carry[p] = alone[p + 1] + (W^T)^C carry[p + 1]: the adjoint scan itself, whose delta_p is carry[p]
        carried = None, None, power(w, C).to(grad_hs.dtype)
        launch_backward(
            args._replace(lengths=None),
            carried,
            alone[1:],
            None,
            None,
            torch.zeros_like(left),
            delta=carry[: P - 1],
            left=torch.empty_like(left),
            square=square.new_empty(P - 1, B),
        )
    lefts = torch.empty_like(carry)
    launch_backward(
        args, dense, grad_hs, None, None, carries, chunk=C, delta=delta, left=lefts.view(P * B, N), square=square
    )
    left.copy_(lefts[0])
