"""The memory of a device, and the limit for the states of one call."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

# All states of a call are kept if they take at most this fraction of the memory of the device. Their gradients need the
# same size again, and the model, the batch and other programs need memory too. The limit depends on the total memory,
# not on the free memory, so that the same call always behaves in the same way.
KEPT_SHARE = 1 / 16
UNKNOWN = 2**31  # bytes; for a device of unknown memory


def _number(file: Path) -> int | None:
    """The number in a file of a control group; None for "max", or if there is no such file."""
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _main_memory() -> tuple[int, int] | None:
    """(main memory, swap) in bytes; None if unknown."""
    try:
        fields = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.M))
        return 1024 * int(fields["MemTotal"]), 1024 * int(fields.get("SwapTotal", 0))
    except (OSError, ValueError, KeyError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
        except (AttributeError, OSError, ValueError):
            return None


def machine_memory(device: str, *, swap: bool = True) -> int | None:
    """The total memory of a device in bytes: for a GPU its device memory; for the CPU the main memory and, with
    ``swap``, the swap space, within the limit of a control group. None if unknown."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    result = _main_memory()
    if result is None:
        return None
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    if not swap:
        return result[0] if limit is None else min(result[0], limit)
    limits, swap_limit = [sum(result)], _number(Path("/sys/fs/cgroup/memory.swap.max"))
    if limit is not None and swap_limit is not None:
        limits.append(limit + swap_limit)
    return min(limits)


_MEMORY = {"cpu": machine_memory("cpu", swap=False) or UNKNOWN}  # read once: it costs more than a small call


def kept_states(device: torch.device) -> int:
    """Bytes of states that a call on a device keeps whole: KEPT_SHARE of the device's memory, swap not counted."""
    name = str(device)
    if name not in _MEMORY and not torch.compiler.is_compiling():
        _MEMORY[name] = machine_memory(name, swap=False) or UNKNOWN
    return int(_MEMORY.get(name, _MEMORY["cpu"]) * KEPT_SHARE)
