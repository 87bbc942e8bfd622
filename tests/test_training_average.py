"""The moving average of the parameters (--average): its weights, evaluations and best.pt with it, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import assert_resumes, build, trained
from torch import nn

from orthokern.training.averaging import Average


@pytest.fixture
def options(mnist: Path) -> list[str]:
    """A pixel run of 30 iterations, with an evaluation after every tenth."""
    data = f"--data {mnist} --pool 4 --validation 60 --batch 20"
    return f"{data} --iterations 30 --hidden 16 --diagnose-every 5 --threads 1 --no-plots --schedule constant".split()


def test_weights() -> None:
    """Against the recursion, over updates in which either bound of the decay holds."""
    model = nn.Linear(3, 2).double()
    average, expected = Average(model, 0.6), [p.detach().clone() for p in model.parameters()]
    for k in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update()
        d = min(0.6, (1 + k) / (10 + k))
        expected = [d * old + (1 - d) * p.detach() for old, p in zip(expected, model.parameters(), strict=True)]
        assert d == 0.6 or k < 13
    for value, wanted in zip(average.values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    other = Average(nn.Linear(3, 2).double(), 0.6)
    other.load_state_dict(average.state_dict())
    assert other.updates == 30 and all(map(torch.equal, other.values, average.values))


@pytest.mark.parametrize("model", ["factorized", "exprnn"])
def test_evaluations_and_the_best_have_averages(model: str, tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "run"
    result = trained(folder, "pixel_mnist", *options, "--model", model, "--lr", "5e-3", "--average", "0.95")
    last, best = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("checkpoint", "best"))
    task = build("pixel_mnist", options, model=model, average=0.95)
    task.model.load_state_dict(last["model"])
    task.average.load_state_dict(last["average"])
    with torch.no_grad():
        raw = task.evaluate(30)
        with task.average.in_model():
            averaged = task.evaluate(30)
            assert model != "factorized" or task.rnn.orthogonality_error() < 1e-5
        assert averaged == last["evaluation"] != raw == task.evaluate(30)
        task.model.load_state_dict(best["model"])
        assert result["test"] == task.test()


@pytest.mark.parametrize("model", ["factorized", "exprnn"])
def test_resume_is_exact(model: str, tmp_path: Path, options: list[str]) -> None:
    assert_resumes("pixel_mnist", [*options, "--model", model, "--average", "0.9"], tmp_path, 17, 30)
