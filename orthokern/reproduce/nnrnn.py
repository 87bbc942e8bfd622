"""The figures of Jahagirdar, Mahabhaleshwara, Siddarmanna and Shankar, "Non-normal Recurrent Neural Networks", 2019, a
report of the NeurIPS reproducibility challenge on Kerg, Goyette et al. 2019 (nnRNN), and the character-level numbers of
the latter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from orthokern.commandline import Settings
from orthokern.diagnostics import FisherMemory, fisher_memory, transient_norms
from orthokern.reproduce.page import drawn, table, written
from orthokern.reproduce.spec import Experiment, Measure, Run, words
from orthokern.reproduce.study import Study

REPORT = "Jahagirdar et al. 2019"
ORIGINAL = "Kerg et al. 2019"
MODELS = {"rnn": "RNN", "lstm": "LSTM", "exprnn": "expRNN", "nnrnn": "nnRNN"}
CURVES = "The report shows curves without numbers. Ours is one seed; the report's curves are means of six."

LOSS = Measure("best held-out loss", "best_loss", digits=5, higher_is_better=False)
RECALL = Measure("best held-out accuracy (%)", "best_accuracy", scale=100.0)
ACCURACY = Measure("test accuracy (%)", "test_accuracy", scale=100.0)
BPC = Measure("test bits per character", "test_bpc", digits=3, higher_is_better=False)


# ---- Figure 2: the copy task -----------------------------------------------------------------------------------------

# A tenth of the steps and twice the batch: half a minute, with the same ranking.
COPY_QUICK = ("--T", "20", "--iterations", "600", "--batch", "20", "--eval-every", "20")


def _copy_run(name: str, model: str, label: str, *options: str, quick: tuple[str, ...] = ()) -> Run:
    return Run(
        name=f"copy-{name}",
        task="copy",
        options=("--preset", f"report-{model}", "--goal", "100", *options),
        quick=(*COPY_QUICK, *quick),
        labels={"model": label},
    )


def _copy() -> tuple[Run, ...]:
    return tuple(_copy_run(model, model, label) for model, label in MODELS.items())


# ---- Figures 5 and 6: ablations --------------------------------------------------------------------------------------


def _ablations() -> tuple[Run, ...]:
    return (
        _copy()[-1],
        _copy_run("nnrnn-l1", "nnrnn", "nnRNN, L1 on gamma", "--modulus-norm", "l1"),
        _copy_run("nnrnn-256", "nnrnn", "nnRNN, 256 units", "--hidden", "256"),
        _copy_run("nnrnn-adam", "nnrnn", "nnRNN, Adam", "--optimizer", "adam"),
        _copy_run("nnrnn-cayley", "nnrnn", "nnRNN, Cayley start", "--init", "cayley"),
        _copy_run("nnrnn-orthogonal", "nnrnn", "nnRNN, random orthogonal start", "--init", "orthogonal"),
    )


# ---- Figure 3: permuted MNIST ----------------------------------------------------------------------------------------


def _psmnist() -> tuple[Run, ...]:
    return tuple(
        Run(
            name=f"psmnist-{model}-{hidden}",
            task="pixel_mnist",
            options=("--preset", f"report-{model}", "--hidden", str(hidden)),
            quick=("--hidden", "64" if hidden == 512 else "32", "--pool", "4", "--epochs", "1"),
            labels={"model": label, "units": "--hidden"},
        )
        for hidden in (512, 128)
        for model, label in MODELS.items()
    )


# ---- Figure 4: the adding task ---------------------------------------------------------------------------------------


# A third of the steps, and learning rates ten times as high.
ADDING_QUICK = ("--T", "30", "--lr", "2e-3", "--batch", "20", "--iterations", "1500")


def _adding() -> tuple[Run, ...]:
    rows = []
    for model, label in MODELS.items():
        skew = model in ("exprnn", "nnrnn")
        for hidden in (128, 512) if skew else (128,):
            rows.append(
                Run(
                    name=f"adding-{model}-{hidden}",
                    task="adding",
                    options=("--preset", f"report-{model}", "--hidden", str(hidden)),
                    quick=(*ADDING_QUICK, "--hidden", str(hidden // 4), *(("--skew-lr", "1e-3") if skew else ())),
                    labels={"model": label, "units": "--hidden"},
                )
            )
    return tuple(rows)


# ---- Penn Treebank, of the paper that the report is on ---------------------------------------------------------------

# model, units, published bits and accuracy for pieces of 150 and of 300; README of the released code (LSTM: that of
# asRNN, Nguyen et al. 2023, without accuracies)
PTB = (
    ("rnn", 1024, (2.89, 40.01), (2.90, 39.97)),
    ("lstm", 475, (1.41, None), (1.43, None)),
    ("exprnn", 1024, (1.45, 68.69), (1.48, 68.57)),
    ("nnrnn", 1024, (1.40, 69.89), (1.42, 69.54)),
)
# That README's, as far as it gives them; the LSTM's are ours.
PTB_OPTIONS = {
    "rnn": "--init glorot --lr 1e-5",
    "lstm": "--init glorot --lr 1e-3",
    "exprnn": "--init cayley --lr 1e-3 --input-lr 1e-3",
}

# Ours at 150 steps: name, label, model, units, options. They have a million parameters each.
_FACTORIZED = "--epochs 12 --precision bf16 --lr 1e-2 --input-lr 5e-2 --apply composed --geodesic-lr 3e-4"
_WIDER = (
    "--epochs 36 --batch 32 --precision bf16 --lr 8e-3 --input-lr 4e-2 --apply composed --geodesic-lr 3.5e-4 "
    "--margin 0.25 --spectrum-lr 2e-2 --average 0.998 --diagnose-every 1000"
)
PTB_OURS = (
    ("factorized", "factorized", "factorized", 1024, _FACTORIZED),
    ("factorized-long", "factorized, margin 0.25", "factorized", 1024, _WIDER),
    ("nnrnn", MODELS["nnrnn"], "nnrnn", 1024, "--epochs 12 --precision bf16 --lr 5e-3 --input-lr 5e-4 --skew-lr 3e-4"),
    ("lstm", MODELS["lstm"], "lstm", 475, "--epochs 12 --lr 5e-3"),
)


def _ptb() -> tuple[Run, ...]:
    rows = []
    for column, bptt in ((0, 150), (1, 300)):
        for model, hidden, *published in PTB:
            bits, percent = published[column]
            options = f"--preset nnrnn-{bptt}"
            if model != "nnrnn":
                options = f"--bptt {bptt} --model {model} --hidden {hidden}"
                options += "" if model == "lstm" else " --nonlinearity modrelu --start glorot-normal"
                options += f" --batch 128 --epochs 100 --schedule plateau {PTB_OPTIONS[model]}"
            rows.append(
                Run(
                    name=f"ptb-stream-{bptt}-{model}",
                    task="char_lm",
                    options=words(options),
                    quick=("--hidden", "128", "--epochs", "1", *(("--lr", "1e-3") if model == "rnn" else ())),
                    labels={"steps": "--bptt", "model": MODELS[model]},
                    published={BPC.title: bits, **({} if percent is None else {ACCURACY.title: percent})},
                )
            )
    for name, label, model, hidden, options in PTB_OURS:
        rows.append(
            Run(
                name=f"ptb-stream-150-{name}-ours",
                task="char_lm",
                options=words(f"--bptt 150 --warmup 100 --model {model} --hidden {hidden} {options}"),
                quick=("--hidden", "128", "--epochs", "1"),
                labels={"steps": "--bptt", "model": f"{label}, our settings"},
            )
        )
    return tuple(rows)


EXPERIMENTS = (
    Experiment(
        "nnrnn-copy", "Copy task, T = {T}", f"{REPORT}, Figure 2 and Table 1", _copy(), (LOSS, RECALL),
        figure="curves", quantity="held_out_loss", named_by=("model",), epochs=False, note=CURVES,
    ),
    Experiment(
        "nnrnn-psmnist", "Permuted sequential MNIST", f"{REPORT}, Figure 3 and Table 2", _psmnist(), (ACCURACY,),
        figure="curves", panel="hidden", legend=("model",), data="mnist",
        note="The report shows curves without numbers, for 512 units. The rows with 128 units are not in the report.",
    ),
    Experiment(
        "nnrnn-adding", "Adding task, T = {T}", f"{REPORT}, Figure 4 and Table 3", _adding(), (LOSS, RECALL),
        figure="curves", quantity="held_out_loss", named_by=("model", "units"), epochs=False,
        note="The report shows curves without numbers. An answer with an error of at most 0.2 is accurate.",
    ),
    Experiment(
        "nnrnn-ablations", "nnRNN on the copy task, one thing changed at a time", f"{REPORT}, Figures 5 and 6",
        _ablations(), (LOSS, RECALL), figure="curves", quantity="held_out_loss",
        named_by=("model",), epochs=False, note=CURVES,
    ),
    Experiment(
        "nnrnn-ptb", "Penn Treebank characters in a stream, truncated at 150 and 300 steps",
        f"{ORIGINAL}, README of the released code; LSTM: Nguyen et al. 2023", _ptb(), (BPC, ACCURACY),
        figure="curves", quantity="held_out_bpc", panel="bptt", named_by=("model",), data="ptb",
        note="The published numbers are of 100 epochs with batches of 128. The rows with our settings have higher "
        "rates, smaller batches, and 12 or 36 epochs.",
    ),
)  # fmt: skip


# ---- Figure 1 and the total memory -----------------------------------------------------------------------------------

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
MEMORY_NOTE = f"""\
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


