"""The pictures of one run, drawn at the end of a training and by `python -m orthokern.diagnostics RUN`, and those of
several runs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orthokern.diagnostics import plots
from orthokern.diagnostics.comparison import caption
from orthokern.diagnostics.runs import RunRecord, number_at

# figure -> the field of the records that each layer has
OF_LAYERS = {"spectrum": "spectrum", "moduli": "eigenvalue_moduli", "angles": "eigenvalue_angles"}
FIGURES = ("curves", "gradients", "spectrum", "moduli", "states", "angles", "layers", "stability")


def of_layer(field: str, recurrence: str | None) -> str:
    """The field of the records that holds `field` for a layer: "l1", "l0_reverse", ...; None: the first layer."""
    return field if recurrence in (None, "l0") else f"{field}_{recurrence}"


def recorded_layers(runs: Iterable[RunRecord]) -> list[str]:
    """The names for `of_layer` of which the records hold a spectrum, moduli or angles, the first layer first."""
    keys = dict.fromkeys(key for run in runs for record in run.records for key in record)
    matches = [re.fullmatch(rf"(?:{'|'.join(OF_LAYERS.values())})(?:_(l\d+(?:_reverse)?))?", key) for key in keys]
    return list(dict.fromkeys(match[1] or "l0" for match in matches if match))


def usual_figures(runs: Iterable[RunRecord]) -> list[str]:
    """The figures that are drawn of runs if none is named. The singular values of an nnRNN may be far from 1 while its
    eigenvalues are not, so their moduli have a figure; in other networks they are left out."""
    moduli = any(run.settings.get("model") == "nnrnn" for run in runs)
    return [name for name in FIGURES if name != "moduli" or moduli]


def _text(run: RunRecord, name: str, usual: str) -> str:
    """A text of config.json, safe for a picture."""
    value = run.config.get(name)
    return caption(value if isinstance(value, str) else usual)


def _draw_curves(run: RunRecord, file: Path, title: str, baseline: float | None) -> Path | None:
    label = _text(run, "loss_label", "loss")
    level = number_at(run.config, "baseline") if baseline is None else baseline
    if any("nll" in record for record in run.records):
        return plots.plot_losses(run.records, file, label=label, baseline=level, title=title)
    goal = number_at(run.config, "goal")
    return plots.plot_learning(run.records, file, loss_label=label, baseline=level, goal=goal, title=title)


def _compared(figure: str, runs: Sequence[RunRecord], recurrence: str | None, **common: Any) -> Any:
    """A figure with a panel for each run, or None."""
    key = {"key": of_layer(OF_LAYERS[figure], recurrence)} if figure in OF_LAYERS else {}
    compare = plots.compare_spectra if figure == "spectrum" else getattr(plots, f"compare_{figure}")
    return compare(runs, **key, **common)


def draw_run(
    run: RunRecord,
    folder: Path,
    figures: Iterable[str] | None = None,
    *,
    recurrence: str | None = None,
    baseline: float | None = None,
) -> list[Path]:
    """Draws the plots of a run for which its records have data; returns the files. Title, label of the loss, baseline
    and goal are those in config.json (`orthokern.training.Task.facts`).

    Args:
        run: the run.
        folder: where the PNG files are written: learning.png for the figure "curves", otherwise FIGURE.png.
        figures: names in `FIGURES`; None: `usual_figures`.
        recurrence: layer whose spectrum, moduli and angles are drawn, see `of_layer`.
        baseline: loss to draw a line at; None: that of the run.
    """
    title = _text(run, "title", f"{run.task}, {run.name}")
    drawn: list[Path | None] = []
    for name in usual_figures([run]) if figures is None else figures:
        if name == "curves":
            drawn.append(_draw_curves(run, folder / "learning.png", title, baseline))
        elif name == "layers":
            drawn.append(plots.plot_layers(run.records, folder / "layers.png", title=title))
        else:
            picture = _compared(name, [run], recurrence, x="iteration", title=title)
            drawn.append(None if picture is None else plots.save(picture, folder / f"{name}.png"))
    return [file for file in drawn if file is not None]


def draw_comparison(
    runs: Sequence[RunRecord],
    folder: Path,
    figures: Iterable[str],
    quantities: Mapping[str, float | None],
    *,
    panel: str | None = None,
    recurrence: str | None = None,
    **common: Any,
) -> list[Path]:
    """Draws pictures of several runs for which their records have data; returns the files.

    Args:
        runs: the runs.
        folder: where the PNG files are written: curves-QUANTITY.png, otherwise FIGURE.png.
        figures: names in `FIGURES` except "layers".
        quantities: name -> baseline or None, of the figure "curves".
        panel: setting that divides curves into panels.
        recurrence: as in `draw_run`.
        common: `legend` and `x` of all figures, see `plots.compare_curves`.
    """
    pictures: list[tuple[str, Any]] = []
    for figure in figures:
        if figure == "curves":
            for name, level in quantities.items():
                picture = plots.compare_curves(runs, name, panel=panel, baseline=level, **common)
                pictures.append((f"curves-{name}", picture))
        else:
            pictures.append((figure, _compared(figure, runs, recurrence, **common)))
    return [plots.save(picture, folder / f"{name}.png") for name, picture in pictures if picture is not None]
