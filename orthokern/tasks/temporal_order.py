"""The temporal order problems: `python -m orthokern.tasks.temporal_order --T 100 [--bits 3]`.

A recurrent network reads T symbols and must report, in order, which of X and Y occurred at two (or three) distant
positions (Hochreiter & Schmidhuber 1997; Manchev & Spratling, section III-A). The data come from
`orthokern.data.TemporalOrderTask`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from orthokern.data import TemporalOrderTask
from orthokern.tasks.last_answer import LastAnswer, LastAnswerOptions, last_answer_command
from orthokern.training.options import defaults, option


@dataclass(kw_only=True)
class TemporalOrderOptions(LastAnswerOptions):
    """The settings of the temporal order problems."""

    GROUP = "the task"
    T: int = option(100, "symbols in a sequence", low=10, basic=True)
    bits: int = option(2, "number of symbols to remember, 2 or 3", low=2, high=3, basic=True)


DEFAULTS = defaults(TemporalOrderOptions)


class TemporalOrder(LastAnswer):
    """The temporal order problem for the training loop; settings as DEFAULTS, complete."""

    name = "temporal_order"
    settings: TemporalOrderOptions

    def __init__(self, settings: TemporalOrderOptions) -> None:
        super().__init__(TemporalOrderTask(settings.T, bits=settings.bits), settings)

    def network_title(self) -> str:
        return f"{self.settings.bits} bits, {super().network_title()}"


DESCRIPTION = """\
Train a recurrent network to report the order of symbols that are far apart in a sequence.

The network reads T symbols. Two (or three) of them are X or Y, the others are distractors. At the end
the network must report the two in order: X X, X Y, Y X or Y Y. The best guess without memory has a
loss of ln 4 nats (ln 8), which is shown as the "baseline". The task is solved if --goal percent of new
sequences are answered correctly.
"""

EXAMPLES = """\
examples:
  python -m orthokern.tasks.temporal_order --T 100                        solve T = 100 with the defaults
  python -m orthokern.tasks.temporal_order --T 60 --bits 3                the 3-bit problem
  python -m orthokern.tasks.temporal_order --T 50 --preset srnn           a plain network, as in the paper
  python -m orthokern.tasks.temporal_order --T 50 --preset oinit          its matrices made orthogonal first
"""


COMMAND = last_answer_command(
    "temporal_order", DESCRIPTION, EXAMPLES, options=TemporalOrderOptions, build=TemporalOrder
)
complete = COMMAND.complete
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
