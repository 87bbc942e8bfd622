"""cayley on CUDA; the kernels: ``csrc/cuda/cayley.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orthokern._elements import check
from orthokern.cuda import _call as native
from orthokern.cuda._call import DTYPES


def cayley(m: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    """See ``orthokern.ops.cayley``."""
    return cayley_of_many([(m, g, lr)])[0]


def cayley_of_many(steps: Sequence[tuple[Tensor, Tensor, float | Tensor]]) -> list[Tensor]:
    """`cayley` of several (m [..., N, K], g, lr), of one dtype and device and of any shapes, by the same kernels.

    The results are bitwise those of separate calls. All matrices that fit into one block each need one launch; the
    others need as many launches as the largest square one and the largest thin one.
    """
    first = steps[0][0]
    alive: list[Tensor | None] = []  # references until the kernels are launched
    outs, matrices = [], []
    for m, g, lr in steps:
        m = native.ready(m, first.dtype, "m", first.device)
        g = native.ready(g, first.dtype, "g", first.device)
        check("cayley", "g", g, first.dtype, native.DEVICE, m.numel())
        outs.append(torch.empty_like(m))
        if not m.numel():
            continue
        N, K = m.shape[-2:]
        rates = lr.to(m.device, torch.float64).expand(m.shape[:-2]).contiguous() if isinstance(lr, Tensor) else None
        sizes = {"batch": m.numel() // (N * K), "N": N, "K": K, "rate": lr if rates is None else 0.0}
        tensors = {"m": m, "g": g, "lr": rates, "out": outs[-1]}
        alive += tensors.values()
        matrices.append(native.addressed(sizes, tensors))
    if matrices:
        problem = {"dtype": DTYPES[first.dtype], "matrices": matrices}
        workspace = native.workspace("cayley_workspace", first.device, problem, {})
        native.call("cayley", first.device, problem, {"workspace": workspace})
    return outs
