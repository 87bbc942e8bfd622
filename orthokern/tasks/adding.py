"""The adding task: `python -m orthokern.tasks.adding --T 1000`.

A recurrent network reads T pairs of a number and a mark, and must output the sum of the two marked numbers (Hochreiter
& Schmidhuber 1997; Vorontsov et al. 2017, section 3.1.1 and Figure 5). The data come from `orthokern.data.AddingTask`.
The best constant answer has a mean squared error of 1/6, the "baseline" of the loss. The task is solved if the error on
new sequences is below --goal or, with --right, if that percentage of them is answered with an error of at most 0.2.

Note [Settings that solve it at any length]
    The last state has to hold two of T numbers and nothing of the other T - 2. The following is expected to prevent
    this, and the defaults avoid it (`--start silent`, "silent" below; docs/results/adding-defaults.md has
    measurements):
    - A unit that keeps its state (an eigenvalue of W at 1) sums its input over T steps. A weight w from the numbers to
      such a unit adds w T / 2 to the state on average, with a standard deviation of w sqrt(T / 12). The gradient of w
      is larger by the same factor than the gradient of a weight that the answer needs, and a step of RMSprop changes
      both equally. Units that remember therefore have no input of their own: their input weights and biases are fixed
      at zero. This is the counterpart of the silent blank of the copy task.
    - The product of number and mark requires a unit that is silent without a mark. The last of every eight units is
      such a gate: with w ~ U(-1, 1) its input is w v + 2 m - 1 - max(w, 0) for number v and mark m, which is at most -1
      for m = 0 and between 0 and 1 for m = 1. The relu is then exactly zero between the marks.
    - The unit before the gate is its sink. W starts as exp(A) P. P rotates the gate into its sink, and the sink into
      the negative gate. A gate therefore receives nothing of its previous value, and two marks in a row are two
      separate numbers. The sink's bias of -3 keeps its output at zero.
    - A[i, k] = -A[k, i] = a / sqrt(6) between a sink k and the six units i of the group that remember. W is orthogonal,
      so the six units receive a fraction sin(a) of the gate, and lose 1 - cos(a) to the sink in every step, T a^2 / 2
      in total. a = 0.5 / sqrt(T) keeps that loss at an eighth.
    - The states are then of order 1 / sqrt(T), and N of them add up in the answer. The readout's rate is
      sqrt(T) / (8 N), so that the number of iterations does not grow with T. A mark at the last step reaches the gates
      only, which happens in 2 / T of the sequences. The readout's noise there grows with its rate, so all rates fall as
      1 / (1 + 0.01 iteration). The readout's bias starts at the mean of the targets.
    - Spectrum, bases and A are applied T times in succession. Their rates are divided by T, as in the copy task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.data import AddingTask
from orthokern.data.adding import POSITIONS, TARGETS
from orthokern.errors import InputError
from orthokern.nn import ExpRNN, FactorizedRNN
from orthokern.tasks.command import task_command
from orthokern.tasks.last_answer import SHORT_EVALUATIONS
from orthokern.tasks.network import EXPONENTIALS, build_recurrence, last_output
from orthokern.tasks.optimization import SCHEDULE_HELP, SCHEDULES
from orthokern.tasks.recurrent import (
    START_HELP,
    STARTS,
    DrawnOptions,
    DrawnTask,
    StartOptions,
    start_normal,
    start_recurrence,
)
from orthokern.training.options import changed, option

# An answer is correct if its error is at most CLOSE: the criterion of Pascanu et al. 2013, a squared error of 0.04.
CLOSE = 0.2

# The settings of Note [Settings that solve it at any length].
SILENT_MODELS = ("factorized", "rnn", "exprnn")
UNITS_PER_GATE = 8  # the units that remember, the sink and the gate
SINK_BIAS = -3.0
ANGLE_TIMES_ROOT_T = 0.5
READOUT_RATE_TIMES_N_BY_ROOT_T = 0.125
INPUT_RATE = RATE = 1e-3
MEAN = {"sum": 1.0, "mean": 0.5}  # of the targets
RATES_TIMES_T = {"geodesic_lr": 1e-2, "spectrum_lr": 2e-2, "skew_lr": 1e-4}
DECAY = 0.01
BATCHES_OF_MEAN = 10  # about this many batches make up the running mean of the error that triggers an evaluation


@dataclass(kw_only=True)
class AddingOptions(StartOptions, DrawnOptions):
    """The settings of the adding task."""

    GROUP = "the task"
    T: int = option(1000, "numbers per sequence", low=2, basic=True)
    target: str = option("sum", "sum or mean of the two numbers", choices=tuple(TARGETS))
    positions: str = option(
        "halves",
        "halves: one mark in each half; pascanu: one in the first tenth, one before the middle",
        choices=tuple(POSITIONS),
    )
    goal: float = option(1e-3, "mean squared error on new sequences at which training ends", low=0.0, basic=True)
    right: float | None = option(
        None,
        f"also solved if this percentage of new sequences has an error of at most {CLOSE:g}; none: only by --goal",
        above=0.0,
        high=100.0,
        metavar="PERCENT",
    )
    short_evaluations: bool = option(False, f"with --right and --goal 0: {SHORT_EVALUATIONS}")
    eval_sequences: int = 2000
    start: str = option(
        "auto",
        "silent: gates that are zero without a mark, and units without input that remember; auto: silent for relu "
        f"and --init identity with --model factorized, rnn or exprnn, else torch. The others: {START_HELP}",
        choices=("auto", "silent", *STARTS),
    )
    nonlinearity: str = "relu"
    init: str = "identity"
    lr: float = changed(
        DrawnOptions,
        "lr",
        default=None,
        help="learning rate of the readout",
        shown=f"by T with the start silent, else {RATE:g}",
    )
    input_lr: float | None = changed(
        DrawnOptions,
        "input_lr",
        help="rate of the recurrent network's other weights",
        shown=f"{INPUT_RATE:g} with the start silent, else as --lr",
    )
    spectrum_lr: float | None = changed(DrawnOptions, "spectrum_lr", shown="by T")
    geodesic_lr: float = changed(DrawnOptions, "geodesic_lr", default=None, shown="by T")
    skew_lr: float | None = changed(DrawnOptions, "skew_lr", shown="by T")
    schedule: str = option(
        "auto",
        f"auto: with the start silent inverse with D = {DECAY:g}, else constant. The others: {SCHEDULE_HELP}",
        choices=("auto", *SCHEDULES),
    )
    lr_decay: float = changed(
        DrawnOptions, "lr_decay", default=None, shown=f"{DECAY:g} with the schedule auto and the start silent, else 0"
    )
    clip: float | None = 1.0
    basis_clip: float | None = 1.0
    iterations: int = 10_000

    def complete(self) -> None:
        possible = self.nonlinearity == "relu" and self.model in SILENT_MODELS and self.hidden > 1
        if self.start == "auto":
            self.start = "silent" if possible and self.init == "identity" and self.sigma is None else "torch"
        silent = self.start == "silent"
        if silent and not possible:
            raise InputError(
                f"--start silent: for --nonlinearity relu, --model {' or '.join(SILENT_MODELS)} and --hidden of at "
                f"least 2, not {self.nonlinearity}, {self.model} and {self.hidden}"
            )
        if silent and self.sigma is not None:
            raise InputError(f"--sigma {self.sigma:g} with --start silent: each sets all weights; give one of the two")
        self.fill(lr_decay=DECAY if silent and self.schedule == "auto" else 0.0)
        if self.schedule == "auto":
            self.schedule = "inverse" if silent else "constant"
        rates = {name: rate / self.T for name, rate in RATES_TIMES_T.items()}
        if self.model not in EXPONENTIALS or not silent:
            del rates["skew_lr"]
        rates["lr"] = READOUT_RATE_TIMES_N_BY_ROOT_T / self.hidden * math.sqrt(self.T) if silent else RATE
        if silent:
            rates["input_lr"] = INPUT_RATE
        self.fill(**rates)
        super().complete()


def gates(hidden: int) -> Tensor:
    """The gates among the units: bool [hidden], the last of every UNITS_PER_GATE, or the last unit if there are
    fewer."""
    unit = torch.arange(hidden, device="cpu") % UNITS_PER_GATE
    return unit == min(UNITS_PER_GATE, hidden) - 1


def sinks(hidden: int) -> Tensor:
    """The sinks among the units, which remove the gates' values: bool [hidden], the units before the gates."""
    return gates(hidden).roll(-1) & ~gates(hidden)


