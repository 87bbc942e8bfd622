"""Data of the temporal order and random permutation problems: golden values, distributions, targets, bad input; and
the streams of all generators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from orthokern.data import AddingTask, CopyTask, RandomPermutationTask, TemporalOrderTask
from orthokern.errors import InputError

TASKS: list[Any] = [TemporalOrderTask(12), TemporalOrderTask(12, bits=3), RandomPermutationTask(7, symbols=9)]


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


GOLDEN_ORDER = ([[1, 4, 3, 3, 3, 4, 0, 1, 2, 2], [3, 5, 1, 1, 0, 4, 3, 0, 1, 0]], [0, 2])
GOLDEN_PERMUTATION = ([[0, 90, 89, 65, 65, 48], [1, 54, 29, 35, 96, 99]], [0, 1])


def test_golden() -> None:
    """Values written down once: a change of the data is a change of every published number."""
    inputs, targets = TemporalOrderTask(10).batch(2, seeded(1))
    assert symbols_of(inputs).T.tolist() == GOLDEN_ORDER[0] and targets.tolist() == GOLDEN_ORDER[1]
    inputs, targets = RandomPermutationTask(6).batch(2, seeded(1))
    assert symbols_of(inputs).T.tolist() == GOLDEN_PERMUTATION[0] and targets.tolist() == GOLDEN_PERMUTATION[1]


@pytest.mark.parametrize("T", [10, 57, 200])
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


@pytest.mark.parametrize("task", [*TASKS, CopyTask(4), AddingTask(12)], ids=lambda task: type(task).__name__)
def test_streams(task: Any) -> None:
    """`fill` overwrites its buffers with what `batch` gives; a generator's state continues the stream."""
    generator, again = seeded(3), seeded(3)
    inputs, targets = task.buffers(6)
    for _ in range(3):
        task.fill(inputs, targets, generator)
        fresh = task.batch(6, again)
        assert torch.equal(inputs, fresh[0]) and torch.equal(targets, fresh[1])
    state = generator.get_state()
    following = task.batch(6, generator)
    assert not torch.equal(following[0], inputs)
    resumed = torch.Generator()
    resumed.set_state(state)
    assert torch.equal(following[0], task.batch(6, resumed)[0])


def test_refusals() -> None:
    for call, message in (
        (lambda: TemporalOrderTask(9), "T must be an integer of at least 10, got 9"),
        (lambda: TemporalOrderTask(20, bits=4), "bits must be 2 or 3, got 4"),
        (lambda: TemporalOrderTask(20, bits=2.0), "bits must be an integer of at least 2, got 2.0"),
        (lambda: TemporalOrderTask(20, bits=[2]), "bits must be an integer of at least 2, got [2]"),
        (lambda: TemporalOrderTask(20).batch(0), "batch must be an integer of at least 1, got 0"),
        (lambda: RandomPermutationTask(1), "T must be an integer of at least 2, got 1"),
        (lambda: RandomPermutationTask(5, symbols=2), "symbols must be an integer of at least 3, got 2"),
        (lambda: RandomPermutationTask(5).batch(0), "batch must be an integer of at least 1, got 0"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert str(error.value) == message
