"""`python -m orthokern.reproduce` in tests, with a toy experiment whose runs need no processes."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from runs import assert_refused
from runs import run as run_task

from orthokern.reproduce import __main__ as command
from orthokern.reproduce import runner
from orthokern.reproduce.spec import Experiment, Measure, Run

ACCURACY = Measure("accuracy (%)", "best_accuracy", scale=100.0)
LOSS = Measure("loss", "best_loss", digits=3, higher_is_better=False)


def toy(margin: str) -> Run:
    return Run(
        name=f"toy-{margin}",
        task="copy",
        options=("--T", "4", "--hidden", "8", "--margin", margin, "--iterations", "6", "--goal", "100", "--no-plots"),
        quick=("--iterations", "3"),
        labels={"margin": margin},
        published={ACCURACY.title: 50.0},
    )


TOY = Experiment(
    "toy",
    "A toy",
    "Nobody 2000, Table 9",
    (toy("0"), toy("0.1")),
    (ACCURACY, LOSS),
    figure="curves",
    quantity="loss",
    legend=("margin",),
    epochs=False,
)


class RunHere:
    """Stands in for subprocess.Popen: a task's command line runs in this process, in a tenth of the time."""

    def __init__(self, command: list[str], stdout: IO[bytes], stderr: int) -> None:
        assert command[:2] == [sys.executable, "-m"] and stderr == subprocess.STDOUT
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            self.code = run_task(command[2].removeprefix("orthokern.tasks."), *command[3:])
        stdout.write(text.getvalue().encode())

    def poll(self) -> int:
        return self.code

    wait = poll


class Command:
    """`python -m orthokern.reproduce` in a folder, with one thread per run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path) -> None:
        self.monkeypatch, self.capsys, self.out, self.full = monkeypatch, capsys, out, out / "full"

    def add(self, experiment: Experiment) -> None:
        self.monkeypatch.setitem(command.EXPERIMENTS, experiment.name, experiment)

    def __call__(self, *options: object, code: int = 0) -> tuple[str, str]:
        """Standard output and standard error."""
        self.capsys.readouterr()
        assert command.main([str(option) for option in (*options, "--out", self.out)]) == code
        return self.capsys.readouterr()

    def rows(self, name: str = "toy") -> list[dict[str, Any]]:
        return json.loads((self.full / f"{name}.json").read_text())["rows"]

    def states(self) -> list[str]:
        return [row["state"] for row in self.rows()]

    def refused(self, message: str, *options: object) -> None:
        assert_refused(self.capsys, message, command.main, *options, "--out", self.out)


def toy_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> Command:
    """The command with the toy experiment, whose runs are not processes."""
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=RunHere, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(runner, "POLL", 0.0)
    reproduce = Command(monkeypatch, capsys, folder)
    reproduce.add(TOY)
    return reproduce
