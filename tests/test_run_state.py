"""A run folder that was edited: for every change of a field of the checkpoint or configuration, the run either ends
with one line or is an ordinary run, and never uses a bad value."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_task
from runs import records, same

from orthokern.errors import CheckpointError, InputError
from orthokern.tasks import adding
from orthokern.training import metrics
from orthokern.training.checkpoint import load_checkpoint, save_checkpoint
from orthokern.training.rundir import RunFolder
from orthokern.training.schema import check_payload


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a nested state; of long lists, the ends."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for index in sorted({0, len(value) - 1} if len(value) > 8 else range(len(value))):
            yield from places(value[index], (*path, index))


def edited(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at one place; `LACK` for none."""
    if not path:
        return new
    if isinstance(value, dict):
        rest = {key: inner for key, inner in value.items() if key != path[0]}
        inner = edited(value[path[0]], path[1:], new)
        return rest if inner is LACK else {**rest, path[0]: inner}
    parts = [edited(inner, path[1:], new) if index == path[0] else inner for index, inner in enumerate(value)]
    return type(value)(part for part in parts if part is not LACK)


LACK = object()
BAD = {
    "lack": LACK,
    "None": None,
    "text": "many",
    "list": [1, 2],
    "dict": {"a": "many"},
    "tensor": torch.zeros(2, 3, 4),
    "huge": 1e25,
    "huge integer": 10**400,
    "negative": -1,
    "negative float": -1.0,
    "nan": math.nan,
    "true": True,
    "expanded": torch.zeros(1).expand(2**40),
    "sparse": torch.zeros(3, 3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the toy task: geodesic bases, RMSprop, two schedules, dropout, a generator of its own."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    assert toy_task.main(["--out", str(folder), "--iterations", "8", "--no-plots"]) == 0
    return folder


def built(run: Path) -> tuple[toy_task.Toy, dict[str, Any]]:
    """A new task of the run's settings, and what a checkpoint of it would hold."""
    from orthokern.training.checkpoint import rng_state
    from orthokern.training.distributed import Shard
    from orthokern.training.state import RunState

    settings = json.loads((run / "config.json").read_text())["settings"]
    task = toy_task.Toy(toy_task.complete(settings))
    state = RunState(task, RunFolder(run, {"settings": settings}), None, 0.0, Shard())  # type: ignore[arg-type]
    return task, state._payload([rng_state()])


def test_a_checkpoint_fits_the_run_that_it_is_of(run: Path) -> None:
    task, fresh = built(run)
    check_payload(load_checkpoint(run / "checkpoint.pt"), fresh, task)


def test_every_edit_of_a_checkpoint_is_refused_or_harmless(run: Path) -> None:
    """Structure: what is refused is one line; what is accepted can be loaded."""
    task, fresh = built(run)
    payload = load_checkpoint(run / "checkpoint.pt")
    refused = accepted = 0
    for path in places(payload):
        if path[0] in ("task", "settings", "format", "version"):  # compared before
            continue
        for name, value in BAD.items():
            if name == "lack" and len(path) == 1:  # told as "lacks"
                continue
            changed = edited(payload, path, value)
            try:
                check_payload(copy.copy(changed), fresh, task)
            except InputError as error:
                assert "\n" not in str(error) and len(str(error)) < 400, (path, name)
                refused += 1
                continue
            accepted += 1
            assert name not in ("text", "dict", "tensor", "expanded", "sparse", "meta", "huge integer") or path[0] in (
                "data",
                "rng_of_other_ranks",
            ), (path, name)
            task.model.load_state_dict(changed["model"])
            task.optimizer.load_state_dict(changed["optimizer"])
            task.scheduler.load_state_dict(changed["scheduler"])
            task.plateau.load_state_dict(changed["plateau"])
    assert refused > 20 * accepted > 0


SAMPLE = [
    ("optimizer", "state", 2, "square_avg"),
    ("optimizer", "param_groups", 0, "lr"),
    ("optimizer", "param_groups", 1, "alpha"),
    ("scheduler", "gamma"),
    ("scheduler", "last_epoch"),
    ("plateau", "num_bad_epochs"),
    ("model", "readout.weight"),
    ("rng", "python"),
    ("rng", "torch"),
    ("settings",),
    ("settings", "hidden"),
    ("task",),
    ("evaluation",),
    ("best",),
    ("iteration",),
    ("task_state", "generator"),
]
NEEDED = [
    ("data",),
    ("evaluated_at",),
    ("plateau",),
    ("average",),
    ("rng_of_other_ranks",),
    ("optimizer", "param_groups", 0, "growth"),
]


def test_a_resumed_command_refuses_in_one_line_before_it_trains(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    payload = load_checkpoint(run / "checkpoint.pt")
    changes = [(path, value) for path in SAMPLE for value in ("many", [1], {}, 1e25, torch.zeros(1, 2))]
    changes.remove((("settings",), {}))  # those of an older version may be fewer
    changes.append((("evaluation",), {"a": 1}))
    for path, value in [*changes, *((path, LACK) for path in NEEDED)]:
        folder = tmp_path / "edited"
        shutil.copytree(run, folder)
        save_checkpoint(folder / "checkpoint.pt", edited(payload, path, value))
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        capfd.readouterr()
        assert toy_task.main(["--resume", str(folder), "--iterations", "12"]) == 2, (path, value)
        out, err = capfd.readouterr()
        assert not out and err.startswith("error: ") and err.count("\n") == 1, (path, value, err)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
        shutil.rmtree(folder)


CONFIG_BAD = [None, "many", [], {}, 1e25, 10**400, -1, True, "\0"]


def test_every_edit_of_the_settings_is_refused_or_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of an experiment that needs no data: exit code and one line, no traceback, whatever config.json says."""
    sizes = ["--T", "20", "--hidden", "8", "--batch", "4", "--eval-sequences", "4", "--no-plots"]
    folder = tmp_path / "run"
    assert adding.main([*sizes, "--iterations", "1", "--out", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    for file in ("checkpoint.pt", "best.pt", "result.json"):  # it begins again: nothing is compared with a checkpoint
        (folder / file).unlink()
    codes = set()
    for name in config["settings"]:
        for value in CONFIG_BAD:
            if name == "iterations" and value == 1e25:  # an endless run
                continue
            changed = {**config, "settings": {**config["settings"], name: value}}
            (folder / "config.json").write_text(json.dumps(changed))
            (folder / "metrics.jsonl").write_bytes(b"")
            capfd.readouterr()
            code = adding.main(["--resume", str(folder)])
            out, err = capfd.readouterr()
            codes.add(code)
            assert code in (0, 2, 3), (name, value)
            if code == 2:
                assert err.startswith("error: ") and err.count("\n") == 1 and not out, (name, value, out, err)
            for file in ("checkpoint.pt", "best.pt", "result.json"):
                (folder / file).unlink(missing_ok=True)
    assert codes >= {0, 2}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"task": "adding"}', b'{"task": "adding", "settings": []}', b"[" * 10_000]
    + [b"[" * 10_000 + b"]" * 10_000]
    + [b'{"task": "adding", "settings": {"a": ' + b"[" * 90 + b"]" * 90 + b"}}", b"\xff", b"\0" * 100],
)
def test_a_damaged_configuration_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        RunFolder.open(tmp_path, "adding")
    assert "\n" not in str(error.value) and "config.json" in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_the_loser_of_two_starts_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that both find the folder new: one has it, whatever the order of their steps."""
    folder = tmp_path / "new"
    winner: list[RunFolder] = []
    taken = metrics.Lock._take

    def take(self: metrics.Lock) -> bool:
        if not winner:  # the other process is a moment faster
            winner.append(RunFolder.__new__(RunFolder))
            monkeypatch.setattr(metrics.Lock, "_take", taken)
            winner[0] = RunFolder.create(folder, "toy", {"who": "winner"})
        return taken(self)

    monkeypatch.setattr(metrics.Lock, "_take", take)
    with pytest.raises(CheckpointError, match="another process is training in the run folder"):
        RunFolder.create(folder, "toy", {"who": "loser"})
    assert json.loads((folder / "config.json").read_text())["settings"] == {"who": "winner"}
    winner[0].lock().release()
    with pytest.raises(InputError, match="in use"):
        RunFolder.create(folder, "toy", {"who": "late"})
    assert json.loads((folder / "config.json").read_text())["settings"] == {"who": "winner"}


def test_a_refused_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(self: toy_task.Toy, batch: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(toy_task.Toy, "loss", refuse)
    for options in ([], ["--out", "a/b/c"]):
        assert toy_task.main(options) == 2
        out, err = capfd.readouterr()
        assert not out and err.startswith("error: out of memory") and err.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_a_run_that_is_refused_for_its_lock_says_one_line(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = metrics.Lock(run / "metrics.jsonl")
    assert toy_task.main(["--resume", str(run)]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: another process is training") and err.count("\n") == 1
    lock.release()


def test_a_full_disk_and_space_again(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """best.pt, checkpoint.pt and metrics.jsonl are then those of a run that never stopped, but for times and for the
    number of iterations, the setting that the resume changed."""
    import errno

    from orthokern.training import checkpoint

    whole, folder = tmp_path / "whole", tmp_path / "full"
    assert toy_task.main(["--out", str(whole), "--iterations", "20", "--no-plots"]) == 0
    fsync, evaluate = os.fsync, toy_task.Toy.evaluate

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(self: toy_task.Toy, iteration: int) -> dict[str, float]:
        if iteration >= 12:
            monkeypatch.setattr(checkpoint.os, "fsync", full)
        return evaluate(self, iteration)

    monkeypatch.setattr(toy_task.Toy, "evaluate", fill)
    assert toy_task.main(["--out", str(folder), "--iterations", "14", "--no-plots"]) == 0
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(toy_task.Toy, "evaluate", evaluate)
    assert load_checkpoint(folder / "checkpoint.pt")["iteration"] == 8
    assert toy_task.main(["--resume", str(folder), "--iterations", "20", "--no-plots"]) == 0

    def known(folder: Path, name: str) -> dict[str, Any]:
        payload = load_checkpoint(folder / name)
        settings = {key: value for key, value in payload["settings"].items() if key != "iterations"}
        return {**payload, "settings": settings, "seconds": 0.0}

    for name in ("checkpoint.pt", "best.pt"):
        assert same(known(whole, name), known(folder, name))
    assert records(whole) == records(folder) and len(records(whole)) == 20
