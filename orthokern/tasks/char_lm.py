"""Characters of the Penn Treebank: `python -m orthokern.tasks.char_lm --data FOLDER --length 75`.

A recurrent network reads a sentence character by character and predicts the next one at every step; sentences are
independent and of different lengths (Vorontsov et al. 2017, section 3.1.2, Tables 3 and 4; the data are
`orthokern.data.load_ptb`'s).
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from orthokern.commandline import Parser, Settings, integer, one_of, real
from orthokern.data import load_ptb
from orthokern.data.ptb import ALPHABET, Sentences
from orthokern.nn import LinearCrossEntropy
from orthokern.tasks import recurrent
from orthokern.tasks.network import add_network_options, build_recurrence
from orthokern.tasks.optimization import add_optimizer_options
from orthokern.tasks.recurrent import STARTS, RecurrentTask, start_recurrence, stream_seed
from orthokern.training import cli
from orthokern.training.distributed import current_shard

DEFAULTS: Settings = {
    **recurrent.DEFAULTS,
    "data": None,
    "length": 75,
    "bucket": 16,
    "released_targets": False,
    "hidden": 512,
    "margin": 1.0,
    "start": "torch",
    "lr": 1e-3,
    "geodesic_lr": 1e-3,
    "clip": 1.0,
    "goal": None,
    "epochs": 20,
    "iterations": None,
    "checkpoint_every": 200,
    "diagnose_every": 50,
}

PRESETS: dict[str, Settings] = {
    # Vorontsov et al. 2017, sections 3.1 and 3.1.2: 512 tanh units, 200 epochs, batches of 50, RMSprop at 1e-3 and
    # geodesic descent at 1e-6, clipping at 30, weight decay 1e-4 on the composite matrix. What the text leaves open is
    # as in the released code; eps: see pixel_mnist. (Its embedding of the characters, N(0, 0.01), goes through a matrix
    # of U(-0.01, 0.01): here characters select columns of the input matrix.)
    "paper": {
        "start": "small",
        "learned_h0": True,
        "bucket": 1,
        "lr": 1e-3,
        "geodesic_lr": 1e-6,
        "eps": 1e-3,
        "clip": 30.0,
        "weight_decay": 1e-4,
        "epochs": 200,
    },
}


class CharModel(nn.Module):
    """A recurrence over character ids and a readout of every state.

    Args:
        settings: as DEFAULTS, complete.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = settings["model"] == "lstm"  # torch's takes no token ids
        self.rnn = build_recurrence(len(ALPHABET), settings)
        self.readout = LinearCrossEntropy(
            settings["hidden"], len(ALPHABET), device=settings["device"], backend=settings["backend"]
        )
        start_recurrence(self.rnn, settings)
        with torch.no_grad():
            self.readout.weight.copy_(nn.init.xavier_uniform_(torch.empty(self.readout.weight.shape)))
            self.readout.get_parameter("bias").zero_()

    def forward(self, inputs: PackedSequence, targets: Tensor, weight: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """inputs: P packed ids int64, targets [P] int64 -> cross-entropy in nats per character (0-dim) and "accuracy",
        both times `weight`."""
        if self.embed:
            ids, batch_sizes, *order = inputs
            features = nn.functional.one_hot(ids, len(ALPHABET)).to(self.readout.weight.dtype)
            inputs = PackedSequence(features, batch_sizes, *order)
        states, _ = self.rnn(inputs)
        with torch.no_grad():
            right = self.readout(states.data.detach()).argmax(-1) == targets
        loss = self.readout.loss(states.data, targets)
        return (loss if weight == 1.0 else weight * loss), {"accuracy": weight * right.double().mean()}


class CharLm(RecurrentTask):
    """Penn Treebank characters for the training loop; settings as DEFAULTS, complete."""

    name = "char_lm"
    loss_label = "cross-entropy (nats per character)"
    baseline = None
    iterations_per_epoch: int

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, classes=len(ALPHABET))
        self.data = load_ptb(
            settings["data"], max_length=settings["length"], released_targets=settings["released_targets"]
        )
        self.time_steps = int(self.data.train.lengths.max())
        shard = current_shard()
        generator = torch.Generator().manual_seed(stream_seed(settings["seed"], "train"))
        self.batches = self.data.train.batches(
            settings["batch"], generator, bucket=settings["bucket"], part=(shard.rank, shard.world)
        )
        self.iterations_per_epoch = max(1, self.batches.per_epoch // settings["accumulate"])
        if settings["epochs"] is not None:
            settings["iterations"] = settings["epochs"] * self.iterations_per_epoch
        self.build(CharModel(settings))

    # ---- training

    def next_batch(self) -> tuple[PackedSequence, Tensor, float]:
        """Inputs, targets, and the weight of this process's mean loss: 1, or where several share a batch, what makes
        the mean of their weighted means the mean over all targets."""
        batch = next(self.batches)
        self.steps = len(batch.batch_sizes)
        weight = len(batch.targets) * current_shard().world / self.batches.joint_targets
        batch = batch.to(self.device)
        return batch.packed(), batch.targets, weight

    # ---- evaluation

    def wants_evaluation(self, iteration: int, metrics: dict[str, Any]) -> bool:
        """After every epoch."""
        return iteration % self.iterations_per_epoch == 0

    def _evaluate(self, sentences: Sentences) -> dict[str, float]:
        total = {"loss": 0.0, "accuracy": 0.0}
        for part in sentences.ordered(200):
            batch = part.to(self.device)
            loss, numbers = self.model(batch.packed(), batch.targets)
            total["loss"] += loss.item() * len(batch.targets)
            total["accuracy"] += numbers["accuracy"].item() * len(batch.targets)
        means = {name: value / sentences.targets for name, value in total.items()}
        return {**means, "bpc": means["loss"] / math.log(2.0)}

    def evaluate(self, iteration: int) -> dict[str, float]:
        """On the validation sentences, all characters alike: "loss" (nats), "bpc" (bits), "accuracy" (fraction)."""
        return self._evaluate(self.data.validation)

    def test(self) -> dict[str, float]:
        return self._evaluate(self.data.test)

    def goal_reached(self, evaluation: dict[str, float]) -> bool:
        goal = self.settings["goal"]
        return goal is not None and evaluation["bpc"] <= goal

    def score(self, evaluation: dict[str, float]) -> float:
        return -evaluation["loss"]

    # ---- records

    def diagnose(self) -> dict[str, Any]:
        return {**super().diagnose(), "time_steps": self.steps}  # norms through time are of this many steps

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])

    def progress_text(self, metrics: dict[str, Any]) -> str:
        bits = metrics["loss"] / math.log(2.0)
        return f"{bits:.3f} bits per character, accuracy {100 * metrics['accuracy']:.1f} %"

    def summary(self, reached: bool, iteration: int, seconds: float, evaluation: dict[str, float] | None) -> str:
        done = f"iteration {iteration}, {seconds:.0f} s"
        if evaluation is None:
            return f"not evaluated: {done}"
        result = f"{evaluation['bpc']:.3f} bits per character, accuracy {100 * evaluation['accuracy']:.2f} %"
        return f"validation: {result}, {done}"

    def title(self) -> str:
        return f"up to {self.settings['length']} characters, {super().title()}"


