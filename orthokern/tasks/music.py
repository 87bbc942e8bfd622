"""Polyphonic music: `python -m orthokern.tasks.music --data FOLDER --delta 0.2`.

A GRU reads piano rolls and predicts the notes of the next time step, each of the 88 notes by a logistic unit (Kanai et
al. 2017, section 4.1.2, Table 2). --data names the folder with Nottingham.mat, ..., or with nottingham.npz, ... of the
same content (`orthokern.data.load_music`). --delta X constrains the spectral norm of the recurrent matrices to 2 - X;
--clip X clips gradients instead. The learning rate decreases while the validation loss does not improve, and training
ends when it is very small. The test pieces are evaluated once, with the best parameters.

    x_t in {0, 1}^88  ->  0.01 E x_t [200]  ->  two GRU layers of 200  ->  W h_t + b [88]  ->  logistic

with dropout of 50 % between layers. The paper does not specify the following: each row of a batch reads one piece in
windows of 35 steps, starting from a zero state; the first step of a piece is not predicted.

Note [First weights]
    In the paper, the first weights are drawn from N(0, 1e-4/200), except for orthogonal W_hn. With this variance, the
    first states are about 1e-7, and the gradients of all weights except the readout bias are below 1e-5: the weights do
    not change noticeably in a thousand iterations at a rate of 0.1 (`--init-std 0.000707` shows this). The default here
    is N(0, 1/200), as in the language model of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthokern.data.music import COLLECTIONS, NOTES, load_music
from orthokern.errors import InputError
from orthokern.tasks.command import task_command
from orthokern.tasks.epochs import count_epochs, data_option, digest, stream_seed
from orthokern.tasks.gru import GruOptions, GruTask, build_gru
from orthokern.tasks.optimization import plateau
from orthokern.training.options import option


@dataclass(kw_only=True)
class MusicOptions(GruOptions):
    """The settings of Kanai et al. 2017, section 4.1.2.

    Training ends when the rate falls below lr_floor; epochs is an upper bound.
    """

    GROUP = "the task"
    data: str = data_option("the piano rolls")
    collection: str = option("nottingham", ", ".join(COLLECTIONS), choices=tuple(COLLECTIONS), basic=True)
    patience: int = option(10, "decrease the rate after N epochs without a better validation loss")
    decay: float = option(1.25, "divisor of the learning rate for --patience", above=1.0)
    lr_floor: float = option(1e-4, "end training when the learning rate is below this", low=0.0)
    layers: int = 2
    lr: float = 0.1
    epochs: int = 1000

    def complete(self) -> None:
        super().complete()
        if self.lr < self.lr_floor:
            raise InputError(f"--lr {self.lr:g}: below --lr-floor, {self.lr_floor:g}, at which training ends")


class MusicModel(nn.Module):
    """Reads notes and computes the likelihood of the next notes. Expects complete settings."""

    def __init__(self, settings: MusicOptions) -> None:
        super().__init__()
        self.scale, self.dropout = settings.input_scale, settings.dropout
        self.input = nn.Linear(NOTES, settings.hidden, bias=False)
        self.rnn = build_gru(settings.hidden, settings)
        self.readout = nn.Linear(settings.hidden, NOTES, bias=settings.bias)
        for layer in (self.input, self.readout):
            nn.init.normal_(layer.weight, 0.0, settings.init_std)
        if settings.bias:
            nn.init.zeros_(self.readout.bias)

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        """inputs, targets [T, B, 88], valid [T, B] bool, h0 [layers, B, N] -> (negative log-likelihood in nats, summed
        over notes and valid steps, 0-dim; h_T)."""
        x = nn.functional.dropout(self.scale * self.input(inputs), self.dropout, self.training)
        states, last = self.rnn(x, h0)
        logits = self.readout(nn.functional.dropout(states, self.dropout, self.training))
        each = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return (each * valid.unsqueeze(-1)).sum(), last


class MusicTask(GruTask):
    """Polyphonic music for the training loop. Expects complete settings."""

    name = "music"
    unit = "time step"
    TITLE = ("collection", *GruTask.TITLE)
    STATE = (*GruTask.STATE, "windows")
    settings: MusicOptions

    def __init__(self, settings: MusicOptions) -> None:
        super().__init__(settings)
        self.data = load_music(settings.data, settings.collection)
        parts = self.data.train, self.data.validation, self.data.test
        self.data_digest = digest(*(tensor for part in parts for tensor in (part.notes, part.offsets)))
        generator = torch.Generator().manual_seed(stream_seed(settings.seed, "train"))
        self.windows = self.data.train.windows(settings.batch, settings.window, generator)
        self.iterations_per_epoch = count_epochs(settings, self.windows.per_epoch)
        self.build(MusicModel(settings))
        self.plateau = plateau(self.optimizer, 1.0 / settings.decay, settings.patience)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        window = next(self.windows).to(self.device)
        return window.inputs, window.targets, window.valid, window.fresh

    def held_out(self, part: str) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        rolls = self.data.validation if part == "validation" else self.data.test
        for _, window in rolls.whole(batch=100, steps=200):
            window = window.to(self.device)
            yield window.inputs, window.targets, window.valid, bool(window.fresh[0])

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        """Whether the learning rate has fallen below "lr_floor"."""
        return bool(self.optimizer.param_groups[0]["lr"] < self.settings.lr_floor)


COMMAND = task_command("music", MusicOptions, MusicTask)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
