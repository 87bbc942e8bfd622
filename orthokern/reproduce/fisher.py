"""Fisher memory of non-normal chains: Figure 1 of Jahagirdar et al. 2019, and the total memory in the supplement of
Kerg et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor

from orthokern.diagnostics import FisherMemory, fisher_memory, transient_norms
from orthokern.reproduce.page import drawn, table, written
from orthokern.reproduce.study import Outcome, Study, output_folder

UNITS = 100
INPUTS = 1000  # inputs of Figure 1b
# (alpha, beta, d): J_tot for noise of variance 1, the supplement of Kerg et al. 2019, Table 6
MEMORY = {
    (0.95, 0.0, 0.0): 3.03,
    (1.0, 0.0, 0.0): 5.19,
    (1.05, 0.0, 0.0): 12.1,
    (0.95, 0.005, 0.0): 3.18,
    (1.0, 0.005, 0.0): 5.30,
    (1.05, 0.005, 0.0): 12.1,
    (0.95, 0.0, 0.2): 12.0,
    (1.0, 0.0, 0.2): 16.2,
    (1.05, 0.0, 0.2): 20.5,
    (0.95, 0.005, 0.2): 12.1,
    (1.0, 0.005, 0.2): 16.3,
    (1.05, 0.005, 0.2): 20.4,
}
NOTE = f"""\
Theta has {UNITS} units: d on the diagonal, alpha on the first subdiagonal, beta below it. The input enters at the first
unit, noise of variance 1 at all units. J_tot is the sum of the Fisher memory curve, without truncation at the steps
that are drawn. With d = 0.2 the condition number of the covariance is up to 1e26, too large for a solve in float64.
This explains the differences to the published numbers in the second digit: sums with 400 bits give 11.939 for the
first of them and 20.837 for the third, as here. In the figure, (a) is the structure of Theta, with 12 units; (b) the
norm of the state by time, mean and standard deviation over {INPUTS} initial states, uniform in [0, 1) in every unit,
with d = 0; (c) the memory curves J(k)."""


def chain(alpha: float, beta: float, d: float, n: int = UNITS) -> tuple[Tensor, Tensor]:
    """Theta [n,n] of the report: d on the diagonal, alpha on the first subdiagonal, beta below it; and the input vector
    [n], the first unit vector; float64."""
    ones = torch.ones(n, n, dtype=torch.float64)
    theta = d * torch.eye(n, dtype=torch.float64) + alpha * (ones.tril(-1) - ones.tril(-2)) + beta * ones.tril(-2)
    return theta, torch.eye(n, dtype=torch.float64)[0]


def _produce(args: Mapping[str, Any], study: Study, stream: TextIO) -> Outcome:
    memories = {key: fisher_memory(*chain(*key), steps=2 * UNITS) for key in MEMORY}
    rows, lines = [], []
    for key, memory in memories.items():
        theirs, ours = MEMORY[key], memory.total
        rows.append(dict(zip(("alpha", "beta", "d"), key, strict=True)) | {"published": theirs, "ours": ours})
        alive = int((memory.curve > 1e-3).nonzero().max())
        cells = [*(f"{value:g}" for value in key), f"{theirs:.3g}", f"{ours:.3f}", f"{ours - theirs:+.3f}"]
        lines.append([*cells, f"{memory.curve[0]:.4f}", str(alive)])
    folder = output_folder(args)
    figure = drawn(folder / f"{study.name}.png", partial(_draw, memories))
    headings = ("alpha", "beta", "d", "published J_tot", "ours", "difference", "J(0)", "longest memory (steps)")
    text = [f"# {study.name}: {study.title}", "", f"{study.source}.", "", *table(headings, lines), ""]
    text += [] if figure is None else [f"![{study.title}]({figure.name})", ""]
    text += ["Longest memory: the largest k for which J(k) is above 0.001. A higher J_tot is more memory.", ""]
    quick = args.get("quick", False)  # the full size is fast enough
    summary = {"experiment": study.name, "source": study.source, "quick": quick, "rows": rows}
    return Outcome(written(folder, study.name, "\n".join([*text, NOTE]) + "\n", summary, figure))


def _draw(memories: Mapping[tuple[float, float, float], FisherMemory], plots: Any) -> Any:
    start = torch.rand(UNITS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = 3 * UNITS // 2
    transients = {
        f"α {alpha:g}, β {beta:g}": transient_norms(chain(alpha, beta, d)[0], start, steps=steps)
        for alpha, beta, d in MEMORY
        if d == 0
    }
    curves = {
        f"α {alpha:g}, β {beta:g}, d {d:g}": memory.curve
        for (alpha, beta, d), memory in memories.items()
        if beta == 0 or alpha == 1
    }
    return plots.memory(chain(1.0, 0.3, 0.6, 12)[0], transients, curves)


FISHER = Study(
    "nnrnn-fisher",
    "Fisher memory and transients of non-normal chains",
    "Jahagirdar et al. 2019, Figure 1; Kerg et al. 2019, supplement, Table 6",
    (),
    _produce,
)
