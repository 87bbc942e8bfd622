"""Select the backend that runs an op, and give the reasons.

A backend is a package with one module, called a leaf, for every op that it implements (``orthokern/cpu/<op>.py``). The
functions of a leaf have the names and signatures of the reference. The ops register their SUPPORT tables here (devices,
dtypes, limits, or the reason why there is no kernel); ``resolve`` compares a call with them. An explicit backend is
never replaced by another one, except by the reference for derivatives that backends do not compute (see
``orthokern.functional``); only "auto" chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from orthokern.errors import BackendUnavailable, one_of, unknown_name

BACKENDS = ("reference", "cpu", "triton", "cuda")
_LEAVES = {name: f"orthokern.{name}" for name in BACKENDS} | {"triton": "orthokern.triton_kernels"}
AUTO_ORDER = ("cuda", "triton", "cpu", "reference")
ENVIRONMENT_VARIABLE = "ORTHOKERN_BACKEND"

# the backend of calls with backend=None, read once: set ORTHOKERN_BACKEND before importing orthokern
_process_default = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() or "auto"


@dataclasses.dataclass(frozen=True)
class Support:
    """The calls of one op that one backend supports."""

    devices: tuple[str, ...] | None = None  # torch device types, or None for any
    dtypes: tuple[torch.dtype, ...] = ()  # of the floating tensors
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)  # largest sizes by letter, e.g. {"N": 512}
    algorithms: tuple[str, ...] = ("sequential",)  # accepted values of algorithm=, besides "auto"
    features: tuple[str, ...] = ()  # optional arguments of the op that are supported
    capability: tuple[int, int] | None = None  # the lowest of a CUDA device, or None for any
    missing: str | None = None  # why there is no kernel; None if there is one

    def reasons(self, call: Call) -> list[str]:
        """Why a call is not supported; empty if it is."""
        device, dtype, facts, algorithm, features = call
        if self.missing is not None:
            return [self.missing]
        result = []
        if self.devices is not None and device.type not in self.devices:
            result.append(f"tensors are on {device.type}, it serves {', '.join(self.devices)}")
        if dtype not in self.dtypes:
            result.append(f"tensors are {dtype_name(dtype)}, it serves {', '.join(map(dtype_name, self.dtypes))}")
        for letter, largest in self.limits.items():
            if facts.get(letter, 0) > largest:
                result.append(f"{letter}={facts[letter]} > {largest}")
        if algorithm not in ("auto", *self.algorithms):
            result.append(f"algorithm is {algorithm}, it serves {', '.join(self.algorithms)}")
        lacking = [name for name in features if name not in self.features]
        if lacking:
            result.append(f"it does not serve {', '.join(lacking)}")
        if self.capability is not None and device.type == "cuda":
            has = torch.cuda.get_device_capability(device)
            if has < self.capability:
                least = ".".join(map(str, self.capability))
                result.append(f"{device} has compute capability {has[0]}.{has[1]}, it needs {least} or later")
        return result


class Call(NamedTuple):
    """The properties of a call that the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype  # of the op's floating tensors
    facts: Mapping[str, int]  # sizes that SUPPORT tables may limit, by their letters, e.g. {"N": 128, "K": 7}
    algorithm: str = "auto"
    features: tuple[str, ...] = ()  # the optional arguments that the call uses

    def __str__(self) -> str:
        """As in messages: "float32 on cuda, N=128"."""
        sizes = (f"{letter}={size}" for letter, size in self.facts.items())
        return ", ".join([f"{dtype_name(self.dtype)} on {self.device}", *sizes])


SupportTable = Mapping[str, Support]

_tables: dict[str, SupportTable] = {}
_chosen: dict[tuple[Any, ...], Any] = {}  # results of `resolve`
_warned: set[str] = set()  # ops that have warned that the reference runs on a GPU


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def register(op: str, table: SupportTable) -> None:
    """Register the SUPPORT table of an op, which must have a row for every backend."""
    lacking = [name for name in BACKENDS if name not in table]
    if lacking:
        raise ValueError(f"SUPPORT of {op} has no row for {', '.join(lacking)}")
    _tables[op] = table


