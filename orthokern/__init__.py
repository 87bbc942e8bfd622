"""orthokern: fast recurrent networks with soft and hard orthogonality constraints.

Importing the package compiles nothing, does not initialise a GPU, and works without the native module, Triton or CUDA:
then the reference backend is used. ``orthokern.explain()`` (or ``python -m orthokern.explain``) lists the available
backends, and the reasons why others are missing.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from orthokern._version import __version__
from orthokern.errors import BackendUnavailable, CheckpointError, InputError

if TYPE_CHECKING:
    from orthokern import (
        compare,
        data,
        diagnostics,
        functional,
        init,
        nn,
        optim,
        parametrize,
        penalties,
        reproduce,
        tasks,
        training,
    )
    from orthokern.conversion import convert
    from orthokern.explain import explain

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "InputError",
    "__version__",
    "compare",
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
    "reproduce",
    "tasks",
    "training",
]


def _wait_passively() -> None:
    """In a command of this package, let waiting OpenMP threads give up their core, unless the environment says
    otherwise. OpenMP reads the setting when torch is loaded.

    By default they spin. If other processes use the cores, the thread that the others wait for then does not run:
    training took five times as long on two busy cores.
    """
    arguments = sys.orig_argv
    if "-m" in arguments[:-1] and arguments[arguments.index("-m") + 1].split(".")[0] == "orthokern":
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


_wait_passively()

# All names but these are imported on first use, so that `import orthokern` costs no more than importing torch, and
# importing the errors costs less.
_LAZY = set(__all__) - globals().keys() - {"empty_cache"}


def empty_cache() -> None:
    """Free the memory that is cached for the next large result on the CPU (``csrc/buffer.h`` explains the cache)."""
    from orthokern import cpu

    cpu.empty_cache()


def __getattr__(name: str) -> Any:
    if name == "convert":
        from orthokern.conversion import convert

        return convert
    if name in _LAZY:
        return importlib.import_module(f"orthokern.{name}")
    raise AttributeError(f"module 'orthokern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


_NEEDED_BY = {"torch._export.serde": "orthokern.ops", "torch.utils.flop_counter": "orthokern.ops._flops"}


class _OpsFinder:
    """Imports the ops with a module of torch that needs them: programs of torch.export name them, and the flop counter
    has a formula for each. `import orthokern` alone loads neither them nor torch. One of sys.meta_path."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _NEEDED_BY else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_NEEDED_BY[name])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _OpsFinder())
for _name in _NEEDED_BY.keys() & sys.modules.keys():
    importlib.import_module(_NEEDED_BY[_name])