def group_turn(size: int, T: int) -> Tensor:
    """exp(A) P of the Note for one group of units: float64 [size, size], orthogonal, on the CPU."""
    turn = torch.eye(size, dtype=torch.float64, device="cpu")
    turn[-2:, -2:] = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], device="cpu")  # rows and columns: sink, gate
    angles = torch.zeros_like(turn)
    angles[:-2, -2] = ANGLE_TIMES_ROOT_T / math.sqrt(T * (UNITS_PER_GATE - 2))
    return torch.linalg.matrix_exp(angles - angles.mT) @ turn


def logarithm_of_turn(turn: Tensor) -> Tensor:
    """The skew matrix whose exponential is `turn`, a rotation in a three-dimensional subspace (Rodrigues)."""
    cosine = (2.0 - (len(turn) - float(turn.trace()))) / 2.0  # the trace of three dimensions is 1 + 2 cos(angle)
    angle = math.acos(min(cosine, 1.0))
    return (turn - turn.mT) * (0.5 * angle / math.sin(angle) if angle else 0.0)


@torch.no_grad()
def start_silent(rnn: nn.Module, T: int) -> None:
    """Redraws the input weights and biases and turns the recurrent matrix, as the module's Note describes. Draws from
    torch's global generator on the CPU."""
    weight = rnn.get_parameter("weight_ih_l0")
    hidden, gate = len(weight), gates(len(weight))
    number = torch.rand(hidden, device="cpu") * 2 - 1
    columns = torch.stack([number, torch.full_like(number, 2.0)], 1)  # [N, 2]
    weight.copy_(columns * gate.unsqueeze(1))
    biases = [parameter for name, parameter in rnn.named_parameters() if name.startswith("bias")]
    for parameter in biases:  # torch's plain recurrence has two
        parameter.zero_()
    biases[0].copy_((-1.0 - number.clamp(min=0.0)) * gate)

    biases[0][sinks(hidden)] = SINK_BIAS
    turn = group_turn(min(UNITS_PER_GATE, hidden), T)
    groups = hidden // len(turn)
    if isinstance(rnn, ExpRNN):  # W is the exponential of this skew matrix; its lower triangle is used
        skew, turn = rnn.get_parameter("skew_l0"), logarithm_of_turn(turn).tril(-1)
        skew[: groups * len(turn), : groups * len(turn)] += torch.block_diag(*[turn] * groups).to(skew.device)
        return
    turned = rnn.get_parameter("u_l0" if isinstance(rnn, FactorizedRNN) else "weight_hh_l0")
    rest = torch.eye(hidden - groups * len(turn), dtype=turn.dtype, device="cpu")
    turned.copy_(torch.block_diag(*[turn] * groups, rest) @ turned.double().cpu())


