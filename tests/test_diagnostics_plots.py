"""The contents of plots of one run and of several, and the command line of the diagnostics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from matplotlib.image import imread
from runs import assert_refused
from test_diagnostics import a_run, new_run, record, write_run

from orthokern.diagnostics import __main__ as command
from orthokern.diagnostics import plots
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.nn import RNN, FactorizedRNN
from orthokern.tasks import copy

# ------------------------------------------------------------------------------------------------------------- pictures


def check_png(path: Path) -> None:
    """A picture that is there, whole, and not empty paper."""
    image = imread(path)
    assert image.ndim == 3 and min(image.shape[:2]) > 100 and image.std() > 0.01
    assert not path.with_name(path.name + ".tmp").exists()


def axes(figure: Any) -> list[Any]:
    """The axes of a figure that must have been drawn."""
    assert figure is not None
    return list(figure.axes)


def shown(axis: Any) -> dict[str, list[Any]]:
    """The legend's texts with what their lines show."""
    return {line.get_label(): line.get_ydata() for line in axis.get_lines()}


def test_curves_of_several_runs_by_panel() -> None:
    grid = [
        new_run(f"{T}-{m}", T=T, margin=m, records=[{"iteration": i, "accuracy": i / T} for i in range(1, 101)])
        for T in (500, 200)
        for m in (None, 0.1, 0.01)
    ]
    left, right = axes(plots.compare_curves(grid, "accuracy", panel="T"))
    assert (left.get_title(), right.get_title()) == ("T 200", "T 500"), "numbers in order"
    assert set(shown(left)) == set(shown(right)) == {"margin none", "margin 0.1", "margin 0.01"}
    assert shown(left)["margin 0.1"][-1] == pytest.approx(50.0), "in percent"
    colours = [{line.get_label(): line.get_color() for line in axis.get_lines()} for axis in (left, right)]
    assert colours[0] == colours[1] and len(set(colours[0].values())) == 3, "a colour means the same everywhere"
    assert left.get_ylabel() == "accuracy (%)" and left.get_xlabel() == "iteration"


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_latent_states_and_eigenvalues(rank: int, tmp_path: Path) -> None:
    rnn, groups = FactorizedRNN(3, 16, rank=rank, margin=0.0), torch.tensor([0.2, -1.0, 0.2, -1.0, -1.0])
    states = rnn(torch.randn(7, 5, 3))[0]
    left, right = axes(plots.plot_latent(rnn, states, groups))
    check_png(plots.save(left.figure, tmp_path / "latent.png"))
    kappa = (states @ rnn.v_l0).detach()[:, groups == -1.0].mean(1)
    x, y = (torch.tensor(np.asarray(values)) for values in left.get_lines()[0].get_data())
    assert set(shown(left)) == {"-1", "0.2"}
    if rank < 3:
        torch.testing.assert_close(y.float(), kappa[:, -1])
    else:  # the components are a rotation: distances within the plane are at most those of kappa
        assert bool((torch.stack([x, y]).diff(dim=1).norm(dim=0) <= kappa.diff(dim=0).norm(dim=1) + 1e-5).all())
    points = np.stack(right.get_lines()[1].get_data())
    np.testing.assert_allclose(np.hypot(*points), 1.0, atol=1e-5)  # W is orthogonal in its subspace
    assert points.shape == (2, rank)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (RNN(3, 4), (5, 2, 4), "module is of type RNN"),
        (FactorizedRNN(3, 4), (5, 4), "states must be [T, B, 4]"),
        (FactorizedRNN(3, 4, dtype=torch.float64), (5, 3, 4), "torch.float64, got "),
        (FactorizedRNN(3, 4), (5, 2, 4), "groups must be a Tensor [B] = [2], got [3]"),
    ],
)
def test_latent_states_need_a_factorized_module(module: Any, shape: tuple[int, ...], message: str) -> None:
    refused(lambda: plots.plot_latent(module, torch.zeros(shape), torch.zeros(3)), message)


def test_a_diverged_run_leaves_room_for_the_others() -> None:
    def run(name: str, *values: float) -> RunRecord:
        return new_run(name, records=[{"iteration": i, "loss": value} for i, value in enumerate(values, 1)])

    diverged = [run("a", 9.0, 5.0, 4.0), run("b", 8.0, 6.0), run("c", 7.0, 1e9, 1e12)]
    (axis,) = axes(plots.compare_curves(diverged, "loss"))
    assert axis.get_ylim()[1] == pytest.approx(80.0), "ten times the first values"


