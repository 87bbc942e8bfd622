"""SIGINT, SIGTERM and SIGHUP as a request to stop after the current iteration."""

import signal
import time
from types import FrameType
from typing import Any

# SIGHUP comes when a terminal or an SSH session ends.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SAME = 2.0  # seconds in which further signals belong to the first one


class StopRequest:
    """Context manager that converts the first of STOP_SIGNALS to a flag, `signal`. A further signal after SAME seconds
    has its usual effect. Before that it is ignored: a terminal signals all processes of a command, and a parent process
    passes its signal on, so that one Ctrl-C may arrive twice."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._received = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the handlers of the caller are kept
                break
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._received = number, time.monotonic()
        elif time.monotonic() - self._received > SAME:
            self.__exit__()
            signal.raise_signal(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
