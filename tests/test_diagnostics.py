"""Diagnostics: norms through time compared with the states, spectra of matrices with known eigenvalues, reading of
runs, the contents of plots, and the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import scan_problem
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import Tensor, nn

from orthokern import InputError, diagnostics, dispatch, functional
from orthokern.diagnostics import __main__ as command
from orthokern.diagnostics import comparison, plots, runs
from orthokern.diagnostics.drawing import recorded_layers
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.nn import GRU, RNN, FactorizedRNN
from orthokern.ops import _taps
from orthokern.reference._scan import norm_over_batch
from orthokern.tasks import copy
from orthokern.training import RunFolder, metrics

OPS = ("factored_scan", "dense_scan")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------ states in a tap


def run_scan(op: str, **options: Any) -> Tensor:
    problem = scan_problem(op, B=3, T=7, N=4, inputs="features")
    x, *matrices, h0, weight, bias, act_param = problem.inputs()
    function = getattr(functional, op)
    hs: Tensor = function(
        x, *matrices, h0, weight=weight, bias=bias, activation=problem.activation, act_param=act_param, **options
    )
    return hs


@pytest.mark.parametrize(
    "options", [{}, {"backend": "reference"}, {"backend": "cpu"}, {"checkpoint_every": 3}], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_state_norms_are_those_of_the_states(op: str, options: dict[str, Any]) -> None:
    why = dispatch.absence(op, "cpu")
    if options.get("backend") == "cpu" and why is not None:
        pytest.skip(str(why))
    with diagnostics.tap() as taken, diagnostics.tap() as also:
        hs = run_scan(op, **options)
    expected = hs.detach().flatten(1).square().sum(1).sqrt()
    assert taken.state_ops == [op] and taken.grad_norms == []
    torch.testing.assert_close(taken.state_norms[0], expected)
    assert not taken.state_norms[0].requires_grad and torch.equal(taken.state_norms[0], also.state_norms[0])
    run_scan(op, **options)
    assert len(taken.state_norms) == 1, "a closed tap collects nothing more"


def test_states_come_first_layer_first_and_gradients_last_layer_first() -> None:
    rnn = FactorizedRNN(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    with diagnostics.tap() as taken:
        output, _ = rnn(torch.randn(6, 2, 3, dtype=torch.float64))
        output.sum().backward()
    assert [norms.shape for norms in taken.state_norms] == [(6,)] * 4 == [norms.shape for norms in taken.grad_norms]
    # the last layer's forward scan is its output's first half, its reverse scan the second half from the end
    ours = torch.stack([output[..., :4].flatten(1).norm(dim=1), output[..., 4:].flip(0).flatten(1).norm(dim=1)])
    torch.testing.assert_close(torch.stack(taken.state_norms[2:]), ours.detach())
    assert taken.grad_norms[0][-1] == pytest.approx(math.sqrt(8)), "ones over [2, 4] reach the last layer's last step"


def test_state_norms_under_compile_and_in_half_precision() -> None:
    u, s = torch.linalg.qr(torch.randn(4, 4))[0], torch.ones(4)
    x = torch.randn(5, 3, 4)

    def scan(x: Tensor) -> Tensor:
        return functional.factored_scan(x, u, s, u)

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), diagnostics.tap() as taken:
        hs = compiled(x)
    torch.testing.assert_close(taken.state_norms[0], hs.flatten(1).norm(dim=1))

    large = torch.full((2, 3, 4), 60000.0, dtype=torch.float16)  # whose squares float16 can't hold
    with diagnostics.tap() as taken:
        functional.dense_scan(large, torch.zeros(4, 4, dtype=torch.float16), activation="identity")
    assert taken.state_norms[0].dtype == torch.float32
    torch.testing.assert_close(taken.state_norms[0], large.float().flatten(1).norm(dim=1))


MODULES: list[Callable[..., nn.Module]] = [
    lambda: RNN(3, 17, nonlinearity="identity"),
    lambda: FactorizedRNN(3, 17, nonlinearity="identity"),
    lambda: GRU(3, 17),
]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("steps", [2, 40])  # few steps have kernels of their own
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_norms_of_gradients_whose_squares_leave_float32(
    make: Callable[..., nn.Module], steps: int, scale: float
) -> None:
    module, x, g = make(), torch.randn(steps, 3, 3), torch.randn(steps, 3, 17)
    norms = []
    for factor in (1.0, scale):
        with diagnostics.tap() as taken:
            module(x)[0].backward(g * factor)
        norms.append(taken.grad_norms[0])
    assert norms[0].shape == (steps,) and norms[0].dtype == torch.float32
    torch.testing.assert_close(norms[1] / scale, norms[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_norms_of_states_whose_squares_leave_float32(op: str, backend: str | None, scale: float) -> None:
    x, w = torch.randn(5, 3, 4), torch.linalg.qr(torch.randn(4, 4))[0]
    norms = []
    for factor in (1.0, scale):
        with diagnostics.tap() as taken:
            getattr(functional, op)(
                x * factor,
                *((w,) if op == "dense_scan" else (w, torch.ones(4), w)),
                activation="identity",
                backend=backend,
            )
        norms.append(taken.state_norms[0])
    torch.testing.assert_close(norms[1] / scale, norms[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_the_reference_takes_norms_beyond_the_range_of_squares(scale: float) -> None:
    g = torch.randn(5, 3, 4)
    torch.testing.assert_close(norm_over_batch(g * scale) / scale, norm_over_batch(g), rtol=1e-6, atol=0)


def test_without_a_tap_no_norm_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_taps.torch.linalg, "vector_norm", lambda *args, **kwargs: pytest.fail("a norm was taken"))
    for op in OPS:
        run_scan(op)


# -------------------------------------------------------------------------------------------------------------- spectra


def turning(angles: list[float], moduli: list[float]) -> Tensor:
    """A matrix [2 K, 2 K] with the eigenvalues modulus * exp(± i angle), in a skewed basis."""
    blocks = [
        m * torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64)
        for a, m in zip(angles, moduli, strict=True)
    ]
    size = 2 * len(angles)
    basis = torch.eye(size, dtype=torch.float64) + 0.3 * torch.randn(size, size, dtype=torch.float64)
    return basis @ torch.block_diag(*blocks) @ torch.linalg.inv(basis)


def test_eigenvalues_of_a_known_matrix() -> None:
    w = turning([0.3, 1.2, 2.5], [0.9, 1.1, 0.4])
    assert diagnostics.spectral_radius(w) == pytest.approx(1.1)
    expected = torch.tensor([-2.5, -1.2, -0.3, 0.3, 1.2, 2.5], dtype=torch.float64)
    torch.testing.assert_close(diagnostics.eigenvalue_angles(w), expected)
    assert torch.linalg.svdvals(w)[0] > 1.1 + 1e-3, "not a normal matrix: its norm would be no substitute"
    counts = diagnostics.angle_histogram(diagnostics.eigenvalue_angles(w))
    where = {index for index, count in enumerate(counts) if count}
    assert sum(counts) == 6 and where == {math.floor((a + math.pi) / (2 * math.pi / 36)) for a in expected.tolist()}


def test_the_parts_of_the_angle_histogram_are_half_open_and_pi_is_minus_pi() -> None:
    angles = torch.tensor([-math.pi, math.pi, 0.0, math.pi / 2 - 1e-9], dtype=torch.float64)
    assert diagnostics.angle_histogram(angles, bins=4) == [2, 0, 2, 0]
    assert diagnostics.angle_histogram(diagnostics.eigenvalue_angles(-torch.eye(5)))[0] == 5
    assert all(math.isnan(count) for count in diagnostics.angle_histogram(torch.tensor([0.0, math.nan])))


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [
        (diagnostics.spectral_radius, [[1.0]], "w is list; accepted: a tensor of real numbers"),
        (diagnostics.eigenvalue_angles, torch.eye(2) * 1j, "w has dtype torch.complex64; accepted: real numbers"),
        (diagnostics.angle_histogram, torch.zeros(2, 3), r"angles has shape \[2, 3\]; accepted: \[N\], N at least 1"),
        (diagnostics.angle_histogram, None, "angles is NoneType; accepted: a tensor of real numbers"),
        (lambda value: diagnostics.angle_histogram(value, 0), torch.zeros(3), "bins is 0; accepted: an integer"),
        (diagnostics.summarize_spectrum, torch.zeros(0), r"singular_values has shape \[0\]; accepted: \[N\]"),
    ],
)
def test_numbers_of_another_kind_are_refused(function: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        function(value)


@pytest.mark.parametrize("function", [diagnostics.spectral_radius, diagnostics.eigenvalue_angles])
def test_matrices_that_have_no_eigenvalues(function: Any) -> None:
    for wrong in (torch.ones(3), torch.ones(2, 3), torch.ones(0, 0)):
        with pytest.raises(InputError, match=r"w has shape \[.*\]; accepted: a square matrix"):
            function(wrong)
    assert np.isnan(np.asarray(function(torch.full((3, 3), math.inf)))).all()


@pytest.mark.parametrize("kind", ["factorized", "low rank", "dense"])
def test_numbers_of_every_recurrence(kind: str) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}
    if kind == "dense":
        module: Any = RNN(3, 6, **options)
    else:
        module = FactorizedRNN(3, 6, margin=0.4, rank=4 if kind == "low rank" else None, **options)
        for s in (p for name, p in module.named_parameters() if name.startswith("spectrum")):
            nn.init.normal_(s)
    found = diagnostics.diagnose_recurrence(module)
    for suffix, layer, reverse in (
        ("", 0, False),
        ("_l0_reverse", 0, True),
        ("_l1", 1, False),
        ("_l1_reverse", 1, True),
    ):
        w = module.recurrent_matrix(layer, reverse).detach()
        values = torch.linalg.svdvals(w)[: 4 if kind == "low rank" else 6]
        expected = {"mean": values.mean(), "std": values.std(correction=0), "min": values[-1], "max": values[0]}
        assert found[f"spectrum{suffix}"] == pytest.approx({name: float(x) for name, x in expected.items()})
        assert found[f"spectral_radius{suffix}"] == pytest.approx(float(torch.linalg.eigvals(w).abs().max()))
        moduli = torch.linalg.eigvals(w).abs()
        assert found[f"eigenvalue_moduli{suffix}"]["min"] == pytest.approx(float(moduli.min()), abs=1e-5)
        assert found[f"eigenvalue_moduli{suffix}"]["mean"] == pytest.approx(float(moduli.mean()))
        assert sum(found[f"eigenvalue_angles{suffix}"]) == 6
    assert ("orthogonality_error" in found) == (kind != "dense")
    assert len(found) == 16 + (kind != "dense") and json.loads(json.dumps(found)) == found
    fewer = diagnostics.diagnose_recurrence(module, eigenvalues=False)
    assert fewer == {name: x for name, x in found.items() if name.startswith(("spectrum", "orthogonality"))}


def test_an_orthogonal_recurrence_has_its_eigenvalues_on_the_circle() -> None:
    found = diagnostics.diagnose_recurrence(FactorizedRNN(2, 16, margin=0.0))
    assert found["spectral_radius"] == pytest.approx(1.0, abs=1e-5) and found["orthogonality_error"] < 1e-5
    assert found["spectrum"] == pytest.approx({"mean": 1.0, "std": 0.0, "min": 1.0, "max": 1.0})


@pytest.mark.parametrize("kind", [RNN, FactorizedRNN])
def test_a_recurrence_that_diverged_is_told_and_raises_nothing(kind: type) -> None:
    module = kind(2, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    found = diagnostics.diagnose_recurrence(module)
    assert math.isnan(found["spectral_radius"]) and math.isnan(found["spectrum"]["mean"])
    assert len(found["eigenvalue_angles"]) == 36


def test_what_is_no_recurrence_is_refused() -> None:
    with pytest.raises(
        InputError, match="module is a Linear without num_layers, .*; accepted: a recurrence of orthokern"
    ):
        diagnostics.diagnose_recurrence(nn.Linear(2, 2))


# ----------------------------------------------------------------------------------------------------------------- runs


def record(iteration: int, *, steps: int, fade: float, spread: float) -> dict[str, Any]:
    """What a harness writes at a diagnosed iteration: a gradient that fades by exp(-fade) over the whole sequence, and
    states that grow as much."""
    at = np.asarray(diagnostics.profile_steps(steps)) / (steps - 1)
    return {
        "iteration": iteration,
        "loss": 1.0 / iteration,
        "grad_norm": 2.0,
        "accuracy": 0.5,
        "spectrum": {"mean": 1.0, "std": spread / 2, "min": 1.0 - spread, "max": 1.0 + spread},
        "orthogonality_error": 1e-6,
        "spectral_radius": 1.0 + spread,
        "eigenvalue_angles": [iteration] + [1] * 35,
        "grad_norm_through_time": (3.0 * np.exp(-fade * (1 - at))).tolist(),
        "state_norm_through_time": np.exp(fade * at).tolist(),
        "seconds": 0.5 * iteration,
        "ms_per_iteration": 500.0,
        "us_per_step": 1e3 * 500.0 / steps,
    }


def write_run(
    folder: Path,
    records: list[dict[str, Any]],
    task: str = "copy",
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    folder.mkdir(parents=True)
    content = {"task": task, "settings": {"seed": 0, "T": 200, **settings}, **(config or {})}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def a_run(folder: Path, steps: int = 220, count: int = 5, fade: float = 1.0, **settings: Any) -> Path:
    records = [record(i, steps=steps, fade=fade, spread=0.01 * i) for i in range(1, count + 1)]
    records[-1] |= {"held_out_accuracy": 0.9, "held_out_loss": 0.3, "held_out_sequences": 200}
    return write_run(folder, records, **settings)


def test_a_run_that_training_wrote_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "copy", {"T": 3, "margin": None, "seed": 1})
    log = metrics.MetricsLog(folder.metrics, lock=folder.lock())
    log.append({"iteration": 1, "loss": math.nan})
    log.append({"iteration": 2, "loss": 0.5, "spectrum": {"mean": 1.0}})
    log.close()
    run = load_run(folder.path)
    assert (run.task, run.settings, run.name) == ("copy", {"T": 3, "margin": None, "seed": 1}, "run")
    assert run.config == folder.config and run.records == metrics.read_metrics(folder.metrics)
    assert run.quantities == ["loss", "spectrum.mean"]
    iterations, losses = run.series("loss")
    assert iterations.tolist() == [2.0] and losses.tolist() == [0.5], "a loss that is no number is no point of a curve"
    assert run.series("spectrum.mean")[1].tolist() == [1.0] and run.series("accuracy")[0].shape == (0,)
    assert metrics.read_metrics is runs.read_metrics


def test_the_result_of_a_run_that_ended_is_in_the_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    assert load_run(folder).result == {} and "test acc" not in comparison.table([load_run(folder)])
    (folder / "result.json").write_text('{"iteration": 5, "test": {"accuracy": 0.914, "loss": 0.25, "bpc": null}}')
    run = load_run(folder)
    assert run.tested == {"accuracy": 0.914, "loss": 0.25}
    header, _, row = comparison.table([run]).splitlines()
    cells = dict(zip([c.strip() for c in header.split("|")], [c.strip() for c in row.split("|")], strict=True))
    assert cells["test accuracy (%)"] == "91.40" and cells["test loss"] == "0.25"


def test_a_run_that_is_going_on_is_read(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", count=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')
    assert [r["iteration"] for r in load_run(folder).records] == [1, 2, 3]
    (folder / "metrics.jsonl").unlink()
    assert load_run(folder).records == []


def test_of_an_iteration_that_was_done_twice_the_later_record_counts(tmp_path: Path) -> None:
    losses = [(1, 1.0), (2, 0.9), (3, 0.8), (2, 0.7), (3, 0.6), (4, 0.5)]
    folder = write_run(tmp_path / "run", [{"iteration": i, "loss": loss} for i, loss in losses])
    assert [(r["iteration"], r["loss"]) for r in load_run(folder).records] == [(1, 1.0), (2, 0.7), (3, 0.6), (4, 0.5)]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: run.rename(run.with_name("gone")), "no such run folder: .*run"),
        (lambda run: (run / "config.json").unlink(), "run is not a run folder: no config.json there"),
        (lambda run: (run / "config.json").write_text('{"task": "co'), "config.json is damaged: not JSON"),
        (lambda run: (run / "config.json").write_text('{"task": "copy"}'), "config.json is not the configuration of"),
        (lambda run: (run / "result.json").write_text("{"), "result.json is damaged: not JSON"),
        (lambda run: (run / "config.json").write_bytes(b"\xff\x00"), "config.json is damaged: not JSON"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"iteration": 1}\nnoise\n{"iteration": 2}\n'),
            "line 2 is not",
        ),
        (lambda run: (run / "metrics.jsonl").write_text('{"iteration": 1}\n[1]\n'), "line 2 is not a JSON object"),
        (lambda run: (run / "metrics.jsonl").write_text('{"loss": 1}\n'), "line 1 has no iteration"),
        (
            lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
            "metrics.jsonl cannot be read",
        ),
    ],
)
def test_a_damaged_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Any, message: str
) -> None:
    folder = a_run(tmp_path / "run")
    break_it(folder)
    with pytest.raises(InputError, match=message) as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
    assert command.main([str(folder), "--figure", "none"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_a_folder_of_runs_is_told_from_a_run(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    with pytest.raises(InputError, match=r"no config.json there; it holds 1 run folder\(s\): give those"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="is a file; accepted: the folder of a run"):
        load_run(tmp_path / "a" / "config.json")


def test_time_steps_are_found_where_a_run_tells_them(tmp_path: Path) -> None:
    assert load_run(a_run(tmp_path / "by times", steps=10020)).time_steps == 10020
    assert load_run(write_run(tmp_path / "none", [{"iteration": 1}])).time_steps is None
    assert load_run(write_run(tmp_path / "config", [], config={"time_steps": 7})).time_steps == 7
    assert load_run(write_run(tmp_path / "negative", [], config={"time_steps": -7})).time_steps is None
    told = load_run(write_run(tmp_path / "records", [{"iteration": 1, "time_steps": 5}, {"iteration": 2}]))
    assert told.time_steps == 5
    twice = record(1, steps=784, fade=0, spread=0.1)
    assert load_run(write_run(tmp_path / "accumulated", [twice], accumulate=4)).time_steps == 196
    varying = [{"iteration": i, "time_steps": i, "state_norm_through_time": [1.0] * i} for i in (1, 2)]
    run = load_run(write_run(tmp_path / "varying", varying))
    assert run.time_steps is None and run.profile_length("state_norm_through_time") is None


# ----------------------------------------------------------------------------------------------------------- comparison


def made(name: str, task: str = "copy", records: list[dict[str, Any]] | None = None, **settings: Any) -> RunRecord:
    return RunRecord(Path("runs") / name, {}, settings, task, records or [])


def test_labels_tell_the_settings_that_differ_and_no_more() -> None:
    grid = [made(f"{T}-{m}", seed=0, T=T, margin=m, lr=0.1 / T) for T in (200, 500) for m in (0.1, None)]
    assert comparison.differing_settings(grid) == ["T", "margin", "lr"]
    assert comparison.labels(grid) == [
        "T 200, margin 0.1",
        "T 200, margin none",
        "T 500, margin 0.1",
        "T 500, margin none",
    ], "the rate follows from T"
    assert comparison.labels(grid[:1]) == ["200-0.1"]
    assert comparison.labels(grid, ["lr"]) == ["lr 0.0005"] * 2 + ["lr 0.0002"] * 2
    seeds = [made("a", seed=0, lr=1.0), made("b", seed=1, lr=1.0), made("c", seed=1, lr=1.0)]
    assert comparison.labels(seeds) == ["seed 0", "seed 1 b", "seed 1 c"]
    tasks = [made("a", "copy", T=1), made("b", "adding", hidden=2)]
    assert comparison.labels(tasks) == ["copy", "adding"]
    assert comparison.setting_text(tasks[1], "T") == "–"
    with pytest.raises(InputError, match="unknown legend 'margn': did you mean 'margin'"):
        comparison.labels(grid, ["margn"])


def test_the_table_has_the_best_held_out_numbers_and_the_last_spectrum(tmp_path: Path) -> None:
    one = record(1, steps=3, fade=0, spread=0.1) | {"held_out_accuracy": 0.8, "held_out_bpc": 2.0}
    two = record(2, steps=3, fade=0, spread=0.2) | {"held_out_accuracy": 0.9, "held_out_bpc": 1.5}
    three = record(3, steps=3, fade=0, spread=0.3) | {"held_out_accuracy": 0.9, "held_out_bpc": 1.7}
    run = made("a", records=[one, two, three, {"iteration": 4, "loss": None}], margin=0.1, T=3)
    assert comparison.best_held_out(run) == {"held_out_accuracy": (0.9, 2), "held_out_bpc": (1.5, 2)}
    header, rule, first, second = comparison.table([run, made("b", margin=None, T=3)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, first, second)]
    by_name = {name: (a, b) for name, a, b in zip(*cells, strict=True)}
    assert by_name["run"] == ("runs/a", "runs/b") and by_name["margin"] == ("0.1", "none") and "T" not in by_name
    assert by_name["iterations"] == ("4", "0") and by_name["seconds"] == ("1.5", "–")
    assert by_name["best held-out accuracy (%), at"] == ("90.00, 2", "–")
    assert by_name["best held-out bpc, at"] == ("1.5, 2", "–")
    assert by_name["s max"] == ("1.3", "–") and by_name["spectral radius"] == ("1.3", "–")
    assert {len(line) for line in (header, rule, first, second)} == {len(header)}, "aligned"


# ---------------------------------------------------------------------------------------------------- numbers to draw


def test_a_thinned_curve_is_means_over_stretches() -> None:
    at, values = np.arange(1.0, 10.0), np.arange(9.0) ** 2
    assert plots.thin_curve(at, values, 9) == (at, values)
    thin_at, thin_values = plots.thin_curve(at, values, 3)
    assert thin_at.tolist() == [2.0, 5.0, 8.0]
    assert thin_values.tolist() == [values[:3].mean(), values[3:6].mean(), values[6:].mean()]
    thin_at, thin_values = plots.thin_curve(np.arange(1000.0), np.full(1000, 0.7), 7)
    assert len(thin_at) == 7 and thin_values == pytest.approx(np.full(7, 0.7))


def test_profiles_of_known_and_of_varying_lengths() -> None:
    same = [{"iteration": i, "p": [float(i)] * 64} for i in range(1, 2001)] + [{"iteration": 2001, "p": [1.0] * 5}]
    found = plots.profiles(same, "p", 500)
    assert found is not None and found.values.shape == (600, 64) and found.in_steps
    assert found.iterations[[0, -1]].tolist() == [1, 2000] and found.steps[[0, -1]].tolist() == [0, 499]
    strange = [{"iteration": 1, "p": [1.0, "b"]}, {"iteration": 2, "p": {}}, {"iteration": 3, "p": [1.0, None]}]
    found = plots.profiles(strange, "p", None)
    assert found is not None and found.iterations.tolist() == [3]  # what is no profile is passed over
    varying = [{"iteration": n, "p": np.linspace(0, 1, n).tolist()} for n in (5, 64)]
    found = plots.profiles(varying, "p", None)
    assert found is not None and not found.in_steps
    assert found.values == pytest.approx(np.stack([np.linspace(0, 1, 64)] * 2))
    assert plots.profiles([{"iteration": 1}], "p", None) is None


# ------------------------------------------------------------------------------------------------------------- pictures


def check_png(path: Path) -> None:
    """A picture that is there, whole, and not empty paper."""
    image = imread(path)
    assert image.ndim == 3 and min(image.shape[:2]) > 100 and image.std() > 0.01
    assert not path.with_name(path.name + ".tmp").exists()


def shown(axis: Any) -> dict[str, list[Any]]:
    """The legend's texts with what their lines show."""
    return {line.get_label(): line.get_ydata() for line in axis.get_lines()}


