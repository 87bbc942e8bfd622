"""The random permutation problem: `python -m orthokern.tasks.random_permutation --T 100`.

A recurrent network reads T symbols and must output the first one at the end (Hochreiter & Schmidhuber 1997; Manchev &
Spratling, section III-A). The data come from `orthokern.data.RandomPermutationTask`.
"""

from __future__ import annotations

import sys

from orthokern.data import RandomPermutationTask
from orthokern.tasks.last_answer import LastAnswer, LastAnswerOptions, last_answer_command
from orthokern.training.options import defaults

DEFAULTS = defaults(LastAnswerOptions)


class RandomPermutation(LastAnswer):
    """The random permutation problem for the training loop; settings as DEFAULTS, complete."""

    name = "random_permutation"

    def __init__(self, settings: LastAnswerOptions) -> None:
        super().__init__(RandomPermutationTask(settings.T), settings)


DESCRIPTION = """\
Train a recurrent network to remember the first of T symbols.

The first symbol is one of two, the others are drawn from 98 more. At the end the network must output
the first symbol, out of all 100. The best guess without memory has a loss of ln 2 nats, which is shown
as the "baseline". The task is solved if --goal percent of new sequences are answered correctly.
"""

EXAMPLES = """\
examples:
  python -m orthokern.tasks.random_permutation --T 100                    solve T = 100 with the defaults
  python -m orthokern.tasks.random_permutation --T 90 --preset srnn       a plain network, as in the paper
  python -m orthokern.tasks.random_permutation --T 240 --preset oinit --lr 0.1
"""


COMMAND = last_answer_command(
    "random_permutation", DESCRIPTION, EXAMPLES, options=LastAnswerOptions, build=RandomPermutation
)
complete = COMMAND.complete
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
