"""The copy task: `python -m orthokern.tasks.copy --T 10000`.

A recurrent network reads ten symbols from an alphabet of eight, then blanks, and a marker after T steps. It must then
output the ten symbols in order (Vorontsov et al. 2017, section 3.1.1; data of `orthokern.data.CopyTask`). The best
guess without memory has a loss of 10 ln 8 / (T + 20) nats per step, the "baseline". The task is solved if the recall
accuracy on new sequences is at least --goal %. By default the network is factorized and has no non-linearity.

Note [Settings that solve it in a hundred iterations]
    The hyper-parameters of the paper (`--preset paper`) take small steps from a random start. The defaults differ in
    the initial values and in the learning rates:
    - The readout is initialised to zero. The input column of the blank is zero and is not trained: the state then
      depends on the symbols alone, and the first gradient that reaches the recurrence is not noise. With any other
      value, the blank is added to the state in T steps; if it is trained, T = 1000 takes twice as many iterations. The
      other input columns are drawn from N(0, 2 / (N + ids)). With `--learn-blank` the column of the blank is drawn and
      trained like the others.
    - The output bias of the blank is initialised to the log-odds of blank and symbol, 9.0 at T = 10 000. Otherwise a
      large part of the training is needed to learn how often the target is blank.
    - RMSprop with a rate of 2e-2 for the readout and 1e-3 for the input table; all rates decrease as
      1 / (1 + 0.005 iteration).
    - The rate of the spectrum is 0.02 / T (1e-3 on p for a margin of 0.001 at T = 10 000). A step of RMSprop changes s
      by a quarter of the rate, and s is applied T times. A hundred steps of the same sign therefore change the signal
      by a factor of at most exp(100 T 0.005 / T) = 1.6. With a rate of 1e-3 all s would reach the margin in ten
      iterations, and 1.001^10000 is 22 000.
    - Bases: geodesic steps with a rate of 0.01 / T; the joint norm of their gradients is clipped to 1.
    With Haar-random U and V the eigenvalues of W are spread evenly over the unit circle. The ten symbols, which are
    read at different distances from the recall, are then stored along nearly orthogonal directions, and training the
    readout and the input table is enough to solve the task. With fixed bases (`--geodesic-lr 0`) or without clipping,
    the number of iterations at T = 1000 is the same: in this task the geodesic steps are not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.data import CopyTask
from orthokern.errors import InputError
from orthokern.init import glorot_
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, LinearCrossEntropy, NonNormalRNN
from orthokern.tasks.command import task_command
from orthokern.tasks.network import build_recurrence
from orthokern.tasks.recurrent import DrawnOptions, DrawnTask
from orthokern.training.options import changed, option

EVALUATION_STEPS = 500_000  # time steps times sequences that an evaluation reads together
RECURRENCES = (RNN, ExpRNN, FactorizedRNN, NonNormalRNN)  # modules with a `loss` method
GEODESIC_RATE_TIMES_T, LARGEST_GEODESIC_RATE = 1e-2, 1e-4
SPECTRUM_RATE_TIMES_T, LARGEST_SPECTRUM_RATE = 2e-2, 1e-3


@dataclass(kw_only=True)
class CopyOptions(DrawnOptions):
    """The settings of the copy task."""

    GROUP = "the task"
    T: int = option(1000, "steps between symbols and recall", basic=True)
    input: str = option(
        "onehot",
        "onehot: ten input units; scalar: one number, the value of the symbol, 0 for the blank",
        choices=("onehot", "scalar"),
    )
    marker: float = option(-1.0, "value of the marker: -1 or 9 in released codes", only={"input": ("scalar",)})
    goal: float = option(
        99.9,
        "recall accuracy on new sequences at which training ends",
        above=0.0,
        high=100.0,
        metavar="PERCENT",
        basic=True,
    )
    start: str = option(
        "zero",
        "zero: readout of zeros, bias of the blank at its log-odds; random: as in the paper; glorot-normal: input "
        "weights and readout Glorot-normal",
        choices=("zero", "random", "glorot-normal"),
    )
    algorithm: str = option(
        "auto",
        "modal: in the eigenbasis of W, for nonlinearity identity; sequential: step by step; auto: modal if it is "
        "faster and as accurate",
        choices=("auto", "modal", "sequential"),
    )
    learn_blank: bool = option(
        False,
        "initialise and train the input column of the blank like the others (default: fixed at zero with --start zero)",
        only={"input": ("onehot",)},
    )
    nonlinearity: str = "identity"
    margin: float | None = 0.001
    lr: float = 2e-2
    input_lr: float | None = changed(DrawnOptions, "input_lr", default=1e-3, shown=None)
    spectrum_lr: float | None = changed(DrawnOptions, "spectrum_lr", shown="by T")
    geodesic_lr: float = changed(DrawnOptions, "geodesic_lr", default=None, shown="by T")
    schedule: str = "inverse"
    lr_decay: float = 0.005
    basis_clip: float | None = 1.0
    iterations: int = 5000

    def complete(self) -> None:
        if vars(self)["margin"] == "by T":
            # Figure 1, at the paper's rates: wide margins learn faster up to T = 1000, and not at all at T = 10000
            self.margin = 0.1 if self.T <= 2000 else 0.001
        self.fill(
            geodesic_lr=min(GEODESIC_RATE_TIMES_T / self.T, LARGEST_GEODESIC_RATE),
            spectrum_lr=min(SPECTRUM_RATE_TIMES_T / self.T, LARGEST_SPECTRUM_RATE),
        )
        super().complete()


class CopyModel(nn.Module):
    """A recurrence and a readout.

    The recurrence has no bias: the blank is the token of nearly every step, so that its input column acts as a bias.

    Args:
        data: the task.
        settings: complete.
    """

    def __init__(self, data: CopyTask, settings: CopyOptions) -> None:
        super().__init__()
        self.data = data
        hidden = settings.hidden
        inputs, classes = data.num_ids if settings.input == "onehot" else 1, data.num_classes
        self.marker = settings.marker if settings.input == "scalar" else None
        self.algorithm = settings.algorithm
        self.rnn = build_recurrence(inputs, settings, bias=False)
        self.readout = LinearCrossEntropy(hidden, classes, device=settings.device, backend=settings.backend)
        table = self.rnn.get_parameter("weight_ih_l0")
        bias = self.readout.get_parameter("bias")
        # Drawn on the CPU, so that a seed gives the same model on every device.
        with torch.no_grad():
            nn.init.zeros_(bias)
            if settings.start == "zero":
                table.copy_(torch.randn(table.shape) * math.sqrt(2.0 / (hidden + classes + 1)))
                if silent_blank(settings):
                    table[:, 0] = 0.0
                nn.init.zeros_(self.readout.weight)
                # The log-odds of the blank against any one symbol, by their frequencies as targets.
                bias[0] = math.log((data.length - data.recall) * data.symbols / data.recall)
            elif settings.start == "glorot-normal":
                table.copy_(glorot_(torch.empty(table.shape)))
                self.readout.weight.copy_(glorot_(torch.empty(self.readout.weight.shape)))
            else:
                table.copy_(torch.empty(table.shape).uniform_(-0.01, 0.01))
                self.readout.weight.copy_(nn.init.xavier_uniform_(torch.empty(self.readout.weight.shape)))

    def inputs(self, tokens: Tensor) -> Tensor:
        """The input of the recurrence: ids [T, B], or features [T, B, D]."""
        return tokens if self.marker is None else self.data.scalar(tokens, self.marker)

    def states(self, tokens: Tensor) -> Tensor:
        """[T, B] -> [T, B, N]."""
        x = self.inputs(tokens)
        states: Tensor = self.rnn(x if x.is_floating_point() else x.long())[0]
        return states

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """tokens, targets [T, B] -> the loss over all steps (0-dim, nats per step), and the "accuracy" of the recall
        (0-dim float64)."""
        recall = self.data.recall
        if isinstance(self.rnn, RECURRENCES):
            loss, hits = self.rnn.loss(self.inputs(tokens), self.readout, targets, algorithm=self.algorithm)
            right = hits[-recall:].sum()
        else:
            states, targets = self.states(tokens), targets.long()
            loss = self.readout.loss(states, targets)
            with torch.no_grad():
                right = (self.readout(states[-recall:].detach()).argmax(-1) == targets[-recall:]).sum()
        return loss, {"accuracy": right.double() / (recall * tokens.shape[1])}


def silent_blank(settings: CopyOptions) -> bool:
    """Whether the input column of the blank is fixed at zero: Note [Settings that solve it in a hundred iterations].
    In scalar input the blank is 0."""
    return settings.start == "zero" and settings.input == "onehot" and not settings.learn_blank


class CopyExperiment(DrawnTask):
    """The copy task for the training loop. Expects complete settings."""

    name = "copy"
    model: CopyModel
    settings: CopyOptions
    loss_label = "cross-entropy (nats per time step)"
    iterations_per_epoch = 100  # the paper's epoch, section 3.1

    def __init__(self, settings: CopyOptions) -> None:
        self.data = CopyTask(settings.T, dtype=torch.uint8)
        classes = self.data.num_classes
        super().__init__(self.data, settings)
        self.goal = settings.goal / 100.0
        self.build(CopyModel(self.data, settings))

        self.way = ("sequential", "")
        if isinstance(self.rnn, RECURRENCES):  # raises if "modal" is requested and not possible
            sizes = self.time_steps, settings.batch, classes
            call: dict[str, Any] = {"ids": settings.input == "onehot", "algorithm": settings.algorithm}
            self.way = self.rnn.explain_loss(*sizes, **call)
        elif settings.algorithm == "modal":
            raise InputError(f"--algorithm modal: not for --model {settings.model}")

    def headline(self) -> str:
        name, why = self.way
        return f"; algorithm {name} ({why})" if why else f"; algorithm {name}"

    def last_step_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return self.model.readout.loss(self.model.states(tokens)[-1], targets[-1].long())

    def clip_gradients(self) -> None:
        if silent_blank(self.settings):
            blank = self.rnn.get_parameter("weight_ih_l0").grad
            if blank is not None:
                # the input column of the blank stays zero: Note [Settings that solve it in a hundred iterations]
                blank[:, 0] = 0.0
        super().clip_gradients()

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """Evaluate if a training batch (which is new data too) reaches the goal, and every "eval_every" iterations."""
        return self.reaches(metrics["accuracy"], self.settings.goal) or super().wants_evaluation(iteration, metrics)

    def evaluation_batch(self) -> int:
        return max(self.settings.batch, EVALUATION_STEPS // self.time_steps)

    def needed(self) -> float:
        return self.settings.goal

    def score(self, evaluation: dict[str, float]) -> float:
        return evaluation["accuracy"]

    def progress_text(self, metrics: dict[str, Any]) -> str:
        return f"{super().progress_text(metrics)}, accuracy {100 * metrics['accuracy']:.1f} %"

    def result_text(self, evaluation: dict[str, float]) -> str:
        return f"recall accuracy {100 * evaluation['accuracy']:.2f} % on {evaluation['sequences']:.0f} fresh sequences"


COMMAND = task_command("copy", CopyOptions, CopyExperiment)
# by T, unless the command line has a margin: `CopyOptions.complete`
COMMAND.presets["paper"]["margin"] = "by T"
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
