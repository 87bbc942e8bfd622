"""metrics.jsonl: one JSON object per line and iteration, written at the end of each iteration."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from orthokern._files import naming
from orthokern.diagnostics.runs import read_metrics
from orthokern.errors import CheckpointError

__all__ = ["HELD_OUT", "MetricsLog", "plain", "read_metrics"]

HELD_OUT = "held_out_"  # prefix of the results of an evaluation


class MetricsLog:
    """Appends records to a file, which is created if it is missing.

    The file is locked until `close` or the end of the process: two processes that train in one folder would overwrite
    each other's records and checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)
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
        lines = self.path.read_bytes().split(b"\n")[:-1]
        if len(lines) < keep:
            raise CheckpointError(f"{self.path} has {len(lines)} records, but its checkpoint is of iteration {keep}")
        self._file.truncate(sum(len(line) + 1 for line in lines[:keep]))

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record."""
        content = memoryview(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        with naming(self.path):
            while content:  # a write to a nearly full disk may be partial
                content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Flushes all records to the disk. It is called before a checkpoint, which must not be ahead of its metrics."""
        with naming(self.path):
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
