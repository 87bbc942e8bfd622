"""The spectral radius of the Jacobian of a GRU at h = 0, against autograd, and its plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orthokern.diagnostics import RunRecord, diagnose_stability, load_run
from orthokern.diagnostics.plots import compare_stability, plot_learning, save
from orthokern.errors import InputError
from orthokern.nn import GRU


@pytest.mark.parametrize("kind", ["kanai", "torch", "torch.nn"])
def test_the_radius_is_that_of_the_map(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "torch.nn":
        module: torch.nn.Module = torch.nn.GRU(3, 6, 2, bias=False, dtype=torch.float64)
    else:
        module = GRU(3, 6, 2, bias=False, variant=kind, init="kanai", init_std=0.7, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)
    result = diagnose_stability(module)
    for layer, suffix in enumerate(("", "_l1")):
        weight = module.get_parameter(f"weight_hh_l{layer}")
        one = GRU(6, 6, bias=False, variant="torch" if kind == "torch.nn" else kind, dtype=torch.float64)
        with torch.no_grad():
            one.weight_hh_l0.copy_(weight)

        def step(h: torch.Tensor, one: GRU = one) -> torch.Tensor:
            return one(torch.zeros(1, 1, 6, dtype=torch.float64), h.view(1, 1, 6))[0].flatten()

        jacobian = torch.autograd.functional.jacobian(step, torch.zeros(6, dtype=torch.float64))
        assert result[f"jacobian_radius{suffix}"] == pytest.approx(torch.linalg.eigvals(jacobian).abs().max().item())
        largest = torch.linalg.matrix_norm(weight[12:], 2).item()
        assert result[f"recurrent_norm{suffix}"] == pytest.approx(largest)
    assert set(result) == {"jacobian_radius", "recurrent_norm", "jacobian_radius_l1", "recurrent_norm_l1"}


def test_what_is_no_gru() -> None:
    for module in (torch.nn.LSTM(3, 4), torch.nn.Linear(3, 4), torch.nn.RNN(3, 4), None):
        with pytest.raises(InputError, match=f"module must be a GRU .*, got {type(module).__name__}"):
            diagnose_stability(module)  # type: ignore[arg-type]
    broken = GRU(3, 4)
    with torch.no_grad():
        broken.weight_hh_l0.fill_(torch.inf)
    assert all(value != value for value in diagnose_stability(broken).values())


def test_plots(tmp_path: Path) -> None:
    records = [{"iteration": i, "grad_norm": 1.0 + (i == 7) * 50, "nll": 3.0 / i} for i in range(1, 21)]
    for record in records[::3]:
        record |= {"jacobian_radius": 0.9 + record["iteration"] / 100, "jacobian_radius_l1": 0.8, "held_out_loss": 2.0}
    runs = []
    for delta in (0.2, 1.1):
        folder = tmp_path / f"run{delta}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"task": "music", "settings": {"delta": delta}}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        runs.append(load_run(folder))
    assert plot_learning(RunRecord(tmp_path, {}, {}, "music", [])) is None
    figure = plot_learning(runs[0], title="a run")
    assert figure is not None and figure.axes[0].get_lines()[0].get_label() == "training batch"
    figure = compare_stability(runs, legend=("delta",), title="two runs")
    assert figure is not None and len(figure.axes) == 2
    norms = figure.axes[0].get_lines()[0].get_ydata()
    assert max(norms) == 1 and sorted(norms)[-2] == pytest.approx(1 / 51)  # an explosion stays one point
    save(figure, tmp_path / "both.png")
