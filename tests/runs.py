"""Run folders in tests: their records without timing, comparisons of two runs, and a small text to train on."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orthokern.training import read_metrics
from orthokern.training.metrics import TIMING_FIELDS


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without their timing fields."""
    return [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in read_metrics(folder / "metrics.jsonl")]


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same bits, tensors included. Wall times are not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


def assert_steps_of_torch(task: Any, optimizer: Any) -> None:
    """Three steps of the task's optimizer are those of ``optimizer(parameters)`` with the same gradients."""
    model = copy.deepcopy(task.model)
    theirs = optimizer(model.parameters())
    for _ in range(3):
        for ours, other in zip(task.model.parameters(), model.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            other.grad = ours.grad.clone()
        task.optimizer.step()
        theirs.step()
    for ours, other in zip(task.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, other)


def write_words(folder: Path, train: int, held_out: int) -> Path:
    """The files of the Penn Treebank with short sentences of three words. Letters within a word are certain, the words
    are not."""
    draw = random.Random(0)
    for part, count in (("train", train), ("valid", held_out), ("test", held_out)):
        lines = [" ".join(draw.choices(["black", "<unk>", "quiz"], k=draw.randint(1, 5))) for _ in range(count)]
        (folder / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in lines))
    return folder
