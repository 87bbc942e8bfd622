"""Redraw a run's plots and compare runs: `python -m orthokern.diagnostics RUN [RUN ...]`; --help explains it."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orthokern._files import make_folder, remove_folders
from orthokern.commandline import Needs, Parser, Settings, command, one_of, path, printable, real, say
from orthokern.diagnostics import comparison, plots
from orthokern.diagnostics.drawing import FIGURES, draw_run, of_layer, recorded_layers, usual_figures
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.errors import InputError, unknown_name

EXIT_OK = 0

_OF_ONE_RUN = ("layers",)  # figures that do not compare runs
_QUANTITIES = ("loss", "accuracy")  # drawn by default, together with all quantities measured on held-out data

# option -> the figures that it changes
_OF_FIGURES = {
    **dict.fromkeys(("quantity", "panel", "baseline"), ("curves", "all")),
    **dict.fromkeys(("legend", "x", "out"), (*FIGURES, "all")),
    "recurrence": ("spectrum", "moduli", "angles", "all"),
}

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
  python -m orthokern.diagnostics runs/* --figure curves --quantity loss --baseline 0.1667
  python -m orthokern.diagnostics runs/* --figure curves --quantity spectrum.max,spectral_radius
  python -m orthokern.diagnostics runs/* --legend margin --table results.md --out pictures

In the table, "best held-out X, at" is the best X on held-out data and the iteration at which it was
found (accuracy: the largest; everything else: the smallest); "s" are the singular values in the last
record that has them. Curves of more than 1000 points are drawn as means over intervals of equal length.
Exit code: 0, or 2 for bad input.
"""


