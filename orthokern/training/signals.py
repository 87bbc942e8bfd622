"""SIGINT and SIGTERM as a request to stop after the iteration under way."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a flag; a second one acts as usual, for those who
    don't want to wait.

    Attributes:
        signal: number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the caller's handlers stay
                break
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, as shells count; 0 if none came."""
        return 128 + self.signal if self.signal is not None else 0
