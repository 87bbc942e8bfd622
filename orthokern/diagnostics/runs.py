"""Run folders as the training loop leaves them: config.json, and metrics.jsonl with a record per iteration.

A run that is still going on can be read at any time: its last line may be half written, and is left out then.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from orthokern.diagnostics.gradients import profile_steps
from orthokern.errors import InputError

__all__ = ["RunRecord", "load_run", "number_at", "read_metrics"]

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run, as it was found in its folder.

    Attributes:
        path: the folder.
        config: what config.json holds: task, settings, versions, device, seed.
        settings: all settings of the run, by name.
        task: the task's name.
        records: what metrics.jsonl holds, by rising "iteration"; [] if the first iteration isn't done.
    """

    path: Path
    config: dict[str, Any]
    settings: dict[str, Any]
    task: str
    records: list[Record]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def time_steps(self) -> int | None:
        """Time steps per sequence, or None if the run doesn't tell, or has sequences of several lengths.

        It is told by "time_steps" in records, configuration or settings, or by the ratio of the two times that a
        record holds: per iteration, and per time step.
        """
        told = {record["time_steps"] for record in self.records if isinstance(record.get("time_steps"), int)}
        if told:
            return told.pop() if len(told) == 1 else None
        for place in (self.config, self.settings):
            if isinstance(place.get("time_steps"), int):
                return int(place["time_steps"])
        for record in reversed(self.records):
            per_iteration, per_step = number_at(record, "ms_per_iteration"), number_at(record, "us_per_step")
            if per_iteration is not None and per_step:
                return max(1, round(1e3 * per_iteration / per_step))
        return None

    def profile_length(self, field: str) -> int | None:
        """`time_steps`, if every record's list under `field` is as long as `profile_steps` of them is; else None."""
        length = self.time_steps
        lists = {len(record[field]) for record in self.records if isinstance(record.get(field), list)}
        return length if length is not None and lists == {len(profile_steps(length))} else None

    @property
    def iterations_per_epoch(self) -> float | None:
        """Iterations that make an epoch, or None if the settings don't tell."""
        value = number_at(self.settings, "iterations_per_epoch")
        return value if value is not None and value > 0 else None

    def series(self, quantity: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations [P] float64 and values [P] float64 of the records that have a finite number under `quantity`.

        Args:
            quantity: a field of the records, or "field.part" for a part of one, as "spectrum.mean".
        """
        return series(self.records, quantity)

    def quantities(self) -> list[str]:
        """Everything that `series` finds numbers for, in the order of first appearance."""
        found: dict[str, None] = {}
        for record in self.records:
            for key, value in record.items():
                if isinstance(value, dict):
                    found |= {f"{key}.{part}": None for part, number in value.items() if _is_number(number)}
                elif key != "iteration" and _is_number(value):
                    found[key] = None
        return list(found)


def load_run(folder: Path | str) -> RunRecord:
    """Reads a run's configuration and records.

    A run that was killed and went on may hold an iteration twice: the later record counts, and earlier ones of that
    iteration and of all behind it are left out.

    Args:
        folder: the run's folder.

    Returns:
        The run. Without metrics.jsonl it has no records: its first iteration isn't done.

    Raises:
        InputError: there is no such folder, it holds no run, or a file is damaged or can't be read.
    """
    path = Path(folder)
    if not path.exists():
        raise InputError(f"no such run folder: {path}")
    if not path.is_dir():
        raise InputError(f"{path} is a file; accepted: the folder of a run")
    config = _read_config(path)
    records: list[Record] = []
    metrics = path / "metrics.jsonl"
    try:
        for number, record in _lines(metrics, strict=True):
            iteration = record.get("iteration")
            if not isinstance(iteration, int):
                raise InputError(f"{metrics} is damaged: line {number} has no iteration")
            while records and records[-1]["iteration"] >= iteration:
                records.pop()
            records.append(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{metrics} cannot be read: {error.strerror or error}") from None
    return RunRecord(path, config, config["settings"], config["task"], records)


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a metrics file, in order, up to a line that is none; [] if there is no file.

    Raises:
        OSError: the file can't be read.
    """
    return [record for _, record in _lines(path, strict=False)] if path.is_file() else []


def series(records: list[Record], quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """See `RunRecord.series`."""
    found = []
    for record in records:
        value = number_at(record, quantity)
        if value is not None:
            found.append((record["iteration"], value))
    pairs = np.asarray(found, dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def number_at(record: Record, quantity: str) -> float | None:
    """The finite number of a record under "field" or "field.part", or None."""
    value = record.get(quantity)
    if value is None and "." in quantity:
        field, part = quantity.split(".", 1)
        inner = record.get(field)
        value = inner.get(part) if isinstance(inner, dict) else None
    return float(value) if _is_number(value) and math.isfinite(value) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        inside = sum(1 for _ in path.glob("*/config.json"))
        hint = f"; it holds {inside} run folder(s): give those, as {path}/*" if inside else ""
        raise InputError(f"{path} is not a run folder: no config.json there{hint}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{file} is damaged: not JSON") from None
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("settings"), dict)
        or not isinstance(config.get("task"), str)
    ):
        raise InputError(f"{file} is not the configuration of an orthokern run")
    return config


def _lines(path: Path, *, strict: bool) -> Iterator[tuple[int, Record]]:
    """(line number from 1, record) for the lines of a metrics file, up to one that is no record.

    With `strict` such a line is an error, unless it is the last one and without a line feed: then it is being written,
    or a kill cut it short.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                if strict and line.endswith(b"\n"):
                    raise InputError(f"{path} is damaged: line {number} is not a JSON object")
                return
            yield number, record
