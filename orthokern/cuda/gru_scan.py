"""gru_scan on CUDA; the kernels: ``csrc/cuda/gru_scan.cu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern._products import ieee_products
from orthokern.cuda import _call as native
from orthokern.cuda._sums import add_product


class _Scan:
    """One GRU scan as the native planner would run it (csrc/cuda/gru_scan.h)."""

    def __init__(self, h0: Tensor, variant: str, steps: int, *, backward: bool) -> None:
        b, n = h0.shape
        self.h0 = h0
        self.sizes = {"T": steps, "B": b, "N": n, "kanai": int(variant == "kanai"), "backward": int(backward)}
        self.plan = native.plan("gru_scan_plan", h0.device, self.sizes)

    def run(self, **tensors: Tensor | None) -> None:
        """Put it on the stream; tensors by the names of csrc/cuda/gru_scan.h."""
        work = self.h0.new_empty(self.plan["work"]) if self.plan["work"] else None
        native.call("gru_scan", self.h0.device, {**self.sizes, "plan": self.plan}, {**tensors, "work": work})


def gru_scan_fwd(
    x: Tensor, w: Tensor, h0: Tensor, bias: Tensor | None, *, variant: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`orthokern.ops.gru_scan`."""
    ready = _ready(h0.device, {"x": x, "w": w, "h0": h0, "bias": bias})
    steps, (b, n) = x.shape[0], h0.shape
    hs, gates = h0.new_empty(steps, b, n), h0.new_empty(steps, b, 3 * n)
    pre = None if variant == "kanai" else h0.new_empty(steps, b, n)
    lengths = native.ready(lengths, torch.int64, h0.device, "lengths")
    of_backward = dict.fromkeys(("grad_hs", "grad_x", "factor", "grad_h0", "norms"))
    scan = _Scan(h0, variant, steps, backward=False)
    scan.run(**ready, **of_backward, lengths=lengths, hs=hs, gates=gates, pre=pre)
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
    w, h0, hs = ready["w"], ready["h0"], ready["hs"]
    lengths = native.ready(lengths, torch.int64, h0.device, "lengths")
    steps, b, n = grad_hs.shape
    grad_x, factor, grad_h0 = torch.empty_like(ready["gates"]), torch.empty_like(hs), torch.empty_like(h0)
    scan = _Scan(h0, variant, steps, backward=True)
    norms = h0.new_zeros(steps, scan.plan["norm_columns"])
    results = {"grad_x": grad_x, "factor": factor, "grad_h0": grad_h0, "norms": norms}
    scan.run(**ready, **results, lengths=lengths, x=None, bias=None)
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
