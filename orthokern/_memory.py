"""The memory of a device, and the limit for the states of one call."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# All states of a call are kept if they take at most this fraction of the memory of the device. Their gradients need the
# same size again, and the model, the batch and other programs need memory too. The limit depends on the total memory,
# not on the free memory, so that the same call always behaves in the same way.
KEPT_SHARE = 1 / 16
UNKNOWN = 2**31  # bytes; for a device of unknown memory


def _machine_memory(device: str) -> int:
    """The total memory of a device in bytes: for a GPU its device memory; for the CPU the main memory without swap
    space, within the limit of a control group."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    except (OSError, ValueError):  # there is no such file, or it holds "max"
        return memory


_MEMORY = {"cpu": _machine_memory("cpu")}  # read once: it costs more than a small call


def kept_states(device: torch.device) -> int:
    """Bytes of states that a call on a device keeps whole: KEPT_SHARE of the device's memory, swap not counted."""
    name = str(device)
    if name not in _MEMORY and not torch.compiler.is_compiling():
        _MEMORY[name] = _machine_memory(name)
    return int(_MEMORY.get(name, _MEMORY["cpu"]) * KEPT_SHARE)
