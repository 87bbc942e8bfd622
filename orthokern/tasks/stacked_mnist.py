"""MNIST by stacked linear recurrences: `python -m orthokern.tasks.stacked_mnist --data FOLDER [--permuted]`.

A linear recurrence of scaled rotations (orthokern.nn.RotationRNN) reads an image one pixel at a time. Its states at
every --stride-th pixel pass through gated layers and --blocks further recurrences with residual connections, as in
linear recurrent units (Orvieto et al. 2023) and S5 (Smith et al. 2023). The mean over these steps is classified. --data
names the folder with the four IDX files of MNIST. The last --validation training images select the best parameters,
with which the test images are evaluated once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.data.mnist import PIXELS
from orthokern.nn import RotationRNN
from orthokern.optim import optimizer_for
from orthokern.tasks.command import task_command
from orthokern.tasks.digits import CLASSES, DigitsOptions, DigitsTask
from orthokern.tasks.optimization import DescentOptions, euclidean
from orthokern.training.options import changed, option


@dataclass(kw_only=True)
class StackOptions(DigitsOptions, DescentOptions):
    """The settings of sequential MNIST with stacked linear recurrences."""

    GROUP = "the network"
    permuted: bool = option(False, "read the pixels in one random order", basic=True)
    permutation_seed: int = option(0, "seed of the order", low=0, only={"permuted": (True,)})
    hidden: int = option(256, "units of the recurrence over pixels, an even number", basic=True)
    stride: int = option(28, "use the state after every N-th pixel; 784: only the last state", high=PIXELS)
    width: int = option(96, "features of a step between the recurrences", basic=True)
    blocks: int = option(2, "further recurrences, each with a gated layer", low=0, basic=True)
    units: int = option(128, "units of each further recurrence, an even number")
    margin: float | None = option(
        None, "radii of the rotations over pixels stay in 1 ± X, and start at 1; none: below 1", low=0.0, below=1.0
    )
    radius: float = option(0.999, "largest initial radius", above=0.5, below=1.0, only={"margin": (None,)})
    max_angle: float = option(math.pi, "largest initial angle, in radians per step", above=0.0, high=math.pi)
    dropout: float = option(0.1, "dropout in every layer", low=0.0, below=1.0)
    batch: int = changed(DescentOptions, "batch", default=100, help="images per batch")
    optimizer: str = changed(
        DescentOptions, "optimizer", default="adam", help="rmsprop, adam, sgd (with Nesterov momentum)"
    )
    lr: float = changed(DescentOptions, "lr", default=2e-3, help="learning rate")
    rotation_lr: float | None = option(None, "rate of radii and angles", low=0.0, shown="as --lr")
    schedule: str = "cosine"
    warmup: int = 500
    clip: float | None = 1.0
    average: float | None = 0.999
    validation: int = 5000
    diagnose_every: int = 100


class Block(nn.Module):
    """x + gated layer(recurrence(normalised x)), x [T, B, width]."""

    def __init__(self, settings: StackOptions) -> None:
        super().__init__()
        width, units = settings.width, settings.units
        self.norm = nn.LayerNorm(width)
        self.rnn = RotationRNN(width, units, backend=settings.backend)
        self.mix = nn.Sequential(nn.GELU(), nn.Linear(units, 2 * width), nn.GLU(), nn.Dropout(settings.dropout))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.norm(x))
        added: Tensor = self.mix(states)
        return x + added


class StackNetwork(nn.Module):
    """A recurrence over pixels, blocks, and a linear readout of the mean over their steps. Expects complete
    settings."""

    def __init__(self, settings: StackOptions) -> None:
        super().__init__()
        hidden, width, margin = settings.hidden, settings.width, settings.margin
        radii = {"radii": (0.5, settings.radius)} if margin is None else {"margin": margin, "horizon": PIXELS}
        self.stride = settings.stride
        self.rnn = RotationRNN(1, hidden, max_angle=settings.max_angle, backend=settings.backend, **radii)
        self.encoder = nn.Sequential(
            nn.LayerNorm(hidden), nn.Dropout(settings.dropout), nn.Linear(hidden, 2 * width), nn.GLU()
        )
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(settings.blocks)))
        self.readout = nn.Sequential(nn.LayerNorm(width), nn.Dropout(settings.dropout), nn.Linear(width, CLASSES))
        self.to(settings.device)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """pixels [T, B, 1] float32, labels [B] int64 -> cross-entropy in nats (0-dim), "accuracy" (0-dim)."""
        states, _ = self.rnn(pixels)
        steps = self.blocks(self.encoder(states[self.stride - 1 :: self.stride]))
        logits = self.readout(steps.mean(0))
        right = (logits.detach().argmax(-1) == labels).double().mean()
        return nn.functional.cross_entropy(logits, labels), {"accuracy": right}


class StackedMnist(DigitsTask):
    """Sequential MNIST with stacked linear recurrences for the training loop. Expects complete settings."""

    name = "stacked_mnist"
    TITLE = ("permuted", "hidden", "blocks")
    time_steps = PIXELS
    scaling = (33.3, 78.6)  # of all pixels of the training images
    model: StackNetwork
    settings: StackOptions

    def __init__(self, settings: StackOptions) -> None:
        super().__init__(settings)
        self.load()
        model = StackNetwork(settings)
        options = euclidean(settings) | {"lr": settings.lr, "rotation_lr": settings.rotation_lr}
        self.train_with(model, optimizer_for(model, **options))

    @torch.no_grad()
    def diagnose(self) -> dict[str, Any]:
        """The learning rate, and the smallest and largest radius of the rotations over pixels."""
        radius = self.model.rnn.eigenvalues().abs()
        return {
            "lr": self.optimizer.param_groups[0]["lr"],
            "smallest_radius": radius.min().item(),
            "largest_radius": radius.max().item(),
        }


COMMAND = task_command("stacked_mnist", StackOptions, StackedMnist)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
