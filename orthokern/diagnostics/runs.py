"""Reads the run folders that the training loop writes: config.json, and metrics.jsonl with one record per iteration.

A run in progress can be read at any time: an incomplete last line of metrics.jsonl is ignored.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from orthokern._files import number, parsed_object, read_object
from orthokern.errors import InputError

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder.

    Attributes:
        path: the folder.
        config: the content of config.json: task, settings, facts for the plots, versions, machine, command, start.
        settings: all settings of the run, by name.
        task: the name of the task.
        records: the records of metrics.jsonl, ordered by "iteration"; [] before the end of the first iteration.
        result: the content of result.json; {} if the run is not finished.
        label: the name of the run in a comparison, instead of its settings; "" for none, as returned by `load_run`.
    """

    path: Path
    config: dict[str, Any]
    settings: dict[str, Any]
    task: str
    records: list[Record]
    result: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def time_steps(self) -> int | None:
        """Time steps per sequence: "time_steps" of the records, otherwise of the configuration. None if it is unknown
        or not the same for all sequences."""
        for places in (self.records, [self.config]):
            steps = {number_at(place, "time_steps") for place in places} - {None, 0.0}
            if steps:
                return int(steps.pop() or 0) if len(steps) == 1 else None
        return None

    @property
    def margin(self) -> float | None:
        """The margin of a factorized network; None for other networks, which record the setting too."""
        return number_at(self.settings, "margin") if self.settings.get("model", "factorized") == "factorized" else None

    @property
    def iterations_per_epoch(self) -> float | None:
        """Iterations per epoch, from the settings; None if unknown."""
        return number_at(self.settings, "iterations_per_epoch") or None

    def series(self, quantity: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations [P] and values [P], float64, of the records that have a finite number under `quantity`: a field of
        the records, or "field.part", e.g. "spectrum.mean"."""
        points = [(r["iteration"], value) for r in self.records if (value := number_at(r, quantity)) is not None]
        pairs = np.asarray(points, dtype=float).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @property
    def tested(self) -> dict[str, float]:
        """Finite numbers on the test data, with the best parameters; {} if there are none."""
        test = self.result.get("test")
        names = test if isinstance(test, dict) else {}
        return {name: value for name in names if (value := number_at(names, name)) is not None}

    def last(self, quantity: str) -> float | None:
        """The last finite number under `quantity`, or None."""
        return next((value for r in reversed(self.records) if (value := number_at(r, quantity)) is not None), None)

    @cached_property
    def quantities(self) -> list[str]:
        """The names of all quantities for which `series` finds numbers, in order of first appearance."""
        names: dict[str, None] = {}
        for record in self.records:
            for key, value in record.items():
                if isinstance(value, dict):
                    names |= {f"{key}.{part}": None for part, inner in value.items() if number(inner) is not None}
                elif key != "iteration" and number(value) is not None:
                    names[key] = None
        return list(names)


def load_run(folder: Path | str) -> RunRecord:
    """Reads the configuration and records of a run. A run that has not finished its first iteration has no
    records.

    Example::

        >>> import json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text(json.dumps({"task": "copy", "settings": {"T": 100}}))
        >>> _ = (folder / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\\n')
        >>> run = load_run(folder)
        >>> run.settings["T"], run.last("loss")
        (100, 2.0)
    """
    path = Path(folder)
    if not os.path.isdir(path):
        raise InputError(f"no such run folder: {path}")
    config = read_object(path / "config.json")
    if not config:
        inside = sum(1 for _ in path.glob("*/config.json"))
        hint = f"; it holds {inside} run folder(s): give those, as {path}/*" if inside else ""
        raise InputError(f"{path} is not a run folder: no config.json there{hint}")
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("task"), str):
        raise InputError(f"{path / 'config.json'} is not the configuration of an orthokern run: no settings or task")
    records = read_metrics(path / "metrics.jsonl")
    return RunRecord(path, config, config["settings"], config["task"], records, read_object(path / "result.json"))


def read_metrics(path: str | Path) -> list[Record]:
    """All complete records of a metrics file, in order; [] if there is no file. A record is a JSON object with
    an "iteration". Anything else raises InputError, which names the line.

    Example::

        >>> read_metrics("no such file")
        []
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]  # without a line that is being written
    except FileNotFoundError:
        return []
    records = [parsed_object(content) for content in lines]
    for line, record in enumerate(records, 1):
        if record is None or number_at(record, "iteration") is None:
            raise InputError(f"{path} is damaged: line {line} is not a JSON object with an iteration")
    return records  # type: ignore[return-value]


def number_at(record: Record, quantity: str) -> float | None:
    """The `number` of a record under "field" or "field.part", or None."""
    value = record.get(quantity)
    if value is None and "." in quantity:
        name, part = quantity.split(".", 1)
        inner = record.get(name)
        value = inner.get(part) if isinstance(inner, dict) else None
    return number(value)
