"""Manchev and Spratling, "On the biological plausibility of orthogonal initialisation for solving gradient instability
in deep neural networks": what is no table of single training runs."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from orthokern._version import __version__
from orthokern.commandline import Settings
from orthokern.errors import InputError
from orthokern.init import glorot_uniform_, learned_orthogonal_
from orthokern.training.checkpoint import write_atomically

__all__ = ["STUDIES", "Study", "conditions"]

PAPER = "Manchev and Spratling"


@dataclass(frozen=True)
class Study:
    """What `python -m orthokern.reproduce NAME` makes, where it is no Experiment.

    Attributes:
        name: as on the command line.
        title: one line.
        source: where the published numbers stand.
        options: those of the command line that it takes.
        produce: the options given, the folder to write to and where to say how it stands -> the files written, a
            Markdown file first.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...]
    produce: Callable[[Settings, Path, TextIO], list[Path]]

    def make(self, given: Settings, stream: TextIO) -> list[Path]:
        """Checks the options and produces.

        Raises:
            InputError: an option that says nothing here.
        """
        for option in given:
            if option not in ("experiment", "quick", "out", *self.options):
                raise InputError(f"--{option}: {self.name} does not take it")
        folder = given.get("out", Path("runs") / "reproduce") / ("quick" if given.get("quick") else "full")
        folder.mkdir(parents=True, exist_ok=True)
        return self.produce(given, folder, stream)


def conditions() -> str:
    """A line on versions, machine and date."""
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"orthokern {__version__}, torch {torch.__version__}; {machine}; {time.strftime('%Y-%m-%d')}."


# ---- the steps of learned orthogonality, section II-A ----------------------------------------------------------------

CHUNK = 1000  # matrices drawn at once


@dataclass(frozen=True)
class Sample:
    """Random square matrices to make orthogonal.

    Attributes:
        label: their law.
        side: n.
        count, quick: how many, and how many with --quick.
        draw: (count, n, generator) -> [count, n, n] float32.
        published: the paper's mean number of steps, or None.
    """

    label: str
    side: int
    count: int
    quick: int
    draw: Callable[[int, int, torch.Generator], Tensor]
    published: float | None = None


def _normal(count: int, n: int, generator: torch.Generator) -> Tensor:
    return 0.1 * torch.randn(count, n, n, generator=generator)


def _uniform(count: int, n: int, generator: torch.Generator) -> Tensor:
    return 0.2 * torch.rand(count, n, n, generator=generator) - 0.1


def _glorot(count: int, n: int, generator: torch.Generator) -> Tensor:
    return glorot_uniform_(torch.empty(count, n, n), generator)


SAMPLES = (
    Sample("N(0, 0.1)", 100, 10_000, 300, _normal, 22.77),
    Sample("U[-0.1, 0.1]", 100, 10_000, 300, _uniform, 24.00),
    # beyond the paper: where its rule stops to converge, and where it does not
    Sample("N(0, 0.1)", 150, 200, 20, _normal),
    Sample("N(0, 0.1)", 200, 100, 10, _normal),
    Sample("N(0, 0.1)", 400, 20, 3, _normal),
    Sample("Glorot-uniform", 100, 200, 20, _glorot),
    Sample("Glorot-uniform", 400, 20, 3, _glorot),
)


def _measure(sample: Sample, guard: bool, quick: bool) -> dict[str, Any]:
    """One row: the descent of the paper (rate 0.1, tolerance 1e-6) on a sample, always the same one."""
    generator = torch.Generator().manual_seed(1234)
    count = sample.quick if quick else sample.count
    steps, converged, scaled, seconds = [], 0, 0, 0.0
    for start in range(0, count, CHUNK):
        w = sample.draw(min(CHUNK, count - start), sample.side, generator)
        began = time.perf_counter()
        result = learned_orthogonal_(w, lr=0.1, tol=1e-6, guard=guard)
        seconds += time.perf_counter() - began
        converged += int(result.converged.sum())
        scaled += int((result.scale != 1).sum())
        steps.append(result.steps[result.converged])
    taken = torch.cat(steps).double()
    return {
        "law": sample.label,
        "side": sample.side,
        "matrices": count,
        "rule": "guarded" if guard else "plain",
        "success_percent": 100.0 * converged / count,
        "scaled_percent": 100.0 * scaled / count,
        "published_evaluations": None if guard else sample.published,
        "mean_evaluations": float(taken.mean()) + 1.0 if len(taken) else None,
        "standard_error": float(taken.std()) / math.sqrt(len(taken)) if len(taken) > 1 else None,
        "least_evaluations": int(taken.min()) + 1 if len(taken) else None,
        "most_evaluations": int(taken.max()) + 1 if len(taken) else None,
        "seconds": seconds,
    }


STEPS_NOTE = """\
The published counts are those of evaluations of the error, the first before any step: one more than the steps. Means
are over the matrices that converged, ± one standard error. "guarded": a matrix that may lie outside the region from
which the descent converges (a largest singular value of 2.45 for this rate) is scaled down first; "plain" is the
published rule, of which the paper says that it always converges."""


def _steps(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    quick = given.get("quick", False)
    rows = []
    for sample in SAMPLES:
        for guard in (False, True):
            rows.append(_measure(sample, guard, quick))
            print(f"{rows[-1]['law']}, n = {sample.side}, {rows[-1]['rule']}: {rows[-1]['seconds']:.1f} s", file=stream)
    headings: tuple[str, ...] = (
        "law",
        "n",
        "matrices",
        "rule",
        "scaled (%)",
        "success (%)",
        "published steps",
        "ours",
        "difference",
    )
    headings += ("least", "most", "seconds")
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in rows:
        theirs, ours = row["published_evaluations"], row["mean_evaluations"]
        error = f" ± {row['standard_error']:.2f}" if row["standard_error"] is not None else ""
        cells = [row["law"], str(row["side"]), str(row["matrices"]), row["rule"]]
        cells += [f"{row['scaled_percent']:.4g}", f"{row['success_percent']:.4g}"]
        cells += ["–" if theirs is None else f"{theirs:.2f}", "–" if ours is None else f"{ours:.2f}{error}"]
        cells += ["–" if theirs is None or ours is None else f"{ours - theirs:+.2f}"]
        cells += [
            "–" if row[f"{end}_evaluations"] is None else str(row[f"{end}_evaluations"]) for end in ("least", "most")
        ]
        lines.append("| " + " | ".join([*cells, f"{row['seconds']:.1f}"]) + " |")
    study = STUDIES[0]
    text = [f"# {study.name}: {study.title}", "", f"{study.source}.", "", *lines, "", STEPS_NOTE, "", conditions()]
    table, numbers = folder / f"{study.name}.md", folder / f"{study.name}.json"
    write_atomically(table, ("\n".join(text) + "\n").encode())
    summary = {"experiment": study.name, "source": study.source, "quick": quick, "rows": rows}
    write_atomically(numbers, json.dumps(summary, indent=1).encode() + b"\n")
    return [table, numbers]


STUDIES = (
    Study(
        "oinit-steps",
        "Steps until random matrices are orthogonal, by gradient descent at a rate of 0.1 to an error of 1e-6",
        f"{PAPER}, section II-A",
        (),
        _steps,
    ),
)
