"""Characters of the Penn Treebank: `python -m orthokern.tasks.char_lm --data FOLDER --length 75`.

A recurrent network reads a sentence character by character and predicts the next one at every step. Sentences are
independent and have different lengths (Vorontsov et al. 2017, section 3.1.2, Tables 3 and 4; data of
`orthokern.data.load_ptb`). With --bptt the text is one stream of characters instead: it is cut into rows, and the state
is carried from batch to batch (Kerg, Goyette et al. 2019, section 4.3; data of `orthokern.data.load_ptb_stream`).
--data names the folder with the text, as words (ptb.train.txt, ptb.valid.txt, ptb.test.txt) or as characters
(ptb.char.train.txt, ...). The test text is evaluated once, with the parameters that are best on the validation text.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from orthokern.data import load_ptb, load_ptb_stream, stream_rows
from orthokern.data.ptb import ALPHABET, Sentences
from orthokern.data.ptb_stream import STREAM_ALPHABET
from orthokern.errors import InputError
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks.command import task_command
from orthokern.tasks.epochs import DataOptions, DataTask, count_epochs, data_option, digest, stream_seed
from orthokern.tasks.network import build_recurrence
from orthokern.tasks.recurrent import RecurrentTask, StartOptions, start_recurrence
from orthokern.training.options import changed, option

# Measurements of both rates and of the margin: docs/choosing.md.
# The input weights are the embeddings of the characters, which learn best at a higher rate than the readout. In
# factorized and exprnn the recurrent matrix has rates of its own, so that this is the rate of input weights and biases.
INPUT_RATE = 10.0
# RMSprop changes every entry of U and V by about its rate, and an element of the next state is a sum over N of them.
GEODESIC_RATE_TIMES_N = 0.4


@dataclass(kw_only=True)
class CharOptions(StartOptions, DataOptions):
    """The settings of the character language model."""

    GROUP = "the task"
    HIDDEN = frozenset({"sigma"})
    data: str = data_option("the Penn Treebank's text files")
    length: int = option(75, "omit sentences longer than N characters", low=4, basic=True, only={"bptt": (None,)})
    bucket: int = option(
        16,
        "number of batches whose sentences are sorted by length together; 1: random batches",
        only={"bptt": (None,)},
    )
    bptt: int | None = option(
        None,
        "one stream of characters instead of sentences, in segments of N, carrying the state",
        shown="sentences",
        basic=True,
    )
    embedding: int | None = option(
        None,
        "size of an embedding of the characters, by which the input weights are multiplied; initially N(0, 0.01^2) "
        "with --start small, else U(-0.1, 0.1); none: no embedding",
        metavar="D",
    )
    goal: float | None = option(
        None, "stop at this number of bits per validation character; none: do not stop", above=0.0, metavar="BITS"
    )
    hidden: int = 512
    nonlinearity: str = "modrelu"
    optimizer: str = "adam"
    lr: float = 1e-2
    input_lr: float | None = changed(
        StartOptions, "input_lr", shown=f"as --lr; factorized, exprnn: {INPUT_RATE:g} --lr"
    )
    geodesic: str = "rmsprop"
    geodesic_lr: float = changed(StartOptions, "geodesic_lr", default=None, shown=f"{GEODESIC_RATE_TIMES_N:g} / hidden")
    schedule: str = "cosine"
    clip: float | None = 1.0
    checkpoint_every: int = 200
    diagnose_every: int = 50

    def complete(self) -> None:
        self.fill(geodesic_lr=GEODESIC_RATE_TIMES_N / self.hidden)
        if self.model in ("factorized", "exprnn"):
            self.fill(input_lr=INPUT_RATE * self.lr)
        super().complete()


State = Tensor | tuple[Tensor, Tensor]  # [1, B, N]; an lstm has two
STREAM_ROWS = 10  # rows in which validation and test are read, as in the code of Kerg et al. 2019


class EmbeddedInput(nn.Module):
    """A parametrization of an input weight: weight [N, D] -> its product with an embedding [N, characters].

    A product of two matrices that both start small learns faster than one matrix at the same rate.
    """

    def __init__(self, characters: int, size: int, *, small: bool) -> None:
        super().__init__()
        start = torch.empty(characters, size)
        self.embedding = nn.Parameter(start.normal_(0.0, 0.01) if small else start.uniform_(-0.1, 0.1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ self.embedding.mT


class CharModel(nn.Module):
    """A recurrence over character ids and a readout of every state.

    Args:
        settings: complete.
        characters: number of different characters.
    """

    def __init__(self, settings: CharOptions, characters: int = len(ALPHABET)) -> None:
        super().__init__()
        rnn: Any = build_recurrence(settings.embedding or characters, settings)
        self.readout = LinearCrossEntropy(settings.hidden, characters, device=settings.device, backend=settings.backend)
        start_recurrence(rnn, settings)
        if settings.embedding is not None:
            product = EmbeddedInput(characters, settings.embedding, small=settings.start == "small")
            parametrize.register_parametrization(rnn, "weight_ih_l0", product.to(settings.device), unsafe=True)
            rnn.input_size = characters
        self.rnn: nn.Module = rnn
        with torch.no_grad():
            self.readout.weight.copy_(nn.init.xavier_uniform_(torch.empty(self.readout.weight.shape)))
            self.readout.get_parameter("bias").zero_()

    def forward(
        self, inputs: Tensor | PackedSequence, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, Tensor, State | None]:
        """inputs int64 [T, B] or P packed ids, targets [T, B] or [P] int64, state of the recurrence (None: its initial
        state) -> cross-entropy in nats per character (0-dim), accuracy (0-dim), the state from which the next piece
        starts, detached; None after packed sentences."""
        states, last = self.rnn(inputs, state)
        if isinstance(states, PackedSequence):
            states, carried = states.data, None
        else:
            carried = last.detach() if isinstance(last, Tensor) else (last[0].detach(), last[1].detach())
        with torch.no_grad():
            right = self.readout(states.detach()).argmax(-1) == targets
        return self.readout.loss(states, targets), right.double().mean(), carried


class CharTask(DataTask, RecurrentTask):
    """The common part of both ways of reading the text; a subclass has `next_batches` and `held_out`."""

    name = "char_lm"
    TITLE = ("bptt", *RecurrentTask.TITLE)
    loss_label = "cross-entropy (nats per character)"
    settings: CharOptions
    parts: dict[str, Any]  # "validation" and "test", for `held_out`
    steps: int  # of the first batch of an iteration, which the diagnostics use
    carried: State | None = None  # the state from which the next batch starts; of sentences always None

    @abstractmethod
    def held_out(self, part: Any) -> Iterator[tuple[Tensor | PackedSequence, Tensor]]:
        """Inputs and targets of each batch of a part of the text."""

    def next_batch(self) -> Any:
        """Inputs, targets, and the weight of their mean loss; see `next_batches`."""
        return next(self.next_batches(1))

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, weight = batch
        loss, right, self.carried = self.model(inputs, targets, self.carried)
        return self.penalized(weight * loss, {"accuracy": weight * right})

    def measure(self, part: str) -> dict[str, float]:
        """The means over all characters of a part of the text: "loss" (nats), "bpc" (bits), "accuracy" (fraction)."""
        loss = right = count = 0.0
        state: State | None = None
        for inputs, targets in self.in_time(self.held_out(self.parts[part])):
            batch_loss, accuracy, state = self.model(inputs, targets, state)
            size = targets.numel()
            loss, right, count = loss + batch_loss.item() * size, right + accuracy.item() * size, count + size
        return {"loss": loss / count, "accuracy": right / count, "bpc": loss / count / math.log(2.0)}

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        goal = self.settings.goal
        return goal is not None and evaluation["bpc"] <= goal

    def diagnose(self) -> dict[str, Any]:
        return {**super().diagnose(), "time_steps": self.steps}  # number of steps of the norms through time

    def progress_text(self, metrics: dict[str, Any]) -> str:
        bits = metrics["loss"] / math.log(2.0)
        return f"{bits:.3f} bits per character, accuracy {100 * metrics['accuracy']:.1f} %"

    def result_text(self, evaluation: dict[str, float]) -> str:
        bits, accuracy = evaluation["bpc"], 100 * evaluation["accuracy"]
        return f"validation: {bits:.3f} bits per character, accuracy {accuracy:.2f} %"


class CharLm(CharTask):
    """Penn Treebank characters by sentence for the training loop. Expects complete settings."""

    STATE = ("batches",)

    def __init__(self, settings: CharOptions) -> None:
        super().__init__(settings)
        data = load_ptb(settings.data, max_length=settings.length)
        if settings.batch > len(data.train):
            raise InputError(f"--batch {settings.batch}: there are {len(data.train)} training sentences")
        self.parts = {"validation": data.validation, "test": data.test}
        parts = data.train, data.validation, data.test
        self.data_digest = digest(*(tensor for part in parts for tensor in (part.tokens, part.offsets)))
        self.time_steps = int(data.train.lengths.max())
        generator = torch.Generator().manual_seed(stream_seed(settings.seed, "train"))
        self.batches = data.train.batches(settings.batch, generator, bucket=settings.bucket)
        self.iterations_per_epoch = count_epochs(settings, self.batches.per_epoch)
        self.build(CharModel(settings))

    def next_batches(self, count: int) -> Iterator[tuple[PackedSequence, Tensor, float]]:
        """Inputs, targets, and the weight of their mean loss. The weights make the average of the losses over the
        batches of an iteration equal to the mean over all their targets."""
        drawn = [next(self.batches) for _ in range(count)]
        targets = sum(len(batch.targets) for batch in drawn)
        self.steps = len(drawn[0].batch_sizes)
        self.time_steps = round(sum(len(batch.batch_sizes) for batch in drawn) / count)
        for batch in drawn:
            weight = len(batch.targets) * count / targets
            batch = batch.to(self.device)
            yield batch.packed(), batch.targets, weight

    def held_out(self, part: Sentences) -> Iterator[tuple[PackedSequence, Tensor]]:
        batches = (sentences.to(self.device) for sentences in part.ordered(200))
        return ((batch.packed(), batch.targets) for batch in batches)


class CharStream(CharTask):
    """Penn Treebank characters as one stream for the training loop, --bptt of them at a time. Expects complete
    settings.

    The stream is cut into --batch rows of equal length, which are read in parallel. Each segment starts from the last
    state of the previous one, also after a checkpoint or a validation; gradients do not cross segments. An epoch starts
    from zero, or from the learned initial state.
    """

    def __init__(self, settings: CharOptions) -> None:
        super().__init__(settings)
        data = load_ptb_stream(settings.data)
        self.data_digest = digest(data.train, data.validation, data.test)
        assert settings.bptt is not None  # see _task
        self.length = settings.bptt
        rows = {"train": stream_rows(data.train, settings.batch)}
        for part, text in (("validation", data.validation), ("test", data.test)):
            if len(text) < 2 * STREAM_ROWS:
                raise InputError(
                    f"--data {settings.data}: the {part} text has {len(text)} characters; with --bptt it is read in "
                    f"{STREAM_ROWS} rows; expected: at least {2 * STREAM_ROWS} characters"
                )
            rows[part] = stream_rows(text, STREAM_ROWS)
        self.parts = {part: tokens.to(self.device) for part, tokens in rows.items()}
        self.time_steps = min(self.length, len(self.parts["train"]) - 1)
        self.pieces = -(-(len(self.parts["train"]) - 1) // self.length)
        self.iterations_per_epoch = count_epochs(settings, self.pieces)
        self.position = 0  # index of the next segment in the epoch
        self.build(CharModel(settings, len(STREAM_ALPHABET)))

    def _piece(self, tokens: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """tokens [L, B] uint8 -> inputs, targets [T, B] int64 of segment `index`; the last one of a text is shorter."""
        length = self.length
        piece = tokens[index * length : (index + 1) * length + 1].long()
        return piece[:-1], piece[1:]

    def next_batches(self, count: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Like `CharLm.next_batches`; the last segment of the text is shorter."""
        order = [(self.position + step) % self.pieces for step in range(count)]
        drawn = [self._piece(self.parts["train"], index) for index in order]
        steps = sum(len(targets) for _, targets in drawn)
        self.steps = len(drawn[0][0])
        for index, (inputs, targets) in zip(order, drawn, strict=True):
            if index == 0:
                self.carried = None
            self.position = (index + 1) % self.pieces
            yield inputs, targets, len(targets) * count / steps

    def held_out(self, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._piece(part, index) for index in range(-(-(len(part) - 1) // self.length)))

    def state_dict(self) -> dict[str, Any]:
        carried = [] if self.carried is None else [self.carried] if isinstance(self.carried, Tensor) else self.carried
        return {"position": self.position, "carried": [state.clone() for state in carried]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        carried = [tensor.to(self.device) for tensor in state["carried"]]
        self.carried = None if not carried else carried[0] if len(carried) == 1 else (carried[0], carried[1])


def _task(settings: CharOptions) -> CharTask:
    return CharLm(settings) if settings.bptt is None else CharStream(settings)


COMMAND = task_command("char_lm", CharOptions, _task)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
