"""Scans with the identity as activation, in chunks of time that run in parallel."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from orthokern._gpu_scans import composed, power
from orthokern._scan_contract import Map, ScanOptions
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


def wants_chunks(options: ScanOptions, T: int, B: int, device: torch.device, factored: bool) -> bool:
    """Whether to scan in chunks. "auto" decides from shapes and the number of SMs."""
    if options.activation != "identity" or options.message_clip > 0 or options.algorithm == "sequential":
        return False
    if options.resets is not None:
        return False
    if options.algorithm == "chunked":
        return True
    if T < CHUNK_MIN_T:
        return False
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    chunk = chunk_length(T)
    chunks = triton.cdiv(T, chunk)
    sequential = T * triton.cdiv(B, processors) * (2 if factored else 1)  # two products a step
    chunked = 2 * chunk * triton.cdiv(chunks * B, processors) + chunks  # one product
    return chunked < CHUNK_GAIN * sequential


def forward_in_chunks(
    map_: Map,
    x: Tensor,
    table: Tensor | None,
    h0: Tensor,
    *,
    T: int,
    precision: str,
    hs: Tensor,
    lengths: Tensor | None = None,
) -> None:
    """Note [Chunks of time], forward: fills hs [T, B, N]. map_: as the op has it."""
    (B, N), C = h0.shape, chunk_length(T)
    P = triton.cdiv(T, C)
    options: dict[str, Any] = {"activation": "identity", "precision": precision}
    w = composed(map_)
    dense = Map(None, None, w.to(h0.dtype))
    entering = torch.zeros(P, B, N, dtype=h0.dtype, device=h0.device)
    entering[0] = h0
    if P > 1:
        last = torch.empty(P, B, N, dtype=h0.dtype, device=h0.device)
        launch_forward(
            dense,
            x,
            table,
            entering.view(P * B, N),
            None,
            T=T,
            B=B,
            chunk=C,
            hs=None,
            last=last.view(P * B, N),
            lengths=lengths,
            **options,
        )
        # last[0] includes h0, so the scan over chunks 1 ... starts from zero
        carried = Map(None, None, power(w, C).to(h0.dtype))
        launch_forward(
            carried,
            last[: P - 1],
            None,
            torch.zeros_like(h0),
            None,
            T=P - 1,
            B=B,
            chunk=P - 1,
            hs=entering[1:],
            **options,
        )
    launch_forward(dense, x, table, entering.view(P * B, N), None, T=T, B=B, chunk=C, hs=hs, lengths=lengths, **options)


def backward_in_chunks(
    map_: Map,
    grad_hs: Tensor,
    *,
    precision: str,
    delta: Tensor,
    left: Tensor,
    square: Tensor,
    lengths: Tensor | None = None,
) -> None:
    """Note [Chunks of time], backward: fills delta [T, B, N], left [B, N] and square [T, B]. map_: as the op has it."""
    T, B, N = grad_hs.shape
    C = chunk_length(T)
    P = triton.cdiv(T, C)
    options: dict[str, Any] = {"act_param": None, "activation": "identity", "precision": precision, "by_row": None}
    w = composed(map_).mT.contiguous()
    dense = Map(None, None, w.to(grad_hs.dtype))
    carry = torch.zeros(P, B, N, dtype=grad_hs.dtype, device=grad_hs.device)  # of each chunk, from the chunk after it
    if P > 1:
        alone = torch.empty_like(carry)  # what each chunk passes on if its carry is zero
        launch_backward(
            dense,
            grad_hs,
            None,
            None,
            carry.view(P * B, N),
            T=T,
            B=B,
            chunk=C,
            delta=None,
            left=alone.view(P * B, N),
            square=None,
            lengths=lengths,
            **options,
        )
        # carry[p] = alone[p + 1] + (W^T)^C carry[p + 1]: the adjoint scan itself, whose delta_p is carry[p]
        rest = torch.empty_like(left)
        carried = Map(None, None, power(w, C).to(grad_hs.dtype))
        launch_backward(
            carried,
            alone[1:],
            None,
            None,
            torch.zeros_like(left),
            T=P - 1,
            B=B,
            chunk=P - 1,
            delta=carry[: P - 1],
            left=rest,
            square=square.new_empty(P - 1, B),
            **options,
        )
    lefts = torch.empty_like(carry)
    launch_backward(
        dense,
        grad_hs,
        None,
        None,
        carry.view(P * B, N),
        T=T,
        B=B,
        chunk=C,
        delta=delta,
        left=lefts.view(P * B, N),
        square=square,
        lengths=lengths,
        **options,
    )
    left.copy_(lefts[0])
