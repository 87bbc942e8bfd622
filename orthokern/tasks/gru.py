"""The common part of the experiments of Kanai et al. 2017: a GRU whose state is carried from batch to batch, trained
with a spectral-norm constraint or with gradient clipping (section 4.1 of the paper)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.commandline import real, say
from orthokern.diagnostics.stability import diagnose_stability
from orthokern.nn import GRU
from orthokern.ops.gru_scan import VARIANTS
from orthokern.optim import SpectralNormProjection, optimizer_for
from orthokern.tasks.epochs import DataOptions, DataTask
from orthokern.training.options import option


@dataclass(kw_only=True)
class GruOptions(DataOptions):
    """The settings of a task with a GRU."""

    GROUP = "the network"
    variant: str = option(
        "kanai", "reset gate applied before the recurrent matrix (kanai) or after it (torch)", choices=VARIANTS
    )
    hidden: int = option(200, "units of a layer", basic=True)
    layers: int = option(1, "GRU layers", basic=True)
    dropout: float = option(
        0.5, "dropout of each layer's output, not of the recurrence", low=0.0, below=1.0, basic=True
    )
    init_std: float = option(
        None,
        "standard deviation of all initial weights except the candidate's recurrent matrices, which are orthogonal",
        above=0.0,
        shown="1 / sqrt(hidden)",
    )
    input_scale: float = option(0.01, "factor of the output of the first, linear layer", above=0.0)
    delta: float | None = option(
        None,
        "after every step no singular value of the candidate's recurrent matrix is above 2 - X",
        convert=real(above=0.0, below=2.0),  # not none, which would mean the default
        shown="0.2 without --clip",
        basic=True,
    )
    clip: float | None = option(None, "clip the norm of the whole gradient; none: no clipping", above=0.0, basic=True)
    bias: bool = option(True, "use a readout without bias")
    batch: int = option(20, "sequences per batch", basic=True)
    window: int = option(35, "time steps of back-propagation; the state is carried to the next window", basic=True)
    lr: float = option(1.0, "learning rate", above=0.0, basic=True)
    checkpoint_every: int = 500
    diagnose_every: int = 50

    def complete(self) -> None:
        super().complete()
        self.fill(init_std=1.0 / math.sqrt(self.hidden))
        if self.clip is None:
            self.fill(delta=0.2)


def build_gru(inputs: int, settings: GruOptions) -> nn.Module:
    """Builds the GRU of the settings, initialised as in section 4.1 of the paper."""
    layers = settings.layers
    dropout = settings.dropout if layers > 1 else 0.0  # the task applies dropout to the output of the last layer
    options: dict[str, Any] = {"init": "kanai", "init_std": settings.init_std, "backend": settings.backend}
    return GRU(inputs, settings.hidden, layers, bias=False, dropout=dropout, variant=settings.variant, **options)


class GruTask(DataTask):
    """A GRU whose state is carried from batch to batch. Expects complete settings.

    A subclass sets up its data, calls `build`, and defines `read`, which returns a batch, and `held_out`, for
    evaluations. The model is a module with `rnn` (a GRU) and the call

        model(inputs [T, B, ...], targets [T, B, ...], valid [T, B] bool or None, h0 [layers, B, N])
            -> (negative log-likelihood, the sum over all valid steps of all rows, 0-dim; h_T)

    The training loss is the mean over the batch of the sum over the steps of a window. The norms of its gradient can
    therefore be compared with the clipping thresholds of the paper. In the records it is "loss"; the mean over steps is
    "nll".

    A run is a success, as defined in section 4.1 of the paper, if the validation loss after every epoch is at most that
    of the untrained model.
    """

    settings: GruOptions
    unit = "step"  # the loss is given per unit
    TITLE: tuple[str, ...] = ("layers", "hidden", "delta", "clip")
    STATE: tuple[str, ...] = ("initial_loss", "worst_loss", "state", "projection")

    def __init__(self, settings: GruOptions) -> None:
        super().__init__(settings)
        self.time_steps = settings.window
        self.state: Tensor | None = None  # [layers, B, N]
        self.initial_loss: float | None = None  # on the validation data, before training
        self.worst_loss = -math.inf  # on the validation data, after any epoch so far

    def build(self, model: nn.Module) -> None:
        """Registers the model and creates its optimizer, with the projection attached."""
        settings = self.settings
        self.loss_label = f"nats per {self.unit}"
        self.model = model.to(self.device)
        self.rnn: nn.Module = model.get_submodule("rnn")
        self.optimizer = optimizer_for(self.model, lr=settings.lr, euclidean=torch.optim.SGD)
        self.projection: SpectralNormProjection | None = None
        if settings.delta is not None:
            self.projection = SpectralNormProjection(self.model, settings.delta)
            self.projection.attach(self.optimizer)

    def zero_state(self, batch: int) -> Tensor:
        """[layers, batch, N]."""
        return torch.zeros(self.settings.layers, batch, self.settings.hidden, device=self.device)

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The next window: inputs, targets, valid (None: all steps are valid) and fresh, the rows that start from a
        zero state: [B] bool, or [] for all rows."""

    @abstractmethod
    def held_out(self, part: str) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        """The windows of "validation" or "test": inputs, targets, valid, and whether all rows start from a zero state.
        Otherwise they continue the first rows of the previous window."""

    def measure(self, part: str) -> dict[str, float]:
        """The mean negative log-likelihood per step, "loss"."""
        total, steps, state = 0.0, 0, self.zero_state(0)
        for inputs, targets, valid, fresh in self.in_time(self.held_out(part)):
            rows = inputs.shape[1]
            loss, state = self.model(inputs, targets, valid, self.zero_state(rows) if fresh else state[:, :rows])
            total += loss.item()
            steps += int(valid.sum())
        return {"loss": total / steps}

    def begin(self) -> None:
        """Evaluate the untrained model, unless the run was resumed."""
        if self.initial_loss is not None:
            return
        say("evaluating the untrained model, before iteration 1")
        self.model.eval()
        with torch.no_grad():
            self.initial_loss = self.measure("validation")["loss"]
        self.model.train()

    def next_batch(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        inputs, targets, valid, fresh = self.read()
        if self.state is None:
            self.state = self.zero_state(inputs.shape[1])
        return inputs, targets, valid, self.state.masked_fill(fresh.view(1, -1, 1), 0.0)

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, _, valid, _ = batch
        total, state = self.model(*batch)
        self.state = state.detach()
        steps = inputs.shape[0] * inputs.shape[1] if valid is None else valid.sum()
        return total / inputs.shape[1], {"nll": total.detach() / steps}

    def evaluate(self, iteration: int) -> dict[str, float]:
        """On the validation data: the values of `measure`, "initial_loss" (of the untrained model), and "success" (1 if
        no loss so far was above the initial loss, else 0)."""
        result, initial = super().evaluate(iteration), self.initial_loss
        assert initial is not None  # since begin
        worst = math.inf if math.isnan(result["loss"]) else max(self.worst_loss, result["loss"])
        if self.wants_evaluation(iteration, {}):  # not in the last iteration of a run, within an epoch
            self.worst_loss = worst
        return {**result, "initial_loss": initial, "success": float(worst <= initial)}

    def diagnose(self) -> dict[str, Any]:
        """Spectral radius of the Jacobian at h = 0 and norm of the recurrent matrix, per layer; the learning rate;
        and the number of projections that changed a matrix."""
        result: dict[str, Any] = {**diagnose_stability(self.rnn), "lr": self.optimizer.param_groups[0]["lr"]}
        if self.projection is not None:
            result["projection"] = dict(self.projection.counts)
        return result

    def progress_text(self, metrics: dict[str, Any]) -> str:
        return f"{metrics['nll']:.3f} nats per {self.unit}, gradient {metrics['grad_norm']:.3g}"

    def result_text(self, evaluation: dict[str, float]) -> str:
        verdict = "" if evaluation["success"] else " (no success: the loss has exceeded that of the untrained model)"
        return f"validation: {self.loss_text(evaluation['loss'])}{verdict}"

    def loss_text(self, loss: float) -> str:
        """The text of a validation loss."""
        return f"{loss:.4f} nats per {self.unit}"
