"""The cost of the spectral constraint in language modelling: Table 3 of Kanai et al. 2017."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.commandline import say
from orthokern.optim import SpectralNormProjection
from orthokern.reproduce.page import Outcome, conditions, data_folder, output_folder, paragraph, publish, table
from orthokern.tasks import word_lm

DELTA, EPOCHS = 0.2, 75
SVD_EVERY, WARM_UP = 10, 3  # iterations


def _naive(w: Tensor, limit: float) -> Tensor:
    """P_delta of eq. 12 to 14: w [N, N] with its singular values limited to `limit`."""
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    return (u * s.clamp(max=limit)) @ vh


def _growth(w: Tensor) -> Tensor:
    """A change of w [N, N] similar to a training step at the bound: the largest singular value grows by 0.01, and noise
    of norm 0.02 is added."""
    u, _, vh = torch.linalg.svd(w)
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(0))
    return 0.01 * torch.outer(u[:, 0], vh[0]) + 0.02 * noise / noise.norm()


def _timed(times: list[float], work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times.append(1e3 * (time.perf_counter() - began))
    return result


def _language_model(args: Mapping[str, Any]) -> word_lm.WordLm:
    """The task of Table 1 without its own projection, which would be part of the optimizer step and could not be timed
    separately."""
    data = data_folder(args, "ptb")
    scale = {"hidden": 64, "window": 10} if args.get("quick") else {}  # the size of gru-table1 --quick
    settings = word_lm.COMMAND.complete({"data": str(data), "device": "cpu", "clip": 1e30, **scale})
    torch.manual_seed(settings.seed)
    return word_lm.WordLm(settings)


def _begin(projection: SpectralNormProjection) -> list[Tensor]:
    """Brings the matrices of an untrained model to the bound, which training would take thousands of iterations to
    reach, and returns the changes that are added to them in every step."""
    for w in projection.matrices:  # orthogonal columns: these become the singular values
        w.mul_(torch.linspace(projection.limit, 0.2, w.shape[1]))
    return [_growth(w) for w in projection.matrices]


def _measure(
    task: word_lm.WordLm, projection: SpectralNormProjection, growth: list[Tensor], iterations: int
) -> tuple[dict[str, list[float]], float]:
    """The time of each part of each iteration in ms, by name; and the largest difference between the two
    projections."""
    times: dict[str, list[float]] = {name: [] for name in ("iteration", "naive SVD", "projection", "gradient clipping")}
    worst = 0.0

    def train() -> None:
        task.optimizer.zero_grad(set_to_none=True)
        loss, _ = task.loss(task.next_batch())
        loss.backward()

    task.model.train()
    for i in range(WARM_UP + iterations):
        _timed(times["iteration"], train)
        # the threshold is above every gradient norm: the same work, and no change
        _timed(times["gradient clipping"], lambda: nn.utils.clip_grad_norm_(task.model.parameters(), 1e30))
        began = time.perf_counter()
        task.optimizer.step()
        times["iteration"][-1] += 1e3 * (time.perf_counter() - began)
        for w, change in zip(projection.matrices, growth, strict=False):
            w.add_(change)
        expected = None
        if i % SVD_EVERY == 0 or i == WARM_UP:
            before = projection.matrices[0].clone()
            expected = _timed(times["naive SVD"], partial(_naive, before, projection.limit))
        _timed(times["projection"], projection.step)
        if expected is not None:
            worst = max(worst, float((projection.matrices[0] - expected).abs().max()))
        if i == WARM_UP - 1:
            for values in times.values():
                values.clear()
            projection.counts = dict.fromkeys(projection.counts, 0)
        if (i + 1) % 50 == 0:
            say(f"iteration {i + 1} of {WARM_UP + iterations}")
    return times, worst


def _table(rows: list[dict[str, Any]]) -> list[str]:
    headings = ("method", "ms per iteration", "% of an iteration", "hours of training", "ratio to clipping")
    clipping = next(row for row in rows if row["method"] == "gradient clipping")
    cells = (
        [
            f"{row['method']}: {row['what']}",
            f"{row['ms_per_iteration']:.2f}",
            f"{row['percent_of_iteration']:.1f}",
            f"{row['hours_of_training']:.1f}",
            f"{row['hours_of_training'] / clipping['hours_of_training']:.3f}",
            f"{row['published_seconds'] / clipping['published_seconds']:.3f}",
        ]
        for row in rows
    )
    return table((*headings, "published ratio"), cells)


def produce(args: Mapping[str, Any], spec: Mapping[str, Any]) -> Outcome:
    """Trains in the setting of Table 1 and times every method on the same iterations."""
    quick, folder = args.get("quick", False), output_folder(args)
    if "threads" in args:
        torch.set_num_threads(args["threads"])
    iterations = args.get("iterations", 20 if quick else 200)
    task = _language_model(args)
    settings = task.settings
    projection = SpectralNormProjection(task.model, DELTA)
    times, worst = _measure(task, projection, _begin(projection), iterations)
    # the projection works in some iterations only, so its cost is the mean; the cost of the others is the median
    each = {name: (statistics.fmean if name == "projection" else statistics.median)(v) for name, v in times.items()}
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "what": what,
            "ms_per_iteration": each[name],
            "percent_of_iteration": 100.0 * each[name] / each["iteration"],
            "hours_of_training": (each["iteration"] + each[name]) * EPOCHS * task.iterations_per_epoch / 3.6e6,
            "published_seconds": seconds,
        }
        for name, what, seconds in spec["methods"]
    ]
    counts = ", ".join(f"{count} {what}" for what, count in projection.counts.items())
    note = (
        f"An iteration without any of these takes {each['iteration']:.1f} ms ({settings.hidden} units, windows of "
        f"{settings.window} steps, batch {settings.batch}, {len(task.data.vocabulary)} words): the median of "
        f"{iterations} iterations in one process. They start from matrices W_hn whose singular values lie between "
        f"0.2 and {projection.limit:g}, and the largest ones grow. The projection took {counts}. The largest "
        f"difference of an entry between the two projections was {worst:.1e}. Hours are for {EPOCHS} epochs of "
        f"{task.iterations_per_epoch} iterations without evaluation. The published column is the ratio of the "
        "published times."
    )
    text = ["Lower is better.", "", *_table(rows), "", paragraph(note), "", conditions()]
    numbers = {"iteration_ms": each["iteration"], "iterations": iterations, "counts": projection.counts}
    return publish(folder, spec, quick, text, rows, **numbers, largest_difference=worst), {}
