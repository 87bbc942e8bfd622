"""Deep feedforward MNIST: `python -m orthokern.tasks.deep_mnist --data FOLDER`.

A network of ten tanh layers. It is so deep that it learns nothing from small random weights (--init normal). It does
learn if the weight matrices are made orthogonal, before training (--init learned) or during training (--init normal
--penalty X) (Manchev & Spratling, section III-C, Tables III and IV). --data names the folder with the four IDX files
(train-images-idx3-ubyte, ...; gzip or not). The last --validation training images select the best parameters, with
which the test images are evaluated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.data.mnist import PIXELS
from orthokern.optim import optimizer_for
from orthokern.penalties import OrthogonalPenalty
from orthokern.tasks.command import task_command
from orthokern.tasks.digits import CLASSES, DigitsOptions, DigitsTask
from orthokern.tasks.optimization import DescentOptions, euclidean
from orthokern.training.options import changed, option


@dataclass(kw_only=True)
class DeepOptions(DigitsOptions, DescentOptions):
    """The settings of deep feedforward MNIST."""

    GROUP = "the network"
    HIDDEN = frozenset({"backend"})  # all computation is done by torch
    layers: int = option(10, "hidden layers", basic=True)
    hidden: int = option(100, "units per hidden layer", basic=True)
    init: str = option(
        "learned",
        "initial matrices: normal: with standard deviation --sigma; learned: the same, then made orthogonal by "
        "gradient descent; orthogonal: random orthogonal, by a QR factorisation; glorot-uniform",
        choices=("normal", "learned", "orthogonal", "glorot-uniform"),
        basic=True,
    )
    sigma: float = option(0.001, "standard deviation of the weights", above=0.0, only={"init": ("normal", "learned")})
    standardize: bool = option(
        True, "use pixels in [0, 1], instead of each with mean 0 and variance 1 over the training images"
    )
    penalty: float = option(0.0, "add X ||W W^T - I||^2 of every weight matrix to the loss", low=0.0, basic=True)
    batch: int = changed(DescentOptions, "batch", default=20, help="images per batch")
    optimizer: str = changed(
        DescentOptions, "optimizer", default="sgd", help="rmsprop, adam, sgd (with Nesterov momentum)"
    )
    lr: float = changed(DescentOptions, "lr", default=0.01, help="learning rate")
    momentum: float = 0.0
    checkpoint_every: int = 1000
    diagnose_every: int = changed(
        DescentOptions,
        "diagnose_every",
        default=250,
        help="iterations between records of orthogonality and gradient norm by layer, 0 for none",
    )


class DeepNetwork(nn.Module):
    """Layers of tanh units, and a linear readout. Expects complete settings."""

    def __init__(self, settings: DeepOptions) -> None:
        super().__init__()
        sides = [PIXELS, *[settings.hidden] * settings.layers, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(sides[i], sides[i + 1]) for i in range(len(sides) - 1))
        with torch.no_grad():
            for layer in self.layers:
                weight = layer.get_parameter("weight")
                if settings.init == "normal":
                    init.normal_(weight, settings.sigma)
                elif settings.init == "learned":
                    init.learned_(weight, std=settings.sigma)
                else:
                    init.initialize_(weight, settings.init)
                layer.get_parameter("bias").zero_()
        self.to(settings.device)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """pixels [B, 784] float32, labels [B] int64 -> cross-entropy in nats (0-dim), "accuracy" (0-dim)."""
        *hidden, readout = self.layers
        h = pixels
        for layer in hidden:
            h = torch.tanh(layer(h))
        logits = readout(h)
        right = (logits.detach().argmax(-1) == labels).double().mean()
        return nn.functional.cross_entropy(logits, labels), {"accuracy": right}

    def weights(self) -> list[Tensor]:
        """The weight matrices, from the input layer [hidden, 784] to the readout [10, hidden]."""
        return [layer.get_parameter("weight") for layer in self.layers]


class DeepMnist(DigitsTask):
    """Deep feedforward MNIST for the training loop. Expects complete settings."""

    name = "deep_mnist"
    TITLE = ("layers", "hidden", "init", "penalty")
    time_steps = 1
    EVALUATION_BATCH = 1000
    PIXEL_BY_PIXEL = False
    model: DeepNetwork
    settings: DeepOptions

    def __init__(self, settings: DeepOptions) -> None:
        super().__init__(settings)
        self.load()
        self.penalty = OrthogonalPenalty(settings.penalty)
        model = DeepNetwork(settings)
        self.train_with(model, optimizer_for(model, lr=settings.lr, **euclidean(settings)))

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = super().loss(batch)
        if not self.penalty.strength:
            return loss, numbers
        added = self.penalty(self.model)
        return loss + added, {**numbers, "penalty": added.detach()}

    def diagnose(self) -> dict[str, Any]:
        """The learning rate; and for each layer, from the input to the readout: ||W W^T - I||_F^2 of the smaller Gram
        matrix, and the norm of the gradient of the loss (including the penalty) for the weight."""
        weights = self.model.weights()
        with torch.no_grad():
            distance = OrthogonalPenalty()
            result: dict[str, Any] = {
                "lr": self.optimizer.param_groups[0]["lr"],
                "orthogonality_by_layer": [distance(w).item() for w in weights],
            }
        gradients = [w.grad for w in weights if w.grad is not None]
        if gradients:
            result["grad_norm_by_layer"] = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).tolist()
        return result


COMMAND = task_command("deep_mnist", DeepOptions, DeepMnist)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
