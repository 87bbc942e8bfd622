"""metrics.jsonl: one JSON object per line and iteration, written at the end of each iteration."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from orthokern._files import json_lines
from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import CheckpointError

__all__ = ["HELD_OUT", "TIMING_FIELDS", "MetricsLog", "plain", "read_metrics"]

HELD_OUT = "held_out_"  # prefix of the results of an evaluation
# All other fields of a resumed run are bitwise equal to those of an uninterrupted run.
TIMING_FIELDS = ("seconds", "ms_per_iteration", "us_per_step")


class MetricsLog:
    """Appends records to a file. If the disk is full, records are kept in memory and written later.

    The file is locked until `close` or the end of the process: two processes that train in one folder would overwrite
    each other's records and checkpoints.

    Args:
        path: the file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending = b""
        self._size = 0  # bytes of complete records
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointError(
                f"another process is training in the run folder {path.parent}; wait for its end, or stop it"
            ) from None
        except OSError:  # a file system without locks
            pass

    def start(self, keep: int = 0) -> None:
        """Removes the records after iteration `keep` and an incomplete last line, so that the file of a resumed run
        ends like that of an uninterrupted run."""
        last = 0
        for line, record in json_lines(self.path):
            if record is None or not line.endswith(b"\n") or record.get("iteration", keep + 1) > keep:
                break
            self._size, last = self._size + len(line), record["iteration"]
        if last < keep:
            raise CheckpointError(f"{self.path} ends at iteration {last}, but its checkpoint is of iteration {keep}")
        os.ftruncate(self._file.fileno(), self._size)

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record, after those that could not be written before."""
        self._pending += json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        descriptor, written = self._file.fileno(), 0
        try:
            while written < len(self._pending):
                written += os.pwrite(descriptor, self._pending[written:], self._size + written)
        except OSError:
            os.ftruncate(descriptor, self._size)  # removes an incomplete line
            raise
        self._size += written
        self._pending = b""

    def sync(self) -> None:
        """Flushes all records to the disk. It is called before a checkpoint, which must not be ahead of its metrics."""
        self._flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file and releases the lock."""
        self._file.close()


def plain(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinity become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
