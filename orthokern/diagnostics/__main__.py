"""Redraw a run's plots and compare runs: `python -m orthokern.diagnostics RUN [RUN ...]`; --help explains it."""

import os
from collections.abc import Sequence
from pathlib import Path

from orthokern.commandline import Parser, Settings, command, names, one_of, printable, say
from orthokern.diagnostics import comparison, plots
from orthokern.diagnostics.drawing import FIGURES, draw_comparison, draw_run, usual_figures
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.errors import InputError, unknown_name

_OF_ONE_RUN = ("layers",)  # figures that do not compare runs
_QUANTITIES = ("loss", "accuracy")  # drawn by default, together with all quantities measured on held-out data

DESCRIPTION = """\
Inspect training runs: redraw the plots of one run from its records, or compare several runs in one
picture. A table of the results is printed on the terminal.

A RUN is the folder of a run, as the tasks write it (config.json and metrics.jsonl); the run may
still be in progress. Nothing is trained, and no checkpoint is read.

  curves     loss, accuracy, or any other number of the records over iterations: one line per run
  gradients  norm of the gradient of the loss for the state at each time step, relative to its
             maximum: one column per iteration. It shows where gradients vanish
  spectrum   singular values of the recurrent matrix: mean, standard deviation, smallest, largest
  moduli     moduli of the eigenvalues of the recurrent matrix (by default for an nnRNN only)
  states     norm of the hidden state at each time step
  angles     histogram of the angles of the eigenvalues of the recurrent matrix
  layers     for one run of a feedforward network: orthogonality error and gradient norm by layer
  stability  for a GRU: norm of the gradient, and spectral radius of the Jacobian at h = 0

The legend shows the settings in which the runs differ.
"""

EXAMPLES = """\
examples:
  python -m orthokern.diagnostics runs/a                     redraw all plots of a run, in its folder
  python -m orthokern.diagnostics runs/*                     compare runs; pictures go to comparison/
  python -m orthokern.diagnostics runs/* --figure none       the table alone, no picture
  python -m orthokern.diagnostics runs/* --figure curves --quantity accuracy --panel T
                                                             accuracy, one panel per T, side by side
  python -m orthokern.diagnostics runs/* --figure curves --quantity spectrum.max,spectral_radius
  python -m orthokern.diagnostics runs/* --legend margin --table results.md --out pictures

In the table, "best held-out X, at" is the best X on held-out data and the iteration at which it was
reached (accuracy: the largest; everything else: the smallest); "s" are the singular values in the last
record that has them. Curves of more than 1000 points are drawn as means over intervals of equal length.
Exit code: 0, or 2 for bad input.
"""


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.diagnostics", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    group = parser.add_argument_group("what to draw")
    kind = one_of("figure", (*FIGURES, "all", "none"))
    text = f"{', '.join(FIGURES)}; all: every figure that the records have data for; none: only the table (default all)"
    group.add_argument("--figure", type=kind, metavar="NAME", help=text)
    text = (
        "numbers to draw as curves, by their names in the records, with a dot before a part: loss, accuracy, "
        "held_out_accuracy, grad_norm, spectral_radius, spectrum.max, ... (default: loss, accuracy, held-out numbers)"
    )
    group.add_argument("--quantity", type=names, metavar="NAME[,...]", help=text)
    text = "curves: one panel for each value of this setting (default: one panel)"
    group.add_argument("--panel", metavar="SETTING", help=text)
    text = "settings that label the runs (default: those in which the runs differ, as many as needed)"
    group.add_argument("--legend", type=names, metavar="SETTING[,...]", help=text)
    text = "iteration or epoch (default: epoch if the length of an epoch is known for all runs)"
    group.add_argument("--x", type=one_of("x", plots.AXES), metavar="NAME", help=text)
    group = parser.add_argument_group("output")
    text = "folder for pictures (default: the folder of the run; for several runs: comparison/)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    group.add_argument("--table", type=Path, metavar="FILE", help="also write the table to FILE, as Markdown")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def body() -> int:
        _run(_parser().parse(arguments))
        return 0

    return command(body)


def _run(options: Settings) -> None:
    figure = options.get("figure", "all")
    for name in ("quantity", "panel"):
        if name in options and figure not in ("curves", "all"):
            raise InputError(f"--{name} has no effect with --figure {figure} (needs curves)")
    unique: dict[str, Path] = {}
    for folder in options["runs"]:
        unique.setdefault(os.path.realpath(folder), folder)
    runs = [load_run(folder) for folder in unique.values()]
    comparison.check_settings("--panel", runs, [options["panel"]] if "panel" in options else ())
    comparison.check_settings("--legend", runs, options.get("legend", ()))
    quantities = _quantities(runs, options)
    drawn = [] if figure == "none" else _draw(figure, runs, options, quantities)
    table = comparison.table(runs)
    if "table" in options:
        options["table"].write_text(table, encoding="utf-8")
    say(table.removesuffix("\n"))
    if drawn:
        say("\n".join(f"drawn: {printable(str(file))}" for file in drawn))
    elif figure != "none":
        what = "anything to draw" if figure == "all" else f"what the figure {figure!r} shows"
        none_yet = "" if any(run.records for run in runs) else " (no record yet)"
        raise InputError(f"no record of {_all_of(runs)} holds {what}{none_yet}")


def _draw(figure: str, runs: Sequence[RunRecord], options: Settings, quantities: Sequence[str]) -> list[Path]:
    """Draws one run as training does, or a comparison; returns the files."""
    common = {name: options[name] for name in ("legend", "x", "panel") if name in options}
    if len(runs) == 1 and not common and "quantity" not in options:
        return draw_run(runs[0], options.get("out", runs[0].path), None if figure == "all" else [figure])
    if figure in _OF_ONE_RUN:
        raise InputError(f"--figure {figure}: of one run, without --quantity, --panel, --legend and --x")
    figures = [name for name in usual_figures(runs) if name not in _OF_ONE_RUN] if figure == "all" else [figure]
    out = options.get("out", runs[0].path if len(runs) == 1 else Path("comparison"))
    return draw_comparison(runs, out, figures, quantities, **common)


def _quantities(runs: Sequence[RunRecord], options: Settings) -> list[str]:
    recorded = list(dict.fromkeys(quantity for run in runs for quantity in run.quantities))
    if "quantity" not in options:
        held_out = dict.fromkeys(name for run in runs for name in comparison.best_held_out(run))
        return [name for name in (*_QUANTITIES, *held_out) if name in recorded]
    for quantity in options["quantity"]:
        if quantity not in recorded:
            if not recorded:
                raise InputError(f"--quantity {quantity}: no record of {_all_of(runs)} holds a number yet")
            raise unknown_name("--quantity", quantity, recorded)
    return list(options["quantity"])


def _all_of(runs: Sequence[RunRecord]) -> str:
    return str(runs[0].path) if len(runs) == 1 else f"these {len(runs)} runs"


if __name__ == "__main__":
    raise SystemExit(main())
