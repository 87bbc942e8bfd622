"""The pictures of one run, drawn at the end of a training and by `python -m orthokern.diagnostics RUN`, and those of
several runs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from orthokern.diagnostics import plots
from orthokern.diagnostics.comparison import caption
from orthokern.diagnostics.runs import RunRecord, number_at

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
    """The figures that are drawn of runs if none is named. The singular values of an nnRNN may be far from 1 while its
    eigenvalues are not, so their moduli have a figure; in other networks they are left out."""
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

    def text(name: str, usual: str) -> str:
        value = run.config.get(name)
        return caption(value if isinstance(value, str) else usual)

    title = text("title", f"{run.task}, {run.name}")
    drawn: list[Path | None] = []
    for name in usual_figures([run]) if figures is None else figures:
        if name == "curves":
            levels = {key: number_at(run.config, key) for key in ("baseline", "goal")}
            file, label = folder / "learning.png", text("loss_label", "loss")
            drawn.append(plots.plot_learning(run.records, file, loss_label=label, title=title, **levels))
        elif name == "layers":
            drawn.append(plots.plot_layers(run.records, folder / "layers.png", title=title))
        else:
            picture = OF_RUNS[name]([run], x="iteration", title=title)
            drawn.append(None if picture is None else plots.save(picture, folder / f"{name}.png"))
    return [file for file in drawn if file is not None]


def draw_comparison(
    runs: Sequence[RunRecord], folder: Path, figures: Iterable[str], quantities: Iterable[str], **common: Any
) -> list[Path]:
    """Draws pictures of several runs for which their records have data; returns the files.

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
    return [plots.save(picture, folder / f"{name}.png") for name, picture in pictures.items() if picture is not None]
