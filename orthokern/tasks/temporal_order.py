"""The temporal order problems: `python -m orthokern.tasks.temporal_order --T 100 [--bits 3]`.

A recurrent network reads T symbols and must report, in order, which of X and Y occurred at two (or three) distant
positions (Hochreiter & Schmidhuber 1997; Manchev & Spratling, section III-A). The best guess without memory has a loss
of ln 4 nats (ln 8), the "baseline". The task is solved if --goal percent of new sequences are answered correctly. The
data come from `orthokern.data.TemporalOrderTask`.
"""

from __future__ import annotations

from dataclasses import dataclass

from orthokern.data import TemporalOrderTask
from orthokern.tasks.command import task_command
from orthokern.tasks.last_answer import LastAnswer, LastAnswerOptions
from orthokern.training.options import option


@dataclass(kw_only=True)
class TemporalOrderOptions(LastAnswerOptions):
    """The settings of the temporal order problems."""

    GROUP = "the task"
    T: int = option(100, "symbols in a sequence", low=10, basic=True)
    bits: int = option(2, "number of symbols to remember, 2 or 3", low=2, high=3, basic=True)


class TemporalOrder(LastAnswer):
    """The temporal order problem for the training loop. Expects complete settings."""

    name = "temporal_order"
    TITLE = ("bits", *LastAnswer.TITLE)
    settings: TemporalOrderOptions

    def __init__(self, settings: TemporalOrderOptions) -> None:
        super().__init__(TemporalOrderTask(settings.T, bits=settings.bits), settings)


COMMAND = task_command("temporal_order", TemporalOrderOptions, TemporalOrder)
main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(main())
