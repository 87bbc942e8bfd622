"""The spectral radius of the Jacobian of a GRU at h = 0, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import prune

from orthokern.diagnostics import diagnose_stability
from orthokern.errors import InputError
from orthokern.nn import GRU


@pytest.mark.parametrize("kind", ["kanai", "torch", "torch.nn"])
def test_the_radius_is_that_of_the_map(kind: str) -> None:
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


@pytest.mark.parametrize("make", [GRU, torch.nn.GRU])
def test_pruned_and_parametrized_weights(make: type[torch.nn.Module]) -> None:
    """The weight in force, in the order of the layers."""
    gru = make(3, 8, num_layers=2)
    before = diagnose_stability(gru)
    prune.random_unstructured(gru, "weight_hh_l0", 0.9)
    after = diagnose_stability(gru)
    assert list(after) == list(before) and after["recurrent_norm_l1"] == before["recurrent_norm_l1"]
    expected = float(torch.linalg.matrix_norm(gru.weight_hh_l0[16:].detach(), 2))
    assert after["recurrent_norm"] == pytest.approx(expected, rel=1e-5)
    if make is torch.nn.GRU:
        torch.nn.utils.parametrizations.weight_norm(gru, "weight_hh_l1")
        assert diagnose_stability(gru) == pytest.approx(after, rel=1e-5)
