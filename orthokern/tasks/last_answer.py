"""The common part of temporal_order and random_permutation, in which a network reads symbols and outputs a class after
the last one (Hochreiter & Schmidhuber 1997; Manchev & Spratling, section III-A)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.data import RandomPermutationTask, TemporalOrderTask
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks.network import build_recurrence, last_output
from orthokern.tasks.recurrent import DrawnOptions, DrawnTask, StartOptions, start_normal, start_recurrence
from orthokern.training.options import option

SHORT_EVALUATIONS = (
    "end an evaluation as soon as the goal can no longer be reached: the record then has the loss and accuracy of "
    "the sequences so far"
)


@dataclass(kw_only=True)
class LastAnswerOptions(StartOptions, DrawnOptions):
    """The settings of a task with one answer per sequence.

    A linear network with W = I adds up its inputs. Input weights start near zero, so that the symbols without meaning
    add little noise to the state, and the weights of the symbols that determine the answer grow first. The bases then
    rotate as far as the order of the symbols requires.
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
    """A task with one answer per sequence, for the training loop. Expects complete settings."""

    settings: LastAnswerOptions

    def __init__(self, data: TemporalOrderTask | RandomPermutationTask, settings: LastAnswerOptions) -> None:
        super().__init__(data, settings)
        self.goal = settings.goal / 100.0
        self.build(LastAnswerModel(data.num_features, data.num_classes, settings))

    def needed(self) -> float | None:
        return self.settings.goal if self.settings.short_evaluations else None

    def result_text(self, evaluation: dict[str, float]) -> str:
        return f"{100 * evaluation['accuracy']:.2f} % of new sequences answered correctly"
