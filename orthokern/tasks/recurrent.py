"""What the tasks with one recurrent network have in common."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from orthokern import init
from orthokern.commandline import Needs, Settings, file_name, integer, real
from orthokern.diagnostics import diagnose_recurrence
from orthokern.errors import InputError
from orthokern.nn import RNN, ExpRNN, FactorizedRNN, NonNormalRNN
from orthokern.penalties import OrthogonalPenalty
from orthokern.tasks.network import LSTMS, check_backend, check_network
from orthokern.tasks.optimization import OptimizerOptions, build_optimizer, build_schedules, check_schedule, penalty
from orthokern.training import Task
from orthokern.training.cli import RunOptions
from orthokern.training.distributed import current_shard
from orthokern.training.options import complete as make_options
from orthokern.training.options import named, option

__all__ = [
    "STARTS",
    "DataOptions",
    "DrawnOptions",
    "DrawnTask",
    "RecurrentTask",
    "StartOptions",
    "complete",
    "count_epochs",
    "digest",
    "epoch_order",
    "start_normal",
    "start_recurrence",
    "stream_seed",
]

STARTS = ("torch", "small", "glorot", "glorot-normal", "learned")


@dataclass(kw_only=True)
class DataOptions(RunOptions):
    """A task that reads its data from files, in epochs.

    Attributes:
        iterations: counted from the epochs unless it is given.
    """

    GROUP = "the task"
    data: str = option("", file_name, "folder with the task's files (required)", "DIR", shown="")
    epochs: int | None = option(20, integer(1), "stop after N epochs", "N")


@dataclass(kw_only=True)
class StartOptions(OptimizerOptions):
    """How the weights besides the recurrent matrix are drawn."""

    GROUP = "the task"
    start: str = named(
        "torch",
        "start",
        STARTS,
        "input weights: torch: as in torch.nn.RNN; small: U(-0.01, 0.01), biases 0, as the paper's released code; "
        "glorot, glorot-normal: Glorot's, uniform or normal, biases 0; learned: as --init learned, biases 0, and the "
        "readout where the task says so; an lstm keeps torch's",
    )
    sigma: float | None = option(
        None,
        real(0.0, exclusive=True, none=True),
        "rnn: draw all matrices from N(0, X), whatever --init and --start, biases 0; those that are to be learned "
        "are then made orthogonal from there; none",
        needs=(Needs("model", ("rnn",)),),
    )


@dataclass(kw_only=True)
class DrawnOptions(OptimizerOptions):
    """A task whose sequences are drawn."""

    GROUP = "the task"
    T: int = 1000  # declared by each task, whose T counts different things
    eval_every: int = option(100, integer(0), "evaluate every N iterations, 0 for never", "N")
    eval_sequences: int = option(200, integer(1), "new sequences per evaluation", "N")


def stream_seed(seed: int, stream: str) -> int:
    """A seed for one of a run's random streams: a function of the run's seed and the stream's name, the same on every
    machine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {stream}".encode()).digest()[:7], "big")


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """The order of the examples in an epoch, int64 [count]: a function of seed and epoch alone, so that a run's
    position in its data is its iteration and nothing else."""
    generator = torch.Generator().manual_seed(stream_seed(seed, f"epoch {epoch}"))
    return torch.randperm(count, generator=generator)


def digest(*data: Tensor) -> int:
    """A checksum of training data, for `Task.data_digest`."""
    found = 0
    for part in data:
        found = zlib.crc32(part.detach().cpu().contiguous().numpy().data, found)
    return found


def count_epochs(settings: DataOptions, batches: int) -> int:
    """Iterations of an epoch of `batches` batches; the epochs become iterations.

    Raises:
        InputError: an iteration takes more than an epoch.
    """
    if settings.accumulate > batches:
        raise InputError(f"--accumulate {settings.accumulate}: an epoch has {batches} batches, which is the most")
    per_epoch: int = batches // settings.accumulate
    if settings.epochs is not None:
        settings.iterations = settings.epochs * per_epoch
    return per_epoch


