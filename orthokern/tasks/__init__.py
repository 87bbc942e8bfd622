"""Training tasks. Each module is a task with a command line; `run` trains one from Python, e.g. for sweeps."""

from __future__ import annotations

import contextlib
import importlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthokern._files import read_object
from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import InputError, unknown_name
from orthokern.training.options import defaults, types

__all__ = ["Result", "names", "run"]


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        task: name of the task.
        folder: the run folder, with all records, the checkpoints and the plots.
        settings: all settings of the run, by name, defaults included.
        exit_code: 0: goal reached, all iterations done or time limit reached; 3: diverged; 129, 130 or 143:
        interrupted.
        message: the last line that the run prints.
        values: the numbers in result.json: "reached", "iteration", "seconds", the last evaluation, ...
        records: one dictionary for each iteration, as in metrics.jsonl.
    """

    task: str
    folder: Path
    settings: dict[str, Any]
    exit_code: int
    message: str
    values: dict[str, Any]
    records: list[dict[str, Any]]


def descriptions() -> dict[str, str]:
    """The name of every task, with the first sentence of its description."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    return {name: text[3 : text.index(": `")] for name, text in texts.items() if "\nmain = COMMAND.main" in text}


def names() -> list[str]:
    """The names of all tasks, for `run`.

    Example::

        >>> "copy" in names()
        True
    """
    return list(descriptions())


def run(task: str, out: str | Path, **settings: Any) -> Result:
    """Train one run of a task in this process, like its command line.

    The number of threads and the flushing of denormals are set for the whole process. Nothing is printed. The global
    random generators are seeded with the setting `seed`. All of these belong to the process, so parallel runs need
    separate processes.

    Args:
        task: a name, e.g. "copy", "adding" or "pixel_mnist"; see `names`.
        out: run folder, new or empty.
        settings: the options of the command line, with underscores: ``hidden=128, margin=0.1, plots=False``. Use None
            for the value "none", and True or False for an option without a value.

    Returns:
        `Result`.

    Raises:
        InputError: an unknown task or setting, a value that the option does not accept, missing data, a backend that is
            not available, a folder that is in use, or a file that cannot be written.

    Example::

        >>> from orthokern import tasks
        >>> result = tasks.run("copy", "runs/first", T=100, margin=0.1, seed=3)
        >>> result.values["reached"], result.settings["hidden"]
        (True, 128)
    """
    if task not in names():
        raise unknown_name("task", task, names())
    command = importlib.import_module(f"{__name__}.{task}").COMMAND
    usual = {**defaults(command.options), "preset": None}
    annotations = {**types(command.options), "preset": (str, False)}
    words = [f"--out={Path(out)}"]
    for name, value in settings.items():
        if name not in usual:
            raise unknown_name(f"setting of task {task}", name, usual)
        if value is None and usual[name] is None and not annotations[name][1]:
            continue  # the default, which the command line cannot express
        if isinstance(value, bool) != isinstance(usual[name], bool):
            accepted = "True or False" if isinstance(usual[name], bool) else "a value"
            raise InputError(f"{name} must be {accepted}, got {value!r}")
        option = name.replace("_", "-")
        if not isinstance(value, bool):
            words.append(f"--{option}={'none' if value is None else value}")
        else:
            words.append(f"--{option}" if value else f"--no-{option}")
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = command.main(words)
    lines = (stderr if code else stdout).getvalue().strip().splitlines()  # warnings are on standard error too
    message = lines[-1] if lines else ""
    if code == 2:
        raise InputError(message.removeprefix("error: "))
    folder = Path(out)
    values = read_object(folder / "result.json")  # a run that diverged or was interrupted has none
    chosen = read_object(folder / "config.json").get("settings", dict(settings))
    return Result(task, folder, chosen, code, message, values, read_metrics(folder / "metrics.jsonl"))
