"""Manchev and Spratling, "On the biological plausibility of orthogonal initialisation for solving gradient instability
in deep neural networks"."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from orthokern.commandline import Settings, say
from orthokern.errors import InputError
from orthokern.init import glorot_uniform_, learned_orthogonal_
from orthokern.reproduce.page import table, written
from orthokern.reproduce.runner import Plan
from orthokern.reproduce.search import Search, find, report_searches
from orthokern.reproduce.spec import Experiment, Measure, Run
from orthokern.reproduce.study import Study, conditions

PAPER = "Manchev and Spratling"


# ---- the steps of learned orthogonality, section II-A ----------------------------------------------------------------

CHUNK = 1000  # number of matrices drawn together
GUARDED = 1000  # matrices for the guarded rule, which has no published mean to compare with


@dataclass(frozen=True)
class Sample:
    """Random square matrices to make orthogonal.

    Attributes:
        label: their distribution.
        side: n.
        count, quick: their number, and their number with --quick. The guarded rule uses at most GUARDED of them.
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
    Sample("N(0, 0.1)", 100, 10_000, 200, _normal, 22.77),
    Sample("U[-0.1, 0.1]", 100, 10_000, 200, _uniform, 24.00),
    # not in the paper: distributions for which its rule no longer converges
    Sample("N(0, 0.1)", 150, 200, 20, _normal),
    Sample("N(0, 0.1)", 200, 100, 10, _normal),
    Sample("N(0, 0.1)", 400, 20, 3, _normal),
    Sample("Glorot-uniform", 100, 200, 20, _glorot),
    Sample("Glorot-uniform", 400, 20, 3, _glorot),
)