@torch.no_grad()
def start_normal(rnn: nn.Module, readout: nn.Module, settings: StartOptions) -> None:
    """Where "sigma" is set, draws the matrices of a plain recurrence and of its readout anew from N(0, sigma), those
    that are "learned" made orthogonal from there, biases 0 (Manchev and Spratling, sections III-B and II-A)."""
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
    """Redraws the input weights and sets biases to 0, unless start is "torch" or the network is an LSTM."""
    if settings.start == "torch" or settings.model in LSTMS:
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


Chosen = TypeVar("Chosen", bound=OptimizerOptions)


def complete(options: type[Chosen], settings: Settings, *, data: str | None = None) -> Chosen:
    """The settings of a task with a recurrent network as an object, checked.

    Args:
        options: the task's class.
        settings: by name.
        data: the files that the folder of --data must hold, for a task that reads its data.

    Raises:
        InputError: no --data where it is needed, or settings that are not compatible.

    Example:
        settings = complete(OptimizerOptions, {"hidden": 64, "iterations": 100})
    """
    made = make_options(options, settings)
    check_network(made)
    sigma = getattr(made, "sigma", None)
    if sigma is not None and made.model != "rnn":
        raise InputError(f"--sigma {sigma:g}: for --model rnn, not {made.model}; see --init")
    check_schedule(made)
    if data is not None and not getattr(made, "data", ""):
        raise InputError(f"--data is needed: the folder with {data}")
    return made


@torch.no_grad()
def plain_numbers(rnn: RNN) -> dict[str, float]:
    """For the record, of the first layer's recurrent matrix W [N, N]: "orthogonality_error_of_w", ||W W^T - I||_F; and
    "recurrent_grad_norm", the norm of the whole loss's gradient for it, after clipping."""
    weight = rnn.get_parameter("weight_hh_l0")
    found = {"orthogonality_error_of_w": OrthogonalPenalty(squared=False)(weight).item()}
    if weight.grad is not None:
        found["recurrent_grad_norm"] = torch.linalg.vector_norm(weight.grad).item()
    return found


class RecurrentTask(Task):
    """A recurrence and a readout, trained together.

    A subclass sets its data up, then calls `build`. `model` is a module with `rnn` and `readout`, and its forward takes
    a batch and returns the loss and further numbers, as `Task.loss` does.
    """

    model: nn.Module
    settings: OptimizerOptions
    loss_label = "cross-entropy (nats)"
    goal: float | None = None  # accuracy to reach, a fraction, drawn into the plot

    def __init__(self, settings: OptimizerOptions, classes: int) -> None:
        """Args: settings: complete; classes: of the readout (0: not a classification)."""
        self.settings = settings
        self.device = torch.device(settings.device)
        self.rows = current_shard().rows(settings.batch)  # of a joint batch, this process's
        check_backend(settings, classes)

    def build(self, model: nn.Module) -> None:
        """Registers the model and creates its optimizer and schedules."""
        self.model = model
        self.rnn: nn.Module = model.get_submodule("rnn")
        self.readout: nn.Module = model.get_submodule("readout")
        self.optimizer = build_optimizer(self.rnn, self.readout, self.settings)
        self.scheduler, self.plateau = build_schedules(self.optimizer, self.settings)

    def without_counters(self) -> bool:
        """Whether the recurrence computes the same in every step, as `Task.capturable` needs: those with an exponential
        move their base every few steps."""
        return isinstance(self.rnn, (RNN, FactorizedRNN))

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = self.module(*batch)
        added = penalty(self.rnn, self.readout, self.settings)
        return loss if added is None else loss + added, numbers

    def clip_gradients(self) -> None:
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)

    def diagnose(self) -> dict[str, Any]:
        """Numbers on the recurrent matrix, and "lr", the readout's learning rate."""
        rate = next(group["lr"] for group in self.optimizer.param_groups if group["role"] == "readout")
        found: dict[str, Any] = {"lr": rate}
        if isinstance(self.rnn, (RNN, FactorizedRNN, ExpRNN, NonNormalRNN)):
            found |= diagnose_recurrence(self.rnn)
        return found | (plain_numbers(self.rnn) if isinstance(self.rnn, RNN) else {})

    def title(self) -> str:
        """What the plots' titles say of the settings."""
        settings = self.settings
        network = f"{settings.hidden} units"
        if settings.model == "factorized":
            network += f", margin {'none' if settings.margin is None else format(settings.margin, 'g')}"
        return f"{settings.model}, {network}"

    def plot(self, records: list[dict[str, Any]], folder: Path) -> list[Path]:
        from orthokern.diagnostics import plots

        title = f"{self.name}, {self.title()}"
        margin = self.settings.margin if self.settings.model == "factorized" else None
        drawn = [
            plots.plot_learning(
                records,
                folder / "learning.png",
                baseline=self.baseline,
                goal=self.goal,
                title=title,
                loss_label=self.loss_label,
            ),
            plots.plot_spectrum(records, folder / "spectrum.png", margin=margin, title=title),
            plots.plot_gradients(records, folder / "gradients.png", length=self.time_steps, title=title),
            plots.plot_states(records, folder / "states.png", length=self.time_steps, title=title),
            plots.plot_angles(records, folder / "angles.png", title=title),
        ]
        if self.settings.model == "nnrnn":
            drawn.append(plots.plot_moduli(records, folder / "moduli.png", title=title))
        return [path for path in drawn if path is not None]


