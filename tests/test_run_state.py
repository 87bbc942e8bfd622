"""A run folder in use by another process, an edited configuration, and a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_task

from orthokern.errors import CheckpointError
from orthokern.training import RunFolder


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