def requested(backend: str | None) -> str:
    """The backend argument of a call, or the default of the process for None: a valid name or "auto".

    Raises:
        InputError: for an unknown name, from the call or from ORTHOKERN_BACKEND.
    """
    if backend is None:
        if _process_default != "auto" and _process_default not in BACKENDS:
            raise unknown_name(f"backend in {ENVIRONMENT_VARIABLE}", _process_default, ("auto", *BACKENDS))
        return _process_default
    if backend != "auto" and backend not in BACKENDS:
        raise unknown_name("backend", backend, ("auto", *BACKENDS))
    return backend


def plain_reference(backend: str | None) -> bool:
    """Whether a call runs the reference as plain torch code, which can be differentiated twice.

    Not under torch.compile, which cannot trace the import of a leaf: there the op runs the reference.
    """
    return requested(backend) == "reference" and not torch.compiler.is_compiling()


def leaf(op: str, backend: str) -> Any:
    """The module with the functions of one op of a backend. Raises ImportError if there is none."""
    return importlib.import_module(f"{_LEAVES[backend]}.{op}")


def backend_of(leaf: Any) -> str:
    """The name of the backend of a leaf, a result of ``resolve``."""
    package = str(leaf.__name__).rsplit(".", 1)[0]
    return next(name for name, folder in _LEAVES.items() if folder == package)


def no_device() -> str | None:
    """Why torch has no CUDA device, in one line; None if there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _silent_device()


@functools.cache
def _silent_device() -> str:
    """Why torch with CUDA finds no device. The result is cached, because the driver is slow."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        message = " ".join(str(error).split())
        if "No CUDA GPUs are available" not in message:
            return f"the CUDA driver does not initialise: {message}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "no CUDA device" + ("" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown!r})")


def absence(op: str, backend: str) -> str | None:
    """Why a backend supports no call of an op on this machine; None if it supports some."""
    row = _tables[op][backend]
    if row.missing is not None:
        return row.missing
    if backend in ("cpu", "cuda"):
        package = importlib.import_module(_LEAVES[backend])
        if not package.AVAILABLE:
            return str(package.REASON)
    if backend in ("triton", "cuda") and (why := no_device()) is not None:
        return why
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if importlib.util.find_spec("orthokern.triton_kernels") is None:  # a source tree that is not installed
            return "orthokern.triton_kernels is not installed: run `pip install -e .`"
    return None


def reasons(op: str, backend: str, call: Call) -> list[str]:
    """Why a backend does not support a call; empty if it does."""
    gone = absence(op, backend)
    return [gone] if gone is not None else _tables[op][backend].reasons(call)


def resolve(
    op: str,
    backend: str | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    algorithm: str = "auto",
    features: tuple[str, ...] = (),
    **facts: int,
) -> Any:
    """The leaf of the backend that ``choose`` selects for a call, with the same errors; see ``Call`` and ``leaf``."""
    key = (op, backend, device, dtype, algorithm, features, *facts.values())
    result = _chosen.get(key)
    if result is None:
        call = Call(device, dtype, facts, algorithm, features)
        name = choose(op, backend, call)
        result = _chosen[key] = leaf(op, name)
        if name == "reference" and device.type in ("cpu", "cuda") and requested(backend) == "auto":
            _warn_of_reference(op, call)
    return result


def _warn_of_reference(op: str, call: Call) -> None:
    """Warn that "auto" has no kernel for a call: on a GPU once per op, not for ops without GPU kernels; on a CPU once,
    if there are no kernels at all."""
    if call.device.type == "cpu":
        cpu = importlib.import_module(_LEAVES["cpu"])
        if not cpu.AVAILABLE and "cpu" not in _warned:
            _warned.add("cpu")
            warnings.warn(f"backend 'auto' runs the reference, which is slow: {cpu.REASON}", stacklevel=3)
        return
    rows = {name: _tables[op][name] for name in AUTO_ORDER if name in ("cuda", "triton")}
    if op in _warned or all(row.missing is not None for row in rows.values()):
        return
    _warned.add(op)
    why = [f"{name}: {' and '.join(reasons(op, name, call))}" for name in rows]
    warnings.warn(f"{op}: backend 'auto' runs the reference, which is slow, on {call}: {'; '.join(why)}", stacklevel=3)