def test_curves_by_epoch_with_their_baseline() -> None:
    records = [{"iteration": i, "loss": 0.2 - 1e-4 * i} for i in range(1, 1001)]
    told = [
        RunRecord(Path(name), {"baseline": 1 / 6}, {"margin": m, "iterations_per_epoch": 100}, "adding", records)
        for name, m in (("a", 1.0), ("b", 10.0))
    ]
    (axis,) = axes(plots.compare_curves(told, "loss"))
    assert axis.get_xlabel() == "epoch" and axis.get_lines()[0].get_xdata()[-1] == pytest.approx(10.0)
    assert shown(axis)["baseline 0.1667"][0] == pytest.approx(1 / 6)
    message = "unknown panel 'margine': did you mean 'margin'"
    refused(lambda: plots.compare_curves(told, "loss", panel="margine"), message)


def test_long_runs_are_thinned_before_they_are_drawn(tmp_path: Path) -> None:
    base = record(1, steps=220, fade=2.0, spread=0.1)
    spike = {"mean": 1.0, "std": 0.0, "min": 0.5, "max": 3.0}
    records = [
        base | {"iteration": i} if i % 50 == 1 else {"iteration": i, "loss": 1.0, "accuracy": 0.1}
        for i in range(1, 200_001)
    ]
    records[50 * 1234]["spectrum"] = spike
    run = new_run("long", records=records, margin=0.1)
    (curves,) = axes(plots.compare_curves([run, new_run("other", records=records, margin=0.2)], "loss"))
    assert [len(line.get_xdata()) for line in curves.get_lines()] == [1000, 1000]
    lines = shown(axes(plots.compare_spectra([run]))[0])
    assert len(lines["maximum"]) == 1000 and max(lines["maximum"]) == 3.0 and min(lines["minimum"]) == 0.5
    heat = axes(plots.compare_gradients([run]))[0]
    assert heat.collections[0].get_array().size == 600 * 64
    check_png(plots.save(heat.figure, tmp_path / "x.png"))


def heat_map(axis: Any) -> np.ndarray:
    """[S, P]"""
    mesh = axis.collections[0]
    return np.asarray(mesh.get_array()).reshape(len(mesh.get_coordinates()) - 1, -1)


def test_norms_of_sequences_of_different_lengths() -> None:
    records = [{"iteration": i, "time_steps": 2 * i, "state_norm_through_time": [1.0] * 2 * i} for i in (1, 2)]
    (axis, _) = axes(plots.compare_states([new_run("a", records=records)]))
    assert axis.get_ylabel() == "t as a fraction of the sequence" and heat_map(axis).shape == (64, 2)


@pytest.mark.parametrize("value", [["a", 2.0], True, "text", [None, 2.0]], ids=str)
def test_records_with_other_values(value: Any) -> None:
    fields = ("grad_norm_through_time", "state_norm_through_time", "eigenvalue_angles")
    run = new_run("a", records=[{"iteration": i, "time_steps": 2, **dict.fromkeys(fields, value)} for i in (1, 2)])
    for draw in (plots.compare_gradients, plots.compare_states, plots.compare_angles):
        assert draw([run]) is None


def test_a_label_that_begins_with_an_underscore() -> None:
    runs = [
        replace(new_run(name, records=[{"iteration": i, "loss": 0.5} for i in (1, 2)]), label=f"_{name}")
        for name in "ab"
    ]
    figure = axes(plots.compare_curves(runs, "loss"))[0].figure
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" _a", " _b"]


