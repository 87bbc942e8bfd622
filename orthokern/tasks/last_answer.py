"""What the tasks share in which a network reads symbols and names a class after the last one: temporal_order and
random_permutation (Hochreiter & Schmidhuber 1997; Manchev & Spratling, section III-A)."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.commandline import Parser, Settings, integer, one_of, real
from orthokern.data import RandomPermutationTask, TemporalOrderTask
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks import recurrent
from orthokern.tasks.memory import check_recurrent
from orthokern.tasks.network import add_network_options, build_recurrence
from orthokern.tasks.optimization import add_optimizer_options
from orthokern.tasks.recurrent import STARTS, DrawnTask, start_normal, start_recurrence
from orthokern.training import cli

__all__ = ["DEFAULTS", "PAPER", "PRESETS", "LastAnswer", "add_short_evaluations", "make_parser", "out_of_reach"]


DEFAULTS: Settings = {
    **recurrent.DEFAULTS,
    "T": 100,
    "margin": 0.01,
    "start": "glorot",
    "lr": 1e-3,
    "geodesic_lr": 1e-3,
    "clip": 1.0,
    "iterations": 20_000,
    "goal": 100.0,
    "eval_every": 100,
    "eval_sequences": 10_000,
    "short_evaluations": False,
    "sigma": None,
}

# Manchev and Spratling, section III-A: 100 tanh units, batches of 20, SGD, up to 100 000 iterations, every 100 of them
# a test on 10 000 sequences; every matrix Glorot-uniform. The rates are those of their Table I for temporal order.
PAPER: Settings = {
    "model": "rnn",
    "hidden": 100,
    "init": "glorot-uniform",
    "start": "glorot",
    "batch": 20,
    "optimizer": "sgd",
    "momentum": 0.0,
    "clip": None,
    "iterations": 100_000,
}

PRESETS: dict[str, Settings] = {
    "srnn": {**PAPER, "lr": 0.01},
    # the strengths of the paper's tables are for the norm, not for its square as in its text
    "open": {**PAPER, "lr": 0.001, "soft_orthogonality": 1.0, "soft_orthogonality_norm": "plain"},
    "oinit": {**PAPER, "lr": 1e-4, "init": "learned", "start": "learned"},
}
PRESET_HELP = {
    "srnn": "the plain network of Manchev and Spratling",
    "open": "theirs with a penalty",
    "oinit": "theirs with every matrix made orthogonal before; each with the paper's rate for temporal order",
}


def out_of_reach(right: int, done: int, count: int, goal: float) -> bool:
    """Whether `goal` percent of `count` answers can't be right any more after `right` of `done` were."""
    return 100.0 * (right + count - done) < goal * count


def add_short_evaluations(group: argparse._ArgumentGroup) -> None:
    """Adds --short-evaluations."""
    group.add_argument(
        "--short-evaluations", action="store_true",
        help="end an evaluation as soon as so many answers are wrong that the goal is out of reach: it then tells the "
        "loss and accuracy of the sequences so far",
    )  # fmt: skip


class LastAnswerModel(nn.Module):
    """A recurrence and a readout of its last state.

    Args:
        features: per time step; classes: to choose from; settings: as DEFAULTS, complete.
    """

    def __init__(self, features: int, classes: int, settings: Settings) -> None:
        super().__init__()
        self.rnn = build_recurrence(features, settings)
        self.readout = LinearCrossEntropy(
            settings["hidden"], classes, device=settings["device"], backend=settings["backend"]
        )
        start_recurrence(self.rnn, settings)
        with torch.no_grad():
            (init.learned_ if settings["start"] == "learned" else init.glorot_uniform_)(self.readout.weight)
            self.readout.get_parameter("bias").zero_()
        start_normal(self.rnn, self.readout, settings)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """inputs [T, B, features] float32, targets [B] int64 -> cross-entropy in nats (0-dim), "accuracy" (0-dim)."""
        states, _ = self.rnn(inputs)
        last = states[-1]
        with torch.no_grad():
            right = self.readout(last.detach()).argmax(-1) == targets
        return self.readout.loss(last, targets), {"accuracy": right.double().mean()}


class LastAnswer(DrawnTask):
    """Such a task for the training loop; settings as DEFAULTS, complete."""

    iterations_per_epoch = None

    def __init__(self, data: TemporalOrderTask | RandomPermutationTask, settings: Settings) -> None:
        check_recurrent(
            settings,
            data.num_features,
            data.num_classes,
            steps=data.length,
            features=data.num_features,
            evaluated=self.evaluation_batch(settings),
        )
        super().__init__(data, settings, classes=data.num_classes)
        self.goal = settings["goal"] / 100.0
        self.build(LastAnswerModel(data.num_features, data.num_classes, settings))

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        every = self.settings["eval_every"]
        return every > 0 and iteration % every == 0

    def settled(self, right: int, done: int) -> bool:
        settings = self.settings
        return settings["short_evaluations"] and out_of_reach(right, done, settings["eval_sequences"], settings["goal"])

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        return 100.0 * evaluation["accuracy"] >= self.settings["goal"]

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        done = f"iteration {iteration}, {seconds:.1f} s"
        goal = f"goal {self.settings['goal']:g} %"
        if evaluation is None:
            return f"not solved ({goal}): {done}"
        result = f"{100 * evaluation['accuracy']:.2f} % of fresh sequences answered right ({goal})"
        return f"{'solved' if reached else 'not solved'}: {result}, {done}"


def make_parser(name: str, description: str, epilog: str, shortest: int, defaults: Settings) -> tuple[Parser, Any]:
    """The command line of such a task.

    Args:
        name: the module's; description, epilog: of the help; shortest: the least T; defaults: the task's.

    Returns:
        The parser and its group for the task's own options.
    """
    parser = Parser(prog=f"python -m orthokern.tasks.{name}", description=description, epilog=epilog)
    group = parser.add_argument_group("the task")
    group.add_argument(
        "--T", type=integer(shortest), metavar="N", help=f"symbols in a sequence (default {defaults['T']})"
    )
    group.add_argument(
        "--goal", type=real(0.0, maximum=100.0), metavar="X",
        help="percentage of new sequences to answer correctly (default 100)",
    )  # fmt: skip
    group.add_argument(
        "--eval-every", type=integer(0), metavar="N", help="evaluate every N iterations, 0 for never (default 100)"
    )
    group.add_argument(
        "--eval-sequences", type=integer(1), metavar="N", help="new sequences per evaluation (default 10000)"
    )
    add_short_evaluations(group)
    group.add_argument("--start", type=one_of("start", STARTS), metavar="NAME", help=recurrent.start_help("glorot"))
    recurrent.add_sigma(parser, group)
    add_network_options(parser, defaults)
    add_optimizer_options(parser, defaults, PRESET_HELP)
    cli.add_run_options(parser, defaults)
    return parser, group
