"""orthokern.tasks.run: a task as a function, with the numbers of its command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import refused
from runs import records, run

from orthokern import tasks
from orthokern.tasks import copy
from orthokern.training import loop

SETTINGS: dict[str, Any] = {"T": 8, "iterations": 3, "hidden": 6, "batch": 4, "margin": 0.2, "plots": False}


def test_the_result_is_that_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tasks.run("copy", tmp_path / "function", seed=5, threads=1, **SETTINGS)
    assert capsys.readouterr() == ("", "")
    words = "--T 8 --iterations 3 --hidden 6 --batch 4 --margin 0.2 --no-plots --seed 5 --threads 1".split()
    assert run("copy", *words, "--out", tmp_path / "line") == 0
    assert [record["loss"] for record in result.records] == [record["loss"] for record in records(tmp_path / "line")]
    assert len(result.records) == 3 and result.exit_code == 0 and result.values["iteration"] == 3
    assert result.settings["margin"] == 0.2 and result.settings["seed"] == 5 and result.settings["plots"] is False
    assert result.task == "copy" and result.folder == tmp_path / "function"
    assert result.message.startswith("not solved: ")


def test_a_warning_is_not_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = loop._plot
    monkeypatch.setattr(loop, "_plot", lambda *given: (print("old", file=sys.stderr), plot(*given))[1])
    assert tasks.run("copy", tmp_path, threads=1, **SETTINGS).message.startswith("not solved: ")


def test_a_run_that_diverges_has_its_records(tmp_path: Path) -> None:
    settings = {**SETTINGS, "nonlinearity": "relu", "lr": 1e30, "input_lr": 1e30, "iterations": 9}
    result = tasks.run("copy", tmp_path, threads=1, **settings)
    assert result.exit_code == 3 and result.message.startswith("diverged: ") and result.values == {}
    assert [record["iteration"] for record in result.records] == list(range(1, len(result.records) + 1)) != []
    assert result.settings["margin"] == 0.2 and result.settings["goal"] == copy.COMMAND.defaults["goal"]


def test_none_is_a_value(tmp_path: Path) -> None:
    """Also where it stands for the default and has no word on the command line."""
    more = {"margin": None, "preset": None, "backend": None, "geodesic_lr": None}
    result = tasks.run("copy", tmp_path, **{**SETTINGS, **more})
    assert result.settings["margin"] is None and result.settings["backend"]


def test_a_switch_that_is_off_overrides_a_preset(tmp_path: Path) -> None:
    options = {"preset": "paper", "learned_h0": False, "hidden": 8, "T": 5, "batch": 2, "iterations": 1, "plots": False}
    assert tasks.run("adding", tmp_path, threads=1, **options).settings["learned_h0"] is False


@pytest.mark.parametrize(
    ("task", "settings", "text"),
    [
        ("copi", {}, "unknown task 'copi': did you mean 'copy'?"),
        ("network", {}, "unknown task 'network'"),
        ("a.b", {}, "unknown task 'a.b'"),
        ("copy", {"hiden": 3}, "unknown setting of task copy 'hiden': did you mean 'hidden'?"),
        ("copy", {"resume": "x"}, "unknown setting of task copy 'resume'"),
        ("copy", {"hidden": 0}, "'0' is not an integer of at least 1"),
        ("copy", {"hidden": True}, "hidden must be a value, got True"),
        ("copy", {"plots": 1}, "plots must be True or False, got 1"),
        ("copy", {"margin": "wide"}, "'wide' is not a number"),
    ],
)
def test_mistakes(task: str, settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    refused(lambda: tasks.run(task, tmp_path / "run", **settings), text)
    assert not (tmp_path / "run").exists()


def test_a_run_with_settings_that_are_no_options_continues(tmp_path: Path) -> None:
    tasks.run("copy", tmp_path, threads=1, **SETTINGS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["settings"] |= {"profile": 3}
    path.write_text(json.dumps(config))
    assert run("copy", "--resume", tmp_path, "--iterations", 4) == 0
