"""Steps until random matrices are orthogonal: section II-A of Manchev and Spratling."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern.commandline import say
from orthokern.init import glorot_uniform_, learned_orthogonal_
from orthokern.reproduce.page import Outcome, conditions, output_folder, paragraph, publish, table

CHUNK = 1000  # number of matrices drawn together
GUARDED = 1000  # matrices for the guarded rule, which has no published mean to compare with


def _draw(label: str, size: int, n: int, generator: torch.Generator) -> Tensor:
    """Matrices [size,n,n] float32 of a distribution."""
    if label == "Glorot-uniform":
        return glorot_uniform_(torch.empty(size, n, n), generator)
    if label.startswith("N"):
        return 0.1 * torch.randn(size, n, n, generator=generator)
    return 0.2 * torch.rand(size, n, n, generator=generator) - 0.1


def _measure(sample: Mapping[str, Any], guard: bool, quick: bool) -> dict[str, Any]:
    """One row: the gradient descent of the paper (rate 0.1, tolerance 1e-6) on a sample with a fixed seed."""
    generator = torch.Generator().manual_seed(1234)
    size = min(sample["quick" if quick else "matrices"], GUARDED if guard else 10**9)
    of_chunks, converged, scaled, seconds = [], 0, 0, 0.0
    for start in range(0, size, CHUNK):
        w = _draw(sample["law"], min(CHUNK, size - start), sample["side"], generator)
        began = time.perf_counter()
        result = learned_orthogonal_(w, lr=0.1, tol=1e-6, guard=guard)
        seconds += time.perf_counter() - began
        converged += int(result.converged.sum())
        scaled += int((result.scale != 1).sum())
        of_chunks.append(result.steps[result.converged])
    steps = torch.cat(of_chunks).double()
    return {
        "law": sample["law"],
        "side": sample["side"],
        "matrices": size,
        "rule": "guarded" if guard else "plain",
        "success_percent": 100.0 * converged / size,
        "scaled_percent": 100.0 * scaled / size,
        "published_evaluations": None if guard else sample.get("published"),
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


def produce(args: Mapping[str, Any], spec: Mapping[str, Any]) -> Outcome:
    """Measures every sample with both rules."""
    quick = args.get("quick", False)
    if "threads" in args:
        torch.set_num_threads(args["threads"])
    rows = []
    for sample in spec["samples"]:
        for guard in (False, True):
            row = _measure(sample, guard, quick)
            rows.append(row)
            say(f"{row['law']}, n = {row['side']}, {row['rule']}: {row['seconds']:.1f} s")
    headings = ["distribution", "n", "matrices", "rule", "scaled (%)", "success (%)", "published steps", "ours"]
    headings += ["difference", "least", "most", "seconds"]
    text = ["Fewer steps are better.", "", *table(headings, map(_cells, rows)), "", paragraph(spec["note"]), ""]
    return publish(output_folder(args), spec, quick, [*text, conditions()], rows), {}
