"""The task stacked_mnist: the network, learning in both orders of the pixels, exact resume, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import assert_resumes, build, records, trained


@pytest.fixture
def small(mnist: Path) -> list[str]:
    sizes = "--hidden 16 --width 16 --units 16 --blocks 1 --batch 20 --warmup 0 --average 0.9 --dropout 0 --lr 1e-2"
    return f"--data {mnist} --validation 60 --threads 1 --no-plots --diagnose-every 5 {sizes}".split()


@pytest.mark.parametrize("order", [[], ["--permuted", "--stride", "784", "--margin", "0.01"]])
def test_it_learns(order: list[str], small: list[str], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", "stacked_mnist", *small, *order, "--epochs", "20")
    assert result["test"]["accuracy"] > 0.5
    radii = [(r["smallest_radius"], r["largest_radius"]) for r in records(tmp_path / "run") if "largest_radius" in r]
    low, high = (0.99, 1.01) if order else (0.0, 1.0)
    assert radii and all(low < smallest < largest < high for smallest, largest in radii)


def test_the_states_that_are_used(small: list[str]) -> None:
    """Every --stride-th one; with a stride of 784 the last one alone."""
    pixels, inputs = torch.randn(784, 2, 1), []
    for stride, steps in (("784", [783]), ("100", list(range(99, 784, 100)))):
        model = build("stacked_mnist", [*small, "--stride", stride]).model
        model.encoder.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
        model(pixels, torch.tensor([1, 2]))
        torch.testing.assert_close(inputs[-1], model.rnn(pixels)[0][steps])


def test_resume(small: list[str], tmp_path: Path) -> None:
    options = [*small, "--schedule", "constant", "--checkpoint-every", "4"]  # a cosine depends on the last iteration
    assert_resumes("stacked_mnist", options, tmp_path, 6, 12)
