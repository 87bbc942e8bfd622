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
    """Paths of one run; in several processes, of all of them. Make it by `create` or `open`.

    Attributes:
        path: the folder.
        config: what config.json holds: task, settings, versions, device, seed, threads.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self._lock: Lock | None = None
        self._made: list[Path] = []  # folders that did not exist before, the innermost first
        self._begun = False  # whether `create` may have written config.json

    def __getstate__(self) -> dict[str, Any]:
        """For the other ranks: without the lock, which is this process's."""
        return {**self.__dict__, "_lock": None, "_made": [], "_begun": False}

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
        """Makes a new folder, locks it (see `Lock`) and writes config.json.

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
        run = cls(path, config)
        try:
            if own:
                run._made_new()
            else:
                _check_empty(path, what)
                run._made = make_folder(path)
            run._lock = Lock(run.metrics)
            # the one who had the lock may have come and gone since the folder was looked at
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
        """Makes the folder, with a number behind its name if another run, of the same second, has it."""
        above, wanted = make_folder(self.path.parent), self.path
        self._made = above
        copy = 1
        while True:
            try:
                self.path.mkdir()  # not asked for first: of two processes, one makes it
            except FileExistsError:
                copy += 1
                self.path = wanted.with_name(f"{wanted.name}-{copy}")
            else:
                self._made = [self.path, *above]
                return

    def lock(self) -> Lock:
        """Hands over the right to write in the folder, which `create` and `open` took.

        Raises:
            OSError, CheckpointError: it was handed over before, and cannot be had again; see `Lock`.
        """
        lock, self._lock = self._lock, None
        return Lock(self.metrics) if lock is None or lock.descriptor < 0 else lock

    def discard(self) -> None:
        """Takes back what `create` or `open` made for a run that was then refused, before its first iteration; what
        others made stays, and so does a run that has begun or that another process has locked."""
        lock, self._lock = self._lock, None
        if self._begun:  # and its lock was handed over
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
            CheckpointError: no run in this folder, one of another task, or one whose checkpoint.pt is gone. (One that
                was killed before its first checkpoint has nothing else to lose either: it may begin again.)
            InputError: the folder can't be written.
        """
        file = path / "config.json"
        try:
            config = read_object(file)
        except FileNotFoundError:
            raise CheckpointError(f"nothing to resume in {path}: no config.json there") from None
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
        """Without a checkpoint a run begins again and writes over what is there: refused where that was trained."""
        if self.checkpoint.exists():
            return
        every = count(self.config["settings"].get("checkpoint_every"), 1)
        done = max((record["iteration"] for record in read_metrics(self.metrics)), default=0)
        due = every is None or done > every  # the record of an iteration is written before its checkpoint
        if due and self.best.exists():  # one of before the first checkpoint comes again with its iteration
            found = "best.pt is there"
        elif self.result.exists():
            found = "result.json is there"
        elif due and done:
            found = f"metrics.jsonl goes to iteration {done}, and a checkpoint was due every {every}"
        else:
            found = None
        if found is not None:
            raise CheckpointError(
                f"nothing to resume in {self.path}: no checkpoint.pt there, though {found}; "
                "put it back, or start a new run in another folder"
            )


def _check_empty(path: Path, what: str) -> None:
    """Refuses a folder that holds more than what a start leaves that was killed before config.json was there."""
    if path.is_dir():
        for file in path.iterdir():
            if file.name != "config.json.tmp" and not (file.name == "metrics.jsonl" and file.lstat().st_size == 0):
                raise InputError(
                    f"{what} is in use (not empty); give another one, or --resume to continue the run in it"
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
