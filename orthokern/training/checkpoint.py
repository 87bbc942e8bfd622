"""Checkpoints that survive a kill at any moment, random states included: a resumed run equals one never stopped.

A checkpoint is one file, written whole under a temporary name in the same folder, flushed to the disk and renamed over
the old one: at any moment the name holds either the old checkpoint or the new one. Files are read with
`torch.load(weights_only=True)`, so that a checkpoint from a stranger can't run code, and every record's CRC is checked
first, which torch.load doesn't do.
"""

import contextlib
import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthokern._files import CHECKPOINT_LIMIT, decoding, open_regular
from orthokern.errors import CheckpointError, InputError

FORMAT = "orthokern.checkpoint"
VERSION = 1


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the file `path` by `content`, all or nothing.

    The temporary name is fixed (`<name>.tmp`), so that what a killed process leaves behind is overwritten by the next
    one.

    Args:
        path: file to replace or create, in an existing folder.
        content: its new content.

    Raises:
        OSError: the disk is full, the folder is gone or not writable. The old file is then as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power failure; not every file system can, and the file itself is safe by now."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoint_bytes(payload: dict[str, Any]) -> bytes:
    """A checkpoint as the content of its file.

    Args:
        payload: nested dicts, lists, tuples, numbers, strings, None and tensors only (what `weights_only=True` reads
            back).
    """
    # To memory first: torch's own file writer reports a full disk as a RuntimeError without errno, and only after part
    # of it is written.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **payload}, buffer)
    return buffer.getvalue()


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: the file, conventionally `checkpoint.pt`.
        payload: see `checkpoint_bytes`.

    Raises:
        OSError: see `write_atomically`.
    """
    write_atomically(path, checkpoint_bytes(payload))


def load_checkpoint(path: Path, limit: int = CHECKPOINT_LIMIT) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU and checks that it is whole and ours.

    Args:
        path: the file.
        limit: bytes that it may have. As its parts are not compressed, it takes no more memory than that.

    Returns:
        What `save_checkpoint` was given, and "format" and "version".

    Raises:
        CheckpointError: no such file, too large, truncated, damaged, not a checkpoint of orthokern, or of a newer
            version.
    """
    try:
        file, size = open_regular(path, limit)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except InputError as error:
        raise CheckpointError(f"no checkpoint: {error}") from None
    with file:
        with decoding(path, "truncated or no checkpoint", size, CheckpointError), zipfile.ZipFile(file) as archive:
            _check_archive(path, archive, size)
        file.seek(0)
        with decoding(path, "no checkpoint that can be read", size, CheckpointError):
            payload = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of an orthokern run")
    if payload.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {payload.get('version')}, this orthokern reads version {VERSION}"
        )
    return payload


def _check_archive(path: Path, archive: zipfile.ZipFile, size: int) -> None:
    """Refuses an archive that would unpack to more than it has, and one with a wrong checksum."""
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(f"checkpoint {path} is no checkpoint: {entry.filename!r} is compressed or encrypted")
    if sum(entry.file_size for entry in archive.infolist()) > size:
        raise CheckpointError(f"checkpoint {path} is damaged: its parts are larger than the file ({size} bytes)")
    damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: wrong checksum in {damaged}")


def seed_all(seed: int) -> None:
    """Seeds every global random generator that `rng_state` saves."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what users draw from)


def rng_state() -> dict[str, Any]:
    """The state of every global random generator: torch (CPU and each GPU), Python and NumPy, in types that a
    checkpoint may hold."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (see seed_all)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(internal), gauss_next],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned. GPU states are skipped on a machine with another number of GPUs."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
