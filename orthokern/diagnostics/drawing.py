"""The plots of one run, drawn at the end of training and by `python -m orthokern.diagnostics RUN`, and the plots of
several runs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from orthokern.diagnostics import plots
from orthokern.diagnostics.comparison import caption
from orthokern.diagnostics.runs import RunRecord

# figure -> function that draws one panel for each run
OF_RUNS: dict[str, Callable[..., Any]] = {
    "gradients": plots.compare_gradients,
    "spectrum": plots.compare_spectra,
    "moduli": plots.compare_moduli,
    "states": plots.compare_states,
    "angles": plots.compare_angles,
    "stability": plots.compare_stability,
}
FIGURES = ("curves", *OF_RUNS, "layers")


def usual_figures(runs: Iterable[RunRecord]) -> list[str]:
    """The figures that are drawn if none is named. The singular values of an nnRNN may be far from 1 while its
    eigenvalues are not, so the moduli of the eigenvalues have a figure; in other networks it is left out."""
    moduli = any(run.settings.get("model") == "nnrnn" for run in runs)
    return [name for name in FIGURES if name != "moduli" or moduli]


def draw_run(run: RunRecord, folder: Path, figures: Iterable[str] | None = None) -> list[Path]:
    """Draws the plots of a run for which its records have data; returns the files. Title, label of the loss, baseline
    and goal are those in config.json (`orthokern.training.Task.facts`).

    Args:
        run: the run.
        folder: where the PNG files are written: learning.png for the figure "curves", otherwise FIGURE.png.
        figures: names in `FIGURES`; None: `usual_figures`.
    """

    title = run.config.get("title")
    title = caption(title if isinstance(title, str) else f"{run.task}, {run.name}")
    pictures: dict[str, Any] = {}
    for name in usual_figures([run]) if figures is None else figures:
        if name == "curves":
            pictures["learning"] = plots.plot_learning(run, title=title)
        elif name == "layers":
            pictures[name] = plots.plot_layers(run, title=title)
        else:
            pictures[name] = OF_RUNS[name]([run], x="iteration", title=title)
    return _saved(pictures, folder)


def _saved(pictures: dict[str, Any], folder: Path) -> list[Path]:
    return [plots.save(picture, folder / f"{name}.png") for name, picture in pictures.items() if picture is not None]


def draw_comparison(
    runs: Sequence[RunRecord], folder: Path, figures: Iterable[str], quantities: Iterable[str], **common: Any
) -> list[Path]:
    """Draws plots of several runs for which their records have data; returns the files.

    Args:
        runs: the runs.
        folder: where the PNG files are written: curves-QUANTITY.png, otherwise FIGURE.png.
        figures: names in `FIGURES` except "layers".
        quantities: those of the figure "curves".
        common: `legend` and `x` of all figures, and `panel` of the curves, see `plots.compare_curves`.
    """
    panel = common.pop("panel", None)
    pictures: dict[str, Any] = {}
    for figure in figures:
        if figure == "curves":
            curves = {name: plots.compare_curves(runs, name, panel=panel, **common) for name in quantities}
            pictures |= {f"curves-{name}": picture for name, picture in curves.items()}
        else:
            pictures[figure] = OF_RUNS[figure](runs, **common)
    return _saved(pictures, folder)