def _measure(sample: Sample, guard: bool, quick: bool) -> dict[str, Any]:
    """One row: the gradient descent of the paper (rate 0.1, tolerance 1e-6) on a sample with a fixed seed."""
    generator = torch.Generator().manual_seed(1234)
    count = sample.quick if quick else sample.count
    count = min(count, GUARDED) if guard else count
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
The published numbers count evaluations of the error, the first of them before any step, so they are one above the
number of steps. Means are over the matrices that converged, ± one standard error. "plain" is the published rule, which
always converges according to the paper. "guarded" first scales down a matrix that may be outside the region from which
the descent converges (a largest singular value of 2.45 for this rate); it uses at most the first 1000 of the same
matrices."""


def _steps(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    quick = given.get("quick", False)
    if "threads" in given:
        torch.set_num_threads(given["threads"])
    rows = []
    for sample in SAMPLES:
        for guard in (False, True):
            rows.append(_measure(sample, guard, quick))
            say(f"{rows[-1]['law']}, n = {sample.side}, {rows[-1]['rule']}: {rows[-1]['seconds']:.1f} s", stream)
    headings = ["distribution", "n", "matrices", "rule", "scaled (%)", "success (%)", "published steps", "ours"]
    headings += ["difference", "least", "most", "seconds"]
    lines = []
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
        lines.append([*cells, f"{row['seconds']:.1f}"])
    study = STUDIES[0]
    text = [f"# {study.name}: {study.title}", "", f"{study.source}.", "", "Fewer steps are better.", ""]
    text += [*table(headings, lines), "", STEPS_NOTE, "", conditions()]
    summary = {"experiment": study.name, "source": study.source, "quick": quick, "rows": rows}
    return written(folder, study.name, "\n".join(text) + "\n", summary)


# ---- Table I: the longest sequences, section III-A -------------------------------------------------------------------

# problem, task, its options
PROBLEMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "temporal-order": ("temporal order", "temporal_order", ()),
    "temporal-order-3bit": ("3-bit temporal order", "temporal_order", ("--bits", "3")),
    "adding": ("adding", "adding", ()),
    "random-permutation": ("random permutation", "random_permutation", ()),
}
# problem, preset -> longest T, rate, penalty's strength
TABLE1: dict[tuple[str, str], tuple[int, str, str | None]] = {
    ("temporal-order", "srnn"): (50, "0.01", None),
    ("temporal-order", "open"): (80, "0.001", "1"),
    ("temporal-order", "oinit"): (120, "0.0001", None),
    ("temporal-order-3bit", "srnn"): (50, "0.1", None),
    ("temporal-order-3bit", "open"): (70, "0.001", "1"),
    ("temporal-order-3bit", "oinit"): (90, "0.0001", None),
    ("adding", "srnn"): (80, "0.01", None),
    ("adding", "open"): (80, "0.01", "0.0001"),
    ("adding", "oinit"): (100, "0.01", None),
    ("random-permutation", "srnn"): (90, "0.0001", None),
    ("random-permutation", "open"): (140, "0.1", "0.01"),
    ("random-permutation", "oinit"): (240, "0.1", None),
}
NETWORKS = {"srnn": "plain", "open": "penalty", "oinit": "learned initialisation"}
# An evaluation of 10 000 sequences takes longer than the 100 iterations between evaluations. Since the goal is that all
# answers are correct, an evaluation ends at the first wrong one.
SEARCHING = ("--short-evaluations", "--diagnose-every", "100", "--checkpoint-every", "500", "--no-plots")
SEARCH_QUICK = ("--hidden", "40", "--iterations", "3000", "--eval-sequences", "500", "--checkpoint-every", "1000")
# The settings that our networks share with those of the paper: size, batch, length, and the criterion.
OURS = ("--hidden", "100", "--batch", "20", "--iterations", "100000", "--eval-sequences", "10000")
ADDING = ("--target", "mean", "--positions", "pascanu", "--goal", "0", "--right", "100")
RMSPROP = ("--preset", "oinit", "--optimizer", "rmsprop", "--lr", "0.001", "--clip", "1")


def _searches() -> tuple[Search, ...]:
    found: list[Search] = []
    for key, (problem, task, options) in PROBLEMS.items():
        for preset, network in NETWORKS.items():
            longest, rate, strength = TABLE1[key, preset]
            given: tuple[str, ...] = ("--preset", preset, "--lr", rate)
            text = f"SGD, α = {rate}"
            if strength is not None:
                given += ("--soft-orthogonality", strength)
                text += f", λ = {strength}"
            given = (*options, *given, *SEARCHING)
            found.append(Search(f"{key}-{preset}", problem, network, text, task, given, SEARCH_QUICK, longest))
        ours = (*OURS, *(ADDING if task == "adding" else ()))
        text = "RMSprop and geodesic steps, the task's defaults (ours)"
        more = (
            ("oinit-rmsprop", "learned initialisation, RMSprop", "RMSprop, α = 0.001, clipped at 1 (ours)", RMSPROP),
            ("factorized", "factorized", text, ours),
        )
        for name, network, text, given in more:
            found.append(
                Search(f"{key}-{name}", problem, network, text, task, (*options, *given, *SEARCHING), SEARCH_QUICK)
            )
    return tuple(found)


SEARCHES = _searches()

TABLE1_NOTE = """\
A T counts as solved if all of 10 000 fresh sequences are answered correctly within 100 000 iterations of 20 sequences,
tested every 100 iterations. In the adding problem an error of at most 0.2 is correct, which is the criterion of the
released code (the paper's text says 0.0001). The published learning rates are the best of a search that the paper does
not describe; ours are the same, with one seed each. "≥" marks a search that solved T = 500, the longest that is tried,
or that was stopped after the time in the column "hours", before it failed."""


def _table1(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    study = next(study for study in STUDIES if study.name == "oinit-table1")
    only = given.get("only")
    chosen = [search for search in SEARCHES if only is None or only in search.name]
    if not chosen:
        names = ", ".join(search.name for search in SEARCHES)
        raise InputError(
            f"--only {only}: no search of {study.name} has this text in its name; the searches are {names}"
        )
    longer = ("--iterations", str(given["iterations"])) if "iterations" in given else ()
    plan = Plan.of(given, folder, None, longer)
    failed: dict[str, str] = {}
    try:
        if not given.get("report"):
            failed = find(study.name, chosen, plan, stream)
    finally:
        files = report_searches(study.name, study.title, study.source, TABLE1_NOTE, SEARCHES, plan)
    for name, line in failed.items():
        raise InputError(f"{name} ended otherwise than by not solving its problem: {line}")
    return files


# ---- Tables II to IV, Figure 3b: MNIST, sections III-B and III-C -----------------------------------------------------

ACCURACY = Measure("test accuracy (%)", "test_accuracy", scale=100.0)
TABLE2_QUICK = ("--pool", "4", "--epochs", "2")
TABLE2_NOTE = """\
The published numbers are the best of many evaluations on the test images, which also selected the learning rates. Ours
are one evaluation, with the parameters that the validation images selected. The paper names no optimizer; RMSprop fits
its numbers, see the presets in orthokern/tasks/pixel_mnist.py."""
FIGURE3B_NOTE = """\
The first 150 000 images. The paper says that its Figure 3b shows the learned initialisation. It shows a spectral radius
and a gradient near zero, and a matrix that becomes orthogonal during training, which is the network with the penalty.
The gradient is that of the whole loss, including the penalty."""


def _pixels(name: str, *options: str, preset: str, quick: tuple[str, ...], published: float | None = None) -> Run:
    return Run(
        name=f"{name}-{preset}",
        task="pixel_mnist",
        options=("--preset", preset, *options),
        quick=quick,
        labels={"network": NETWORKS[preset]},
        published={} if published is None else {ACCURACY.title: published},
    )


def _deep(name: str, network: str, *options: str, published: float | None = None) -> Run:
    rate = options[options.index("--lr") + 1]
    strength = options[options.index("--penalty") + 1] if "--penalty" in options else None
    return Run(
        name=f"deep-{name}",
        task="deep_mnist",
        options=options,
        quick=("--epochs", "2"),
        labels={"network": network, "α": rate, "λ": strength or ""},
        published={} if published is None else {ACCURACY.title: published},
    )


DEEP_NOTE = """\
The published numbers are the best of many evaluations on the test images, after training on all 60 000 others. Ours
are one evaluation, after training on 50 000, with the parameters that 10 000 others selected."""
TABLE3_RATES = ("0.1", "0.01", "0.001", "0.0001", "0.00001")
TABLE4 = {"0.1": 91.40, "0.01": 91.65, "0.001": 90.66, "0.0001": 88.80, "0.00001": 72.81}
DEEP_LEGEND = ("init", "penalty", "lr")

EXPERIMENTS = (
    Experiment(
        "oinit-table2", "Sequential MNIST", f"{PAPER}, Table II",
        tuple(
            _pixels("pixels", preset=preset, quick=TABLE2_QUICK, published=published)
            for preset, published in (("srnn", 11.35), ("oinit", 86.81), ("open", 91.81))
        ),
        (ACCURACY,), figure="curves", named_by=("network",), data="mnist", note=TABLE2_NOTE,
    ),
    Experiment(
        "oinit-table3", "A feedforward network of ten layers on MNIST", f"{PAPER}, Table III",
        (
            *(_deep(f"ff-{rate}", "plain", "--preset", "ff", "--lr", rate, published=11.35) for rate in TABLE3_RATES),
            _deep(
                "open-0.01-0.01", "penalty", "--preset", "open", "--lr", "0.01", "--penalty", "0.01", published=97.03
            ),
            _deep("oinit-0.01", "learned initialisation", "--preset", "oinit", "--lr", "0.01", published=96.77),
            # not in the paper: matrices that are drawn orthogonal, to compare with learned ones; both remedies together
            _deep("qr-0.01", "orthogonal by QR (ours)", "--preset", "ff", "--init", "orthogonal", "--lr", "0.01"),
            _deep(
                "both-0.01-0.01", "learned initialisation and penalty (ours)",
                "--preset", "oinit", "--lr", "0.01", "--penalty", "0.01",
            ),
        ),
        (ACCURACY,), figure="curves", legend=DEEP_LEGEND, data="mnist", note=DEEP_NOTE,
    ),
    Experiment(
        "oinit-table4", "The same network with a penalty of 1, at five rates", f"{PAPER}, Table IV",
        tuple(
            _deep(f"open-{rate}-1", "penalty", "--preset", "open", "--lr", rate, "--penalty", "1", published=published)
            for rate, published in TABLE4.items()
        ),
        (ACCURACY,), figure="curves", legend=DEEP_LEGEND, data="mnist", note=DEEP_NOTE,
    ),
    Experiment(
        "oinit-figure3b", "How matrices become orthogonal while the network learns, sequential MNIST",
        f"{PAPER}, Figure 3b",
        tuple(
            _pixels(
                "dynamics", "--epochs", "3", "--diagnose-every", "25",
                preset=preset, quick=("--pool", "4", "--epochs", "1"),
            )
            for preset in ("srnn", "oinit", "open")
        ),
        (ACCURACY,), figure="dynamics", named_by=("network",), data="mnist", note=FIGURE3B_NOTE,
    ),
)  # fmt: skip


STUDIES = (
    Study(
        "oinit-steps",
        "Steps until random matrices are orthogonal, by gradient descent at a rate of 0.1 to an error of 1e-6",
        f"{PAPER}, section II-A",
        ("threads",),
        _steps,
    ),
    Study(
        "oinit-table1",
        "The longest sequences that a network solves, T growing by 10",
        f"{PAPER}, Table I",
        ("jobs", "threads", "iterations", "only", "report", "device", "budget"),
        _table1,
    ),
)
