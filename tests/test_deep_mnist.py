"""The task deep_mnist: initialisations, penalty, learning where a plain network does not learn, test data."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checks import gram_error
from runs import build, records, trained


@pytest.fixture
def small(mnist: Path) -> list[str]:
    return f"--data {mnist} --validation 60 --hidden 16 --threads 1 --no-plots --diagnose-every 5".split()


@pytest.mark.parametrize(("preset", "learns"), [("ff", False), ("open", True), ("oinit", True)])
def test_only_orthogonal_matrices_learn(
    preset: str, learns: bool, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten layers, as the paper says: from N(0, 0.001) the gradient does not arrive, unless the matrices are made
    orthogonal. A penalty of 1 at a rate of 0.05 does that in some hundred iterations."""
    penalty = ["--penalty", "1"] if preset == "open" else []
    options = [*small, "--preset", preset, *penalty, "--lr", "0.05", "--epochs", "40"]
    result = trained(tmp_path / "run", "deep_mnist", *options)
    assert (result["test"]["accuracy"] > 0.8) == learns
    seen = [r["grad_norm_by_layer"] for r in records(tmp_path / "run") if "grad_norm_by_layer" in r]
    assert all(len(norms) == 11 for norms in seen)
    if not learns:
        assert result["test"]["accuracy"] == pytest.approx(0.1, abs=0.01)
        assert result["test"]["loss"] == pytest.approx(math.log(10), rel=0.02)
        assert max(norms[0] for norms in seen) < 1e-12
    held_out = [r["held_out_accuracy"] for r in records(tmp_path / "run") if "held_out_accuracy" in r]
    assert len(held_out) == 40 and result["best"]["score"] == max(held_out)
    assert "on the test data with the parameters of iteration" in capsys.readouterr().out


def test_starts(small: list[str]) -> None:
    for name, orthogonal in (("normal", False), ("learned", True), ("orthogonal", True), ("glorot-uniform", False)):
        sigma = ["--sigma", "0.02"] if name in ("normal", "learned") else []
        task = build("deep_mnist", [*small, "--init", name, *sigma, "--layers", "3"])
        weights = task.model.weights()
        assert [tuple(w.shape) for w in weights] == [(16, 784), (16, 16), (16, 16), (10, 16)]
        assert all((gram_error(w) < 1e-6) == orthogonal for w in weights), name
        assert not any(p.any() for label, p in task.model.named_parameters() if "bias" in label)
        if name == "normal":
            assert float(weights[0].detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_penalty_is_that_of_every_matrix(small: list[str]) -> None:
    task = build("deep_mnist", [*small, "--init", "normal", "--layers", "2", "--penalty", "0.5"])
    batch = task.next_batch()
    loss, numbers = task.loss(batch)
    added = loss - task.model(*batch)[0]
    assert numbers["penalty"].item() == pytest.approx(added.item())
    assert added.item() == pytest.approx(0.5 * float(sum(map(gram_error, task.model.weights()))), rel=1e-4)


def test_pixels_are_standardised_by_the_training_images_alone(small: list[str]) -> None:
    task = build("deep_mnist", small)
    pixels, _ = task._batch(task.train_set, slice(None))
    assert len(task.train_set[1]) == 200 and len(task.validation_set[1]) == 60
    torch.testing.assert_close(pixels.mean(0), torch.zeros(784), rtol=0, atol=1e-5)
    torch.testing.assert_close(pixels.std(0, correction=0), torch.ones(784), rtol=1e-4, atol=0)
    plain = build("deep_mnist", [*small, "--no-standardize"])
    images = plain.validation_set[0]
    torch.testing.assert_close(plain._batch(plain.validation_set, slice(None))[0], images.float() / 255.0)
