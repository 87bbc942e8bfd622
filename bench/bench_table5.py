"""Table 5 of Vorontsov et al. 2017 (appendix 5.3): seconds per 1000 iterations on the copy task with T = 100.

The time includes the whole iteration: data, forward, loss over all 120 steps, backward, optimizer. Batches of 50.
torch.nn.RNN has no linear recurrence, so its row uses tanh; our rows are without an activation, as in the copy task of
the paper, and with tanh. The one-hot input of torch.nn.RNN is allocated once, and only the ten rows that change in a
new batch are rewritten.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_modules import copy_weights
from harness import BATCH, Bench, Size, check, ratio, spread_ms
from torch import Tensor, nn

import orthokern.nn
from orthokern.data import CopyTask
from orthokern.optim import optimizer_for

SIZES = [{"N": 128, "T": 100}, {"N": 500, "T": 100}, {"N": 1000, "T": 100}]
QUICK = [{"N": 32, "T": 5}]
ITERATIONS = {128: 30, 500: 10, 1000: 6}  # of a round

MARGIN = 0.1
# Rates of SGD and of the geodesic steps; they do not affect the time. The timed rates are the paper's: at larger ones
# the dense recurrence without an activation diverges within a hundred iterations. The checked rates reveal a wrong
# step.
TIMED_RATES, CHECKED_RATES = (1e-4, 1e-6), (1e-2, 1e-3)

# Relative RMS of losses and parameters after the checked iterations, float32 against float64. Measured: at most 2e-6.
TOLERANCE = 2e-5
CHECKED_ITERATIONS = 2

# Seconds of SGD and of geoSGD in the paper, by N
PAPER = {128: (21.9, 40.4), 500: (46.7, 161.4), 1000: (95.4, 711.2)}


class Torch(nn.Module):
    """torch.nn.RNN, a linear readout, cross-entropy: what a user of torch alone would write."""

    one_hot: Tensor

    def __init__(self, N: int, task: CopyTask) -> None:
        super().__init__()
        self.rnn = nn.RNN(task.num_ids, N)
        self.readout = nn.Linear(N, task.num_classes)
        self.task = task
        tokens, _ = task.batch(BATCH, torch.Generator())
        self.register_buffer("one_hot", nn.functional.one_hot(tokens, task.num_ids).float())

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """0-dim, from tokens and targets [T, B]."""
        symbols = slice(0, self.task.recall)  # all that differs between batches
        self.one_hot[symbols] = nn.functional.one_hot(tokens[symbols], self.task.num_ids).to(self.one_hot.dtype)
        states, _ = self.rnn(self.one_hot)
        return nn.functional.cross_entropy(self.readout(states).flatten(0, 1), targets.flatten())


class Ours(nn.Module):
    """A recurrence of ours on token ids, and the fused readout."""

    def __init__(self, rnn: nn.Module, readout: orthokern.nn.LinearCrossEntropy) -> None:
        super().__init__()
        self.rnn, self.readout = rnn, readout

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """0-dim, from tokens and targets [T, B]."""
        states, _ = self.rnn(tokens)
        loss: Tensor = self.readout.loss(states, targets)
        return loss


class Trainer:
    """A model, its optimizer and its own stream of the same data."""

    def __init__(
        self, model: nn.Module, task: CopyTask, rates: tuple[float, float], backend: str | None = None
    ) -> None:
        lr, geodesic_lr = rates
        self.model, self.task = model, task
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer: torch.optim.Optimizer = optimizer_for(
            model,
            lr=lr,
            geodesic_lr=geodesic_lr,
            euclidean=torch.optim.SGD,
            geodesic_options={"backend": backend},
        )
        if isinstance(model, Torch):  # no indirection of ours in the baseline
            self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def iterate(self, iterations: int) -> Tensor:
        """Train; returns the losses [iterations]."""
        losses = []
        for _ in range(iterations):
            loss = self.model.loss(*self.task.batch(BATCH, self.generator))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)


def models(N: int, task: CopyTask) -> dict[str, nn.Module]:
    """All variants by name, float32, with the same function at the start."""
    factorized = orthokern.nn.FactorizedRNN(task.num_ids, N, margin=MARGIN)
    baseline = Torch(N, task)
    copy_weights(factorized, baseline.rnn)
    result: dict[str, nn.Module] = {"torch.nn.RNN, tanh": baseline}
    for nonlinearity in ("identity", "tanh"):
        dense = orthokern.nn.RNN(task.num_ids, N, nonlinearity=nonlinearity)
        dense.load_state_dict(baseline.rnn.state_dict())
        variants: dict[str, nn.Module] = {"RNN": dense}
        for apply in ("factored", "composed"):
            variants[f"FactorizedRNN, {apply}"] = orthokern.nn.FactorizedRNN(
                task.num_ids, N, nonlinearity=nonlinearity, margin=MARGIN, apply=apply
            )
            variants[f"FactorizedRNN, {apply}"].load_state_dict(factorized.state_dict())
        for name, rnn in variants.items():
            readout = orthokern.nn.LinearCrossEntropy(N, task.num_classes)
            readout.load_state_dict(baseline.readout.state_dict())
            result[f"{name}, {nonlinearity}"] = Ours(rnn, readout)
    return result


def in_float64(model: nn.Module) -> nn.Module:
    """The same model on the reference backend; torch's own for the baseline."""
    double = copy.deepcopy(model).double()
    for module in double.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    return double


