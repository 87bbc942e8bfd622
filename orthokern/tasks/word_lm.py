"""Words of the Penn Treebank: `python -m orthokern.tasks.word_lm --data FOLDER --delta 0.2`.

A GRU reads the text word by word and predicts the next word (Kanai et al. 2017, section 4.1.1, Table 1, after Zaremba
et al. 2014). --data names the folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt (`orthokern.data.load_words`).
--delta X constrains the spectral norm of the recurrent matrix to 2 - X; --clip X clips gradients instead. The test text
is evaluated once, with the best parameters.

    word  ->  0.01 E[word] [650]  ->  a GRU layer of 650  ->  W h_t + b [10 000]  ->  softmax

with dropout of 50 % between layers. The text is cut into 20 streams, which are read in parallel; the state is carried
from window to window, and is zero at the beginning of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthokern.data import load_words, stream_rows
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks.command import task_command
from orthokern.tasks.epochs import count_epochs, data_option, digest
from orthokern.tasks.gru import GruOptions, GruTask, build_gru
from orthokern.training.options import option


@dataclass(kw_only=True)
class WordOptions(GruOptions):
    """The settings of Kanai et al. 2017, section 4.1.1."""

    GROUP = "the task"
    data: str = data_option("the Penn Treebank's text files")
    goal: float | None = option(None, "stop at this validation perplexity; none: do not stop", above=1.0)
    decay: float = option(1.1, "divisor of the learning rate after every epoch", low=1.0)
    decay_after: int = option(10, "epochs at the initial rate")
    hidden: int = 650
    epochs: int = 75


class WordModel(nn.Module):
    """Reads words and computes the likelihood of the next word.

    Args:
        words: C, size of the vocabulary.
        settings: complete.
    """

    def __init__(self, words: int, settings: WordOptions) -> None:
        super().__init__()
        self.scale, self.dropout = settings.input_scale, settings.dropout
        self.embedding = nn.Embedding(words, settings.hidden)
        self.rnn = build_gru(settings.hidden, settings)
        self.readout = LinearCrossEntropy(
            settings.hidden, words, settings.bias, reduction="sum", backend=settings.backend
        )
        for weight in (self.embedding.weight, self.readout.weight):
            nn.init.normal_(weight, 0.0, settings.init_std)
        if settings.bias:
            nn.init.zeros_(self.readout.get_parameter("bias"))

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor | None, h0: Tensor) -> tuple[Tensor, Tensor]:
        """inputs, targets [T, B] int64, valid [T, B] bool or None, h0 [layers, B, N] -> (negative log-likelihood in
        nats, summed over the valid words, 0-dim; h_T)."""
        x = nn.functional.dropout(self.scale * self.embedding(inputs), self.dropout, self.training)
        states, last = self.rnn(x, h0)
        states = nn.functional.dropout(states, self.dropout, self.training)
        if valid is not None:
            states, targets = states[valid], targets[valid]
        return self.readout.loss(states, targets), last


class WordLm(GruTask):
    """Penn Treebank words for the training loop. Expects complete settings."""

    name = "word_lm"
    unit = "word"
    STATE = (*GruTask.STATE, "position")
    settings: WordOptions

    def __init__(self, settings: WordOptions) -> None:
        super().__init__(settings)
        self.data = load_words(settings.data)
        self.data_digest = digest(self.data.train, self.data.validation, self.data.test)
        words = len(self.data.vocabulary)
        self.streams = stream_rows(self.data.train, settings.batch).to(self.device)  # [L, B]
        self.time_steps = min(settings.window, len(self.streams) - 1)
        self.windows_per_epoch = -(-(len(self.streams) - 1) // settings.window)
        self.iterations_per_epoch = count_epochs(settings, self.windows_per_epoch)
        self.position = 0  # windows read
        self.build(WordModel(words, settings))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda iteration: self._rate(iteration))

    def _rate(self, iteration: int) -> float:
        """The factor of the learning rate; iteration 0 is the first."""
        epoch = iteration // self.iterations_per_epoch
        return float(self.settings.decay ** -max(0, epoch + 1 - self.settings.decay_after))

    def read(self) -> tuple[Tensor, Tensor, None, Tensor]:
        window = self.position % self.windows_per_epoch
        self.position += 1
        begin = window * self.settings.window
        piece = self.streams[begin : begin + self.settings.window + 1]
        return piece[:-1], piece[1:], None, torch.full((), window == 0, device=self.device)

    def held_out(self, part: str) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
        """Every word of the text except the first is a target once."""
        text = self.data.validation if part == "validation" else self.data.test
        count, rows, steps = len(text) - 1, self.settings.batch, self.settings.window
        length = -(-count // rows)
        first = length * torch.arange(rows)
        for begin in range(0, length, steps):
            step = torch.arange(begin, min(begin + steps, length)).unsqueeze(1)
            place = (first + step).clamp(max=count)
            valid = (first + step) < count
            inputs, targets = text[place], text[(place + 1).clamp(max=count)]
            yield inputs.to(self.device), targets.to(self.device), valid.to(self.device), begin == 0

    def measure(self, part: str) -> dict[str, float]:
        """The "loss", and the "perplexity"."""
        result = super().measure(part)
        return {**result, "perplexity": _perplexity(result["loss"])}

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        goal = self.settings.goal
        return goal is not None and evaluation["perplexity"] <= goal

    def progress_text(self, metrics: dict[str, Any]) -> str:
        return f"perplexity {_perplexity(metrics['nll']):.1f}, gradient {metrics['grad_norm']:.3g}"

    def loss_text(self, loss: float) -> str:
        return f"perplexity {_perplexity(loss):.2f}"


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


COMMAND = task_command("word_lm", WordOptions, WordLm)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
