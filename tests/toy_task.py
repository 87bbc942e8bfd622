"""A small task with everything that a resumed run has to get right: geodesic bases, RMSprop, two schedules,
dropout from the global generator, data from the task's own. `python tests/toy_task.py --out DIR` trains it.

The network reads noise and says, at every step, the mean of what it has read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.nn import FactorizedRNN
from orthokern.optim import optimizer_for
from orthokern.tasks.optimization import plateau
from orthokern.training import Task, cli
from orthokern.training.options import option


@dataclass(kw_only=True)
class ToyOptions(cli.RunOptions):
    GROUP = "the task"
    batch: int = option(8, "sequences")
    hidden: int = option(12, "units")
    dropout: float = option(0.0, "dropout", low=0.0)
    device: str = "cpu"
    iterations: int = 30
    checkpoint_every: int = 4
    diagnose_every: int = 5


class Model(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.rnn = FactorizedRNN(3, hidden, nonlinearity="tanh", margin=0.1, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.readout = nn.Linear(hidden, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions [T, B] for x [T, B, 3]."""
        return self.readout(self.dropout(self.rnn(x)[0]))[..., 0]


class Toy(Task):
    name = "toy"
    time_steps = 9
    device = torch.device("cpu")
    iterations_per_epoch = 8

    def __init__(self, settings: ToyOptions) -> None:
        self.settings = settings
        self.model: Model = Model(settings.hidden, settings.dropout)
        self.optimizer = optimizer_for(self.model, lr=3e-3, geodesic_lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.plateau = plateau(self.optimizer, factor=0.9, patience=1)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.batches = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        self.batches += 1
        x = torch.randn(self.time_steps, self.settings.batch, 3, generator=self.generator, dtype=torch.float64)
        target = x.sum(2).cumsum(0) / torch.arange(1, self.time_steps + 1)[:, None]
        return x, target

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x, target = batch
        error = (self.model(x) - target).square()
        decay = 1e-3 * self.model.readout.weight.square().sum()  # a parameter used past the forward pass
        return error.mean() + decay, {"last_error": error[-1].mean().detach()}

    def last_step_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        return (self.model(x)[-1] - target[-1]).square().mean()

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        return iteration % 6 == 0

    def evaluate(self, iteration: int) -> dict[str, float]:
        assert not self.model.training
        generator = torch.Generator().manual_seed(1000 + iteration)
        x = torch.randn(self.time_steps, 16, 3, generator=generator, dtype=torch.float64)
        return {"loss": (self.model(x)[-1] - x.mean(0).sum(1)).square().mean().item()}

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def diagnose(self) -> dict[str, Any]:
        return {"orthogonality_error": self.model.rnn.orthogonality_error()}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.batches = state["batches"]

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        return f"done at {iteration}"


main = cli.TaskCommand("toy", "", "", ToyOptions, Toy).main


if __name__ == "__main__":
    sys.exit(main())