def checked(name: str, model: nn.Module, task: CopyTask) -> float:
    """Train a copy for a few iterations and compare losses and parameters with float64; returns the largest error."""
    ours = Trainer(copy.deepcopy(model), task, CHECKED_RATES)
    exact = Trainer(in_float64(model), task, CHECKED_RATES, backend="reference")
    losses = ours.iterate(CHECKED_ITERATIONS)
    # The reference solves U's and V's systems in one batch, and MKL's LU of two large float64 matrices was seen to
    # deadlock when torch gives each a thread.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    exact_losses = exact.iterate(CHECKED_ITERATIONS)
    torch.set_num_threads(threads)
    parameters = [losses, *ours.model.parameters()]
    exact_parameters = [exact_losses, *exact.model.parameters()]
    return check(name, parameters, exact_parameters, TOLERANCE)


@pytest.mark.sizes(SIZES, quick=QUICK)
def test_table5(bench: Bench, size: Size) -> None:
    """Every variant of one hidden size, in turns."""
    N = size["N"]
    task = CopyTask(size["T"])
    built = models(N, task)
    errors = {name: checked(name, model, task) for name, model in built.items()}
    trainers = {name: Trainer(model, task, TIMED_RATES) for name, model in built.items()}
    iterations = 2 if bench.quick else ITERATIONS[N]
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(trainer.iterate, iterations) for name, trainer in trainers.items()
    }
    # The one that pytest-benchmark's own table shows goes last: the default way, in the paper's setting.
    shown = "FactorizedRNN, factored, identity"
    calls[shown] = calls.pop(shown)
    seconds = bench.interleave(f"Table 5, {iterations} iterations", calls, rounds=3)
    for name, trainer in trainers.items():
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters()), f"{name} diverged"

    sgd, geodesic = PAPER.get(N, (None, None))
    for name in built:
        factorized = name.startswith("FactorizedRNN")
        bench.record(
            "table5",
            name,
            {**size, "B": BATCH},
            1000 * statistics.median(seconds[name]) / iterations,
            unit="s",
            better="lower",
            over_torch=ratio(seconds[name], seconds["torch.nn.RNN, tanh"]),
            paper_seconds=geodesic if factorized else sgd,
            ms_per_iteration=spread_ms([t / iterations for t in seconds[name]]),
            error=errors[name],
        )
