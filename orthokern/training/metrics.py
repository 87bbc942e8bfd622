"""metrics.jsonl: one JSON object per line and iteration, on the disk as soon as it is known."""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import CheckpointError

__all__ = ["TIMING_FIELDS", "MetricsLog", "plain", "read_metrics"]

# All other fields of a resumed run equal those of one that was never stopped, bit for bit.
TIMING_FIELDS = ("seconds", "ms_per_iteration", "us_per_step")


class MetricsLog:
    """Appends records to a file; a full disk delays them, and loses none while the process lives.

    The file is locked until `close`, or the process's end: two processes that train in one folder would write over each
    other's records and checkpoints.

    Args:
        path: the file; created if missing.
        keep: on resuming, the number of the last iteration whose records stay; later ones, and a line that a kill cut
            short, are removed, so that the file ends as that of an uninterrupted run. None: start an empty file.

    Raises:
        OSError: the file cannot be opened.
        CheckpointError: the file ends before iteration `keep`, or another process writes it.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        self._pending = b""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self._good = self._end_of(keep) if keep is not None else 0
            os.ftruncate(self._descriptor, self._good)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is training in the run folder {self.path.parent}; wait for its end, or stop it"
            ) from None
        except OSError:  # a file system without locks
            pass

    def _end_of(self, keep: int) -> int:
        """Size in bytes of the file up to the records of iteration `keep`."""
        good, last = 0, 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                iteration = json.loads(line)["iteration"]
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n") or iteration > keep:
                break
            good, last = good + len(line), iteration
        if last < keep:
            raise CheckpointError(
                f"{self.path} ends at iteration {last}, but the checkpoint beside it was taken at iteration {keep}"
            )
        return good

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record, after any that a full disk held back.

        Args:
            record: JSON values; "iteration" is required. Floats that JSON can't say (NaN, infinity) become null.

        Raises:
            OSError: the disk is full: the record is kept in memory and comes with the next one.
        """
        self._pending += json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes what a full disk held back.

        Raises:
            OSError: it still cannot be written.
        """
        try:
            written = 0
            while written < len(self._pending):
                written += os.pwrite(self._descriptor, self._pending[written:], self._good + written)
        except OSError:
            os.ftruncate(self._descriptor, self._good)  # no half line stays
            raise
        self._good += len(self._pending)
        self._pending = b""

    def sync(self) -> None:
        """Forces all records to the disk: called before a checkpoint, which must never be ahead of its metrics.

        Raises:
            OSError: as `flush`.
        """
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