def test_every_plot_of_one_run(tmp_path: Path) -> None:
    run = load_run(a_run(tmp_path / "run", margin=0.1))
    records, out = run.records, tmp_path
    for path in (
        plots.plot_learning(records, out / "learning.png", baseline=0.5, goal=0.9, title="title"),
        plots.plot_spectrum(records, out / "spectrum.png", margin=0.1),
        plots.plot_gradients(records, out / "gradients.png", length=220),
        plots.plot_states(records, out / "states.png", length=220),
        plots.plot_angles(records, out / "angles.png"),
    ):
        assert path is not None
        check_png(path)


def test_plots_without_anything_to_draw_write_nothing(tmp_path: Path) -> None:
    bare: list[dict[str, Any]] = [{"iteration": 1, "loss": None, "spectrum": None, "eigenvalue_angles": [None] * 36}]
    bare[0] |= {"grad_norm_through_time": [0.0] * 64, "state_norm_through_time": [None] * 64}
    path = tmp_path / "x.png"
    for records in ([], bare):
        assert plots.plot_learning(records, path) is None and plots.plot_spectrum(records, path) is None
        assert plots.plot_gradients(records, path, length=100) is None
        assert plots.plot_states(records, path, length=100) is None and plots.plot_angles(records, path) is None
        run = made("a", records=records)
        assert plots.compare_curves([run], "loss") is None
        for compare in (plots.compare_gradients, plots.compare_spectra, plots.compare_states, plots.compare_angles):
            assert compare([run]) is None
    assert not path.exists()


