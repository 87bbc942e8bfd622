"""The gradient of an exponential from few rows on the CPU; the kernel: ``csrc/cpu/few_rows.cpp``."""

from __future__ import annotations

from torch import Tensor

from orthokern.cpu._call import call, new


def few_rows(k: Tensor, h: Tensor, turn: Tensor, s: Tensor, weights: Tensor) -> Tensor:
    """[N,N], strictly lower triangular: Note [Gradient of an exponential from few rows] in
    ``orthokern/nn/_few_rows.py``; k and h [R,N], X^T and S [N,N], C [terms,terms]."""
    (R, N), grad = k.shape, new(*turn.shape, dtype=k.dtype)
    sizes = {"R": R, "N": N, "terms": len(weights)}
    call("few_rows", k.dtype, sizes, {"k": k, "h": h, "turn": turn, "s": s, "weights": weights, "grad": grad})
    return grad
