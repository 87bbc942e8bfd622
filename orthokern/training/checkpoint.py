"""Checkpoints, which include the states of the random generators: a resumed run equals an uninterrupted one.

A checkpoint is one file. It is written under a temporary name in the same folder, flushed to the disk, and renamed over
the old one, so that a process that is killed at any time leaves the old or the new checkpoint. Files are read with
`torch.load(weights_only=True)`, so that an untrusted checkpoint cannot run code. The CRC of every record, which
torch.load does not check, is checked first.
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
    """Replaces the content of the file `path` atomically.

    The temporary name is fixed (`<name>.tmp`), so that the temporary file of a killed process is overwritten by the
    next one.

    Args:
        path: file to replace or create, in an existing folder.
        content: its new content.

    Raises:
        OSError: the disk is full, or the folder is missing or not writable. The old file is unchanged.

    Example::

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "result.txt"
        >>> write_atomically(file, b"done")
        >>> file.read_bytes()
        b'done'
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
    """Flushes a rename to the disk, if the file system supports it. The content of the file has been flushed before."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoint_bytes(payload: dict[str, Any]) -> bytes:
    """The content of a checkpoint file.

    Args:
        payload: nested dicts, lists, tuples, numbers, strings, None and tensors only (the types that
            `weights_only=True` reads).
    """
    # Written to memory first: torch's file writer reports a full disk as a RuntimeError without errno, and only after a
    # part has been written.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **payload}, buffer)
    return buffer.getvalue()


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: the file, conventionally `checkpoint.pt`.
        payload: nested dicts, lists, tuples, numbers, strings, None and tensors only.

    Raises:
        OSError: the disk is full, or the folder is missing or not writable. The old file is unchanged.

    Example::

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.pt"
        >>> save_checkpoint(file, {"iteration": 3, "w": torch.zeros(2)})
        >>> load_checkpoint(file)["iteration"]
        3
    """
    write_atomically(path, checkpoint_bytes(payload))


def load_checkpoint(path: Path, limit: int = CHECKPOINT_LIMIT) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU and checks its integrity and format.

    Args:
        path: the file.
        limit: largest accepted size in bytes. The parts are not compressed, so that they need at most this memory.

    Returns:
        The payload given to `save_checkpoint`, with "format" and "version" added.

    Raises:
        CheckpointError: the file is missing, too large, truncated, damaged, not a checkpoint of orthokern, or of a
            newer version.

    Example::

        >>> load_checkpoint(Path("no such file"))
        Traceback (most recent call last):
        orthokern.errors.CheckpointError: no checkpoint at no such file
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
    """Rejects an archive with compressed records or a wrong checksum."""
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
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that user code may use)


def rng_state() -> dict[str, Any]:
    """The states of all global random generators: torch (CPU and each GPU), Python and NumPy, in types that a
    checkpoint may contain.

    Example::

        >>> state = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """
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
    """Restores the states returned by `rng_state`. GPU states are ignored if the number of GPUs is different."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
