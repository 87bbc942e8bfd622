"""gru_scan on CUDA; the kernels: ``csrc/cuda/gru_scan.cu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern.cuda import _call as native
from orthokern.cuda._sums import add_product


def _plan(h0: Tensor, variant: str, steps: int, *, backward: bool) -> dict[str, int]:
    """The sizes of a GRU scan in one direction, and how the native planner would run it (csrc/cuda/gru_scan.h)."""
    b, n = h0.shape
    sizes = {"T": steps, "B": b, "N": n, "kanai": int(variant == "kanai"), "backward": int(backward)}
    return {**sizes, **native.plan("gru_scan_plan", h0.device, sizes)}


def _run(plan: dict[str, int], h0: Tensor, tensors: dict[str, Tensor | None]) -> None:
    """Put the scan of a plan on the stream; tensors by the names of csrc/cuda/gru_scan.h."""
    work = h0.new_empty(plan["work_floats"]) if plan["work_floats"] else None
    native.call("gru_scan", h0.device, plan, {**tensors, "h0": h0, "work": work})


def gru_scan_fwd(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *, variant: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    ready = _ready(h0.device, {"x": x, "w": w, "h0": h0, "bias": bias})
    steps, (b, n) = x.shape[0], h0.shape
    hs, gates = h0.new_empty(steps, b, n), h0.new_empty(steps, b, 3 * n)
    pre = None if variant == "kanai" else h0.new_empty(steps, b, n)
    lengths = native.ready(lengths, torch.int64, h0.device, "lengths")
    plan = _plan(h0, variant, steps, backward=False)
    _run(plan, ready.pop("h0"), {**ready, "lengths": lengths, "hs": hs, "gates": gates, "pre": pre})
    return hs, gates, h0.new_empty(0) if pre is None else pre


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
    kanai = variant == "kanai"
    given = {"grad_hs": grad_hs, "hs": hs, "gates": gates, "pre": None if kanai else pre, "w": w, "h0": h0}
    ready = _ready(h0.device, given)
    w, h0, hs = ready.pop("w"), ready.pop("h0"), ready["hs"]
    lengths = native.ready(lengths, torch.int64, h0.device, "lengths")
    steps, b, n = grad_hs.shape
    grad_x, factor, grad_h0 = torch.empty_like(ready["gates"]), torch.empty_like(hs), torch.empty_like(h0)
    plan = _plan(h0, variant, steps, backward=True)
    norms = h0.new_zeros(steps, plan["norm_columns"])
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "norms": norms}
    _run(plan, h0, {**ready, **results, "w": w, "lengths": lengths})
    norm, empty = norms.sum(1).sqrt(), h0.new_empty(0)
    if not need_params:
        return grad_x, empty, grad_h0, empty, norm
    rows, rows_n = grad_x.view(steps * b, 3 * n), factor.view(steps * b, n)
    grad_w = torch.zeros_like(w)

    def add(to: Tensor, left: Tensor) -> None:
        """to += sum over steps of left_t h_{t-1}^T, without a copy of the states that h0 would stand in front of."""
        to.addmm_(left[:b].mT, h0)
        if steps > 1:
            add_product(to, left[b:], hs.view(steps * b, n)[:-b])

    with ieee_products():
        add(grad_w[: 2 * n], rows[:, : 2 * n])
        if kanai:
            add_product(grad_w[2 * n :], rows[:, 2 * n :], rows_n)
        else:
            add(grad_w[2 * n :], rows_n)
    if bias is None:
        return grad_x, grad_w, grad_h0, empty, norm
    grad_bias = rows.sum(0)
    if not kanai:
        grad_bias[2 * n :] = rows_n.sum(0)
    return grad_x, grad_w, grad_h0, grad_bias, norm


def _ready(device: torch.device, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The same, checked and contiguous."""
    return {name: native.ready(tensor, torch.float32, device, name) for name, tensor in tensors.items()}