def _names(text: str) -> list[str]:
    """An argparse type: names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.diagnostics", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="folder of a run")
    group = parser.add_argument_group("what to draw")
    kind = one_of("figure", (*FIGURES, "all", "none"))
    text = f"{', '.join(FIGURES)}; all: every figure that the records have data for; none: only the table (default all)"
    group.add_argument("--figure", type=kind, metavar="NAME", help=text)
    text = (
        "numbers to draw as curves, by their names in the records, with a dot before a part: loss, accuracy, "
        "held_out_accuracy, grad_norm, spectral_radius, spectrum.max, ... (default: loss, accuracy, held-out numbers)"
    )
    group.add_argument("--quantity", type=_names, metavar="NAME[,...]", help=text)
    text = "curves: one panel for each value of this setting (default: one panel)"
    group.add_argument("--panel", metavar="SETTING", help=text)
    text = "settings that label the runs (default: those in which the runs differ, as many as needed)"
    group.add_argument("--legend", type=_names, metavar="SETTING[,...]", help=text)
    text = "iteration or epoch (default: epoch if the length of an epoch is known for all runs)"
    group.add_argument("--x", type=one_of("x", plots.AXES), metavar="NAME", help=text)
    text = "curves: draw a line at this value (default: the baseline of the loss, if known)"
    group.add_argument("--baseline", type=real(), metavar="X", help=text)
    text = "spectrum, moduli, angles: layer to draw, as in the names of its parameters: l1, l0_reverse (default: first)"
    group.add_argument("--recurrence", metavar="NAME", help=text)
    group = parser.add_argument_group("output")
    text = "folder for pictures (default: the folder of the run; for several runs: comparison/)"
    group.add_argument("--out", type=path, metavar="DIR", help=text)
    group.add_argument("--table", type=path, metavar="FILE", help="also write the table to FILE, as Markdown")
    parser.needs = {name: ((Needs("figure", figures),),) for name, figures in _OF_FIGURES.items()}
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def body() -> int:
        parser = _parser()
        given = parser.parse(arguments)
        parser.check_all_play(given, SimpleNamespace(figure=given.get("figure", "all")))
        _run(given)
        return EXIT_OK

    return command(body, arguments)


def _run(given: Settings) -> None:
    figure = given.get("figure", "all")
    if figure != "none":
        _check_matplotlib()
    unique = {os.path.realpath(folder): folder for folder in reversed(given["runs"])}
    runs = [load_run(folder) for folder in reversed(unique.values())]
    for option in ("panel", "legend"):
        if option in given:
            named = [given[option]] if option == "panel" else given[option]
            comparison.check_settings(f"--{option}", runs, named)
    quantities = _quantities(runs, given) if figure in ("curves", "all") else []  # refuses unknown ones
    if "recurrence" in given:
        _check_recurrence(given["recurrence"], runs)
    table = comparison.table(runs)
    out = given.get("out", runs[0].path if len(runs) == 1 else Path("comparison"))
    made: list[Path] = []
    if figure != "none":
        made = _write(out, lambda: make_folder(out))
    try:
        if "table" in given:
            _write(given["table"], lambda: given["table"].write_text(table, encoding="utf-8"))
        say(table.removesuffix("\n"))
        if figure == "none":
            return
        if len(runs) == 1 and not given.keys() & {"quantity", "panel", "legend", "x"}:
            chosen = None if figure == "all" else [figure]
            beside = {name: given.get(name) for name in ("recurrence", "baseline")}
            drawn = _write(out, lambda: draw_run(runs[0], out, chosen, **beside))
        else:
            drawn = _compare(_compared(figure, runs), runs, given, out, quantities)
    finally:
        remove_folders(made)  # but one that holds a picture
    if drawn:
        say("\n".join(f"drawn: {printable(str(file))}" for file in drawn))
    else:
        what = "anything to draw" if figure == "all" else f"what the figure {figure!r} shows"
        raise InputError(
            f"no record of {_all_of(runs)} holds {what}"
            + ("" if any(run.records for run in runs) else " (no record yet)")
        )


def _check_matplotlib() -> None:
    """Rejects invalid settings of matplotlib: MPLBACKEND, a matplotlibrc."""
    try:
        importlib.import_module("matplotlib")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"matplotlib cannot be used: {reason}; accepted without it: --figure none") from None


def _write(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def _compared(figure: str, runs: Sequence[RunRecord]) -> list[str]:
    """The figures that are drawn of several runs."""
    if figure == "all":
        return [name for name in usual_figures(runs) if name not in _OF_ONE_RUN]
    if figure in _OF_ONE_RUN:
        raise InputError(f"--figure {figure}: of one run, without --quantity, --panel, --legend and --x")
    return [figure]


def _compare(
    figures: Iterable[str], runs: Sequence[RunRecord], given: Settings, out: Path, quantities: Sequence[str]
) -> list[Path]:
    """Draws pictures of several runs; for curves one per quantity."""
    common: dict[str, Any] = {key: given[key] for key in ("legend", "x") if key in given}
    layer = given.get("recurrence")
    drawings: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "gradients": (plots.compare_gradients, {}),
        "spectrum": (plots.compare_spectra, {"key": of_layer("spectrum", layer)}),
        "moduli": (plots.compare_moduli, {"key": of_layer("eigenvalue_moduli", layer)}),
        "states": (plots.compare_states, {}),
        "angles": (plots.compare_angles, {"key": of_layer("eigenvalue_angles", layer)}),
        "stability": (plots.compare_stability, {}),
    }
    files: list[Path] = []
    for name in figures:
        if name == "curves":
            panel = given.get("panel")
            pictures = {f"curves-{q}": _curves_of(q, runs, given, panel=panel, **common) for q in quantities}
        else:
            draw, options = drawings[name]
            pictures = {name: draw(runs, **options, **common)}
        for stem, picture in pictures.items():
            if picture is not None:
                file = out / f"{stem}.png"
                files.append(_write(file, partial(plots.save, picture, file)))
    return files


def _curves_of(quantity: str, runs: Sequence[RunRecord], given: Settings, **options: Any) -> Any:
    # among the usual quantities the baseline is that of the loss
    level = given.get("baseline") if "quantity" in given or quantity in ("loss", "held_out_loss") else None
    return plots.compare_curves(runs, quantity, baseline=level, **options)


def _quantities(runs: Sequence[RunRecord], given: Settings) -> list[str]:
    known = list(dict.fromkeys(quantity for run in runs for quantity in run.quantities))
    if "quantity" not in given:
        held_out = dict.fromkeys(name for run in runs for name in comparison.best_held_out(run))
        return [name for name in (*_QUANTITIES, *held_out) if name in known]
    for quantity in given["quantity"]:
        if quantity not in known:
            if not known:
                raise InputError(f"--quantity {quantity}: no record of {_all_of(runs)} holds a number yet")
            raise unknown_name("--quantity", quantity, known)
    return list(given["quantity"])


def _check_recurrence(name: str, runs: Sequence[RunRecord]) -> None:
    known = recorded_layers(runs)
    if not known:
        raise InputError(f"--recurrence {name}: no record of {_all_of(runs)} holds a spectrum, moduli or angles")
    if name not in known:
        raise unknown_name("--recurrence", name, known)


def _all_of(runs: Sequence[RunRecord]) -> str:
    return str(runs[0].path) if len(runs) == 1 else f"these {len(runs)} runs"


if __name__ == "__main__":
    sys.exit(main())
