"""Checkpoints, which include the states of the random generators: a resumed run equals an uninterrupted one.

A checkpoint is one file. It is written under a temporary name in the same folder, flushed to the disk, and renamed over
the old one, so that a process killed at any time leaves either the old or the new checkpoint. Files are read with
`torch.load(weights_only=True)`, so that a checkpoint cannot run code.
"""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthokern._files import write_atomically
from orthokern.errors import CheckpointError

FORMAT = "orthokern.checkpoint"
VERSION = 1


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Writes a checkpoint atomically: nested dicts, lists, tuples, numbers, strings, None and tensors. TypeError for
    what ``torch.load(weights_only=True)`` does not read. OSError if the disk is full, or the folder is missing or not
    writable. The old file is then unchanged.

    Example::

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.pt"
        >>> save_checkpoint(file, {"iteration": 3, "w": torch.zeros(2)})
        >>> load_checkpoint(file)["iteration"]
        3
    """
    # To memory first: torch's file writer reports a full disk as a RuntimeError after writing a part.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **payload}, buffer)
    buffer.seek(0)
    if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        raise TypeError(
            f"a checkpoint must hold numbers, strings, tensors and containers only, got {', '.join(foreign)}"
        )
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The payload of `save_checkpoint`, with "format" and "version" added, on the CPU. CheckpointError if the file is
    missing, damaged, not a checkpoint of orthokern, or of another version."""
    if not Path(path).is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile, pickle, torch and the file system have no common base class
        reason = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:120]  # torch's messages are in colour
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason or type(error).__name__}") from None
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of an orthokern run")
    if payload.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path} must have format version {VERSION}, got {payload.get('version')}")
    return payload


def seed_all(seed: int) -> None:
    """Seeds every global random generator that `rng_state` saves."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that user code may use)


def rng_state() -> dict[str, Any]:
    """The states of all global random generators: torch (CPU and each GPU), Python and NumPy, in types that a
    checkpoint may contain."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 (see seed_all)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(internal), gauss_next],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the states returned by `rng_state`. GPU states are ignored if the number of GPUs is different."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
