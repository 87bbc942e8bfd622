"""A run's folder: config.json, metrics.jsonl, checkpoint.pt, best.pt and plots."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthokern._files import read_object, write_atomically
from orthokern._version import __version__
from orthokern.errors import CheckpointError, InputError
from orthokern.training.metrics import MetricsLog


class RunFolder:
    """The paths of a run. Use `create` or `open` to construct it.

    Attributes:
        path: the folder.
        config: the content of config.json, see `create`.
        log: metrics.jsonl, locked for this process.
        metrics, checkpoint, best, result: the files. checkpoint.pt is the last state, from which a resumed run
            continues, best.pt the state with the best evaluation so far.
    """

    log: MetricsLog

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config
        self.metrics, self.checkpoint = path / "metrics.jsonl", path / "checkpoint.pt"
        self.best, self.result = path / "best.pt", path / "result.json"

    @classmethod
    def create(
        cls, path: Path | None, task: str, settings: dict[str, Any], facts: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Creates a new folder (None: `runs/<task>-<time>/` in the working directory), locks it and writes config.json
        with all settings of the run, as JSON values, and `facts`, which plots use (`Task.facts`). InputError if the
        folder has a run with a record, or other files; OSError if it cannot be created or written."""
        config = {
            "task": task,
            "settings": settings,
            **(facts or {}),
            "versions": {
                "orthokern": __version__,
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "machine": {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()},
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        folder = _new_folder(Path("runs"), task) if path is None else path
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder, config)
        # a run that ended within its first iteration leaves config.json and an empty metrics.jsonl
        names = {"config.json", "config.json.tmp", "metrics.jsonl"}
        left = names if run.metrics.exists() else set()
        if any(file.name not in left for file in folder.iterdir()) or (left and run.metrics.stat().st_size):
            raise InputError(f"--out {path} is in use (not empty); give another folder, or --resume to continue")
        run.log = MetricsLog(run.metrics)
        run.write_config()
        return run

    def write_config(self) -> None:
        """Writes config.json; called again if a resumed run has changed settings."""
        write_atomically(self.path / "config.json", json.dumps(self.config, indent=2).encode() + b"\n")

    @classmethod
    def open(cls, path: Path, task: str) -> RunFolder:
        """Opens the folder of an earlier run, to resume it."""
        config = read_object(path / "config.json")
        if not config:
            runs = sorted(file.parent for file in path.glob("*/config.json"))
            hint = f"; give one of the runs in it, such as {runs[0]}" if runs else ""
            raise CheckpointError(f"nothing to resume in {path}: no config.json there{hint}")
        if not isinstance(config.get("settings"), dict) or config.get("task") != task:
            raise CheckpointError(f"{path} must hold a run of the task {task!r}, got {config.get('task')!r}")
        run = cls(path, config)
        every = config["settings"].get("checkpoint_every") or 1
        done = run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0  # iterations
        if not run.checkpoint.exists() and (done > every or run.result.exists()):
            raise CheckpointError(
                f"nothing to resume in {path}: no checkpoint.pt there, though metrics.jsonl ends at iteration {done}; "
                "put it back, or start a new run in another folder"
            )
        run.log = MetricsLog(run.metrics)
        return run

    def close(self) -> None:
        """Releases the folder for other processes."""
        self.log.close()


def _new_folder(parent: Path, task: str) -> Path:
    """Creates `<task>-<time>` in a folder, with a number if the name exists."""
    parent.mkdir(parents=True, exist_ok=True)
    name, copy = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        path = parent / (name if copy == 1 else f"{name}-{copy}")
        try:
            path.mkdir()  # without a check first, so that only one of two processes succeeds
            return path
        except FileExistsError:
            copy += 1


def processor() -> str:
    """The name of the CPU without trademark signs, with its family; the architecture if the name is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    name = " ".join(re.sub(r"\((R|TM|C)\)|\bCPU\b|@.*$", "", fields.get("model name", platform.machine())).split())
    # on a virtual machine, the name may be only a brand
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