def test_states_angles_and_spectra_of_several_runs(tmp_path: Path) -> None:
    both = [load_run(a_run(tmp_path / str(m), fade=math.log(10), margin=m)) for m in (0.02, None)]
    assert heat_map(axes(plots.compare_states(both))[0])[[0, -1], 0] == pytest.approx([0.0, 1.0])

    angles = axes(plots.compare_angles(both))[0]
    shares = heat_map(angles)
    assert shares.shape == (36, 5) and shares.sum(axis=0) == pytest.approx(100.0)
    assert shares[0] == pytest.approx([100 * i / (i + 35) for i in range(1, 6)])
    assert angles.get_ylim() == pytest.approx((-math.pi, math.pi))

    bounded, free = axes(plots.compare_spectra(both))
    assert shown(free)["maximum"] == pytest.approx([1.01, 1.02, 1.03, 1.04, 1.05])
    assert sorted(line.get_ydata()[0] for line in bounded.get_lines() if line.get_linestyle() == "--") == [0.98, 1.02]
    assert not [line for line in free.get_lines() if line.get_linestyle() == "--"]


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("model", ["factorized", "nnrnn"])
def test_a_run_is_redrawn_as_training_drew_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    folder = tmp_path / "run"
    small = "--T 5 --hidden 4 --batch 2 --iterations 3 --diagnose-every 1 --eval-sequences 2 --threads 1".split()
    assert copy.main([*small, "--model", model, "--out", str(folder)]) == 0
    pictures = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    names = ["learning", "gradients", "spectrum", *(["moduli"] if model == "nnrnn" else []), "states", "angles"]
    assert set(pictures) == {f"{name}.png" for name in names}
    capsys.readouterr()
    assert command.main([str(folder), "--out", str(tmp_path / "again")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| run ") and not err
    assert [line.rsplit("/", 1)[1] for line in out.splitlines() if line.startswith("drawn: ")] == [
        f"{name}.png" for name in names
    ]
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == pictures
    for name in pictures:
        check_png(folder / name)


def test_moduli_of_several_runs_and_layers_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moduli = {"mean": 1.0, "std": 0.1, "min": 0.9, "max": 1.2}
    layers = {"orthogonality_by_layer": [1.0, 0.5], "grad_norm_by_layer": [0.1, 0.2]}
    records = [{"iteration": i, "loss": 1.0, "eigenvalue_moduli": moduli, **layers} for i in (1, 2)]
    folders = [str(write_run(tmp_path / name, records, model="nnrnn")) for name in "ab"]
    assert command.main([*folders, "--out", str(tmp_path / "both")]) == 0
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"curves-loss.png", "moduli.png"}
    both = axes(plots.compare_moduli([load_run(folder) for folder in folders]))
    assert [axis.get_ylabel() for axis in both] == ["|eigenvalue| (no unit)"] * 2
    assert shown(both[0])["maximum"].tolist() == [1.2, 1.2]
    assert_refused(capsys, "--figure layers: of one run", command.main, *folders, "--figure", "layers")
    assert command.main([folders[0]]) == 0
    assert {path.name for path in Path(folders[0]).glob("*.png")} == {"learning.png", "moduli.png", "layers.png"}


def test_runs_are_compared_in_one_picture_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(a_run(tmp_path / f"m{m}", margin=m)) for m in (0.0, 0.1)]
    monkeypatch.chdir(tmp_path)
    assert command.main([*folders, "--table", "table.md"]) == 0
    names = {path.name for path in (tmp_path / "comparison").iterdir()}
    curves = {f"curves-{q}.png" for q in ("loss", "accuracy", "held_out_accuracy", "held_out_loss")}
    assert names == curves | {"gradients.png", "spectrum.png", "states.png", "angles.png"}
    for name in names:
        check_png(tmp_path / "comparison" / name)
    table = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out.startswith(table) and table.count("\n") == 4

    chosen = ["--figure", "curves", "--quantity", "spectrum.max,grad_norm", "--panel", "margin", "--out", "some/where"]
    assert command.main([*folders, *chosen]) == 0
    assert {path.name for path in Path("some/where").iterdir()} == {"curves-spectrum.max.png", "curves-grad_norm.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figur", "all"], "unknown option --figur: did you mean --figure"),
        (["--figure", "curves", "--quantity", "acuracy"], "unknown --quantity 'acuracy': did you mean 'accuracy'"),
        (["--panel", "margn"], "unknown --panel 'margn': did you mean 'margin'"),
        (["--legend", "margin,sed"], "unknown --legend 'sed': did you mean 'seed'"),
        (["--x", "epoch"], "the settings do not tell"),
        (["--figure", "moduli"], "holds what the figure 'moduli' shows"),
        (["--out", "{run}/config.json"], "config.json: File exists"),
        (
            ["--figure", "spectrum", "--quantity", "loss"],
            "--quantity has no effect with --figure spectrum (needs curves)",
        ),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    folder = a_run(tmp_path / "run", margin=0.1)
    assert_refused(capsys, message, command.main, folder, *(option.format(run=folder) for option in options))
