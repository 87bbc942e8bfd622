"""The pictures of one run, drawn at the end of a training and by `python -m orthokern.diagnostics RUN`, and those of
several runs."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orthokern.diagnostics import plots
from orthokern.diagnostics.comparison import caption
from orthokern.diagnostics.runs import RunRecord, number_at

OF_LAYERS = ("spectrum", "eigenvalue_moduli", "eigenvalue_angles")  # fields of the records that each layer has
FIGURES = ("curves", "gradients", "spectrum", "moduli", "states", "angles", "layers", "stability")

Drawing = tuple[Callable[..., Path | None], dict[str, Any]]
"""A function of `orthokern.diagnostics.plots`, and its options beside records, file and title."""


def of_layer(field: str, recurrence: str | None) -> str:
    """The field of the records that holds `field` for a layer: "l1", "l0_reverse", ...; None: the first layer.

    Example:
        >>> of_layer("spectrum", None), of_layer("spectrum", "l1")
        ('spectrum', 'spectrum_l1')
    """
    return field if recurrence in (None, "l0") else f"{field}_{recurrence}"


def recorded_layers(runs: Iterable[RunRecord]) -> list[str]:
    """The names for `of_layer` of which the records hold a spectrum, moduli or angles, the first layer first.

    Example:
        >>> run = RunRecord(Path("a"), {}, {}, "copy", [{"iteration": 1, "spectrum": {}, "spectrum_l1": {}}])
        >>> recorded_layers([run])
        ['l0', 'l1']
    """
    keys = dict.fromkeys(key for run in runs for record in run.records for key in record)
    matches = [re.fullmatch(rf"(?:{'|'.join(OF_LAYERS)})(?:_(l\d+(?:_reverse)?))?", key) for key in keys]
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


def _curves(run: RunRecord, baseline: float | None) -> Drawing:
    label = _text(run, "loss_label", "loss")
    level = number_at(run.config, "baseline") if baseline is None else baseline
    if any("nll" in record for record in run.records):
        return plots.plot_losses, {"label": label, "baseline": level}
    return plots.plot_learning, {"loss_label": label, "baseline": level, "goal": number_at(run.config, "goal")}


def _gradients(run: RunRecord) -> Drawing:
    last = any("last_grad_norm_through_time" in record for record in run.records)
    key = "last_grad_norm_through_time" if last else "grad_norm_through_time"
    return plots.plot_gradients, {"key": key, "length": run.profile_length(key)}


def draw_run(
    run: RunRecord,
    folder: Path,
    figures: Iterable[str] | None = None,
    *,
    recurrence: str | None = None,
    baseline: float | None = None,
) -> list[Path]:
    """Draws the plots of a run for which its records have data.

    Title, label of the loss, baseline and goal are those in config.json (`orthokern.training.Task.facts`).

    Args:
        run: the run.
        folder: where the PNG files are written: learning.png for the figure "curves", otherwise FIGURE.png.
        figures: names in `FIGURES`; None: `usual_figures`.
        recurrence: layer whose spectrum, moduli and angles are drawn, see `of_layer`.
        baseline: loss to draw a line at; None: that of the run.

    Returns:
        The files written.

    Raises:
        ValueError: matplotlib rejects its own settings (MPLBACKEND, matplotlibrc).
        OSError: a file cannot be written.

    Example::

        >>> import tempfile
        >>> run = RunRecord(Path("a"), {}, {}, "copy", [{"iteration": i, "loss": 1 / i} for i in (1, 2, 3)])
        >>> [file.name for file in draw_run(run, Path(tempfile.mkdtemp()))]
        ['learning.png']
    """
    drawings: dict[str, Drawing] = {
        "curves": _curves(run, baseline),
        "gradients": _gradients(run),
        "spectrum": (plots.plot_spectrum, {"margin": run.margin, "key": of_layer("spectrum", recurrence)}),
        "moduli": (plots.plot_moduli, {"key": of_layer("eigenvalue_moduli", recurrence)}),
        "states": (plots.plot_states, {"length": run.profile_length("state_norm_through_time")}),
        "angles": (plots.plot_angles, {"key": of_layer("eigenvalue_angles", recurrence)}),
        "layers": (plots.plot_layers, {}),
        "stability": (plots.plot_stability, {}),
    }
    title = _text(run, "title", f"{run.task}, {run.name}")
    drawn: list[Path] = []
    for name in usual_figures([run]) if figures is None else figures:
        draw, options = drawings[name]
        file = folder / ("learning.png" if name == "curves" else f"{name}.png")
        path = draw(run.records, file, title=title, **options)
        drawn += [] if path is None else [path]
    return drawn


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
    """Draws pictures of several runs for which their records have data.

    Args:
        runs: the runs.
        folder: where the PNG files are written: curves-QUANTITY.png, otherwise FIGURE.png.
        figures: names in `FIGURES` except "layers".
        quantities: name -> baseline or None, of the figure "curves".
        panel: setting that divides curves into panels.
        recurrence: as in `draw_run`.
        common: `legend` and `x` of all figures, see `plots.compare_curves`.

    Returns:
        The files written.
    """
    compare: dict[str, Callable[..., Any]] = {
        "gradients": plots.compare_gradients,
        "spectrum": partial(plots.compare_spectra, key=of_layer("spectrum", recurrence)),
        "moduli": partial(plots.compare_moduli, key=of_layer("eigenvalue_moduli", recurrence)),
        "states": plots.compare_states,
        "angles": partial(plots.compare_angles, key=of_layer("eigenvalue_angles", recurrence)),
        "stability": plots.compare_stability,
    }
    pictures: list[tuple[str, Any]] = []
    for figure in figures:
        if figure == "curves":
            for name, level in quantities.items():
                picture = plots.compare_curves(runs, name, panel=panel, baseline=level, **common)
                pictures.append((f"curves-{name}", picture))
        else:
            pictures.append((figure, compare[figure](runs, **common)))
    return [plots.save(picture, folder / f"{name}.png") for name, picture in pictures if picture is not None]
