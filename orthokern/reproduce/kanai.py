"""The tables and the figure of Kanai, Fujiwara and Iwamura, "Preventing gradient explosions in gated recurrent units",
2017."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from orthokern.commandline import Settings, say
from orthokern.errors import InputError
from orthokern.optim import SpectralNormProjection
from orthokern.reproduce.page import paragraph, table, written
from orthokern.reproduce.spec import Experiment, Measure, Run, over_seeds
from orthokern.reproduce.study import Study, conditions, data_folder
from orthokern.tasks import word_lm
from orthokern.training.checkpoint import load_checkpoint, seed_all

PAPER = "Kanai et al. 2017"
LEGEND = ("delta", "clip")

SUCCESS = Measure("success (%)", "success", scale=100.0, digits=0, rate=True)

# ---- Table 1: words of the Penn Treebank -----------------------------------------------------------------------------

VALIDATION_PERPLEXITY = Measure("validation perplexity", "best_perplexity", digits=1, higher_is_better=False)
TEST_PERPLEXITY = Measure("test perplexity", "test_perplexity", digits=1, higher_is_better=False)

# option, success in %, validation and test perplexity; None where no run succeeded
WORDS = (
    ("delta", "0.2", 100, 102.0, 97.6),
    ("delta", "0.5", 100, 102.8, 98.4),
    ("delta", "0.8", 100, 103.7, 99.0),
    ("delta", "1.1", 100, 105.2, 100.3),
    ("delta", "1.4", 100, 107.0, 102.1),
    ("clip", "5", 100, 109.3, 106.9),
    ("clip", "10", 40, 103.1, 100.4),
    ("clip", "15", 0, None, None),
    ("clip", "20", 0, None, None),
)
WORDS_QUICK = ("--hidden", "64", "--epochs", "1")

# ---- Table 2: Nottingham ---------------------------------------------------------------------------------------------

VALIDATION_NLL = Measure("validation NLL", "best_loss", digits=3, higher_is_better=False)
TEST_NLL = Measure("test NLL", "test_loss", digits=3, higher_is_better=False)

MUSIC = (
    ("delta", "0.2", 100, 3.46, 3.53),
    ("delta", "0.5", 100, 3.47, 3.53),
    ("delta", "0.8", 100, 3.59, 3.64),
    ("delta", "1.1", 100, 4.58, 4.56),
    ("delta", "1.4", 100, 4.64, 4.62),
    ("clip", "15", 100, 3.57, 3.64),
    ("clip", "30", 100, 3.61, 3.64),
    ("clip", "45", 100, 3.88, 3.89),
    ("clip", "60", 100, 5.26, 5.36),
)
MUSIC_QUICK = ("--hidden", "64", "--epochs", "8", "--patience", "2", "--input-scale", "0.1")

METHODS = {"delta": "spectral constraint, δ", "clip": "gradient clipping, threshold"}


def _runs(
    task: str, prefix: str, rows: Iterable[Any], quick: tuple[str, ...], measures: tuple[Measure, ...], *more: str
) -> tuple[Run, ...]:
    """A run for each row, which has an option, its value and the published numbers; with `more` options."""
    runs = []
    for option, value, *published in rows:
        numbers = {measure.title: number for measure, number in zip(measures, published, strict=True)}
        runs.append(
            Run(
                name=f"{prefix}-{option}-{value}",
                task=task,
                options=(f"--{option}", value, *more),
                quick=quick,
                labels={"method": METHODS[option], "value": value},
                published={title: number for title, number in numbers.items() if number is not None},
            )
        )
    return tuple(runs)


SUCCEEDS = """\
A run is a success if the validation loss after every epoch is at most that of the untrained model (section 4.1 of the
paper)."""
ONE_RUN = f"""\
{SUCCEEDS} The success rate of one run is 0 or 100 %. The paper gives means over an unspecified number of runs."""
WORDS_NOTE = f"""\
{ONE_RUN} Its schedule has 75 epochs: a row with fewer has a higher perplexity mainly for that reason."""
MUSIC_NOTE = f"""\
{ONE_RUN} Its schedule divides the learning rate by 1.25 after ten epochs without a better validation loss, until it is
a thousandth of the first one, which takes at least 320 epochs: a row with fewer falls short mainly for that reason."""

# ---- the success rates of Table 1 ------------------------------------------------------------------------------------

FIRST_EPOCH = f"""\
{SUCCEEDS} The published rates are of whole trainings, ours of the first epoch."""


def _first_epoch() -> tuple[Run, ...]:
    """Runs that clip, and one with the constraint, for one epoch, in which a run that fails diverges; three seeds."""
    rows = (row[:3] for row in WORDS if row[0] == "clip" or row is WORDS[0])
    runs = _runs("word_lm", "words-first", rows, WORDS_QUICK, (SUCCESS,), "--epochs", "1")
    return tuple(seed for run in runs for seed in over_seeds(run, range(3)))


# ---- Figure 1 --------------------------------------------------------------------------------------------------------


def _figure1() -> tuple[Run, ...]:
    return tuple(
        Run(
            name=f"stability-{option}-{value}",
            task="word_lm",
            options=(f"--{option}", value, "--iterations", "500", "--diagnose-every", "1"),
            quick=("--hidden", "64", "--iterations", "150"),
            labels={"method": METHODS[option], "value": value},
        )
        for option, value in (("clip", "5"), ("delta", "0.2"))
    )


EXPERIMENTS = (
    Experiment(
        "gru-table1", "Words of the Penn Treebank", f"{PAPER}, Table 1",
        _runs("word_lm", "words", WORDS, WORDS_QUICK, (SUCCESS, VALIDATION_PERPLEXITY, TEST_PERPLEXITY)),
        (SUCCESS, VALIDATION_PERPLEXITY, TEST_PERPLEXITY),
        figure="curves", quantity="held_out_perplexity", legend=LEGEND, data="ptb", note=WORDS_NOTE,
    ),
    Experiment(
        "gru-success", "Words of the Penn Treebank, success of the first epoch", f"{PAPER}, Table 1",
        _first_epoch(), (SUCCESS, VALIDATION_PERPLEXITY), figure="curves", quantity="nll", named_by=("method", "value"),
        data="ptb", note=FIRST_EPOCH,
    ),
    Experiment(
        "gru-table2", "Polyphonic music, Nottingham", f"{PAPER}, Table 2",
        _runs("music", "nottingham", MUSIC, MUSIC_QUICK, (SUCCESS, VALIDATION_NLL, TEST_NLL)),
        (SUCCESS, VALIDATION_NLL, TEST_NLL),
        figure="curves", quantity="held_out_loss", legend=LEGEND, data="music", note=MUSIC_NOTE,
    ),
    Experiment(
        "gru-figure1", "Norm of the gradient and spectral radius of the Jacobian at h = 0", f"{PAPER}, Figure 1",
        _figure1(), (SUCCESS,), figure="stability", legend=LEGEND, data="ptb", epochs=False,
    ),
)  # fmt: skip


# ---- Table 3: what the constraint costs ------------------------------------------------------------------------------

DELTA = 0.2
EPOCHS = 75
# seconds of a whole training
PUBLISHED = {"naive SVD": 5.02e4, "projection": 4.55e4, "gradient clipping": 4.96e4}
TITLES = {
    "naive SVD": "P_δ by a full SVD after every step",
    "projection": "P_δ by `SpectralNormProjection`",
    "gradient clipping": "norm of the gradient, and scaling",
}
SVD_EVERY = 10  # iterations


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


def _timed(into: list[float], work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    into.append(1e3 * (time.perf_counter() - began))
    return result


def _language_model(given: Settings) -> word_lm.WordLm:
    """The task of Table 1 without its own projection, which would be part of the optimizer step and could not be timed
    separately."""
    data = data_folder(given, "ptb")
    hidden = int(WORDS_QUICK[WORDS_QUICK.index("--hidden") + 1])  # of the run that `_begin` may load
    scale = {"hidden": hidden, "window": 10} if given.get("quick", False) else {}
    settings = word_lm.complete({**word_lm.DEFAULTS, "data": str(data), "device": "cpu", "constraint": "none", **scale})
    seed_all(settings.seed)
    task = word_lm.WordLm(settings)
    task.initial_loss = 0.0  # not read
    return task


def _begin(task: word_lm.WordLm, projection: SpectralNormProjection, folder: Path) -> tuple[str, list[Tensor]]:
    """A description of the initial parameters of the timed iterations, and the changes that are added to the matrices
    in every step."""
    earlier = folder / f"words-delta-{DELTA}" / "checkpoint.pt"
    if earlier.exists():
        found = load_checkpoint(earlier)
        try:
            task.model.load_state_dict(found["model"])
        except (RuntimeError, LookupError) as error:
            raise InputError(f"{earlier} is of another model than this command times: {error}") from None
        return f"iteration {found['iteration']} of the run words-delta-{DELTA}", []
    # an untrained model takes thousands of iterations to reach the bound; before that, the projection changes nothing
    for w in projection.matrices:  # orthogonal columns: these become the singular values
        w.mul_(torch.linspace(projection.limit, 0.2, w.shape[1]))
    began_with = f"candidate's matrices with singular values from {projection.limit:g} to 0.2, the largest growing"
    return began_with, [_growth(w) for w in projection.matrices]


def _measure(
    task: word_lm.WordLm, projection: SpectralNormProjection, growth: list[Tensor], iterations: int, stream: TextIO
) -> tuple[dict[str, list[float]], float]:
    """The time of each part of each iteration in ms, by name; and the largest difference of the two projections."""
    times: dict[str, list[float]] = {name: [] for name in ("iteration", *PUBLISHED)}
    worst = 0.0

    def train() -> None:
        task.optimizer.zero_grad(set_to_none=True)
        loss, _ = task.loss(task.next_batch())
        loss.backward()

    task.model.train()
    warm_up = 3
    for i in range(warm_up + iterations):
        _timed(times["iteration"], train)
        # the threshold is above every gradient norm: the same work, and no change
        _timed(times["gradient clipping"], lambda: nn.utils.clip_grad_norm_(task.model.parameters(), 1e30))
        began = time.perf_counter()
        task.optimizer.step()
        times["iteration"][-1] += 1e3 * (time.perf_counter() - began)
        for w, change in zip(projection.matrices, growth, strict=False):
            w.add_(change)
        expected = None
        if i % SVD_EVERY == 0:
            before = projection.matrices[0].clone()
            expected = _timed(times["naive SVD"], partial(_naive, before, projection.limit))
        _timed(times["projection"], projection.step)
        if expected is not None:
            worst = max(worst, float((projection.matrices[0] - expected).abs().max()))
        if i == warm_up - 1:
            for values in times.values():
                values.clear()
            projection.counts = dict.fromkeys(projection.counts, 0)
        if (i + 1) % 50 == 0:
            say(f"iteration {i + 1} of {warm_up + iterations}", stream)
    return times, worst


def _table(rows: list[dict[str, Any]]) -> list[str]:
    headings = ("method", "ms per iteration", "% of an iteration", "hours of training", "ratio to clipping")
    cells = []
    clipping = next(row for row in rows if row["method"] == "gradient clipping")
    for row in rows:
        ratio = row["hours_of_training"] / clipping["hours_of_training"]
        published = row["published_seconds"] / clipping["published_seconds"]
        cells.append([
            f"{row['method']}: {row['what']}", f"{row['ms_per_iteration']:.2f}", f"{row['percent_of_iteration']:.1f}",
            f"{row['hours_of_training']:.1f}", f"{ratio:.3f}", f"{published:.3f}",
        ])  # fmt: skip
    return table((*headings, "published ratio"), cells)


def _cost(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    """Trains in the setting of Table 1 and times every method on the same iterations."""
    quick = given.get("quick", False)
    if "threads" in given:
        torch.set_num_threads(given["threads"])
    iterations = given.get("iterations", 20 if quick else 200)
    task = _language_model(given)
    settings = task.settings
    projection = SpectralNormProjection(task.model, DELTA)
    began_with, growth = _begin(task, projection, folder)
    times, worst = _measure(task, projection, growth, iterations, stream)
    if projection.counts["projections"] == 0:
        raise InputError(
            f"gru-table3: no singular value rose above {projection.limit:g} in {iterations} iterations from "
            f"{began_with}: there was no projection to time; increase --iterations"
        )
    # the projection does its work in some iterations only, so its cost is the mean; that of the others is the median
    each = {name: (statistics.fmean if name == "projection" else statistics.median)(v) for name, v in times.items()}
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "what": TITLES[name],
            "ms_per_iteration": each[name],
            "percent_of_iteration": 100.0 * each[name] / each["iteration"],
            "hours_of_training": (each["iteration"] + each[name]) * EPOCHS * task.iterations_per_epoch / 3.6e6,
            "published_seconds": seconds,
        }
        for name, seconds in PUBLISHED.items()
    ]
    study = STUDIES[0]
    counts = ", ".join(f"{count} {what}" for what, count in projection.counts.items())
    text = [
        f"# {study.name}: {study.title}", "", f"{study.source}. {'Scaled down (`--quick`).' if quick else ''}".rstrip(),
        "", "Lower is better.", "", *_table(rows), "", paragraph(
        f"An iteration without any of these takes {each['iteration']:.1f} ms ({settings.hidden} units, windows of "
        f"{settings.window} steps, batch {settings.batch}, {len(task.data.vocabulary)} words): the median of "
        f"{iterations} iterations from {began_with}, in one process. The projection took {counts}. The largest "
        f"difference of an entry between the two projections was {worst:.1e}. Hours are for {EPOCHS} epochs of "
        f"{task.iterations_per_epoch} iterations without evaluation. The published column is the ratio of the "
        "published times."),
        "", conditions(),
    ]  # fmt: skip
    summary = {
        "experiment": study.name, "source": study.source, "quick": quick, "rows": rows,
        "iteration_ms": each["iteration"], "iterations": iterations, "counts": projection.counts,
        "largest_difference": worst,
    }  # fmt: skip
    return written(folder, study.name, "\n".join(text) + "\n", summary)


_TITLE = "Cost of the spectral constraint in language modelling"
STUDIES = (Study("gru-table3", _TITLE, f"{PAPER}, Table 3", ("data", "threads", "iterations"), _cost),)
