"""gru_scan on the CPU; the kernels: ``csrc/cpu/gru_scan.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern.cpu._call import call, new


def gru_scan_fwd(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *, variant: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    sizes = _sizes(h0, variant, x.shape[0])
    dtype, (T, B, N) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    hs, gates = new(T, B, N, dtype=dtype), new(T, B, 3 * N, dtype=dtype)
    pre = None if variant == "kanai" else new(T, B, N, dtype=dtype)
    inputs = {"x": x, "w": w, "h0": h0, "bias": bias, "lengths": lengths}
    call("gru_scan_fwd", dtype, sizes, {**inputs, "hs": hs, "gates": gates, "pre": pre})
    return hs, gates, torch.empty(0, dtype=dtype) if pre is None else pre


def gru_scan_bwd(
    grad_hs: Tensor,
    hs: Tensor,
    gates: Tensor,
    pre: Tensor,
    w: Tensor,
    h0: Tensor,
    bias: Tensor | None,
    *,
    variant: str,
    need_params: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    sizes = _sizes(h0, variant, grad_hs.shape[0])
    dtype, (T, B, N) = h0.dtype, (sizes["T"], sizes["B"], sizes["N"])
    kanai = variant == "kanai"
    inputs = {"w": w, "h0": h0, "lengths": lengths, "grad_hs": grad_hs}
    saved = {"saved_hs": hs, "saved_gates": gates, "saved_pre": None if kanai else pre}
    grad_x, factor = new(T, B, 3 * N, dtype=dtype), new(T, B, N, dtype=dtype)
    grad_h0, grad_norm = torch.empty(B, N, dtype=dtype), torch.empty(T, dtype=dtype)
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "grad_norm": grad_norm}
    call("gru_scan_bwd", dtype, sizes, {**inputs, **saved, **results})
    empty = torch.empty(0, dtype=dtype)
    if not need_params:
        return grad_x, empty, grad_h0, empty, grad_norm
    rows, rows_n = grad_x.view(T * B, 3 * N), factor.view(T * B, N)
    grad_w = torch.empty(3 * N, N, dtype=dtype)

    def product(to: Tensor, left: Tensor) -> None:
        """to = sum over steps of left_t h_{t-1}^T, without a copy of the states that h0 would stand in front of."""
        torch.mm(left[:B].mT, h0, out=to)
        if T > 1:
            to.addmm_(left[B:].mT, hs.view(T * B, N)[:-B])

    with ieee_products():
        product(grad_w[: 2 * N], rows[:, : 2 * N])
        if kanai:
            torch.mm(rows[:, 2 * N :].mT, rows_n, out=grad_w[2 * N :])
        else:
            product(grad_w[2 * N :], rows_n)
    if bias is None:
        return grad_x, grad_w, grad_h0, empty, grad_norm
    grad_bias = rows.sum(0)
    if not kanai:
        grad_bias[2 * N :] = rows_n.sum(0)
    return grad_x, grad_w, grad_h0, grad_bias, grad_norm


def _sizes(h0: Tensor, variant: str, steps: int) -> dict[str, int]:
    B, N = h0.shape
    return {"B": B, "T": steps, "N": N, "kanai": int(variant == "kanai")}
