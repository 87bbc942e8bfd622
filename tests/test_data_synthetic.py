"""The generators of synthetic data: golden values, distributions, targets, baselines, streams, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused

from orthokern import init
from orthokern.data import AddingTask, CopyTask, RandomPermutationTask, TemporalOrderTask

TASKS: list[Any] = [TemporalOrderTask(12), TemporalOrderTask(12, bits=3), RandomPermutationTask(7, symbols=9)]
TASKS += [CopyTask(4), AddingTask(12)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symbols_of(inputs: torch.Tensor) -> torch.Tensor:
    """[T, B] int64, after a check that the inputs are one-hot."""
    assert inputs.dtype == torch.float32
    assert set(inputs.unique().tolist()) == {0.0, 1.0} and (inputs.sum(-1) == 1).all()
    return inputs.argmax(-1)


def uniform(values: torch.Tensor, start: int, end: int) -> bool:
    """Whether integers lie in [start, end), and all of them about equally often: six standard deviations."""
    count = torch.bincount(values.flatten() - start, minlength=end - start).double()
    mean = values.numel() / (end - start)
    return len(count) == end - start and float((count - mean).abs().max()) < 6 * mean**0.5 + 1


def test_golden() -> None:
    """Values written down once: a change of the data is a change of every published number."""
    inputs, targets = TemporalOrderTask(10).batch(2, seeded(1))
    expected = [[1, 4, 3, 3, 3, 4, 0, 1, 2, 2], [3, 5, 1, 1, 0, 4, 3, 0, 1, 0]]
    assert symbols_of(inputs).T.tolist() == expected and targets.tolist() == [0, 2]
    inputs, targets = RandomPermutationTask(6).batch(2, seeded(1))
    assert symbols_of(inputs).T.tolist() == [[0, 90, 89, 65, 65, 48], [1, 54, 29, 35, 96, 99]]
    assert targets.tolist() == [0, 1]
    inputs, targets = AddingTask(4).batch(2, seeded(1))
    assert inputs.dtype == targets.dtype == torch.float32
    numbers = [0.757632, 0.403069, 0.029282, 0.397137, 0.279311, 0.734684, 0.799859, 0.754372]
    assert inputs[..., 0].T.flatten().tolist() == pytest.approx(numbers, abs=1e-6)
    assert inputs[..., 1].T.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    assert targets.tolist() == pytest.approx([0.432351, 1.033683], abs=1e-6)
    tokens, targets = CopyTask(3, symbols=8, recall=4).batch(2, seeded(1))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.T.tolist() == [[6, 5, 8, 4, 0, 0, 9, 0, 0, 0, 0], [4, 1, 2, 6, 0, 0, 9, 0, 0, 0, 0]]
    assert targets.T.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6, 5, 8, 4], [0, 0, 0, 0, 0, 0, 0, 4, 1, 2, 6]]


@pytest.mark.parametrize("T", [10, 57])
@pytest.mark.parametrize("bits", [2, 3])
def test_temporal_order(T: int, bits: int) -> None:
    task = TemporalOrderTask(T, bits=bits)
    assert (task.length, task.num_features, task.num_classes) == (T, 6, 2**bits)
    assert task.baseline == pytest.approx(math.log(2**bits))
    inputs, targets = task.batch(2000, seeded())
    assert inputs.shape == (T, 2000, 6) and targets.shape == (2000,) and targets.dtype == torch.int64
    symbols = symbols_of(inputs)
    marked = symbols >= 4
    assert (marked.sum(0) == bits).all()
    places = marked.T.nonzero()[:, 1].view(2000, bits)
    spans = [(0.1, 0.2), (0.5, 0.6)] if bits == 2 else [(0.1, 0.2), (0.3, 0.4), (0.6, 0.7)]
    expected = torch.zeros(2000, dtype=torch.int64)
    for place, (start, end) in zip(places.T, spans, strict=True):
        assert uniform(place, int(T * start + 1e-9), int(T * end + 1e-9))
        expected = 2 * expected + (symbols.gather(0, place.unsqueeze(0))[0] == 5)
    assert torch.equal(targets, expected) and uniform(targets, 0, 2**bits)
    assert uniform(symbols[~marked], 0, 4)


@pytest.mark.parametrize("T", [2, 90])
def test_random_permutation(T: int) -> None:
    task = RandomPermutationTask(T)
    assert (task.length, task.num_features, task.num_classes) == (T, 100, 100)
    assert task.baseline == pytest.approx(math.log(2))
    inputs, targets = task.batch(2000, seeded())
    assert inputs.shape == (T, 2000, 100) and targets.shape == (2000,) and targets.dtype == torch.int64
    symbols = symbols_of(inputs)
    assert torch.equal(symbols[0], targets) and uniform(targets, 0, 2) and uniform(symbols[1:], 2, 100)


@pytest.mark.parametrize("target", ["sum", "mean"])
@pytest.mark.parametrize("positions", ["halves", "pascanu"])
@pytest.mark.parametrize("T", [10, 31, 200])
def test_adding(T: int, positions: str, target: str) -> None:
    task = AddingTask(T, target=target, positions=positions)
    inputs, targets = task.batch(2000, seeded())
    assert inputs.shape == (T, 2000, 2) and targets.shape == (2000,)
    assert (task.length, task.num_features) == (T, 2)
    assert ((inputs[..., 0] >= 0) & (inputs[..., 0] < 1)).all()
    assert set(inputs[..., 1].unique().tolist()) == {0.0, 1.0} and (inputs[..., 1].sum(0) == 2).all()
    first, second = inputs[..., 1].T.nonzero()[:, 1].view(-1, 2).T
    bounds = (0, T // 2, T) if positions == "halves" else (0, T // 10, T // 2)
    assert uniform(first, *bounds[:2]) and uniform(second, *bounds[1:])
    expected = (inputs[..., 0].double() * inputs[..., 1].double()).sum(0)
    torch.testing.assert_close(targets.double(), expected / (2 if target == "mean" else 1), atol=1e-6, rtol=0)
    # the variance of the target, of which 2000 draws tell 10 %
    assert task.baseline == pytest.approx(float(targets.var()), rel=0.2)


@pytest.mark.parametrize("T", [1, 2, 7, 200])
def test_copy(T: int) -> None:
    task = CopyTask(T)
    tokens, targets = task.batch(5, seeded())
    assert tokens.shape == targets.shape == (T + 20, 5)
    assert (task.length, task.num_ids, task.num_classes) == (T + 20, 10, 9)
    step = 9 + T
    assert (tokens == task.marker).nonzero()[:, 0].tolist() == [step] * 5
    blank = torch.ones(T + 20, dtype=torch.bool)
    blank[:10] = False
    blank[step] = False
    assert (tokens[blank] == 0).all()
    assert ((tokens[:10] >= 1) & (tokens[:10] <= 8)).all()
    assert torch.equal(targets[-10:], tokens[:10])
    assert (targets[:-10] == 0).all()
    assert task.baseline == pytest.approx(10 * math.log(8) / (T + 20))
    assert type(CopyTask(np.uint8(T)).length) is int and CopyTask(np.uint8(T)).length == T + 20


def test_scalar_coding() -> None:
    task = CopyTask(3, recall=4)
    tokens, _ = task.batch(2, seeded(1))
    values = task.scalar(tokens, 7.5)
    assert values.dtype == torch.float32 and values.shape == (11, 2, 1)
    assert values[:, 0, 0].tolist() == [6, 5, 8, 4, 0, 0, 7.5, 0, 0, 0, 0]
    assert tokens[6, 0] == 9  # the tokens themselves stay


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TemporalOrderTask(9), "T must be an integer of at least 10, got 9"),
        (lambda: TemporalOrderTask(20, bits=4), "bits must be 2 or 3, got 4"),
        (lambda: RandomPermutationTask(1), "T must be an integer of at least 2, got 1"),
        (lambda: AddingTask(9, positions="pascanu"), "T must be at least 10 for positions 'pascanu', got 9"),
        (lambda: AddingTask(5, target="summ"), "unknown target 'summ': did you mean 'sum'"),
        (lambda: CopyTask(5, symbols=2.5), "symbols must be an integer of at least 1, got 2.5"),
        (
            lambda: CopyTask(2**62).batch(4),
            f"batch must be small enough for a tensor, got 4 sequences of {2**62 + 20} steps",
        ),
        *((lambda task=task: task.batch(0), "batch must be an integer of at least 1, got 0") for task in TASKS),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    refused(call, message)


@pytest.mark.parametrize("task", TASKS)
def test_batches_are_on_the_cpu_with_any_default_device(task: Any) -> None:
    batches = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            batches.append(task.batch(3, torch.Generator("cpu").manual_seed(1)))
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


def test_generators_are_checked() -> None:
    for call in (lambda: CopyTask(5).batch(2, 0), lambda: init.haar_orthogonal_(torch.empty(4, 4), 2.0)):
        refused(call, "generator must be a CPU torch.Generator or None, got ")
