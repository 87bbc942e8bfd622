"""The temporal order problems: `python -m orthokern.tasks.temporal_order --T 100 [--bits 3]`.

A recurrent network reads T symbols and must say which of X and Y stood at two (or three) places far apart (Hochreiter &
Schmidhuber 1997; Manchev & Spratling, section III-A; the data are `orthokern.data.TemporalOrderTask`'s).
"""

from __future__ import annotations

import sys

from orthokern.commandline import Parser, Settings, integer
from orthokern.data import TemporalOrderTask
from orthokern.errors import InputError
from orthokern.tasks import last_answer, recurrent
from orthokern.tasks.last_answer import PRESETS, LastAnswer
from orthokern.training import cli

DEFAULTS: Settings = {**last_answer.DEFAULTS, "bits": 2}


class TemporalOrder(LastAnswer):
    """The temporal order problem for the training loop; settings as DEFAULTS, complete."""

    name = "temporal_order"

    def __init__(self, settings: Settings) -> None:
        super().__init__(TemporalOrderTask(settings["T"], bits=settings["bits"]), settings)

    def title(self) -> str:
        return f"{self.settings['bits']} bits, {super().title()}"


DESCRIPTION = """\
Train a recurrent network to tell the order of symbols that it reads far apart.

The network reads T symbols, all but two (or three) of them distractors, and must report those two in
order at the end: X X, X Y, Y X or Y Y. The best guess without memory costs ln 4 nats
(ln 8), the "baseline" that is shown beside the loss. Solved means: --goal percent of new sequences
answered correctly.
"""

EXAMPLES = """\
examples:
  python -m orthokern.tasks.temporal_order --T 100                        solve T = 100 with the defaults
  python -m orthokern.tasks.temporal_order --T 60 --bits 3                the 3-bit problem
  python -m orthokern.tasks.temporal_order --T 50 --preset srnn           a plain network, as in the paper
  python -m orthokern.tasks.temporal_order --T 50 --preset oinit          its matrices made orthogonal first

Exit code: 0 solved or all iterations done, 2 bad arguments, 3 diverged, 130 or 143 interrupted
(saved; --resume continues).
"""


def _parser() -> Parser:
    parser, group = last_answer.make_parser("temporal_order", DESCRIPTION, EXAMPLES, 10, DEFAULTS)
    group.add_argument("--bits", type=integer(2), metavar="N", help="number of symbols to remember, 2 or 3 (default 2)")
    return parser


def complete(settings: Settings) -> Settings:
    """Checks what argparse can't.

    Raises:
        InputError: bits other than 2 and 3, or settings that don't go together.
    """
    if settings["bits"] not in (2, 3):
        raise InputError(f"--bits {settings['bits']}: accepted: 2, 3")
    return recurrent.complete(settings)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.run("temporal_order", _parser(), DEFAULTS, PRESETS, complete, TemporalOrder, arguments)


if __name__ == "__main__":
    sys.exit(main())
