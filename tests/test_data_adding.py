"""The data of the adding problem: golden values, positions, targets, baselines, reproducibility, bad input."""

from __future__ import annotations

import pytest
import torch

from orthokern.data import AddingTask
from orthokern.errors import InputError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def marks(inputs: torch.Tensor) -> torch.Tensor:
    """Steps of the two marks, [B, 2], after a check that there are just two."""
    assert set(inputs[..., 1].unique().tolist()) == {0.0, 1.0}
    assert (inputs[..., 1].sum(0) == 2).all()
    return inputs[..., 1].T.nonzero()[:, 1].view(-1, 2)


def test_golden() -> None:
    """Values written down once: a change of the data is a change of every published number."""
    inputs, targets = AddingTask(4).batch(2, seeded(1))
    assert inputs.dtype == targets.dtype == torch.float32
    assert inputs[..., 0].T.flatten().tolist() == pytest.approx(
        [0.757632, 0.403069, 0.029282, 0.397137, 0.279311, 0.734684, 0.799859, 0.754372], abs=1e-6
    )
    assert inputs[..., 1].T.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    assert targets.tolist() == pytest.approx([0.432351, 1.033683], abs=1e-6)


@pytest.mark.parametrize("target", ["sum", "mean"])
@pytest.mark.parametrize("positions", ["halves", "pascanu"])
@pytest.mark.parametrize("T", [10, 31, 200])
def test_marks_and_targets(T: int, positions: str, target: str) -> None:
    task = AddingTask(T, target=target, positions=positions)
    inputs, targets = task.batch(2000, seeded())
    assert inputs.shape == (T, 2000, 2) and targets.shape == (2000,)
    assert (task.length, task.num_features) == (T, 2)
    assert ((inputs[..., 0] >= 0) & (inputs[..., 0] < 1)).all()
    first, second = marks(inputs).unbind(1)
    bounds = (0, T // 2, T) if positions == "halves" else (0, T // 10, T // 2)
    for steps, start, end in ((first, *bounds[:2]), (second, *bounds[1:])):
        count = torch.bincount(steps - start, minlength=end - start)
        assert len(count) == end - start  # none outside, and none that never comes
        mean = 2000 / (end - start)
        assert (count - mean).abs().max() < 6 * mean**0.5 + 1  # uniform: six standard deviations
    expected = (inputs[..., 0].double() * inputs[..., 1].double()).sum(0)
    torch.testing.assert_close(targets.double(), expected / (2 if target == "mean" else 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("target", "baseline"), [("sum", 1 / 6), ("mean", 1 / 24)])
def test_baseline_is_the_error_of_the_expected_target(target: str, baseline: float) -> None:
    """The variance of the target; its estimate from 400 000 draws has a standard deviation of about 0.2 %."""
    task = AddingTask(10, target=target)
    assert task.baseline == pytest.approx(baseline)
    targets = torch.cat([task.batch(100_000, generator)[1] for generator in [seeded()] for _ in range(4)]).double()
    guess = 1.0 if target == "sum" else 0.5
    assert float((targets - guess).square().mean()) == pytest.approx(task.baseline, rel=0.01)


def test_refusals() -> None:
    with pytest.raises(InputError, match="^T must be an integer of at least 1, got 0$"):
        AddingTask(0)
    with pytest.raises(InputError, match="^T must be at least 2 for positions 'halves', got 1$"):
        AddingTask(1)
    with pytest.raises(InputError, match="^T must be at least 10 for positions 'pascanu', got 9$"):
        AddingTask(9, positions="pascanu")
    with pytest.raises(InputError, match="unknown target 'summ': did you mean 'sum'"):
        AddingTask(5, target="summ")
    with pytest.raises(InputError, match="unknown positions 'half': did you mean 'halves'"):
        AddingTask(5, positions="half")
    with pytest.raises(InputError, match="batch must be .* got 0"):
        AddingTask(5).batch(0)
