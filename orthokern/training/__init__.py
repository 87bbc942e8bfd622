"""The training loop of all tasks: progress, metrics, checkpoints, signals, run folders, command line.

A task is a subclass of `Task`. Its command line is a `training.cli.TaskCommand` (see `orthokern.tasks.copy`).
"""

from orthokern.training.checkpoint import load_checkpoint, save_checkpoint
from orthokern.training.loop import LoopSettings, Outcome, train
from orthokern.training.metrics import read_metrics
from orthokern.training.rundir import RunFolder
from orthokern.training.task import Task

__all__ = [
    "LoopSettings",
    "Outcome",
    "RunFolder",
    "Task",
    "load_checkpoint",
    "read_metrics",
    "save_checkpoint",
    "train",
]
