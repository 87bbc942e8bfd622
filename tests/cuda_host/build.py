"""Build the host harness: the sources of csrc/cuda as plain C++, in one Python module that runs them on the CPU.

``load`` compiles what has changed, into a folder that pytest keeps between runs. ``use`` puts the module in the place
of the native CUDA kernels, so that ``orthokern.cuda`` works on CPU tensors, and lets the ops reach it under the
backend name "cuda".
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pybind11
import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
NAME = "orthokern_cuda_host"
# -fopenmp-simd and the like stay away: a kernel must not be vectorised across what other threads see.
# Every load and store checks its address (-fsanitize=alignment); runtime.cpp holds what a failed check calls.
# _FORTIFY_SOURCE would take the switch between two fibers' stacks for an attack.
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-fsanitize=alignment",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
    "-DORTHOKERN_CUDA_HOST",
    f"-I{HERE}",
    f"-I{CSRC}",
]
ORDERS = {"forward": (0, 0), "reverse": (1, 0), "random": (2, 1)}


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the host harness does not compile:\n{shlex.join(command)}\n{done.stderr}")


def nvcc() -> str | None:
    """The nvcc that setup.py builds with, by its own search."""
    spec = importlib.util.spec_from_file_location("orthokern_setup_script", HERE.parents[1] / "setup.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    path: str | None = script.Cuda.find_nvcc()
    return path


def load(folder: Path) -> Any:
    """The harness as a module; objects and the library stay in ``folder``, under names that hold their hash."""
    headers = sorted([*HERE.glob("*.h"), *CSRC.glob("*.h"), *CSRC.glob("cuda/*.h"), *CSRC.glob("common/*.h")])
    common = hashlib.sha256(shlex.join([*compiler(), *FLAGS, pybind11.__version__]).encode())
    for header in headers:
        common.update(header.read_bytes())
    python = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_paths()["include"])]
    objects = []
    for source in sorted([*CSRC.glob("cuda/*.cu"), *HERE.glob("*.cu"), *HERE.glob("*.cpp")]):
        digest = common.copy()
        digest.update(source.read_bytes())
        objects.append(folder / f"{source.stem}-{digest.hexdigest()[:16]}.o")
        if not objects[-1].exists():
            flags = [*FLAGS, "-O0", *python] if source.stem == "module" else FLAGS
            partial = objects[-1].with_suffix(f".{os.getpid()}")
            run([*compiler(), *flags, "-x", "c++", "-c", str(source), "-o", str(partial)])
            partial.rename(objects[-1])
    names = "".join(file.name for file in objects)
    library = folder / f"{NAME}-{hashlib.sha256(names.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        run([*compiler(), "-shared", *map(str, objects), "-o", str(partial)])
        partial.rename(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    true_set_chip = module.set_chip

    def set_chip(**chip: int) -> None:
        from orthokern.cuda import _call

        true_set_chip(**chip)
        _call.forget_plans()

    module.set_chip = set_chip
    return module


def use(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend "cuda" be the harness, for CPU tensors, and everything else what it was."""
    from orthokern import dispatch
    from orthokern.cuda import _call

    monkeypatch.setattr(_call, "kernels", module)
    _call.forget_plans()
    monkeypatch.setattr(_call, "DEVICE", "cpu")
    true_resolve = dispatch.resolve

    def resolve(op: str, backend: str | None = None, **facts: Any) -> Any:
        return dispatch.leaf(op, "cuda") if backend == "cuda" else true_resolve(op, backend, **facts)

    monkeypatch.setattr(dispatch, "resolve", resolve)


class OnSecondDevice:
    """The harness for tensors that are all on cuda:1. `called`: the devices that each native function used; torch's
    current device must stay what it was."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.called: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(arguments: dict[str, Any]) -> Any:
            self.module.devices_used()
            result = getattr(self.module, name)({**arguments, "device": 1})
            assert self.module.current_device() == 0, name
            self.called.setdefault(name, []).extend(self.module.devices_used())
            return result

        return call