class AddingModel(nn.Module):
    """A recurrence and a linear readout of its last state. Expects complete settings."""

    def __init__(self, settings: AddingOptions) -> None:
        super().__init__()
        self.rnn = build_recurrence(2, settings)
        self.readout = nn.Linear(settings.hidden, 1)
        if settings.start == "silent":
            start_silent(self.rnn, settings.T)
        else:
            start_recurrence(self.rnn, settings)
        with torch.no_grad():
            if settings.start == "learned":
                init.learned_(self.readout.weight)
            elif settings.start == "glorot-normal":
                nn.init.xavier_normal_(self.readout.weight)
            else:
                nn.init.xavier_uniform_(self.readout.weight)
            self.readout.bias.fill_(MEAN[settings.target] if settings.start == "silent" else 0.0)
        start_normal(self.rnn, self.readout, settings)
        self.readout.to(settings.device)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """inputs [T, B, 2], targets [B] float32 -> mean squared error (0-dim); "accuracy", the fraction of answers with
        an error of at most CLOSE (0-dim)."""
        error = self.readout(last_output(self.rnn, inputs)).squeeze(-1) - targets
        return error.square().mean(), {"accuracy": (error.detach().abs() <= CLOSE).double().mean()}


class Adding(DrawnTask):
    """The adding task for the training loop. Expects complete settings."""

    name = "adding"
    settings: AddingOptions
    loss_label = "mean squared error"
    iterations_per_epoch = 100  # the paper's epoch, section 3.1
    STATE = (*DrawnTask.STATE, "running_error")

    def __init__(self, settings: AddingOptions) -> None:
        data = AddingTask(settings.T, target=settings.target, positions=settings.positions)
        super().__init__(data, settings)
        self.build(AddingModel(settings))
        self.running_error = self.baseline
        # units, see Note [Settings that solve it at any length]
        self.without_input = ~gates(settings.hidden).to(self.device)

    def clip_gradients(self) -> None:
        if self.settings.start == "silent":
            for name, parameter in self.rnn.named_parameters():
                if name.startswith(("weight_ih", "bias")) and parameter.grad is not None:
                    parameter.grad[self.without_input] = 0.0
        super().clip_gradients()

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """Evaluate if the running mean of the training batches' errors (which are new data too) is below the goal, and
        every "eval_every" iterations. A single batch is often below it by chance."""
        self.running_error += (metrics["loss"] - self.running_error) / BATCHES_OF_MEAN
        return self.running_error < self.settings.goal or super().wants_evaluation(iteration, metrics)

    def needed(self) -> float | None:
        return self.settings.right if self.settings.short_evaluations and self.settings.goal == 0.0 else None

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        right = self.settings.right
        solved = right is not None and self.reaches(evaluation["accuracy"], right)
        return solved or evaluation["loss"] < self.settings.goal

    def goal_text(self) -> str:
        right = self.settings.right
        goal = f"goal {self.settings.goal:g}" if right is None else f"goal {right:g} % within {CLOSE:g}"
        return f"{goal}, baseline {self.baseline:.4g}"

    def result_text(self, evaluation: dict[str, float]) -> str:
        share = "" if self.settings.right is None else f", {100 * evaluation['accuracy']:.2f} % right,"
        return f"mean squared error {evaluation['loss']:.3g}{share} on fresh sequences"


COMMAND = task_command("adding", AddingOptions, Adding)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
