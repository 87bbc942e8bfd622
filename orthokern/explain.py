"""Which backend serves what on this machine, and why another does not: ``python -m orthokern.explain``.

``orthokern.explain()`` returns the same text: the module itself can be called.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import types

import orthokern
from orthokern import dispatch, ops


def explain() -> str:
    """Return the text: versions, the native module and its instruction sets, devices, op by backend, reasons."""
    assert ops.NAMES  # importing the ops registers their SUPPORT tables
    head = f"orthokern {orthokern.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return f"{head}\n{dispatch.explain()}"


class _CallableModule(types.ModuleType):
    """`orthokern.explain` is this module once anything has imported it; calling it must work either way."""

    def __call__(self) -> str:
        return explain()


sys.modules[__name__].__class__ = _CallableModule


def main(argv: list[str] | None = None) -> int:
    """Print the text; returns the exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m orthokern.explain", description=__doc__.split("\n")[0])
    parser.parse_args(argv)
    try:
        print(explain(), flush=True)
    except BrokenPipeError:  # `... | head` has seen enough; what is left must not be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