class DrawnData(Protocol):
    """A generator of sequences; those of orthokern.data are some."""

    length: int
    baseline: float

    def buffers(self, batch: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """inputs [T, B, ...], targets [B] or [T, B]."""
        ...

    def fill(self, inputs: Tensor, targets: Tensor, generator: torch.Generator | None = None) -> None:
        """Redraws both in place."""
        ...


class DrawnTask(RecurrentTask):
    """A task whose sequences are drawn, each seen once. A subclass calls `build` after this constructor."""

    settings: DrawnOptions
    EVALUATION_BATCH = 250  # sequences; what their states need is what limits it

    def __init__(self, data: DrawnData, settings: DrawnOptions, classes: int) -> None:
        """Args: data: the generator; settings: complete; classes: of the readout (0: not a classification)."""
        super().__init__(settings, classes)
        self.drawn = data
        self.baseline = data.baseline
        self.time_steps = data.length
        self.generator = torch.Generator().manual_seed(stream_seed(settings.seed, "train"))
        self._buffers = data.buffers(settings.batch, self.device)

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.capturable = self.without_counters()

    @classmethod
    def evaluation_batch(cls, settings: DrawnOptions) -> int:
        """Sequences that an evaluation reads at once."""
        return min(cls.EVALUATION_BATCH, settings.eval_sequences)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self._buffers
        self.drawn.fill(inputs, targets, self.generator)
        return inputs[:, self.rows], targets[..., self.rows]

    def held_out(self, iteration: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Fresh batches of `size` sequences, the same whenever an iteration is evaluated, in tensors of their own."""
        generator = torch.Generator().manual_seed(stream_seed(self.settings.seed, f"held-out {iteration}"))
        inputs, targets = self.drawn.buffers(size, self.device)
        while True:
            self.drawn.fill(inputs, targets, generator)
            yield inputs, targets

    def evaluate(self, iteration: int) -> dict[str, float]:
        """On "eval_sequences" fresh sequences: their mean "loss", and "accuracy" (a fraction). Fewer, where the rest of
        them can change nothing that matters: see `settled`."""
        count = self.settings.eval_sequences
        size = self.evaluation_batch(self.settings)
        loss, right, done = 0.0, 0.0, 0
        for inputs, targets in self.held_out(iteration, size):
            taken = min(size, count - done)
            batch_loss, numbers = self.model(inputs[:, :taken], targets[..., :taken])
            loss += batch_loss.item() * taken
            right += numbers["accuracy"].item() * taken
            done += taken
            if done == count or self.settled(round(right), done):
                break
        return {"loss": loss / done, "accuracy": round(right) / done}

    def settled(self, right: int, done: int) -> bool:
        """Whether an evaluation that has seen `done` sequences, `right` of them answered right, may end here. Default:
        never."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def title(self) -> str:
        return f"T = {self.settings.T}, {super().title()}"
