"""metrics.jsonl: one JSON object per line and iteration, written at the end of each iteration."""

import contextlib
import fcntl
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from orthokern._files import count, json_lines
from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import CheckpointError

__all__ = ["TIMING_FIELDS", "Lock", "MetricsLog", "plain", "read_metrics"]

HELD_OUT = "held_out_"  # prefix of the results of an evaluation
# All other fields of a resumed run are bitwise equal to those of an uninterrupted run.
TIMING_FIELDS = ("seconds", "ms_per_iteration", "us_per_step")


class Lock:
    """Exclusive access to a run folder: a lock on its metrics.jsonl, until `release` or the end of the process. Two
    processes that train in the same folder would overwrite each other's records and checkpoints.

    Args:
        path: the file; created if missing.

    Attributes:
        descriptor: of the open file.
        created: whether the file did not exist before.

    Raises:
        OSError: the file cannot be opened.
        CheckpointError: it is not a regular file, or another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        try:
            while not self._take():
                self.release()
        except BlockingIOError:
            self.release()
            raise CheckpointError(
                f"another process is training in the run folder {path.parent}; wait for its end, or stop it"
            ) from None
        except BaseException:
            self.release()
            raise

    def _take(self) -> bool:
        """Whether the locked file is still the one with this name. Its owner may have removed it in the meantime."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self.descriptor, self.created = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                self.descriptor, self.created = os.open(self.path, flags), False
            except FileNotFoundError:
                if self.path.is_symlink():  # to nowhere
                    raise
                return False
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{self.path} cannot be written: it is no regular file")
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            return True
        try:
            return os.path.samestat(os.stat(self.path), found)
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def remove(self) -> None:
        """Removes the file, if nothing was written to it, and releases the lock."""
        with contextlib.suppress(OSError):
            if self.descriptor >= 0 and os.fstat(self.descriptor).st_size == 0:
                self.path.unlink()
        self.release()

    def __del__(self) -> None:
        self.release()


class MetricsLog:
    """Appends records to a file. If the disk is full, records are kept in memory and written later.

    The file is locked until `close` or the end of the process, see `Lock`.

    Args:
        path: the file; created if missing.
        keep: for a resumed run, the last iteration whose records are kept. Later records and an incomplete last line
            are removed, so that the file ends like that of an uninterrupted run. None: start an empty file.
        lock: the lock on the file, if the caller has it; the log releases it.

    Attributes:
        held_out: names of the numbers of the last evaluation in the records that are kept.

    Raises:
        OSError: the file cannot be opened.
        CheckpointError: the file ends before iteration `keep`, or another process writes it.
        InputError: the file cannot be read.
    """

    def __init__(self, path: Path, keep: int | None = None, lock: Lock | None = None) -> None:
        self.path = path
        self.held_out: set[str] = set()
        self._pending = b""
        self._lock = Lock(path) if lock is None else lock
        self._descriptor = self._lock.descriptor
        try:
            self._good = self._end_of(keep) if keep is not None else 0
            os.ftruncate(self._descriptor, self._good)
        except BaseException:
            self.close()
            raise

    def _end_of(self, keep: int) -> int:
        """Size of the file in bytes up to the records of iteration `keep`."""
        good, last = 0, 0
        for line, record in json_lines(self.path):
            iteration = None if record is None else count(record.get("iteration"))
            if record is None or iteration is None or not line.endswith(b"\n") or iteration > keep:
                break
            good, last = good + len(line), iteration
            names = {name.removeprefix(HELD_OUT) for name in record if name.startswith(HELD_OUT)}
            self.held_out = names or self.held_out
        if last < keep:
            raise CheckpointError(
                f"{self.path} ends at iteration {last}, but the checkpoint beside it was taken at iteration {keep}"
            )
        return good

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record, after those that could not be written before.

        Args:
            record: JSON values; "iteration" is required. NaN and infinity, which JSON does not have, become null.

        Raises:
            OSError: the disk is full. The record is kept in memory and written with the next one.
        """
        self._pending += json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes the records that could not be written before.

        Raises:
            OSError: they still cannot be written.
        """
        try:
            written = 0
            while written < len(self._pending):
                written += os.pwrite(self._descriptor, self._pending[written:], self._good + written)
        except OSError:
            os.ftruncate(self._descriptor, self._good)  # removes an incomplete line
            raise
        self._good += len(self._pending)
        self._pending = b""

    def sync(self) -> None:
        """Flushes all records to the disk. It is called before a checkpoint, which must not be ahead of its metrics.

        Raises:
            OSError: as `flush`.
        """
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        self._lock.release()


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinity become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