def test_a_run_of_one_point_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line needs two points to be drawn; one gets a marker, in the picture that is written."""
    written: list[Any] = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *a, **k: (written.append(self), savefig(self, *a, **k))
    )
    for draw in (plots.plot_learning, plots.plot_spectrum):
        for count, marker in ((1, "o"), (2, "None")):
            records = [record(i, steps=9, fade=1.0, spread=0.01) for i in range(1, count + 1)]
            assert draw(records, tmp_path / "picture.png") is not None
            lines = [line for axis in written[-1].axes for line in axis.get_lines() if line.get_linestyle() == "-"]
            assert lines and {line.get_marker() for line in lines} == {marker}


def test_curves_of_several_runs_by_panel() -> None:
    grid = [
        made(f"{T}-{m}", T=T, margin=m, records=[{"iteration": i, "accuracy": i / T} for i in range(1, 101)])
        for T in (500, 200)
        for m in (None, 0.1, 0.01)
    ]
    figure = plots.compare_curves(grid, "accuracy", panel="T")
    assert figure is not None
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("T 200", "T 500"), "numbers in order"
    assert set(shown(left)) == set(shown(right)) == {"margin none", "margin 0.1", "margin 0.01"}
    assert shown(left)["margin 0.1"][-1] == pytest.approx(50.0), "in percent"
    colours = [{line.get_label(): line.get_color() for line in axis.get_lines()} for axis in (left, right)]
    assert colours[0] == colours[1] and len(set(colours[0].values())) == 3, "a colour means the same everywhere"
    assert left.get_ylabel() == "accuracy (%)" and left.get_xlabel() == "iteration"

    figure = plots.compare_curves(grid, "accuracy")
    assert figure is not None and len(figure.axes) == 1 and len(shown(figure.axes[0])) == 6

    grid = [made(f"{T}-{s}-{m}", T=T, seed=s, margin=m, records=grid[0].records)
            for T, s, m in ((200, 0, 0.1), (200, 0, 1.0), (500, 0, 0.1), (500, 1, 0.1))]  # fmt: skip
    figure = plots.compare_curves(grid, "accuracy", panel="T", legend=["seed", "margin"])
    assert figure is not None
    left, right = figure.axes
    assert list(shown(left)) == ["margin 0.1", "margin 1"], "all have seed 0"
    assert list(shown(right)) == ["seed 0", "seed 1"], "all have margin 0.1"
    assert left.get_lines()[0].get_color() == right.get_lines()[0].get_color() != left.get_lines()[1].get_color()


def test_runs_with_labels_of_their_own() -> None:
    """In place of settings, in one legend below the panels; runs with one label are one entry of one colour."""
    grid = [
        replace(made(f"{T}-{seed}-{name}", T=T, seed=seed, margin=0.1, records=[
            {"iteration": i, "accuracy": i / 100} for i in range(1, count + 1)
        ]), label=name)
        for T, count in ((200, 40), (500, 80)) for seed in (0, 1) for name in ("zero", "learned")
    ]  # fmt: skip
    figure = plots.compare_curves(grid, "accuracy", panel="T", legend_title="weights of the blank")
    assert figure is not None
    left, right = figure.axes
    assert left.get_legend() is None and right.get_legend() is None
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "weights of the blank"
    assert [text.get_text() for text in legend.get_texts()] == ["zero", "learned"]
    for axis in (left, right):
        colours = [line.get_color() for line in axis.get_lines()]
        assert len(colours) == 4 and len(set(colours[::2])) == len(set(colours[1::2])) == 1 != len(set(colours))
    assert {line.get_marker() for line in left.get_lines()} == {"o"}
    assert {line.get_marker() for line in right.get_lines()} == {"None"}


def test_all_curves_of_a_panel_have_markers_or_none() -> None:
    runs = [
        made(str(count), seed=count, records=[{"iteration": i, "accuracy": i / 100} for i in range(1, count + 1)])
        for count in (40, 80)
    ]
    figure = plots.compare_curves(runs, "accuracy")
    assert figure is not None and {line.get_marker() for line in figure.axes[0].get_lines()} == {"None"}


def test_axis_of_percentages(tmp_path: Path) -> None:
    """It shows the values from end to end, and no ticks beyond 100."""
    records = [{"iteration": i, "loss": 1.0, "accuracy": 0.82 + 0.001 * i} for i in range(1, 101)]
    figure = plots.compare_curves([made("a", records=records)], "accuracy")
    assert figure is not None and figure.axes[0].get_ylim() == pytest.approx((81.1, 93.0), abs=0.2)
    for first, low in ((0.1, -3.0), (0.9, 89.0), (1.0, 97.5)):
        last = [{"iteration": 1, "accuracy": first}, {"iteration": 2, "accuracy": 1.0}]
        figure = plots.compare_curves([made(f"from {first}", records=last)], "accuracy")
        assert figure is not None
        assert figure.axes[0].get_ylim()[0] == pytest.approx(low) and 100 < figure.axes[0].get_ylim()[1] <= 103


def test_a_diverged_run_leaves_room_for_the_others() -> None:
    def run(name: str, *values: float) -> RunRecord:
        return made(name, records=[{"iteration": i, "loss": value} for i, value in enumerate(values, 1)])

    figure = plots.compare_curves([run("a", 9.0, 5.0, 4.0), run("b", 8.0, 6.0), run("c", 7.0, 1e9, 1e12)], "loss")
    assert figure is not None
    (axis,) = figure.axes
    assert axis.get_ylim()[1] == pytest.approx(80.0), "ten times the first values"
    (beyond,) = (line for line in axis.get_lines() if line.get_marker() == "^")
    assert list(beyond.get_xdata()) == [2, 3] and set(beyond.get_ydata()) == {80.0}
    figure = plots.compare_curves([run("a", 9.0, 5e-7), run("b", 8.0, 800.0)], "loss")
    assert figure is not None and figure.axes[0].get_ylim()[1] > 800, "all are shown"


def test_only_a_loss_diverges() -> None:
    """Other numbers may grow a thousandfold; a baseline has the unit of its quantity."""
    records = [{"iteration": i, "seconds": 0.1 * i**2, "accuracy": 0.5} for i in range(1, 201)]
    figure = plots.compare_curves([made("a", records=records)], "seconds")
    assert figure is not None and not [line for line in figure.axes[0].get_lines() if line.get_marker() == "^"]
    figure = plots.compare_curves([made("a", records=records)], "accuracy", baseline=0.1)
    assert figure is not None
    (axis,) = figure.axes
    assert shown(axis)["baseline 0.1"][0] == pytest.approx(10.0) and axis.get_ylim()[0] < 10


def test_bounds_are_those_of_a_factorized_network() -> None:
    records = [{"iteration": i, "spectrum": {"mean": 1.0, "std": 0.1, "min": 0.5, "max": 1.6}} for i in (1, 2)]
    for model, bounded in (("factorized", True), ("rnn", False)):
        run = RunRecord(Path(model), {}, {"model": model, "margin": 0.1}, "copy", records)
        figure = plots.compare_spectra([run])
        assert figure is not None
        assert any("bounds" in str(line.get_label()) for line in figure.axes[0].get_lines()) == bounded


def test_curves_by_epoch_with_their_baseline() -> None:
    records = [{"iteration": i, "loss": 0.2 - 1e-4 * i} for i in range(1, 1001)]
    told = [
        RunRecord(Path(name), {"baseline": 1 / 6}, {"margin": m, "iterations_per_epoch": 100}, "adding", records)
        for name, m in (("a", 1.0), ("b", 10.0))
    ]
    figure = plots.compare_curves(told, "loss")
    assert figure is not None
    (axis,) = figure.axes
    assert axis.get_xlabel() == "epoch" and axis.get_lines()[0].get_xdata()[-1] == pytest.approx(10.0)
    assert shown(axis)["baseline 0.1667"][0] == pytest.approx(1 / 6)
    counted = [r | {"epoch": round(r["iteration"] / 817, 4)} for r in records]
    assert made("c", records=counted).iterations_per_epoch == 817, "from records that count both"
    figure = plots.compare_curves(told, "loss", x="iteration", baseline=0.3)
    assert figure is not None and "baseline 0.3" in shown(figure.axes[0])
    with pytest.raises(InputError, match="neither records nor settings tell"):
        plots.compare_curves([*told, made("c", records=records)], "loss", x="epoch")
    with pytest.raises(InputError, match="unknown panel 'margine': did you mean 'margin'"):
        plots.compare_curves(told, "loss", panel="margine")


def test_many_runs_are_told_apart_by_colour_and_stroke() -> None:
    many = [made(str(i), lr=float(i), records=[{"iteration": 1, "loss": 1.0 + i}]) for i in range(20)]
    figure = plots.compare_curves(many, "loss")
    assert figure is not None
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20
    assert all(line.get_marker() == "o" for line in lines), "a single point would be invisible as a line"


def test_long_runs_are_thinned_before_they_are_drawn(tmp_path: Path) -> None:
    base = record(1, steps=220, fade=2.0, spread=0.1)
    spike = {"mean": 1.0, "std": 0.0, "min": 0.5, "max": 3.0}
    records = [
        base | {"iteration": i} if i % 50 == 1 else {"iteration": i, "loss": 1.0, "accuracy": 0.1}
        for i in range(1, 200_001)
    ]
    records[50 * 1234]["spectrum"] = spike
    run = made("long", records=records, margin=0.1)
    figure = plots.compare_curves([run, made("other", records=records, margin=0.2)], "loss")
    assert figure is not None and [len(line.get_xdata()) for line in figure.axes[0].get_lines()] == [1000, 1000]
    figure = plots.compare_spectra([run])
    assert figure is not None
    lines = shown(figure.axes[0])
    assert len(lines["maximum"]) == 1000 and max(lines["maximum"]) == 3.0 and min(lines["minimum"]) == 0.5
    figure = plots.compare_gradients([run])
    assert figure is not None and figure.axes[0].collections[0].get_array().size == 600 * 64
    check_png(plots.save(figure, tmp_path / "x.png"))


def heat_map(axis: Any) -> np.ndarray:
    """[S, P]"""
    mesh = axis.collections[0]
    return np.asarray(mesh.get_array()).reshape(len(mesh.get_coordinates()) - 1, -1)


def test_gradients_of_several_runs(tmp_path: Path) -> None:
    steady = load_run(a_run(tmp_path / "a", fade=0.0, margin=0.0))
    fading = load_run(a_run(tmp_path / "b", fade=math.log(1e3), margin=0.1))
    figure = plots.compare_gradients([steady, fading])
    assert figure is not None
    first, second, bar = figure.axes
    assert [axis.get_title() for axis in (first, second)] == ["margin 0", "margin 0.1"]
    assert heat_map(first).shape == (64, 5) and heat_map(first) == pytest.approx(0.0)
    assert heat_map(second)[0] == pytest.approx(-3.0) and heat_map(second)[-1] == pytest.approx(0.0)
    assert first.collections[0].get_clim() == second.collections[0].get_clim() == (-3.0, 0.0), "one scale for all"
    assert first.get_ylim() == pytest.approx((-1.5, 220.5), abs=2) and first.get_ylabel() == "time step t"
    assert "last step" not in bar.get_ylabel()


def test_the_last_steps_gradient_is_taken_where_all_runs_have_it(tmp_path: Path) -> None:
    runs_ = []
    for name, margin in (("a", 0.0), ("b", 0.1)):
        run = load_run(a_run(tmp_path / name, fade=0.0, margin=margin))
        for r in run.records:
            r["last_grad_norm_through_time"] = np.logspace(-2, 0, 64).tolist()
        runs_.append(run)
    figure = plots.compare_gradients(runs_)
    assert figure is not None and heat_map(figure.axes[0])[0] == pytest.approx(-2.0)
    assert "last step" in figure.axes[-1].get_ylabel()
    for r in runs_[1].records:
        del r["last_grad_norm_through_time"]
    figure = plots.compare_gradients(runs_)
    assert figure is not None and heat_map(figure.axes[0]) == pytest.approx(0.0), "never two quantities in one picture"


def test_states_angles_and_spectra_of_several_runs(tmp_path: Path) -> None:
    both = [load_run(a_run(tmp_path / str(m), fade=math.log(10), margin=m)) for m in (0.02, None)]
    figure = plots.compare_states(both)
    assert figure is not None and heat_map(figure.axes[0])[[0, -1], 0] == pytest.approx([0.0, 1.0])

    figure = plots.compare_angles(both)
    assert figure is not None
    shares = heat_map(figure.axes[0])
    assert shares.shape == (36, 5) and shares.sum(axis=0) == pytest.approx(100.0)
    assert shares[0] == pytest.approx([100 * i / (i + 35) for i in range(1, 6)])
    assert figure.axes[0].get_ylim() == pytest.approx((-math.pi, math.pi))

    figure = plots.compare_spectra(both)
    assert figure is not None
    bounded, free = figure.axes
    assert shown(free)["maximum"] == pytest.approx([1.01, 1.02, 1.03, 1.04, 1.05])
    assert sorted(line.get_ydata()[0] for line in bounded.get_lines() if line.get_linestyle() == "--") == [0.98, 1.02]
    assert not [line for line in free.get_lines() if line.get_linestyle() == "--"]


# --------------------------------------------------------------------------------------------------------- command line


def test_a_run_is_redrawn_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run", margin=0.1)
    assert command.main([str(folder)]) == 0
    names = ["learning", "gradients", "spectrum", "states", "angles"]
    for name in names:
        check_png(folder / f"{name}.png")
    out, err = capsys.readouterr()
    assert out.startswith("| run ") and not err
    assert [line.rsplit("/", 1)[1] for line in out.splitlines() if line.startswith("drawn: ")] == [
        f"{n}.png" for n in names
    ]


@pytest.mark.parametrize("options", [["--model", "factorized"], ["--model", "nnrnn"]])
def test_a_run_is_redrawn_as_training_drew_it(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "run"
    small = "--T 5 --hidden 4 --batch 2 --iterations 3 --diagnose-every 1 --eval-sequences 2 --threads 1".split()
    assert copy.main([*small, *options, "--out", str(folder)]) == 0
    pictures = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert ("moduli.png" in pictures) == ("nnrnn" in options)
    assert command.main([str(folder), "--out", str(tmp_path / "again")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == pictures


def test_moduli_of_several_runs_and_layers_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moduli = {"mean": 1.0, "std": 0.1, "min": 0.9, "max": 1.2}
    layers = {"orthogonality_by_layer": [1.0, 0.5], "grad_norm_by_layer": [0.1, 0.2]}
    records = [{"iteration": i, "loss": 1.0, "eigenvalue_moduli": moduli, **layers} for i in (1, 2)]
    folders = [str(write_run(tmp_path / name, records, model="nnrnn")) for name in "ab"]
    assert command.main([*folders, "--out", str(tmp_path / "both")]) == 0
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"curves-loss.png", "moduli.png"}
    figure = plots.compare_moduli([load_run(folder) for folder in folders])
    assert figure is not None and [axis.get_ylabel() for axis in figure.axes] == ["|eigenvalue| (no unit)"] * 2
    assert shown(figure.axes[0])["maximum"].tolist() == [1.2, 1.2]
    capsys.readouterr()
    assert command.main([*folders, "--figure", "layers"]) == 2
    assert "--figure layers: of one run" in capsys.readouterr().err
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


def test_invalid_settings_of_matplotlib(tmp_path: Path) -> None:
    """A table can still be printed; a picture is refused with one line."""
    words = [sys.executable, "-m", "orthokern.diagnostics", str(a_run(tmp_path / "run"))]
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    done = subprocess.run([*words, "--figure", "none"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "| copy |" in done.stdout
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: matplotlib cannot be used: ") and "'nonsense'" in done.stderr
    assert not list(tmp_path.glob("**/*.png"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figur", "all"], "unknown option --figur: did you mean --figure"),
        (["--figure", "gradient"], "unknown figure 'gradient': did you mean 'gradients'"),
        (["--figure", "curves", "--quantity", "acuracy"], "unknown --quantity 'acuracy': did you mean 'accuracy'"),
        (["--panel", "margn"], "unknown --panel 'margn': did you mean 'margin'"),
        (["--legend", "margin,sed"], "unknown --legend 'sed': did you mean 'seed'"),
        (["--x", "epoch"], "neither records nor settings tell"),
        (["--figure", "layers"], "holds what the figure 'layers' shows"),
        (["--recurrence", "nonsense"], "unknown --recurrence 'nonsense': accepted: l0"),
        (["--figure", "spectrum", "--recurrence", "l1"], "unknown --recurrence 'l1': accepted: l0"),
        (["--out", "{run}/config.json"], "config.json cannot be written"),
        (["--figure", "none", "--table", "{run}/no/table.md"], "table.md cannot be written"),
        (["--figure", "none", "--out", "{run}"], "--out: for --figure curves or gradients or"),
        (["--figure", "spectrum", "--quantity", "loss"], "--quantity: for --figure curves or all; here --figure is"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    folder = a_run(tmp_path / "run", margin=0.1)
    assert command.main([str(folder), *(option.format(run=folder) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_the_layers_of_the_records() -> None:
    records = [
        {"iteration": 1, "spectrum": {}, "spectrum_l1": {}, "spectrum_drift": 1.0},
        {"iteration": 2, "eigenvalue_angles": [], "eigenvalue_angles_l0_reverse": [], "my_spectrum_l7": {}},
    ]
    assert recorded_layers([made("a", records=records)]) == ["l0", "l1", "l0_reverse"]
    assert recorded_layers([made("a", records=[])]) == []


def test_a_layer_without_any_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [{"iteration": 1, "loss": 1.0}])
    assert command.main([str(folder), "--recurrence", "l0"]) == 2
    assert (
        capsys.readouterr().err == f"error: --recurrence l0: no record of {folder} holds a spectrum, moduli or angles\n"
    )


def test_a_link_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert command.main([str(loop), "--figure", "none"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and str(loop) in err and err.count("\n") == 1


def test_a_run_without_records_has_a_table_and_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [])
    assert command.main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "| copy |" in out and "holds anything to draw (no record yet)" in err


def test_the_command_runs_and_teaches() -> None:
    done = subprocess.run([sys.executable, "-m", "orthokern.diagnostics", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    for word in ("RUN", "--figure", "--quantity", "--panel", "--table", "examples:", "Exit code"):
        assert word in done.stdout


def test_iterations_over_lengths() -> None:
    """A panel per problem with something solved, a line per network with something solved, a colour per network."""
    one = {"easy": {"plain": {20: 5, 10: 3}, "other": {}, "third": {10: 7}}, "hard": {"plain": {}, "third": {}}}
    figure = plots.iterations_over_lengths(one, "Lengths")
    assert figure is not None and figure.get_suptitle() == "Lengths: easy" and len(figure.axes) == 1
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines) == ["plain", "third"] and list(lines["plain"].get_xdata()) == [10, 20]
    assert list(lines["plain"].get_ydata()) == [3, 5]
    two = plots.iterations_over_lengths({**one, "hard": {"third": {10: 9}}}, "Lengths")
    assert two is not None and two.get_suptitle() == "Lengths"
    assert [axis.get_title() for axis in two.axes] == ["easy", "hard"]
    assert two.axes[1].get_lines()[0].get_color() == lines["third"].get_color()
    assert plots.iterations_over_lengths({"hard": {"plain": {}}}) is None
