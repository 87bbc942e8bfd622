"""The common part of all command lines of the project: types of options, and a parser with one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TextIO

import torch

from orthokern._files import LARGEST_INTEGER
from orthokern.errors import BackendUnavailable, InputError, nearest, unknown_name

Settings = dict[str, Any]

# The largest value of a real option: far above any reasonable value, and so far below the largest float32 that a rate
# divided by a small number, as in optimizers, does not overflow. For larger values torch raises a RuntimeError.
LARGEST = 1e30
MAX_THREADS = 1024  # torch accepts any number, and crashes if the system does not

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

COMPILER = "torch._dynamo"

# ---- output ----------------------------------------------------------------------------------------------------------


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes text and flushes it, to standard output unless `stream` is given.

    Errors of the stream are ignored: its reader may have ended (`... | head`), or its disk may be full.
    """
    try:
        print(text, end="", file=stream, flush=True)
    except (OSError, ValueError):  # the rest of the buffer must not cause an error at the end of the interpreter
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, (stream or sys.stdout).fileno())
            os.close(null)


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints lines with `write`."""
    write(text + "\n", stream)


def printable(text: str) -> str:
    """The text with escapes for control characters, and for bytes of a file name that are not text in the encoding of
    the file system."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """Converts an error message to one line of at most 1000 characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:740]}...{line[-250:]}"


# ---- the main function -----------------------------------------------------------------------------------------------


class _StandIn(types.ModuleType):
    """The two functions of ``torch._dynamo`` that torch's optimizers call in each step. Both mean nothing outside of a
    compilation. Any other attribute, and any submodule, imports the compiler."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.marked: list[Callable[..., Any]] = []

    def graph_break(self, *args: Any, **options: Any) -> None:
        pass

    def disable(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        self.marked.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(COMPILER), name)

    def remove(self) -> None:
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], torch._dynamo
            for fn in self.marked:  # `torch._disable_dynamo` stores what `disable` returns
                vars(fn).pop("__dynamo_disable", None)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Within the context torch's optimizers do not import ``torch._dynamo``, which takes a second and 140 MB."""
    if COMPILER in sys.modules:
        yield
        return
    stand_in = _StandIn()
    sys.modules[COMPILER] = torch._dynamo = stand_in
    try:
        yield
    finally:
        stand_in.remove()


def command(body: Callable[[], int]) -> int:
    """Runs the main function of a command. An error that a user can cause is printed as one line on standard error.

    Returns:
        The exit code of `body`; EXIT_BAD_INPUT for an InputError, a BackendUnavailable or an OSError;
        EXIT_INTERRUPTED for a KeyboardInterrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for characters that its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        with without_compiler():
            return body()
    except (InputError, BackendUnavailable) as error:
        text = str(error)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        text = reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return EXIT_INTERRUPTED
    say(f"error: {one_line(text)}", sys.stderr)
    return EXIT_BAD_INPUT


# ---- values of options -----------------------------------------------------------------------------------------------


def integer(minimum: int, maximum: int | None = None, *, none: bool = False) -> Callable[[str], int | None]:
    """An argparse type: an integer in [`minimum`, `maximum`], also written as 1e4. With `none`, the word none is
    accepted and gives None."""
    most = LARGEST_INTEGER if maximum is None else maximum

    def parse(text: str) -> int | None:
        if none and text.lower() == "none":
            return None
        try:
            value = int(text) if "e" not in text.lower() else int(float(text)) if float(text).is_integer() else None
        except (ValueError, OverflowError):
            value = None
        if value is not None and minimum <= value <= most:
            return value
        accepted = f"of at least {minimum}" if value is None or value < minimum else f"of at most {most}"
        if maximum is not None:
            accepted = f"from {minimum} to {maximum}"
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer {accepted}")

    return parse


def real(
    low: float | None = None,
    *,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    none: bool = False,
) -> Callable[[str], float | None]:
    """An argparse type: a finite number of magnitude at most LARGEST, in [`low`, `high`] and (`above`, `below`). With
    `none`, the word none is accepted and gives None."""
    bounds = (("of at least", low), ("above", above), ("at most", high), ("below", below))
    texts = [f"{name} {bound:g}" for name, bound in bounds if bound is not None]
    accepted = "a number" + (f" {' and '.join(texts)}" if texts else "") + (" or none" if none else "")

    def parse(text: str) -> float | None:
        if none and text.lower() == "none":
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (low is None or value >= low) and (high is None or value <= high)
        inside = inside and (above is None or value > above) and (below is None or value < below)
        if not (math.isfinite(value) and inside):
            raise argparse.ArgumentTypeError(f"{text!r} is not {accepted}")
        if abs(value) > LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is beyond {LARGEST:g}")
        return value

    return parse


def one_of(argument: str, choices: Iterable[str]) -> Callable[[str], str]:
    """An argparse type: one of some names. The error for an unknown name suggests the most similar one."""
    names = tuple(choices)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(str(unknown_name(argument, text, names)))
        return text

    return parse


def names(text: str) -> list[str]:
    """An argparse type: names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def device(text: str) -> str:
    """An argparse type: a torch device that this machine has."""
    try:
        chosen = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; accepted: cpu, cuda, cuda:0, ...") from None
    if chosen.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r}: this project runs on cpu and cuda devices")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return text


