"""orthokern: fast recurrent networks with soft and hard orthogonality constraints.

Importing the package compiles nothing, does not initialise a GPU, and works without the native module, Triton or CUDA:
then the reference backend is used. ``orthokern.explain()`` (or ``python -m orthokern.explain``) lists the available
backends, and the reasons why others are missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orthokern._version import __version__
from orthokern.errors import BackendUnavailable, CheckpointError, InputError

if TYPE_CHECKING:
    from orthokern import data, diagnostics, functional, init, nn, optim, parametrize, penalties, training
    from orthokern.conversion import convert
    from orthokern.explain import explain

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "InputError",
    "__version__",
    "convert",
    "data",
    "diagnostics",
    "empty_cache",
    "explain",
    "functional",
    "init",
    "nn",
    "optim",
    "parametrize",
    "penalties",
    "training",
]

# imported on first use, so that `import orthokern` costs no more than torch, and the errors not even that
_LAZY = ("data", "diagnostics", "explain", "functional", "init", "nn", "optim", "parametrize", "penalties", "training")


def empty_cache() -> None:
    """Free the memory that is cached for the next large result on the CPU (``csrc/buffer.h`` explains the cache)."""
    from orthokern import cpu

    cpu.empty_cache()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"orthokern.{name}")
    if name == "convert":
        from orthokern.conversion import convert

        return convert
    raise AttributeError(f"module 'orthokern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "convert"})
