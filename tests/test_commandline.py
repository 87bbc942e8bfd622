"""Rules for all command lines: one line for bad input, no traceback, lines of limited length, and runs whose output
cannot be written. The cases are generated from the options of the commands."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from orthokern import tasks
from orthokern.commandline import Parser, one_line
from orthokern.errors import InputError
from orthokern.tasks import copy

TASKS = tasks.names()
COMMANDS = {name: f"orthokern.tasks.{name}" for name in TASKS} | {
    "diagnostics": "orthokern.diagnostics.__main__",
    "explain": "orthokern.explain",
    "reproduce": "orthokern.reproduce.__main__",
}
LONGEST = 1000  # characters of an error line


def module(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name])


def parser(name: str) -> Parser:
    home = module(name)
    made = home.COMMAND.parser() if hasattr(home, "COMMAND") else home._parser()
    assert isinstance(made, Parser)
    return made


def main(name: str, *arguments: object) -> int:
    """The exit code, also of --help."""
    try:
        return int(module(name).main([str(argument) for argument in arguments]))
    except SystemExit as ended:
        return int(ended.code or 0)


def options(name: str) -> Iterator[argparse.Action]:
    return (action for action in parser(name)._actions if action.option_strings and action.dest != "help")


@pytest.mark.parametrize("name", TASKS)
def test_help_is_short_and_help_all_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(name, "--help") == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60 and "--help-all" in text and "examples:" in text and "--out DIR" in text
    assert main(name, "--help-all") == 0
    text = capsys.readouterr().out
    shown = {action.dest for action in options(name) if f"  {action.option_strings[-1]}" in text}  # a switch once
    assert shown == {action.dest for action in options(name)} and "Exit code:" in text


@pytest.mark.parametrize("name, text, value", [("T", "1e4", 10_000), ("T", "12", 12), ("slope", "-.01", -0.01)])
def test_numbers(name: str, text: str, value: float) -> None:
    """An integer may have an exponent, and a negative number is no option."""
    assert copy.COMMAND.parser().parse([f"--{name}", text]) == {name: value}
    assert copy.COMMAND.parser().parse(["--slope", "-1e-2"]) == {"slope": -0.01}


TEXTS = ("--out", "--resume", "--data", "--quantity", "--legend", "--table", "--features", "--only")


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_values_and_words_are_one_short_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option with a type, and text of any kind: too long, of several lines, not encodable, empty."""
    values = ["x" * 10_000, "y " * 5_000, "1" * 10_000, "a\nb\r\x1b[31m", "\ud800"]
    made, needed = parser(name), ["name"] if name in ("diagnostics", "reproduce") else []
    for action in options(name):
        for value in values if action.nargs != 0 and action.type is not None else []:
            word = f"{action.option_strings[0]}={value}"
            try:
                made.parse([word, *needed])
            except InputError as error:
                text = one_line(str(error))
                assert action.option_strings[0] in text and text.isprintable() and len(text) <= LONGEST, text
            else:  # a name, of a file or of what a run's records hold
                assert action.option_strings[0] in TEXTS
    for text in ("--" + "q" * 10_000, "q" * 10_000, "--q=" + "z " * 5_000, "q\nr", "\udce9"):
        assert main(name, text) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1, told
        assert len(told.err) <= LONGEST + len("error: ...\n") and told.err[:-1].isprintable()


def test_an_error_line_keeps_what_is_short() -> None:
    text = "--out /a/folder: 'x' is not y; accepted: " + ", ".join(f"name{i}" for i in range(100))
    assert one_line(text) == text
    words = one_line("begin " + "of words " * 5_000 + "end")
    assert words.startswith("begin") and words.endswith("end") and "..." in words and len(words) <= LONGEST


# In one process each, as importing torch takes seconds: what only an interpreter of its own shows.
_SCRIPT = """
import sys, runpy
codes = []
for words in {commands!r}:
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        codes.append(ended.code or 0)
open({told!r}, "w").write(repr(codes))
"""


@pytest.mark.parametrize("redirection", ["LC_ALL=C", ">/dev/full 2>/dev/full"])
def test_an_interpreter_of_its_own(redirection: str, tmp_path: Path) -> None:
    small = "--T 5 --hidden 4 --batch 2 --iterations 1 --eval-sequences 2 --no-plots --threads 1".split()
    copy, folder = "orthokern.tasks.copy", tmp_path / "rün"
    commands = [
        [copy, "--help"],
        [copy, "--ünknown"],
        [copy, *small, "--out", str(folder)],
        ["orthokern.diagnostics", str(folder), "--figure", "none"],
        ["orthokern"],
        ["orthokern.tasks", "copy"],
    ]
    if redirection == "LC_ALL=C":  # where these bytes are no text
        commands = [[os.fsencode(word).decode("ascii", "surrogateescape") for word in words] for words in commands]
    script = _SCRIPT.format(commands=commands, told=str(tmp_path / "codes"))
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    if redirection == "LC_ALL=C":
        environment |= {"LC_ALL": "C"}
        out, err = (shlex.quote(str(tmp_path / name)) for name in ("out", "err"))
        redirection = f">{out} 2>{err}"
    line = f"exec {shlex.join([sys.executable, str(tmp_path / 'script.py')])} {redirection}"
    done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and (tmp_path / "codes").read_text() == "[0, 2, 0, 0, 0, 2]"
    assert len((folder / "metrics.jsonl").read_bytes().splitlines()) == 1  # nothing else was written into it
    if (tmp_path / "err").exists():
        assert "Traceback" not in (tmp_path / "err").read_text(errors="replace")
        assert "usage: " in (tmp_path / "out").read_text(errors="replace")