def _fisher(given: Settings, folder: Path, stream: TextIO) -> list[Path]:
    quick = given.get("quick", False)  # the full size is fast enough
    found = {key: fisher_memory(*chain(*key), steps=2 * UNITS) for key in MEMORY}
    rows = [
        {"alpha": key[0], "beta": key[1], "d": key[2], "published": MEMORY[key], "ours": memory.total}
        for key, memory in found.items()
    ]
    headings = ("alpha", "beta", "d", "published J_tot", "ours", "difference", "J(0)", "longest memory (steps)")
    lines = []
    for row, memory in zip(rows, found.values(), strict=True):
        theirs, ours = row["published"], row["ours"]
        alive = int((memory.curve > 1e-3).nonzero().max())
        cells = [f"{row[name]:g}" for name in ("alpha", "beta", "d")]
        cells += [f"{theirs:.3g}", f"{ours:.3f}", f"{ours - theirs:+.3f}", f"{memory.curve[0]:.4f}", str(alive)]
        lines.append(cells)
    study = STUDIES[0]
    figure = drawn(folder / f"{study.name}.png", partial(_draw, found))
    text = [f"# {study.name}: {study.title}", "", f"{study.source}.", "", *table(headings, lines), ""]
    text += [] if figure is None else [f"![{study.title}]({figure.name})", ""]
    text += ["Longest memory: the largest k for which J(k) is above 0.001. A higher J_tot is more memory.", ""]
    text.append(MEMORY_NOTE)
    summary = {"experiment": study.name, "source": study.source, "quick": quick, "rows": rows}
    return written(folder, study.name, "\n".join(text) + "\n", summary, figure)


def _draw(found: dict[tuple[float, float, float], FisherMemory], plots: Any) -> Any:
    start = torch.rand(UNITS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = 3 * UNITS // 2
    transients = {
        f"α {alpha:g}, β {beta:g}": transient_norms(chain(alpha, beta, d)[0], start, steps=steps)
        for alpha, beta, d in MEMORY
        if d == 0
    }
    curves = {
        f"α {alpha:g}, β {beta:g}, d {d:g}": memory.curve
        for (alpha, beta, d), memory in found.items()
        if beta == 0 or alpha == 1
    }
    return plots.memory(chain(1.0, 0.3, 0.6, 12)[0], transients, curves)


_SOURCE = f"{REPORT}, Figure 1; {ORIGINAL}, supplement, Table 6"
STUDIES = (Study("nnrnn-fisher", "Fisher memory and transients of non-normal chains", _SOURCE, (), _fisher),)
