"""The figures of the nnRNN report: what the ablations change, a quick run, the table of Fisher memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import settings_of

from orthokern.diagnostics import plots
from orthokern.reproduce import __main__ as command
from orthokern.reproduce import nnrnn


def test_an_ablation_changes_one_thing() -> None:
    (ablations,) = (experiment for experiment in nnrnn.EXPERIMENTS if experiment.name == "nnrnn-ablations")
    base, *others = (vars(settings_of(run.task, run.options)) for run in ablations.runs)
    changed = [{key: other[key] for key in other if other[key] != base[key]} for other in others]
    assert changed == [
        {"modulus_norm": "l1"},
        {"hidden": 256},
        {"optimizer": "adam"},
        {"init": "cayley"},
        {"init": "orthogonal"},
    ]


def test_a_figure_of_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "nnrnn-copy --quick --only nnrnn --iterations 4 --threads 1 --out".split()
    assert command.main([*options, str(tmp_path)]) == 0
    folder = tmp_path / "quick"
    rows = json.loads((folder / "nnrnn-copy.json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["not run", "not run", "not run", "done"]
    assert rows[-1]["settings"]["model"] == "nnrnn" and rows[-1]["settings"]["T"] == 20
    assert (folder / "nnrnn-copy.md").read_text() in capsys.readouterr().out


def test_the_fisher_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nnrnn-fisher", "--out", str(tmp_path)]) == 0
    table = (tmp_path / "full" / "nnrnn-fisher.md").read_text()
    assert table in capsys.readouterr().out
    rows = json.loads((tmp_path / "full" / "nnrnn-fisher.json").read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["ours"] == pytest.approx(row["published"], rel=5e-3 if row["d"] == 0 else 2.5e-2)
        assert f"| {row['published']:.3g} | {row['ours']:.3f} |" in table
    assert (tmp_path / "full" / "nnrnn-fisher.png").read_bytes().startswith(b"\x89PNG")
    assert command.main(["nnrnn-fisher", "--epochs", "3", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --epochs: nnrnn-fisher does not accept it\n"


def test_a_figure_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPLBACKEND of an unknown name makes importing matplotlib a ValueError, for one."""

    def fail(*_: Any) -> Any:
        raise ValueError("Key backend: 'foo' is\nnot a valid value")

    monkeypatch.setattr(plots, "memory", fail)
    assert command.main(["nnrnn-fisher", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    line = "warning: nnrnn-fisher.png not drawn: ValueError: Key backend: 'foo' is not a valid value\n"
    assert err == line and ".png" not in out
    folder = tmp_path / "full"
    assert len(json.loads((folder / "nnrnn-fisher.json").read_text())["rows"]) == 12
    assert {file.name for file in folder.iterdir()} == {"nnrnn-fisher.md", "nnrnn-fisher.json"}
