"""The command lines of the tasks, from the texts and presets in tasks.toml."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orthokern._files import read_toml
from orthokern.commandline import Parser, Settings
from orthokern.training.cli import RunOptions, TaskCommand
from orthokern.training.options import add_options
from orthokern.training.task import Task


@functools.cache
def _texts() -> dict[str, Any]:
    return read_toml(Path(__file__).parent / "tasks.toml")


def task_command(name: str, options: type[Any], build: Callable[[Any], Task]) -> TaskCommand[Any]:
    """The command line of the task `name`; see `TaskCommand`. Its description is the docstring of the module with
    `build`, without its Notes."""
    own = _texts()[name]
    table = _texts()[own.get("presets_of", name)]
    description = (sys.modules[build.__module__].__doc__ or "").partition("\nNote ")[0]
    presets = _presets(options, table) if "presets" in table else {}
    return TaskCommand(name, description, own["examples"], options, build, presets, table.get("preset_help"))


def _presets(options: type[RunOptions], table: dict[str, Any]) -> dict[str, Settings]:
    """The settings of each preset."""
    parser = Parser()
    add_options(parser, options)
    bases = dict(_texts()["shared"])
    for name, text in table.get("bases", {}).items():
        bases[name] = text.format_map(bases)
    return {name: parser.parse(text.format_map(bases).split()) for name, text in table["presets"].items()}
