"""Steps until random matrices are orthogonal: section II-A of Manchev and Spratling."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from orthokern.commandline import say
from orthokern.init import glorot_uniform_, learned_orthogonal_
from orthokern.reproduce.page import conditions, table, written
from orthokern.reproduce.study import Outcome, Study, output_folder

CHUNK = 1000  # number of matrices drawn together
GUARDED = 1000  # matrices for the guarded rule, which has no published mean to compare with


class Sample(NamedTuple):
    """Random square matrices to make orthogonal.

    Attributes:
        label: their distribution.
        side: n.
        size, quick: their number, and their number with --quick. The guarded rule uses at most GUARDED of them.
        published: the paper's mean number of steps, or None.
    """

    label: str
    side: int
    size: int
    quick: int
    published: float | None = None


SAMPLES = (
    Sample("N(0, 0.1)", 100, 10_000, 200, 22.77),
    Sample("U[-0.1, 0.1]", 100, 10_000, 200, 24.00),
    # not in the paper: distributions for which its rule no longer converges
    Sample("N(0, 0.1)", 150, 200, 20),
    Sample("N(0, 0.1)", 200, 100, 10),
    Sample("N(0, 0.1)", 400, 20, 3),
    Sample("Glorot-uniform", 100, 200, 20),
    Sample("Glorot-uniform", 400, 20, 3),
)
NOTE = """\
The published numbers count evaluations of the error, the first of them before any step, so they are one above the
number of steps. Means are over the matrices that converged, ± one standard error. "plain" is the published rule, which
always converges according to the paper. "guarded" first scales down a matrix that may be outside the region from which
the descent converges (a largest singular value of 2.45 for this rate); it uses at most the first 1000 of the same
matrices."""


def _draw(label: str, size: int, n: int, generator: torch.Generator) -> Tensor:
    """Matrices [size,n,n] float32 of a distribution."""
    if label == "Glorot-uniform":
        return glorot_uniform_(torch.empty(size, n, n), generator)
    if label.startswith("N"):
        return 0.1 * torch.randn(size, n, n, generator=generator)
    return 0.2 * torch.rand(size, n, n, generator=generator) - 0.1


def _measure(sample: Sample, guard: bool, quick: bool) -> dict[str, Any]:
    """One row: the gradient descent of the paper (rate 0.1, tolerance 1e-6) on a sample with a fixed seed."""
    generator = torch.Generator().manual_seed(1234)
    size = sample.quick if quick else sample.size
    size = min(size, GUARDED) if guard else size
    of_chunks, converged, scaled, seconds = [], 0, 0, 0.0
    for start in range(0, size, CHUNK):
        w = _draw(sample.label, min(CHUNK, size - start), sample.side, generator)
        began = time.perf_counter()
        result = learned_orthogonal_(w, lr=0.1, tol=1e-6, guard=guard)
        seconds += time.perf_counter() - began
        converged += int(result.converged.sum())
        scaled += int((result.scale != 1).sum())
        of_chunks.append(result.steps[result.converged])
    steps = torch.cat(of_chunks).double()
    return {
        "law": sample.label,
        "side": sample.side,
        "matrices": size,
        "rule": "guarded" if guard else "plain",
        "success_percent": 100.0 * converged / size,
        "scaled_percent": 100.0 * scaled / size,
        "published_evaluations": None if guard else sample.published,
        "mean_evaluations": float(steps.mean()) + 1.0 if len(steps) else None,
        "standard_error": float(steps.std()) / math.sqrt(len(steps)) if len(steps) > 1 else None,
        "least_evaluations": int(steps.min()) + 1 if len(steps) else None,
        "most_evaluations": int(steps.max()) + 1 if len(steps) else None,
        "seconds": seconds,
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    theirs, ours, error = row["published_evaluations"], row["mean_evaluations"], row["standard_error"]
    return [
        row["law"],
        str(row["side"]),
        str(row["matrices"]),
        row["rule"],
        f"{row['scaled_percent']:.4g}",
        f"{row['success_percent']:.4g}",
        "–" if theirs is None else f"{theirs:.2f}",
        "–" if ours is None else f"{ours:.2f}" + ("" if error is None else f" ± {error:.2f}"),
        "–" if theirs is None or ours is None else f"{ours - theirs:+.2f}",
        *("–" if row[end] is None else str(row[end]) for end in ("least_evaluations", "most_evaluations")),
        f"{row['seconds']:.1f}",
    ]


def _produce(args: Mapping[str, Any], study: Study, stream: TextIO) -> Outcome:
    quick = args.get("quick", False)
    if "threads" in args:
        torch.set_num_threads(args["threads"])
    rows = []
    for sample in SAMPLES:
        for guard in (False, True):
            rows.append(_measure(sample, guard, quick))
            say(f"{rows[-1]['law']}, n = {sample.side}, {rows[-1]['rule']}: {rows[-1]['seconds']:.1f} s", stream)
    headings = ["distribution", "n", "matrices", "rule", "scaled (%)", "success (%)", "published steps", "ours"]
    headings += ["difference", "least", "most", "seconds"]
    text = [f"# {study.name}: {study.title}", "", f"{study.source}.", "", "Fewer steps are better.", ""]
    text += [*table(headings, map(_cells, rows)), "", NOTE, "", conditions()]
    summary = {"experiment": study.name, "source": study.source, "quick": quick, "rows": rows}
    return Outcome(written(output_folder(args), study.name, "\n".join(text) + "\n", summary))


ORTHOGONALITY = Study(
    "oinit-steps",
    "Steps until random matrices are orthogonal, by gradient descent at a rate of 0.1 to an error of 1e-6",
    "Manchev and Spratling, section II-A",
    ("threads",),
    _produce,
)
