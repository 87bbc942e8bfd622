"""The common part of the tasks with one recurrent network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.data._generator import Generator
from orthokern.diagnostics import diagnose_recurrence
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, NonNormalRNN
from orthokern.penalties import OrthogonalPenalty
from orthokern.tasks.epochs import Experiment, stream_seed
from orthokern.tasks.network import GATED
from orthokern.tasks.optimization import OptimizerOptions, build_optimizer, penalty
from orthokern.training.options import changed, option

STARTS = ("torch", "small", "glorot", "glorot-normal", "learned")
START_HELP = (
    "input weights: torch: as in torch.nn.RNN; small: U(-0.01, 0.01), biases 0, as the paper's released code; "
    "glorot, glorot-normal: Glorot-uniform or -normal, biases 0; learned: as --init learned, biases 0, and the "
    "readout in some tasks; an lstm or a gru starts as in torch, with biases 0, and a forget bias of 1"
)


@dataclass(kw_only=True)
class StartOptions(OptimizerOptions):
    """The initialisation of the weights other than the recurrent matrix."""

    GROUP = "the task"
    start: str = option("torch", START_HELP, choices=STARTS)
    sigma: float | None = option(
        None,
        "draw all matrices from a normal distribution of standard deviation X instead of by --init and --start, "
        "biases 0; a matrix whose --init or --start is learned is then made orthogonal; none: by --init and --start",
        above=0.0,
        only={"model": ("rnn",)},
    )


@dataclass(kw_only=True)
class DrawnOptions(OptimizerOptions):
    """The settings of a task whose sequences are generated."""

    GROUP = "the task"
    T: int = 1000  # declared by each task, because T has a different meaning in each
    eval_every: int = option(100, "evaluate every N iterations, 0 for never", low=0)
    eval_sequences: int = option(
        200, "new sequences per evaluation; `copy` ends an evaluation once the goal can no longer be reached"
    )
    goal: float = 100.0  # declared by each task, a percentage in most
    iterations: int = changed(
        OptimizerOptions, "iterations", help="stop after N iterations, even if the task is not solved"
    )


@torch.no_grad()
def start_normal(rnn: nn.Module, readout: nn.Module, settings: StartOptions) -> None:
    """If "sigma" is set, redraws the matrices of a plain recurrence and of its readout from N(0, sigma), and sets the
    biases to 0. Matrices with the start "learned" are then made orthogonal (Manchev and Spratling, sections III-B and
    II-A)."""
    sigma = settings.sigma
    if sigma is None:
        return
    for weight, how in (
        (rnn.get_parameter("weight_hh_l0"), settings.init),
        (rnn.get_parameter("weight_ih_l0"), settings.start),
        (readout.get_parameter("weight"), settings.start),
    ):
        if how == "learned":
            init.learned_(weight, std=sigma)
        else:
            init.normal_(weight, sigma)
    for module in (rnn, readout):
        for name, parameter in module.named_parameters():
            if name.startswith("bias"):
                parameter.zero_()


@torch.no_grad()
def start_recurrence(rnn: nn.Module, settings: StartOptions) -> None:
    """Redraws the input weights and sets biases to 0, unless start is "torch" or the network has gates."""
    if settings.start == "torch" or settings.model in GATED:
        return
    weight = rnn.get_parameter("weight_ih_l0")
    if settings.start == "small":
        weight.copy_(torch.empty(weight.shape).uniform_(-0.01, 0.01))
    else:
        starts = {"learned": init.learned_, "glorot": init.glorot_uniform_, "glorot-normal": init.glorot_}
        starts[settings.start](weight)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):
            parameter.zero_()


class RecurrentTask(Experiment):
    """A recurrence and a readout, trained together.

    A subclass sets up its data, then calls `build`. `model` is a module with `rnn` and `readout`. Its forward takes a
    batch, and returns the loss and further numbers as `Task.loss` does.
    """

    model: nn.Module
    settings: OptimizerOptions
    loss_label = "cross-entropy (nats)"
    TITLE: tuple[str, ...] = ("model", "hidden", "margin")

    def build(self, model: nn.Module) -> None:
        """Registers the model and creates its optimizer and schedules."""
        self.rnn: nn.Module = model.get_submodule("rnn")
        self.readout: nn.Module = model.get_submodule("readout")
        self.train_with(model, build_optimizer(self.rnn, self.readout, self.settings))

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.penalized(*super().loss(batch))

    def penalized(self, loss: Tensor, numbers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the penalties of the settings to a loss, and to its numbers."""
        added = penalty(self.rnn, self.readout, self.settings)
        return (loss, numbers) if added is None else (loss + added, {**numbers, "penalty": added.detach()})

    def diagnose(self) -> dict[str, Any]:
        """Numbers about the recurrent matrix, and "lr", the learning rate of the readout. Those of a plain matrix W [N,
        N] include "orthogonality_error_of_w", ||W W^T - I||_F, and "recurrent_grad_norm", the norm of the gradient of
        the whole loss for W, after clipping."""
        rate = next(group["lr"] for group in self.optimizer.param_groups if group["role"] == "readout")
        result: dict[str, Any] = {"lr": rate}
        if isinstance(self.rnn, (RNN, FactorizedRNN, ExpRNN, NonNormalRNN)):
            result |= diagnose_recurrence(self.rnn)
        if isinstance(self.rnn, RNN):
            weight = self.rnn.get_parameter("weight_hh_l0")
            result["orthogonality_error_of_w"] = OrthogonalPenalty(squared=False)(weight.detach()).item()
            if weight.grad is not None:
                result["recurrent_grad_norm"] = torch.linalg.vector_norm(weight.grad).item()
        return result


