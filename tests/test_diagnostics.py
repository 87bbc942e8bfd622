"""Diagnostics: norms through time compared with the states, spectra of matrices with known eigenvalues, reading and
tables of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import call_functional, refused, scan_problem
from runs import assert_refused
from torch import Tensor, nn

from orthokern import diagnostics
from orthokern.diagnostics import __main__ as command
from orthokern.diagnostics import comparison
from orthokern.diagnostics.runs import RunRecord, load_run
from orthokern.nn import GRU, RNN, FactorizedRNN
from orthokern.training import RunFolder, metrics


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------ states in a tap


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"checkpoint_every": 3}], ids=str)
@pytest.mark.parametrize("op", ["factored_scan", "dense_scan"])
def test_state_norms_are_those_of_the_states(op: str, options: dict[str, Any]) -> None:
    problem = scan_problem(op, B=3, T=7, N=4, inputs="features")
    inputs = list(problem.inputs())
    with diagnostics.tap() as recorded, diagnostics.tap() as also:
        hs = call_functional(problem, inputs, **options)
    expected = hs.detach().flatten(1).square().sum(1).sqrt()
    assert recorded.state_ops == [op] and recorded.grad_norms == []
    torch.testing.assert_close(recorded.state_norms[0], expected)
    assert not recorded.state_norms[0].requires_grad and torch.equal(recorded.state_norms[0], also.state_norms[0])
    call_functional(problem, inputs, **options)
    assert len(recorded.state_norms) == 1, "a closed tap collects nothing more"


def test_states_come_first_layer_first_and_gradients_last_layer_first() -> None:
    rnn = FactorizedRNN(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    with diagnostics.tap() as recorded:
        output, _ = rnn(torch.randn(6, 2, 3, dtype=torch.float64))
        output.sum().backward()
    assert (
        [norms.shape for norms in recorded.state_norms] == [(6,)] * 4 == [norms.shape for norms in recorded.grad_norms]
    )
    # the last layer's forward scan is its output's first half, its reverse scan the second half from the end
    ours = torch.stack([output[..., :4].flatten(1).norm(dim=1), output[..., 4:].flip(0).flatten(1).norm(dim=1)])
    torch.testing.assert_close(torch.stack(recorded.state_norms[2:]), ours.detach())
    assert recorded.grad_norms[0][-1] == pytest.approx(math.sqrt(8)), (
        "ones over [2, 4] reach the last layer's last step"
    )


@pytest.mark.parametrize("kind", [RNN, FactorizedRNN, GRU])
@pytest.mark.parametrize("steps", [2, 40])  # few steps have kernels of their own
def test_norms_of_gradients_whose_squares_leave_float32(kind: type, steps: int) -> None:
    scale = 2.0**-100
    module = kind(3, 17, **({} if kind is GRU else {"nonlinearity": "identity"}))
    x, g = torch.randn(steps, 3, 3), torch.randn(steps, 3, 17)
    norms = []
    for factor in (1.0, scale):
        with diagnostics.tap() as recorded:
            module(x)[0].backward(g * factor)
        norms.append(recorded.grad_norms[0])
    assert norms[0].shape == (steps,) and norms[0].dtype == torch.float32
    torch.testing.assert_close(norms[1] / scale, norms[0], rtol=1e-6, atol=0)


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
    assert diagnostics.angle_histogram(torch.tensor([-math.pi, math.pi, 0.0], dtype=torch.float64), bins=4) == [
        2,
        0,
        1,
        0,
    ]
    assert diagnostics.angle_histogram(torch.tensor([-math.pi, math.pi]), bins=4) == [2, 0, 0, 0]  # float32
    assert diagnostics.eigenvalue_angles(-torch.ones(3, 3).triu(1)).tolist() == [0.0, 0.0, 0.0]
    assert diagnostics.eigenvalue_angles(-torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    for value in (math.nan, math.inf):
        assert all(math.isnan(count) for count in diagnostics.angle_histogram(torch.tensor([0.0, value])))
    assert sum(counts) == 6 and where == {math.floor((a + math.pi) / (2 * math.pi / 36)) for a in expected.tolist()}


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [
        (diagnostics.spectral_radius, [[1.0]], "w must be a square matrix [N, N] of real numbers, got list"),
        (diagnostics.eigenvalue_angles, torch.eye(2) * 1j, "real numbers, got torch.complex64 [2, 2]"),
        (lambda value: diagnostics.angle_histogram(value, 0), torch.zeros(3), "bins must be an integer of at least 1"),
        (diagnostics.summarize_spectrum, torch.zeros(0), "got torch.float32 [0]"),
        (diagnostics.diagnose_recurrence, nn.Linear(2, 2), ", got Linear without num"),
    ],
)
def test_numbers_of_another_kind_are_refused(function: Callable[[Any], Any], value: Any, message: str) -> None:
    refused(lambda: function(value), message)


@pytest.mark.parametrize("kind", ["factorized", "low rank", "dense"])
def test_numbers_of_every_recurrence(kind: str) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}
    if kind == "dense":
        module: Any = RNN(3, 6, **options)
    else:
        module = FactorizedRNN(3, 6, margin=0.4, rank=4 if kind == "low rank" else None, **options)
        for s in (p for name, p in module.named_parameters() if name.startswith("spectrum")):
            nn.init.normal_(s)
    result = diagnostics.diagnose_recurrence(module)
    for suffix, layer, reverse in (
        ("", 0, False),
        ("_l0_reverse", 0, True),
        ("_l1", 1, False),
        ("_l1_reverse", 1, True),
    ):
        w = module.recurrent_matrix(layer, reverse).detach()
        count = 4 if kind == "low rank" else 6
        values = torch.linalg.svdvals(w)[:count]
        expected = {"mean": values.mean(), "std": values.std(correction=0), "min": values[-1], "max": values[0]}
        assert result[f"spectrum{suffix}"] == pytest.approx({name: float(x) for name, x in expected.items()})
        assert result[f"spectral_radius{suffix}"] == pytest.approx(float(torch.linalg.eigvals(w).abs().max()))
        moduli = torch.linalg.eigvals(w).abs().sort().values[-count:]
        assert result[f"eigenvalue_moduli{suffix}"]["min"] == pytest.approx(float(moduli.min()), abs=1e-5)
        assert result[f"eigenvalue_moduli{suffix}"]["mean"] == pytest.approx(float(moduli.mean()))
        assert sum(result[f"eigenvalue_angles{suffix}"]) == count
        if kind != "dense":
            states = torch.randn(7, 2, 6, dtype=torch.float64)
            latent = module.latent(states, layer, reverse) @ module.latent_matrix(layer, reverse).mT
            torch.testing.assert_close(module.latent(states @ w.mT, layer, reverse), latent)
    assert ("orthogonality_error" in result) == (kind != "dense")
    assert len(result) == 16 + (kind != "dense") and json.loads(json.dumps(result)) == result
    fewer = diagnostics.diagnose_recurrence(module, eigenvalues=False)
    assert fewer == {name: x for name, x in result.items() if name.startswith(("spectrum", "orthogonality"))}


@pytest.mark.parametrize("kind", [RNN, FactorizedRNN])
def test_a_recurrence_that_diverged_is_told_and_raises_nothing(kind: type) -> None:
    module = kind(2, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    assert diagnostics.eigenvalue_angles(torch.full((3, 3), math.inf)).isnan().all()
    result = diagnostics.diagnose_recurrence(module)
    assert math.isnan(result["spectral_radius"]) and math.isnan(result["spectrum"]["mean"])
    assert len(result["eigenvalue_angles"]) == 36


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
        "time_steps": steps,
    }


def write_run(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    folder.mkdir(parents=True)
    content = {"task": "copy", "settings": {"seed": 0, "T": 200, **settings}}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def a_run(folder: Path, fade: float = 1.0, **settings: Any) -> Path:
    records = [record(i, steps=220, fade=fade, spread=0.01 * i) for i in range(1, 6)]
    records[-1] |= {"held_out_accuracy": 0.9, "held_out_loss": 0.3, "held_out_sequences": 200}
    return write_run(folder, records, **settings)


def test_a_run_that_training_wrote_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "copy", {"T": 3, "margin": None, "seed": 1})
    log = folder.log
    assert log is not None
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


def test_the_result_of_a_run_that_ended_is_in_the_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    assert load_run(folder).result == {} and "test acc" not in comparison.table([load_run(folder)])
    (folder / "result.json").write_text('{"iteration": 5, "test": {"accuracy": 0.914, "loss": 0.25, "bpc": null}}')
    run = load_run(folder)
    assert run.tested == {"accuracy": 0.914, "loss": 0.25}
    header, _, row = comparison.table([run]).splitlines()
    cells = dict(zip([c.strip() for c in header.split("|")], [c.strip() for c in row.split("|")], strict=True))
    assert cells["test accuracy (%)"] == "91.40" and cells["test loss"] == "0.25"
    (folder / "result.json").write_text('{"iteration": "5", "time_steps": [5]}')
    assert load_run(folder).tested == {}


def test_a_run_in_progress_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"iteration": i, "loss": 1.0 / i} for i in (1, 2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "lo')  # a line that is being written
    assert [record["iteration"] for record in load_run(folder).records] == [1, 2]
    (folder / "metrics.jsonl").unlink()
    assert load_run(folder).records == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run.rename(run.with_name("gone")), run.write_text("")), "no such run folder: /"),
        (
            lambda run: ((run / "inner").mkdir(), (run / "config.json").rename(run / "inner" / "config.json")),
            "no config.json there; it holds 1 run folder(s): give those",
        ),
        (lambda run: (run / "config.json").unlink(), "run is not a run folder: no config.json there"),
        (lambda run: (run / "config.json").write_text('{"task": "co'), "config.json is damaged: not a JSON object"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"iteration": 1}\nnoise\n{"iteration": 2}\n'),
            "line 2 is not",
        ),
        (lambda run: (run / "metrics.jsonl").write_text('{"iteration": null}\n'), "line 1 is not"),
    ],
)
def test_a_damaged_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Any, message: str
) -> None:
    folder = a_run(tmp_path / "run")
    break_it(folder)
    told = refused(lambda: load_run(folder), message)
    assert_refused(capsys, f"error: {told}\n", command.main, folder, "--figure", "none")


# ----------------------------------------------------------------------------------------------------------- comparison


def new_run(name: str, task: str = "copy", records: list[dict[str, Any]] | None = None, **settings: Any) -> RunRecord:
    return RunRecord(Path("runs") / name, {}, settings, task, records or [])


def test_labels_tell_the_settings_that_differ_and_no_more() -> None:
    grid = [new_run(f"{T}-{m}", seed=0, lr=0.1 / T, T=T, margin=m) for T in (200, 500) for m in (0.1, None)]
    assert comparison.differing_settings(grid) == ["T", "lr", "margin"]
    assert comparison.labels(grid) == [
        "T 200, margin 0.1",
        "T 200, margin none",
        "T 500, margin 0.1",
        "T 500, margin none",
    ], "the rate follows from T"
    assert comparison.labels(grid[:1]) == ["200-0.1"]
    assert comparison.labels(grid, ["lr"]) == ["lr 0.0005"] * 2 + ["lr 0.0002"] * 2
    seeds = [new_run("a", seed=0, lr=1.0), new_run("b", seed=1, lr=1.0), new_run("c", seed=1, lr=1.0)]
    assert comparison.labels(seeds) == ["seed 0", "seed 1 b", "seed 1 c"]
    tasks = [new_run("a", "copy", T=1), new_run("b", "adding", hidden=2)]
    assert comparison.labels(tasks) == ["copy", "adding"]
    assert comparison.setting_text(tasks[1], "T") == "–"
    refused(lambda: comparison.labels(grid, ["margn"]), "unknown legend 'margn': did you mean 'margin'")


def test_the_table_has_the_best_held_out_numbers_and_the_last_spectrum(tmp_path: Path) -> None:
    one = record(1, steps=3, fade=0, spread=0.1) | {"held_out_accuracy": 0.8, "held_out_bpc": 2.0}
    two = record(2, steps=3, fade=0, spread=0.2) | {"held_out_accuracy": 0.9, "held_out_bpc": 1.5}
    three = record(3, steps=3, fade=0, spread=0.3) | {"held_out_accuracy": 0.9, "held_out_bpc": 1.7}
    run = new_run("a", records=[one, two, three, {"iteration": 4, "loss": None}], margin=0.1, T=3)
    assert comparison.best_held_out(run) == {"held_out_accuracy": (0.9, 2), "held_out_bpc": (1.5, 2)}
    header, rule, first, second = comparison.table([run, new_run("b", margin=None, T=3)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, first, second)]
    by_name = {name: (a, b) for name, a, b in zip(*cells, strict=True)}
    assert by_name["run"] == ("runs/a", "runs/b") and by_name["margin"] == ("0.1", "none") and "T" not in by_name
    assert by_name["iterations"] == ("4", "0") and by_name["seconds"] == ("1.5", "–")
    assert by_name["best held-out accuracy (%), at"] == ("90.00, 2", "–")
    assert by_name["best held-out bpc, at"] == ("1.5, 2", "–")
    assert by_name["s max"] == ("1.3", "–") and by_name["spectral radius"] == ("1.3", "–")
    assert {len(line) for line in (header, rule, first, second)} == {len(header)}, "aligned"