def choose(op: str, backend: str | None, call: Call) -> str:
    """The name of the backend that runs a call.

    Args:
        op: its name, e.g. "factored_scan".
        backend: a name, "auto" or None (the process default, ORTHOKERN_BACKEND or auto).
        call: the call.

    Raises:
        BackendUnavailable: the explicit backend does not support the call, or no backend does; with all reasons.
        InputError: for an unknown backend name.
    """
    name = requested(backend)
    for candidate in AUTO_ORDER if name == "auto" else (name,):
        if not reasons(op, candidate, call):
            return candidate
    lines = []
    for candidate in AUTO_ORDER:
        why = reasons(op, candidate, call)
        lines.append(f"{candidate}: {' and '.join(why) if why else 'can serve this call'}")
    text = f"no backend serves {op}" if name == "auto" else f"backend {name!r} cannot serve {op}"
    raise BackendUnavailable(f"{text} ({dtype_name(call.dtype)} on {call.device.type}): {'; '.join(lines)}")


def explain_call(op: str, backend: str | None, call: Call) -> str:
    """Describe the backend that ``choose`` selects for a call, with the same arguments, and why not the others.

    Raises:
        InputError: for an unknown op or backend.
    """
    one_of("op", op, _tables)
    request, head = requested(backend), f"{op} ({call})"
    try:
        chosen = choose(op, backend, call)
        lines = [f"{head}: backend {request!r} takes {chosen}"]
    except BackendUnavailable:
        chosen = ""
        lines = [f"{head}: no backend serves" if request == "auto" else f"{head}: backend {request!r} cannot serve"]
    for name in AUTO_ORDER:
        why = reasons(op, name, call)
        if name == chosen:
            text = "chosen" if request == "auto" else "asked for, and it can serve"
        elif why:
            text = " and ".join(why)
        else:
            text = "could serve, and comes later in the order of auto" if request == "auto" else "could serve"
        lines.append(f"  {name}: {text}")
    return "\n".join(lines)


def explain() -> str:
    """Describe the native module, the devices, and every registered op with its backends and reasons."""
    lines = [f"PyTorch {torch.__version__}"]
    cpu = importlib.import_module(_LEAVES["cpu"])
    lines.append(f"native module: {'available' if cpu.AVAILABLE else f'not available: {cpu.REASON}'}")
    for key, value in cpu.build_info().items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        lines.append(f"  {key}: {text}")
    lines.append(f"devices: cpu ({torch.get_num_threads()} threads)")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            lines.append(f"  cuda:{index}: {torch.cuda.get_device_name(index)}")
    else:
        lines.append(f"  no GPU: {no_device()}")
    origin = "the built-in default" if _process_default == "auto" else f"from {ENVIRONMENT_VARIABLE}"
    if _process_default not in ("auto", *BACKENDS):
        origin += f", unknown: calls fail; accepted: auto, {', '.join(BACKENDS)}"
    lines.append(f"default backend: {_process_default} ({origin}; order of auto: {', '.join(AUTO_ORDER)})")
    lines.append("")

    width = max((len(op) for op in _tables), default=0)
    lines.append("  ".join([" " * width, *(f"{name:<9}" for name in BACKENDS)]).rstrip())
    why: dict[str, list[str]] = {}
    for op, table in _tables.items():
        cells = []
        for name in BACKENDS:
            gone = absence(op, name)
            cells.append(f"{'yes' if gone is None else 'no':<9}")
            if gone is not None:
                text = f"{name}: {gone}"
            else:
                row = table[name]
                where = "any device" if row.devices is None else ", ".join(row.devices)
                limits = "".join(f", {letter} up to {largest}" for letter, largest in row.limits.items())
                more = f"; {', '.join(row.features)}" if row.features else ""
                text = f"{name}: {where}; {', '.join(map(dtype_name, row.dtypes))}{limits}{more}"
            why.setdefault(text, []).append(op)
        lines.append("  ".join([f"{op:<{width}}", *cells]).rstrip())
    lines.append("")
    for text in sorted(why, key=lambda text: BACKENDS.index(text.split(":")[0])):
        ops = why[text]
        lines.append(text + ("" if len(ops) == len(_tables) else f" ({', '.join(ops)})"))
    return "\n".join(lines)
