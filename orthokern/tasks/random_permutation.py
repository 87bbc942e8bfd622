"""The random permutation problem: `python -m orthokern.tasks.random_permutation --T 100`.

A recurrent network reads T symbols and must output the first one at the end (Hochreiter & Schmidhuber 1997; Manchev &
Spratling, section III-A). The first symbol is one of two; the others are drawn from 98 more. The best guess without
memory has a loss of ln 2 nats, the "baseline". The task is solved if --goal percent of new sequences are answered
correctly. The data come from `orthokern.data.RandomPermutationTask`.
"""

from __future__ import annotations

from orthokern.data import RandomPermutationTask
from orthokern.tasks.command import task_command
from orthokern.tasks.last_answer import LastAnswer, LastAnswerOptions


class RandomPermutation(LastAnswer):
    """The random permutation problem for the training loop. Expects complete settings."""

    name = "random_permutation"

    def __init__(self, settings: LastAnswerOptions) -> None:
        super().__init__(RandomPermutationTask(settings.T), settings)


COMMAND = task_command("random_permutation", LastAnswerOptions, RandomPermutation)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
