"""The tasks in tests: their command lines, comparisons of two runs, and a small text to train on."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orthokern.training import load_checkpoint, read_metrics
from orthokern.training.cli import TaskCommand

# All other fields of a resumed run are bitwise equal to those of an uninterrupted run.
TIMING_FIELDS = ("seconds", "ms_per_iteration", "us_per_step")


def command(task: str) -> TaskCommand[Any]:
    """The command line of a task."""
    loaded: TaskCommand[Any] = importlib.import_module(f"orthokern.tasks.{task}").COMMAND
    return loaded


def run(task: str, *options: object) -> int:
    """The exit code of a task's command line."""
    return command(task).main([str(option) for option in options])


def trained(folder: Path, task: str, *options: object) -> dict[str, Any]:
    """The content of result.json of a run that a task's command line trains to its end in this new folder."""
    assert run(task, *options, "--out", folder) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def settings_of(task: str, options: Sequence[str], **changes: Any) -> Any:
    """The complete settings of a command line, with some changed."""
    its = command(task)
    return its.settings({**its.parser().parse(list(options)), **changes})


def build(task: str, options: Sequence[str], **changes: Any) -> Any:
    """A task as its command line builds it, with the parameters of seed 0."""
    settings = settings_of(task, options, **changes)
    torch.manual_seed(0)
    return command(task).build(settings)


def assert_refused(
    capsys: pytest.CaptureFixture[str], message: str, main: Callable[[list[str]], int], *arguments: object
) -> None:
    """A command line ends with exit code 2 and one line of error that holds the message."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


def assert_resumes(task: str, options: Sequence[object], folder: Path, *ends: int) -> Path:
    """Parts of a run that end at these iterations have the records and the states of a run without a stop. A part also
    evaluates at its end. The folder of the run without a stop is returned."""
    whole, parts = folder / "whole", folder / "parts"
    assert run(task, *options, "--out", whole, "--iterations", ends[-1]) == 0
    for end in ends:
        where = ["--resume", parts] if parts.exists() else [*options, "--out", parts]
        assert run(task, *where, "--iterations", end) == 0
    assert len(records(whole)) == ends[-1]
    for ours, theirs in zip(records(parts), records(whole), strict=True):
        if ours["iteration"] in ends:
            ours = {name: value for name, value in ours.items() if name in theirs}
        assert ours == theirs
    resumed, expected = (load_checkpoint(each / "checkpoint.pt") for each in (parts, whole))
    for part in ("model", "optimizer", "scheduler", "plateau", "average", "task_state", "rng"):
        assert same(resumed[part], expected[part]), part
    return whole


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without their timing fields."""
    return [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in read_metrics(folder / "metrics.jsonl")]


def same(a: Any, b: Any) -> bool:
    """Whether two states are bit-identical, tensors included. Wall times are not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def assert_same_run(a: Path, b: Path) -> None:
    """The records and the states of two runs are equal."""
    assert records(a) == records(b)
    assert same(load_checkpoint(a / "checkpoint.pt"), load_checkpoint(b / "checkpoint.pt"))
    assert same(load_checkpoint(a / "best.pt"), load_checkpoint(b / "best.pt"))


def write_words(folder: Path, train: int, held_out: int) -> Path:
    """The files of the Penn Treebank with short sentences of three words. Letters within a word are certain, the words
    are not."""
    draw = random.Random(0)
    for part, count in (("train", train), ("valid", held_out), ("test", held_out)):
        lines = [" ".join(draw.choices(["black", "<unk>", "quiz"], k=draw.randint(1, 5))) for _ in range(count)]
        (folder / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in lines))
    return folder