class DrawnTask(RecurrentTask):
    """A task whose sequences are generated and used once each. A subclass calls `build` after this constructor."""

    settings: DrawnOptions
    TITLE = ("T", *RecurrentTask.TITLE)
    STATE: tuple[str, ...] = ("generator",)

    def __init__(self, data: Generator, settings: DrawnOptions) -> None:
        super().__init__(settings)
        self.drawn = data
        self.baseline = data.baseline
        self.time_steps = data.length
        self.answers: int = getattr(data, "recall", 1)  # in a sequence
        self.generator = torch.Generator().manual_seed(stream_seed(settings.seed, "train"))
        data.batch(settings.batch, torch.Generator())  # raises before the run starts if there is no memory for it

    def next_batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self.drawn.batch(self.settings.batch, self.generator)
        return inputs.to(self.device), targets.to(self.device)

    def held_out(self, iteration: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """New batches of `size` sequences. An iteration always gets the same batches."""
        generator = torch.Generator().manual_seed(stream_seed(self.settings.seed, f"held-out {iteration}"))
        while True:
            inputs, targets = self.drawn.batch(size, generator)
            yield inputs.to(self.device), targets.to(self.device)

    def evaluate(self, iteration: int) -> dict[str, float]:
        """The mean "loss" and the "accuracy" (a fraction) on "eval_sequences" new sequences, or on fewer if `settled`
        ends the evaluation; and the number of these "sequences"."""
        count, size = self.settings.eval_sequences, self.evaluation_batch()
        loss, right, done = 0.0, 0, 0
        for inputs, targets in self.in_time(self.held_out(iteration, size)):
            rows = min(size, count - done)
            batch_loss, numbers = self.model(inputs[:, :rows], targets[..., :rows])
            loss += batch_loss.item() * rows
            right += round(numbers["accuracy"].item() * rows * self.answers)
            done += rows
            if done == count or self.settled(right, done):
                break
        return {"loss": loss / done, "accuracy": right / (done * self.answers), "sequences": done}

    def evaluation_batch(self) -> int:
        """Sequences of an evaluation that are read together; limited by the memory of their states."""
        return min(250, self.settings.eval_sequences)

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        every = self.settings.eval_every
        return every > 0 and iteration % every == 0

    def needed(self) -> float | None:
        """The percentage of correct answers that a useful result needs. An evaluation ends as soon as it can no longer
        be reached. Default: None, for a whole evaluation."""
        return None

    def settled(self, right: int, done: int) -> bool:
        """Whether an evaluation may end after `done` sequences with `right` correct answers."""
        count, needed = self.settings.eval_sequences * self.answers, self.needed()
        return needed is not None and not self.reaches((right + count - done * self.answers) / count, needed)

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        return self.reaches(evaluation["accuracy"], self.settings.goal)

    def goal_text(self) -> str:
        """The goal in the summary."""
        return f"goal {self.settings.goal:g} %"

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        done, goal = f"iteration {iteration}, {seconds:.1f} s", f"({self.goal_text()})"
        if evaluation is None:
            return f"not solved {goal}: {done}"
        return f"{'solved' if reached else 'not solved'}: {self.result_text(evaluation)} {goal}, {done}"