# ---- the parser ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line. For an unknown option it suggests a similar one.

    Options have no default in the parser, because the settings of a resumed run and of a preset take precedence over
    the defaults.

    Attributes:
        basic: names of the options that --help shows; empty: all. --help-all shows all.

    Example::

        >>> parser = Parser(prog="example", description="An example.")
        >>> _ = parser.add_argument("--hidden", type=integer(1), help="hidden units")
        >>> parser.parse(["--hidden", "8"])
        {'hidden': 8}
        >>> parser.parse(["--hiden", "8"])
        Traceback (most recent call last):
        orthokern.errors.InputError: unknown option --hiden: did you mean --hidden?
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=105),
            argument_default=argparse.SUPPRESS,
            **keywords,
        )
        self.basic: set[str] = set()
        # argparse's own pattern mistakes -1e-2 for an option
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        raise InputError(re.sub(r"^argument ", "", message))

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message, file)

    def _print_basic_help(self) -> None:
        """The help of the basic options, with the first examples."""
        self.usage = f"{self.prog} [options]"
        self.epilog = "\n".join((self.epilog or "").splitlines()[:4]) + "\n\n--help-all shows all options."
        for action in self._actions:
            if action.dest not in ("help", *self.basic):
                action.help = argparse.SUPPRESS
        self.print_help()

    def parse(self, arguments: list[str] | None) -> Settings:
        """The given options, by name.

        Raises:
            InputError: an unknown option, or a value that is not accepted.
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        if self.basic and ("--help-all" in arguments or "--help" in arguments or "-h" in arguments):
            if "--help-all" in arguments:
                self.print_help()
            else:
                self._print_basic_help()
            raise SystemExit(0)
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            # without the dashes, which all options have in common
            options = [option.lstrip("-") for action in self._actions for option in action.option_strings]
            name = unknown[0].split("=")[0]
            guess = nearest(name.lstrip("-"), options) if name.startswith("-") else None
            other = {"--epochs": "iterations", "--iterations": "epochs"}.get(name)  # a task may have only one of them
            guess = other if other in options else guess
            raise InputError(
                f"unknown {'option' if name.startswith('-') else 'argument'} {name}"
                + (f": did you mean --{guess}?" if guess else "; see --help")
            )
        return vars(parsed)


def listing(prog: str, text: str) -> int:
    """The main function of a command that lists other commands: prints `text`. Returns the exit code."""

    def body() -> int:
        Parser(prog=prog, description=text).parse(None)
        say(text)
        return 0

    return command(body)
