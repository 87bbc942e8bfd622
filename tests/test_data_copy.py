"""The data of the copy task: golden values, layouts, encodings, reproducibility, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from orthokern.data import CopyTask
from orthokern.errors import InputError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_golden_arjovsky() -> None:
    """Values written down once: a change of the data is a change of every published number."""
    task = CopyTask(3, symbols=8, recall=4)
    tokens, targets = task.batch(2, seeded(1))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.T.tolist() == [[6, 5, 8, 4, 0, 0, 9, 0, 0, 0, 0], [4, 1, 2, 6, 0, 0, 9, 0, 0, 0, 0]]
    assert targets.T.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6, 5, 8, 4], [0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 6]]


def test_golden_exprnn() -> None:
    """The same symbols; the marker comes a step later, and with it the first recalled symbol."""
    tokens, targets = CopyTask(3, symbols=8, recall=4, layout="exprnn").batch(2, seeded(1))
    assert tokens.T.tolist() == [[6, 5, 8, 4, 0, 0, 0, 9, 0, 0, 0], [4, 1, 2, 6, 0, 0, 0, 9, 0, 0, 0]]
    assert targets.T.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6, 5, 8, 4], [0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 6]]


@pytest.mark.parametrize("layout", ["arjovsky", "exprnn"])
@pytest.mark.parametrize("T", [1, 2, 7, 200])
def test_layout(T: int, layout: str) -> None:
    task = CopyTask(T, layout=layout)
    tokens, targets = task.batch(5, seeded())
    assert tokens.shape == targets.shape == (T + 20, 5)
    assert (task.length, task.num_ids, task.num_classes) == (T + 20, 10, 9)
    step = 10 + T - (layout == "arjovsky")
    assert (tokens == task.marker).nonzero()[:, 0].tolist() == [step] * 5
    blank = torch.ones(T + 20, dtype=torch.bool)
    blank[:10] = False
    blank[step] = False
    assert (tokens[blank] == 0).all()
    assert ((tokens[:10] >= 1) & (tokens[:10] <= 8)).all()
    assert torch.equal(targets[-10:], tokens[:10])
    assert (targets[:-10] == 0).all()


def test_all_symbols_are_equally_likely() -> None:
    tokens, _ = CopyTask(1).batch(4000, seeded())
    share = torch.bincount(tokens[:10].flatten(), minlength=10)[1:9] / 40_000
    assert (share - 1 / 8).abs().max() < 0.01  # six standard deviations


@pytest.mark.parametrize("marker", [-1.0, 9.0])
def test_scalar_coding(marker: float) -> None:
    task = CopyTask(3, recall=4)
    tokens, _ = task.batch(2, seeded(1))
    values = task.scalar(tokens, marker)
    assert values.dtype == torch.float32 and values.shape == (11, 2, 1)
    assert values[:, 0, 0].tolist() == [6, 5, 8, 4, 0, 0, marker, 0, 0, 0, 0]
    assert tokens[6, 0] == 9  # the tokens themselves stay


def test_baseline() -> None:
    """10 ln 8 / (T + 20); 0.0945 at T = 200 and 0.0204 at T = 1000 in the literature."""
    assert CopyTask(200).baseline == pytest.approx(10 * math.log(8) / 220)
    assert round(CopyTask(200).baseline, 4) == 0.0945
    assert round(CopyTask(1000).baseline, 4) == 0.0204


def test_refusals() -> None:
    with pytest.raises(InputError, match="^T must be an integer of at least 1, got 0$"):
        CopyTask(0)
    with pytest.raises(InputError, match="recall must be an integer of at least 1, got -1"):
        CopyTask(5, recall=-1)
    with pytest.raises(InputError, match="symbols .* got 2.5"):
        CopyTask(5, symbols=2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown layout 'arjovski': did you mean 'arjovsky'"):
        CopyTask(5, layout="arjovski")
    with pytest.raises(InputError, match="batch must be .* got 0"):
        CopyTask(5).batch(0)


def test_small_dtypes_hold_the_same_draws() -> None:
    wide, small = CopyTask(7), CopyTask(7, dtype=torch.uint8)
    batches = [task.batch(3, torch.Generator().manual_seed(1)) for task in (wide, small)]
    for a, b in zip(*batches, strict=True):
        assert b.dtype == torch.uint8 and torch.equal(a, b.long())
    for symbols, dtype in ((255, torch.uint8), (8, torch.int8), (8, torch.float32)):
        with pytest.raises(InputError, match="dtype is"):
            CopyTask(7, symbols=symbols, dtype=dtype)
