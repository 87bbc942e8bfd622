"""The common part of temporal_order and random_permutation, in which a network reads symbols and outputs a class after
the last one (Hochreiter & Schmidhuber 1997; Manchev & Spratling, section III-A)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.commandline import Settings
from orthokern.data import RandomPermutationTask, TemporalOrderTask
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks import recurrent
from orthokern.tasks.network import build_recurrence, last_output
from orthokern.tasks.recurrent import DrawnOptions, DrawnTask, StartOptions, start_normal, start_recurrence
from orthokern.training.cli import TaskCommand
from orthokern.training.options import option

SHORT_EVALUATIONS = (
    "end an evaluation as soon as the goal can no longer be reached: the record then has the loss and accuracy of "
    "the sequences so far"
)


@dataclass(kw_only=True)
class LastAnswerOptions(StartOptions, DrawnOptions):
    """The settings of a task with one answer per sequence.

    A linear network with W = I adds up its inputs. Input weights start near zero, so that the symbols without meaning
    add little noise to the state, and those of the symbols that decide the answer grow first. The bases then turn as
    far as the order of the symbols requires.
    """

    GROUP = "the task"
    T: int = option(100, "symbols in a sequence", low=2, basic=True)
    goal: float = option(100.0, "percentage of new sequences to answer correctly", low=0.0, high=100.0, basic=True)
    short_evaluations: bool = option(False, SHORT_EVALUATIONS)
    eval_sequences: int = 10_000
    margin: float | None = 0.01
    nonlinearity: str = "identity"
    init: str = "identity"
    start: str = "small"
    geodesic_lr: float = 1e-3
    clip: float | None = 1.0
    iterations: int = 20_000


# Manchev and Spratling, section III-A: 100 tanh units, batches of 20, SGD, up to 100 000 iterations, a test on 10 000
# sequences every 100 iterations; every matrix Glorot-uniform. The rates are those of their Table I for temporal order.
PAPER: Settings = {"model": "rnn", "hidden": 100, "init": "glorot-uniform", "start": "glorot", "batch": 20}
PAPER |= {"nonlinearity": "tanh", "optimizer": "sgd", "momentum": 0.0, "clip": None, "iterations": 100_000}

PRESETS: dict[str, Settings] = {
    "srnn": {**PAPER, "lr": 0.01},
    # the penalties in the tables of the paper are for the norm, not for its square as in the text
    "open": {**PAPER, "lr": 0.001, "soft_orthogonality": 1.0, "soft_orthogonality_norm": "plain"},
    "oinit": {**PAPER, "lr": 1e-4, "init": "learned", "start": "learned"},
}
PRESET_HELP = {
    "srnn": "the plain network of Manchev and Spratling",
    "open": "theirs with a penalty",
    "oinit": "theirs with every matrix made orthogonal before; each with the paper's rate for temporal order",
}


def out_of_reach(right: int, done: int, count: int, goal: float) -> bool:
    """Whether `goal` percent correct of `count` answers are impossible, given that `right` of `done` were correct."""
    return 100.0 * (right + count - done) < goal * count


class LastAnswerModel(nn.Module):
    """A recurrence and a readout of its last state.

    Args:
        features: number of input features; classes: number of classes; settings: complete.
    """

    def __init__(self, features: int, classes: int, settings: StartOptions) -> None:
        super().__init__()
        self.rnn = build_recurrence(features, settings)
        self.readout = LinearCrossEntropy(settings.hidden, classes, device=settings.device, backend=settings.backend)
        start_recurrence(self.rnn, settings)
        with torch.no_grad():
            self.start_readout(settings)
            self.readout.get_parameter("bias").zero_()
        start_normal(self.rnn, self.readout, settings)

    def start_readout(self, settings: StartOptions) -> None:
        """Initialises the weight of the readout."""
        (init.learned_ if settings.start == "learned" else init.glorot_uniform_)(self.readout.weight)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """inputs [T, B, features] float32, targets [B] int64 -> cross-entropy in nats (0-dim), "accuracy" (0-dim)."""
        last = last_output(self.rnn, inputs)
        with torch.no_grad():
            right = self.readout(last.detach()).argmax(-1) == targets
        return self.readout.loss(last, targets), {"accuracy": right.double().mean()}


class LastAnswer(DrawnTask):
    """A task with one answer per sequence, for the training loop; settings as DEFAULTS, complete."""

    settings: LastAnswerOptions
    iterations_per_epoch = None

    def __init__(self, data: TemporalOrderTask | RandomPermutationTask, settings: LastAnswerOptions) -> None:
        super().__init__(data, settings, classes=data.num_classes)
        self.goal = settings.goal / 100.0
        self.build(LastAnswerModel(data.num_features, data.num_classes, settings))

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        every = self.settings.eval_every
        return every > 0 and iteration % every == 0

    def settled(self, right: int, done: int) -> bool:
        settings = self.settings
        return settings.short_evaluations and out_of_reach(right, done, settings.eval_sequences, settings.goal)

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        return 100.0 * evaluation["accuracy"] >= self.settings.goal

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        done = f"iteration {iteration}, {seconds:.1f} s"
        goal = f"goal {self.settings.goal:g} %"
        if evaluation is None:
            return f"not solved ({goal}): {done}"
        result = f"{100 * evaluation['accuracy']:.2f} % of new sequences answered correctly ({goal})"
        return f"{'solved' if reached else 'not solved'}: {result}, {done}"


def last_answer_command(
    name: str, description: str, examples: str, *, options: type[LastAnswerOptions], build: Callable[[Any], LastAnswer]
) -> TaskCommand[Any]:
    """The command line of a task with one answer per sequence, with the presets of all of them."""
    complete = functools.partial(recurrent.complete, options)
    return TaskCommand(name, description, examples, options, complete, build, PRESETS, PRESET_HELP)