# ---- command line ----------------------------------------------------------------------------------------------------

DESCRIPTION = """\
Train a recurrent network to predict the next character of Penn Treebank sentences.

--data names the folder with the text, as words (ptb.train.txt, ptb.valid.txt, ptb.test.txt) or as
characters (ptb.char.train.txt, ...). Sentences of up to --length characters are used, each a sequence
of its own; there is no work on padding. The test sentences are looked at once, at the end, with the
parameters that are best on the validation sentences.
"""

EXAMPLES = """\
examples:
  python -m orthokern.tasks.char_lm --data ptb                           sentences of up to 75
  python -m orthokern.tasks.char_lm --data ptb --length 300              nearly all of them
  python -m orthokern.tasks.char_lm --data ptb --preset paper --margin 0.1 --epochs 20
  python -m orthokern.tasks.char_lm --data ptb --model lstm --hidden 256

Exit code: 0 all epochs done, 2 bad arguments or data, 3 diverged, 130 or 143 interrupted (saved;
--resume goes on).
"""


def _parser() -> Parser:
    parser = Parser(prog="python -m orthokern.tasks.char_lm", description=DESCRIPTION, epilog=EXAMPLES)
    group = parser.add_argument_group("the task")
    group.add_argument("--data", metavar="DIR", help="folder with the three text files (needed)")
    group.add_argument(
        "--length", type=integer(4), metavar="N", help="leave out sentences of more than N characters (default 75)"
    )
    group.add_argument(
        "--bucket", type=integer(1), metavar="N",
        help="batches' worth of sentences that are sorted by length together; 1: batches at random (default 16)",
    )  # fmt: skip
    group.add_argument(
        "--released-targets", action="store_true",
        help="count two trivial targets per sentence too, as the code released with the paper does",
    )  # fmt: skip
    group.add_argument(
        "--goal",
        type=real(0.0, exclusive=True, none=True),
        metavar="BITS",
        help="stop at this many bits per validation character; none (default none)",
    )
    group.add_argument("--start", type=one_of("start", STARTS), metavar="NAME", help=recurrent.START_HELP)
    recurrent.add_epochs(group, DEFAULTS["epochs"])
    add_network_options(parser, DEFAULTS)
    add_optimizer_options(parser, DEFAULTS, {"paper": "hyper-parameters of Vorontsov et al. 2017, section 3.1.2"})
    cli.add_run_options(parser, DEFAULTS)
    return parser


def complete(settings: Settings) -> Settings:
    """Checks what argparse can't.

    Raises:
        InputError: no --data, or settings that don't go together.
    """
    settings = recurrent.complete_with_data(settings, "the Penn Treebank's text files")
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.run("char_lm", _parser(), DEFAULTS, PRESETS, complete, CharLm, arguments)


if __name__ == "__main__":
    sys.exit(main())
