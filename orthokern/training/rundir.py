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

from orthokern._files import count, make_folder, read_object, remove_folders
from orthokern._version import __version__
from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import CheckpointError, InputError
from orthokern.training.checkpoint import write_atomically
from orthokern.training.metrics import Lock
from orthokern.training.schema import json_value


class RunFolder:
    """The paths of a run. Several processes of a run share one folder. Use `create` or `open` to construct it.

    Attributes:
        path: the folder.
        config: the content of config.json: task, settings, versions, device, seed, threads.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self._lock: Lock | None = None
        self._made: list[Path] = []  # folders that did not exist before, the innermost first
        self._begun = False  # whether `create` may have written config.json

    def __getstate__(self) -> dict[str, Any]:
        """The state for the other ranks, without the lock, which belongs to this process."""
        return {**self.__dict__, "_lock": None, "_made": [], "_begun": False}

    @property
    def metrics(self) -> Path:
        """The records, one line of JSON per iteration."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The last state, from which a resumed run continues."""
        return self.path / "checkpoint.pt"

    @property
    def best(self) -> Path:
        """The state with the best evaluation so far."""
        return self.path / "best.pt"

    @property
    def result(self) -> Path:
        """The result, written when the goal is reached or all iterations are done."""
        return self.path / "result.json"

    @property
    def profile(self) -> Path:
        """The profile, if --profile was given."""
        return self.path / "profile.json"

    @classmethod
    def create(
        cls, path: Path | None, task: str, settings: dict[str, Any], facts: Mapping[str, Any] | None = None
    ) -> "RunFolder":
        """Creates a new folder, locks it (see `Lock`) and writes config.json.

        Args:
            path: the folder; must not exist, or be empty. None: `runs/<task>-<time>/` in the working directory.
            task: name of the task.
            settings: all settings of the run, as JSON values.
            facts: further values for config.json that plots use: `Task.facts`

        Raises:
            InputError: the folder is in use, or cannot be created or written.

        Example::

            >>> import pathlib, tempfile
            >>> folder = pathlib.Path(tempfile.mkdtemp()) / "first"
            >>> run = RunFolder.create(folder, "copy", {"seed": 0}, {"baseline": 0.1})
            >>> run.config["task"], run.checkpoint.name
            ('copy', 'checkpoint.pt')
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
        run = cls(path, config)
        try:
            if own:
                run._made_new()
            else:
                _check_empty(path, what)
                run._made = make_folder(path)
            run._lock = Lock(run.metrics)
            # another process may have used the folder since it was checked
            _check_empty(run.path, what)
            run._begun = True
            write_atomically(run.path / "config.json", json.dumps(config, indent=2).encode() + b"\n")
        except OSError as error:
            run.discard()
            raise InputError(f"{what} cannot be written: {run.path}: {error.strerror or error}") from None
        except ValueError as error:
            run.discard()
            if isinstance(error, InputError):
                raise
            raise InputError(f"{what} cannot be written: {str(path)!r} is no file name") from None
        return run

    def _made_new(self) -> None:
        """Creates the folder. A number is appended to its name if another run of the same second has this name."""
        above, wanted = make_folder(self.path.parent), self.path
        self._made = above
        copy = 1
        while True:
            try:
                self.path.mkdir()  # created without a check first, so that only one of two processes succeeds
            except FileExistsError:
                copy += 1
                self.path = wanted.with_name(f"{wanted.name}-{copy}")
            else:
                self._made = [self.path, *above]
                return

    def rewrite(self) -> None:
        """Writes config.json again, with the settings that a resumed run changed: the next one continues with these.

        Raises:
            OSError: the file cannot be written.
        """
        self.config["threads"] = self.config["settings"].get("threads")
        write_atomically(self.path / "config.json", json.dumps(self.config, indent=2).encode() + b"\n")

    def lock(self) -> Lock:
        """Transfers the lock that `create` or `open` acquired to the caller.

        Raises:
            OSError, CheckpointError: the lock was transferred before and cannot be acquired again; see `Lock`.
        """
        lock, self._lock = self._lock, None
        return Lock(self.metrics) if lock is None or lock.descriptor < 0 else lock

    def discard(self) -> None:
        """Removes the files that `create` or `open` made for a run that was rejected before its first iteration. Files
        of others are kept, and so is a run that has started or that another process has locked."""
        lock, self._lock = self._lock, None
        if self._begun:  # its lock was transferred
            try:
                lock = Lock(self.metrics) if lock is None or lock.descriptor < 0 else lock
            except (OSError, CheckpointError):
                return
            trained = os.fstat(lock.descriptor).st_size > 0 or self.checkpoint.exists() or self.best.exists()
            if trained:
                lock.release()
                return
            (self.path / "config.json").unlink(missing_ok=True)
            lock.remove()
        elif lock is not None:
            if lock.created:
                lock.remove()
            lock.release()
        remove_folders(self._made)

    @classmethod
    def open(cls, path: Path, task: str) -> "RunFolder":
        """Opens the folder of an earlier run, to resume it.

        Raises:
            CheckpointError: no run in this folder, a run of another task, or a run whose checkpoint.pt is missing. (A
                run that was killed before its first checkpoint is accepted and starts again.)
            InputError: the folder cannot be written.
        """
        file = path / "config.json"
        try:
            config = read_object(file)
        except FileNotFoundError:
            raise CheckpointError(f"nothing to resume in {path}: no config.json there{_other_runs(path)}") from None
        except InputError as error:
            raise CheckpointError(f"nothing to resume in {path}: {error}") from None
        settings = config.get("settings")
        if not isinstance(settings, dict) or type(config.get("task")) is not str:
            raise CheckpointError(f"{file} is not the configuration of an orthokern run")
        wrong = next((name for name, value in settings.items() if not json_value(value)), None)
        if wrong is not None:
            raise CheckpointError(f"{file} is damaged: the setting {wrong[:40]!r} has no value that a setting can have")
        if config["task"] != task:
            raise CheckpointError(f"{path} holds a run of the task {config['task'][:40]!r}, not of {task!r}")
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write the run folder {path}: permission denied")
        run = cls(path, config)
        try:
            run._lock = Lock(run.metrics)
            run._check_nothing_is_lost()
        except OSError as error:
            raise InputError(f"{run.metrics} cannot be written: {error.strerror or error}") from None
        except InputError:
            run.discard()
            raise
        return run

    def _check_nothing_is_lost(self) -> None:
        """Rejects a folder without a checkpoint whose run got further than its first checkpoint: the run would start
        again and overwrite its files."""
        if self.checkpoint.exists():
            return
        every = count(self.config["settings"].get("checkpoint_every"), 1)
        done = max((record["iteration"] for record in read_metrics(self.metrics)), default=0)
        due = every is None or done > every  # the record of an iteration is written before its checkpoint
        if due and self.best.exists():  # a best.pt from before the first checkpoint is written again
            found = "best.pt exists"
        elif self.result.exists():
            found = "result.json exists"
        elif due and done:
            found = f"metrics.jsonl ends at iteration {done}, and a checkpoint is written every {every}"
        else:
            found = None
        if found is not None:
            raise CheckpointError(
                f"nothing to resume in {self.path}: no checkpoint.pt there, though {found}; "
                "put it back, or start a new run in another folder"
            )


def _other_runs(path: Path) -> str:
    """Names a run folder inside `path`, if there is one."""
    runs = sorted(file.parent for file in path.glob("*/config.json"))
    return f"; {path} holds {len(runs)} run folder(s): give one, as --resume {runs[0]}" if runs else ""


def _check_empty(path: Path, what: str) -> None:
    """Rejects a folder with any files other than those of a run that was killed before config.json was written."""
    if path.is_dir():
        for file in path.iterdir():
            if file.name != "config.json.tmp" and not (file.name == "metrics.jsonl" and file.lstat().st_size == 0):
                raise InputError(
                    f"{what} is in use (not empty); give another folder, or --resume to continue the run in it"
                )


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
