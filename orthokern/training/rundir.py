"""A run's folder: config.json, metrics.jsonl, checkpoint.pt, best.pt and plots."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthokern._version import __version__
from orthokern.diagnostics.runs import number_at, read_metrics
from orthokern.errors import CheckpointError, InputError
from orthokern.training.checkpoint import write_atomically


class RunFolder:
    """Paths of one run; in several processes, of all of them. Make it by `create` or `open`.

    Attributes:
        path: the folder.
        config: what config.json holds: task, settings, versions, device, seed, threads.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The last state: what a resumed run continues from."""
        return self.path / "checkpoint.pt"

    @property
    def best(self) -> Path:
        """The state with the best evaluation so far."""
        return self.path / "best.pt"

    @property
    def result(self) -> Path:
        """How the run ended: written when the goal is reached or all iterations are done."""
        return self.path / "result.json"

    @property
    def profile(self) -> Path:
        """Where an iteration's time goes, if --profile asked."""
        return self.path / "profile.json"

    @classmethod
    def create(
        cls, path: Path | None, task: str, settings: dict[str, Any], facts: Mapping[str, Any] | None = None
    ) -> "RunFolder":
        """Makes a new folder and writes config.json.

        Args:
            path: the folder; must not exist, or be empty. None: `runs/<task>-<time>/` under the working directory.
            task: the task's name.
            settings: everything that the run depends on, as JSON values.
            facts: what plots of the run tell besides, for config.json: "baseline", "time_steps", ...

        Raises:
            InputError: the folder is in use, can't be made, or can't be written.
        """
        what = "the run folder" if path is None else f"--out {path}: the folder"
        own = path is None
        if path is None:
            path = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = {
            "task": task,
            "settings": settings,
            **(facts or {}),
            "device": settings.get("device"),
            "seed": settings.get("seed"),
            "threads": settings.get("threads"),
            "versions": _versions(),
            "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            if own:
                path = _new_folder(path)
            elif path.is_dir() and any(path.iterdir()):
                raise InputError(
                    f"{what} is in use (not empty); give another one, or --resume to continue the run in it"
                )
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "config.json", json.dumps(config, indent=2).encode() + b"\n")
        except OSError as error:
            raise InputError(f"{what} cannot be written: {path}: {error.strerror or error}") from None
        return cls(path, config)

    @classmethod
    def open(cls, path: Path, task: str) -> "RunFolder":
        """Opens the folder of an earlier run, to resume it.

        Raises:
            CheckpointError: no run in this folder, one of another task, or one whose checkpoint.pt is gone. (One that
                was killed before its first checkpoint has nothing else to lose either: it may begin again.)
            InputError: the folder can't be written.
        """
        file = path / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"nothing to resume in {path}: no config.json there") from None
        except OSError as error:
            raise CheckpointError(f"nothing to resume in {path}: {error.strerror or error}") from None
        except ValueError:
            raise CheckpointError(f"{file} is damaged: not JSON") from None
        if not isinstance(config, dict) or not isinstance(config.get("settings"), dict) or "task" not in config:
            raise CheckpointError(f"{file} is not the configuration of an orthokern run")
        if config["task"] != task:
            raise CheckpointError(f"{path} holds a run of the task {config['task']!r}, not of {task!r}")
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write the run folder {path}: permission denied")
        run = cls(path, config)
        run._check_nothing_is_lost()
        return run

    def _check_nothing_is_lost(self) -> None:
        """Without a checkpoint a run begins again and writes over what is there: refused where that was trained."""
        if self.checkpoint.exists():
            return
        found = next((f"{file.name} is there" for file in (self.best, self.result) if file.exists()), None)
        every = self.config["settings"].get("checkpoint_every")
        if found is None and every is not None and self.metrics.exists():
            done = max((int(number_at(record, "iteration") or 0) for record in read_metrics(self.metrics)), default=0)
            if done > every:  # the record of an iteration is written before its checkpoint
                found = f"metrics.jsonl goes to iteration {done}, and a checkpoint was due every {every}"
        if found is not None:
            raise CheckpointError(
                f"nothing to resume in {self.path}: no checkpoint.pt there, though {found}; "
                "put it back, or start a new run in another folder"
            )


def _new_folder(path: Path) -> Path:
    """Makes the folder, with a number behind its name if another run, of the same second, has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = 1
    while True:
        folder = path if copy == 1 else path.with_name(f"{path.name}-{copy}")
        try:
            folder.mkdir()  # not asked for first: of two processes, one makes it
        except FileExistsError:
            copy += 1
        else:
            return folder


def _versions() -> dict[str, str]:
    return {
        "orthokern": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
