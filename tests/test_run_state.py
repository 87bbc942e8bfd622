"""A run folder in use by another process, an edited configuration, and a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import toy_task
from runs import records, same

from orthokern.errors import CheckpointError
from orthokern.training import RunFolder, load_checkpoint


@pytest.mark.parametrize("content", [b"", b"[]", b'{"task": "adding"}', b'{"task": "adding", "settings": []}', b"\xff"])
def test_a_damaged_configuration_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        RunFolder.open(tmp_path, "adding")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert toy_task.main(["--out", str(tmp_path / "run"), "--iterations", "2", "--no-plots"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["settings"]["hidden"] = "many"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    capfd.readouterr()
    assert toy_task.main(["--resume", str(tmp_path / "run")]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_full_disk_and_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """best.pt, checkpoint.pt and metrics.jsonl are then those of a run that never stopped, but for times and for the
    number of iterations, the setting that the resume changed."""
    whole, folder = tmp_path / "whole", tmp_path / "full"
    assert toy_task.main(["--out", str(whole), "--iterations", "20", "--no-plots"]) == 0
    fsync, evaluate = os.fsync, toy_task.Toy.evaluate

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(self: toy_task.Toy, iteration: int) -> dict[str, float]:
        if iteration >= 12:
            monkeypatch.setattr(os, "fsync", full)
        return evaluate(self, iteration)

    monkeypatch.setattr(toy_task.Toy, "evaluate", fill)
    assert toy_task.main(["--out", str(folder), "--iterations", "14", "--no-plots"]) == 2
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
