"""Fisher memory of non-normal chains: Figure 1 of Jahagirdar et al. 2019, and the total memory in the supplement of
Kerg et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orthokern.diagnostics import FisherMemory, fisher_memory, transient_norms
from orthokern.reproduce.page import Outcome, drawn, output_folder, paragraph, picture, publish, table

UNITS = 100
INPUTS = 1000  # inputs of Figure 1b


def chain(alpha: float, beta: float, d: float, n: int = UNITS) -> tuple[Tensor, Tensor]:
    """Theta [n,n] of the report: d on the diagonal, alpha on the first subdiagonal, beta below it; and the input vector
    [n], the first unit vector; float64."""
    ones = torch.ones(n, n, dtype=torch.float64)
    theta = d * torch.eye(n, dtype=torch.float64) + alpha * (ones.tril(-1) - ones.tril(-2)) + beta * ones.tril(-2)
    return theta, torch.eye(n, dtype=torch.float64)[0]


def produce(args: Mapping[str, Any], spec: Mapping[str, Any]) -> Outcome:
    """Computes the memory of all chains; the full size is fast enough for --quick."""
    memories = {tuple(key): fisher_memory(*chain(*key), steps=2 * UNITS) for *key, _ in spec["memory"]}
    rows, lines = [], []
    for (alpha, beta, d, theirs), memory in zip(spec["memory"], memories.values(), strict=True):
        rows.append({"alpha": alpha, "beta": beta, "d": d, "published": theirs, "ours": memory.total})
        alive = int((memory.curve > 1e-3).nonzero().max())
        cells = [f"{alpha:g}", f"{beta:g}", f"{d:g}", f"{theirs:.3g}", f"{memory.total:.3f}"]
        lines.append([*cells, f"{memory.total - theirs:+.3f}", f"{memory.curve[0]:.4f}", str(alive)])
    folder = output_folder(args)
    figure = drawn(folder / f"{spec['name']}.png", partial(_draw, memories))
    headings = ("alpha", "beta", "d", "published J_tot", "ours", "difference", "J(0)", "longest memory (steps)")
    text = [*table(headings, lines), "", *picture(spec["title"], figure)]
    text += ["Longest memory: the largest k for which J(k) is above 0.001. A higher J_tot is more memory.", ""]
    return publish(folder, spec, args.get("quick", False), [*text, paragraph(spec["note"])], rows, figure), {}


def _draw(memories: Mapping[tuple[float, ...], FisherMemory], plots: Any) -> Any:
    start = torch.rand(UNITS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = 3 * UNITS // 2
    transients = {
        f"α {alpha:g}, β {beta:g}": transient_norms(chain(alpha, beta, d)[0], start, steps=steps)
        for alpha, beta, d in memories
        if d == 0
    }
    curves = {
        f"α {alpha:g}, β {beta:g}, d {d:g}": memory.curve
        for (alpha, beta, d), memory in memories.items()
        if beta == 0 or alpha == 1
    }
    return plots.memory(chain(1.0, 0.3, 0.6, 12)[0], transients, curves)
